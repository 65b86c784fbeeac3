"""One optimizer step over all ranks: accumulate, exchange, update.

Gradients are accumulated as sums over samples, divided by a nominal count so that
they stay in range, added over all ranks, and then rescaled by nominal / true count.
So a step is exact for any shares, micro-batch sizes and counts, also where a count
(of unmasked tokens, say) is known only after the forward pass.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from geartrain.collectives.gradient_buckets import DEFAULT_BUCKET_BYTES, GradientBuckets
from geartrain.errors import ConfigError
from geartrain.parallel.loss_terms import SINGLE_TERM, LossTerm
from geartrain.parallel.step_checks import (
    check_optimizer,
    check_same_plan,
    check_still_frozen,
    check_sums,
)
from geartrain.parallel.trailer import RankFigures, Trailer, TrailerLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from geartrain.collectives.protocol import Collective
    from geartrain.parallel.low_communication import ModelAverager
    from geartrain.parallel.residual_state import ResidualState


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How a step is made."""

    max_grad_norm: float | None = None
    """Clips the norm of the aggregated gradient, as one device would."""
    overlap: bool = True
    """Send gradients while the last micro-batch's backward still runs."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    loss_scaling: bool = False
    """fp16 only; one scale for all ranks, since all see the same gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step came to, the same on all ranks."""

    loss: float
    trailer: Trailer
    grad_norm: float | None
    """Norm before clipping; None where it is not clipped."""
    skipped: bool
    """The update was skipped: a gradient was not finite (fp16 loss scaling)."""
    term_losses: dict[str, float]


@dataclass(slots=True)
class StepEngine:
    """Runs steps on one rank.

    Args:
        model: The user's model, on this rank's device.
        optimizer: Any torch optimizer over its parameters.
        settings: How a step is made.
        rank: This rank.
        world: All ranks, for the trailer.
        agree_names: Gathers the term names that all ranks saw, once.
        synchronize: Waits for the device's queue, so that time is measured honestly.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    settings: EngineSettings
    rank: int
    world: Collective
    agree_names: Callable[[tuple[str, ...]], tuple[str, ...]]
    synchronize: Callable[[], None]
    gradient_group: Collective | None = None
    """The ranks that exchange gradients; None where this rank is left out."""
    residuals: ResidualState | None = None
    """What compressed exchanges owe; None where nothing is exchanged."""
    averager: ModelAverager | None = None
    """Makes each rank's steps its own, and averages models; None: exact steps."""
    _named: list[tuple[str, torch.nn.Parameter]] = field(default_factory=list)
    _frozen: list[tuple[str, torch.nn.Parameter]] = field(default_factory=list)
    _buckets: GradientBuckets | None = None
    _scaler: torch.amp.GradScaler | None = None
    members: tuple[int, ...] = ()
    """Ranks that are left; all of the world at first."""
    _num_ranks: int = 0
    _layout: TrailerLayout | None = None
    _last_vector: torch.Tensor | None = None
    _num_samples: int = 0
    _nominal: float = 1.0
    """What sums are divided by until the true counts are known."""
    _known_counts: dict[str, float] | None = None
    _loss_sums: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _counts: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _per_term: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _started_at_s: float = 0.0
    _not_compute_s: float = 0.0
    _optimizer_s: float = 0.0
    _wait_s: float = 0.0
    _open: bool = False

    def __post_init__(self) -> None:
        check_optimizer(self.model, self.optimizer)
        parameters = list(self.model.named_parameters())
        self._named = [(n, p) for n, p in parameters if p.requires_grad]
        self._frozen = [(n, p) for n, p in parameters if not p.requires_grad]
        if self.settings.loss_scaling:
            device_type = self._named[0][1].device.type if self._named else "cpu"
            self._scaler = torch.amp.GradScaler(device_type)
            # It makes its scale at the first loss, which a rank without samples never has.
            self._scaler.scale(torch.zeros((), device=device_type))
        self._num_ranks = self.world.num_members
        self.members = self.members or tuple(range(self._num_ranks))
        if self._num_ranks > 1:
            self._make_buckets()

    @property
    def gradient_bytes(self) -> int:
        """Bytes that one exchange sums."""
        return sum(p.numel() * p.element_size() for _, p in self._named)

    @property
    def num_parameters(self) -> int:
        """Trainable elements of the model."""
        return sum(p.numel() for _, p in self._named)

    @property
    def last_wait_s(self) -> float:
        """How long the last exchange took here, waiting for others included."""
        return self._wait_s

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler, if any, for saving and loading."""
        return self._scaler

    @property
    def buckets(self) -> GradientBuckets | None:
        """The flat gradient buffers; None on a single rank with one loss term."""
        return self._buckets

    def resize_buckets(self, bucket_bytes: int) -> None:
        """Cut the gradients into other buckets, between two steps; all ranks alike."""
        self.settings = replace(self.settings, bucket_bytes=bucket_bytes)
        if self._buckets is not None:
            self._buckets.regroup(bucket_bytes)

    def begin(
        self, num_samples: int, known_counts: Mapping[str, float] | None = None
    ) -> None:
        """Open a step.

        Args:
            num_samples: Samples of the global batch, over all ranks.
            known_counts: Fleet-wide counts by term where they are known already,
                which spares several loss terms a backward each.

        Raises:
            ConfigError: If the step before was not finished.
        """
        if self._open:
            msg = "the step before was not finished; call optimizer_step() once a batch"
            raise ConfigError(msg)
        check_still_frozen(self._frozen)
        self._open = True
        self._num_samples = num_samples
        self._nominal = float(max(num_samples, 1))
        self._known_counts = dict(known_counts) if known_counts is not None else None
        self._loss_sums, self._counts, self._per_term = {}, {}, {}
        self._not_compute_s = 0.0
        if self.residuals is not None:
            self.residuals.begin_step()
        self._started_at_s = time.perf_counter()
        if self._buckets is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self._buckets.collective = self.gradient_group
            self._buckets.begin_step()

    def accumulate(
        self, terms: Mapping[str, LossTerm], *, last: bool = False, ghost: bool = False
    ) -> None:
        """Run backward of one micro-batch.

        Args:
            terms: Its loss terms.
            last: No further micro-batch follows, so gradients may be sent.
            ghost: It only keeps collectives matched and must contribute nothing.
        """
        self._check_names(terms)
        for name, term in terms.items():
            loss_sums = self._loss_sums.setdefault(name, [])
            counts = self._counts.setdefault(name, [])
            if not ghost:  # not 0 times its values, which may be infinite
                loss_sums.append(term.loss_sum.detach())
                counts.append(term.count)
        needs_own_backward = len(terms) > 1 and self._known_counts is None
        if needs_own_backward:
            self._accumulate_per_term(terms, ghost=ghost)
            return
        overlaps = self.settings.overlap and self.averager is None
        if last and overlaps and self._buckets is not None:
            self._buckets.send_during_backward()
        loss = sum(t.loss_sum / self._divisor(name) for name, t in terms.items())
        assert isinstance(loss, torch.Tensor)
        if loss.requires_grad or any(term.count > 0 for term in terms.values()):
            self._backward(loss * 0.0 if ghost else loss, retain_graph=False)

    def exclude_time(self, seconds: float) -> None:
        """Time inside the open step that was not compute, such as reading input."""
        self._not_compute_s += seconds

    def finish(self, figures: RankFigures, *, stop: bool) -> StepOutcome:
        """Exchange, update, and close the step.

        Args:
            figures: This rank's figures; compute_s and previous_wait_s are filled in.
            stop: Whether this rank asks all to stop after this step.

        Raises:
            CommunicationError: If a peer was lost; nothing was applied.
            ConfigError: If no step is open, or the ranks' samples or counts do not add
                up; nothing was applied.
        """
        if not self._open:
            msg = (
                "no step is open; run the loop over session.micro_batches(batch) to its "
                "end, then call optimizer_step() once"
            )
            raise ConfigError(msg)
        self._open = False  # also where the exchange fails: nothing is left to finish
        self.synchronize()
        compute_s = time.perf_counter() - self._started_at_s - self._not_compute_s
        figures = replace(
            figures,
            compute_s=compute_s + self._optimizer_s,
            previous_wait_s=self._wait_s,
        )
        started_at_s = time.perf_counter()
        trailer = self._exchange(figures, stop=stop)
        self.synchronize()
        exchanged_at_s = time.perf_counter()
        self._wait_s = exchanged_at_s - started_at_s
        grad_norm, skipped = self._update(self._basis(trailer))
        if self.residuals is not None:
            self.residuals.end_step(applied=not skipped)
        self.synchronize()
        self._optimizer_s = time.perf_counter() - exchanged_at_s
        if self.averager is not None:
            started_at_s = time.perf_counter()
            self.averager.after_step([rank.num_samples for rank in trailer.ranks])
            self._wait_s += time.perf_counter() - started_at_s
        return _outcome(trailer, grad_norm, skipped=skipped)

    def abandon(self) -> None:
        """Close an open step without an update (an error in the user's code)."""
        self._open = False

    @property
    def last_vector(self) -> torch.Tensor | None:
        """What the last step that was applied here came to, for who has not applied it."""
        return self._last_vector

    def outcome_of(self, vector: torch.Tensor) -> StepOutcome:
        """A step that others have applied, and whose state this rank was given.

        Args:
            vector: Their ``last_vector``.
        """
        assert self._layout is not None, "a step that others finished was begun here too"
        self._last_vector = vector
        if self.residuals is not None:
            self.residuals.adopt_step()
        return _outcome(self._layout.unpack(vector), None, skipped=False)

    def regroup(self, world: Collective, members: tuple[int, ...]) -> None:
        """Go on among those that are left; gradients held are lost.

        Args:
            world: All of them.
            members: Their ranks.
        """
        self.world, self.members = world, members
        self.gradient_group = None
        self._open = False
        if self._buckets is not None:
            self._buckets.renew()

    # -- backward ---------------------------------------------------------------

    def _check_names(self, terms: Mapping[str, LossTerm]) -> None:
        expected = self._layout.term_names if self._layout else tuple(self._loss_sums)
        if expected and set(expected) != set(terms):
            msg = (
                f"loss_fn returned the terms {sorted(terms)} but before it were "
                f"{sorted(expected)}; return every term for each batch, with count 0 "
                "where it is absent"
            )
            raise ConfigError(msg)

    def _divisor(self, name: str) -> float:
        if self._known_counts is None:
            return self._nominal
        count = self._known_counts.get(name)
        if count is None:
            msg = (
                f"loss_fn returned the term {name!r} but count_fn counted "
                f"{sorted(self._known_counts)}; let both use the same names"
            )
            raise ConfigError(msg)
        return max(count, 1e-30)  # no counted element anywhere: the sum is 0 as well

    def _backward(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        if not loss.requires_grad:
            msg = (
                "the loss does not depend on any trainable parameter; expected loss_fn "
                "to use the model's output, with gradients enabled"
            )
            raise ConfigError(msg)
        scaled = self._scaler.scale(loss) if self._scaler is not None else loss
        scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def _accumulate_per_term(self, terms: Mapping[str, LossTerm], *, ghost: bool) -> None:
        """One backward a term: their weights are known only after all forwards."""
        if self._buckets is None:
            self._make_buckets()
        assert self._buckets is not None
        flats = self._buckets.flats
        for index, (name, term) in enumerate(terms.items()):
            sums = self._per_term.setdefault(name, [torch.zeros_like(f) for f in flats])
            if not term.loss_sum.requires_grad and not term.count > 0:
                continue  # a term that is absent from this micro-batch
            torch._foreach_zero_(flats)
            loss = term.loss_sum / self._nominal
            is_last = index == len(terms) - 1
            self._backward(loss * 0.0 if ghost else loss, retain_graph=not is_last)
            torch._foreach_add_(sums, flats)
        torch._foreach_zero_(flats)

    def _make_buckets(self) -> None:
        self._buckets = GradientBuckets(self._named, self.settings.bucket_bytes)
        self._buckets.begin_step()

    # -- exchange ---------------------------------------------------------------

    def _exchange(self, figures: RankFigures, *, stop: bool) -> Trailer:
        layout = self._agree_layout()
        if self._per_term or (len(layout.term_names) > 1 and self._known_counts is None):
            self._combine_terms(layout)
        sums_counts = self._sums_counts(layout.term_names)
        touched = self._touched()
        sends = self.gradient_group is not None and self.averager is None
        if self._buckets is not None and sends:
            self._buckets.send_rest()
        vector = layout.pack(self.rank, figures, sums_counts, touched, stop=stop)
        pending = self.world.all_reduce(vector)
        if self._buckets is not None and sends:
            self._buckets.wait()
        pending.wait()
        trailer = layout.unpack(vector)
        check_same_plan(trailer.ranks, self.members)
        check_sums(trailer, self._num_samples, self._known_counts)
        self._last_vector = vector
        return trailer

    def _agree_layout(self) -> TrailerLayout:
        seen = tuple(sorted(self._loss_sums))
        if self._layout is None:
            names = self.agree_names(seen) or (SINGLE_TERM,)
            self._layout = TrailerLayout(
                term_names=names,
                num_parameters=len(self._named),
                world_size=self._num_ranks,
            )
        return self._layout

    def _sums_counts(self, names: Sequence[str]) -> torch.Tensor:
        return torch.tensor(
            [_total(self._loss_sums.get(name, [])) for name in names]
            + [_total(self._counts.get(name, [])) for name in names],
            dtype=torch.float64,
        )

    def _touched(self) -> list[bool]:
        if self._buckets is not None:
            return self._buckets.touched
        return [parameter.grad is not None for _, parameter in self._named]

    def _combine_terms(self, layout: TrailerLayout) -> None:
        """Add up the terms' gradients, each weighted by nominal / its true count."""
        counts = self._sums_counts(layout.term_names)[len(layout.term_names) :]
        if self.averager is None:
            self.world.all_reduce(counts).wait()
        if self._buckets is None:
            return
        for name, count in zip(layout.term_names, counts.tolist(), strict=True):
            if name in self._per_term and count:
                torch._foreach_add_(
                    self._buckets.flats, self._per_term[name], alpha=self._nominal / count
                )

    # -- update -----------------------------------------------------------------

    def _basis(self, trailer: Trailer) -> Trailer:
        """Whose counts and gradients make up the update: all ranks', or only one's own."""
        if self.averager is None:
            return trailer
        names = self._agree_layout().term_names
        counts = self._sums_counts(names)[len(names) :].tolist()
        own = dict(zip(names, counts, strict=True))
        return replace(trailer, counts=own, touched=self._touched())

    def _update(self, trailer: Trailer) -> tuple[float | None, bool]:
        had_none = self.averager is not None and not any(trailer.counts.values())
        if self.gradient_group is None or had_none:
            return None, False
        self._rescale(trailer)
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        grad_norm = self._clip()
        if self._scaler is None:
            self.optimizer.step()
            return grad_norm, False
        scale = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        factor = self._scaler.get_scale() / scale
        if self.residuals is not None:
            self.residuals.scale_(factor)
        return grad_norm, factor < 1.0

    def _rescale(self, trailer: Trailer) -> None:
        single = len(trailer.counts) == 1 and self._known_counts is None
        count = next(iter(trailer.counts.values()))
        factor = self._nominal / count if single and count else 1.0
        if self._buckets is not None:
            self._buckets.scale_(factor)
            self._buckets.drop_untouched(trailer.touched)
        elif factor != 1.0:
            grads = [p.grad for _, p in self._named if p.grad is not None]
            torch._foreach_mul_(grads, factor)

    def _clip(self) -> float | None:
        if self.settings.max_grad_norm is None:
            return None
        parameters = [p for _, p in self._named]
        return float(
            torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        )


def _total(values: list[torch.Tensor]) -> float:
    """Sum micro-batch values in float64, with one device synchronisation."""
    if not values:
        return 0.0
    return float(torch.stack([v.to(torch.float64).reshape(()) for v in values]).sum())


def _outcome(trailer: Trailer, grad_norm: float | None, *, skipped: bool) -> StepOutcome:
    losses = {
        name: total / trailer.counts[name] if trailer.counts[name] else 0.0
        for name, total in trailer.loss_sums.items()
    }
    return StepOutcome(
        loss=sum(losses.values()),
        trailer=trailer,
        grad_norm=grad_norm,
        skipped=skipped,
        term_losses=losses,
    )
