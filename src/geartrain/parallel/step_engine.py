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

from geartrain.collectives.gradient_buckets import GradientBuckets
from geartrain.errors import ConfigError
from geartrain.parallel.commit import (
    Committer,
    ReducedStep,
    StepName,
    VotedStep,
    check_same_gradients,
    gradient_code,
)
from geartrain.parallel.loss_terms import SINGLE_TERM, LossTerm
from geartrain.parallel.step_checks import (
    check_differentiable,
    check_names,
    check_optimizer,
    check_same_plan,
    check_still_frozen,
    check_sums,
)
from geartrain.parallel.step_update import (
    EngineSettings,
    StepOutcome,
    clip,
    make_outcome,
    make_scaler,
    multiply_gradients,
    step_scaled,
)
from geartrain.parallel.term_sums import TermSums
from geartrain.parallel.trailer import RankFigures, Trailer, TrailerLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from geartrain.collectives.protocol import Collective
    from geartrain.parallel.low_communication import ModelAverager
    from geartrain.parallel.residual_state import ResidualState


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
    committer: Committer | None = None
    """Asked before a step is applied; None: whoever has the sums applies them."""
    on_reduced: Callable[[ReducedStep], None] | None = None
    """Told of each committed step right before it is applied here."""
    name: StepName = field(default_factory=StepName)
    """Of the state that the model is in."""
    _voted: VotedStep | None = None
    _gradient_code: float = 0.0
    """Of the step that was applied last."""
    members: tuple[int, ...] = ()
    """Ranks that are left; all of the world at first."""
    num_ranks: int = 0
    """Of the fleet; as many as take part where 0."""
    _num_ranks: int = 0
    _layout: TrailerLayout | None = None
    _last_vector: torch.Tensor | None = None
    _num_samples: int = 0
    _terms: TermSums = field(default_factory=TermSums)
    _started_at_s: float = 0.0
    _not_compute_s: float = 0.0
    _optimizer_s: float = 0.0
    last_wait_s: float = 0.0
    """How long the last exchange took here, waiting for others included."""
    _open: bool = False

    def __post_init__(self) -> None:
        check_optimizer(self.model, self.optimizer)
        parameters = list(self.model.named_parameters())
        self._named = [(n, p) for n, p in parameters if p.requires_grad]
        self._frozen = [(n, p) for n, p in parameters if not p.requires_grad]
        if self.settings.loss_scaling:
            self._scaler = make_scaler(self._parameters)
        self._num_ranks = self.num_ranks or self.world.num_members
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
        self._open, self._voted = True, None
        self._num_samples = num_samples
        self._terms = TermSums(
            nominal=float(max(num_samples, 1)),
            known_counts=dict(known_counts) if known_counts is not None else None,
        )
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
        check_names(terms, self._layout.term_names if self._layout else self._terms.names)
        self._terms.add(terms, ghost=ghost)
        if self._terms.are_weighed_late(terms):
            if self._buckets is None:
                self._make_buckets()
            assert self._buckets is not None
            flats = self._buckets.flats
            self._terms.accumulate_apart(flats, terms, self._backward, ghost=ghost)
            return
        overlaps = self.settings.overlap and self.averager is None
        if last and overlaps and self._buckets is not None:
            self._buckets.send_during_backward()
        loss = sum(t.loss_sum / self._terms.divisor(name) for name, t in terms.items())
        assert isinstance(loss, torch.Tensor)
        if loss.requires_grad or any(term.count > 0 for term in terms.values()):
            self._backward(loss * 0.0 if ghost else loss, False)

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
            previous_wait_s=self.last_wait_s,
            gradient_code=self._gradient_code,
        )
        if self.committer is not None:
            self.committer.exchanging()
        started_at_s = time.perf_counter()
        self._voted = voted = self._exchange(figures, stop=stop)
        self.synchronize()
        if self.committer is not None:
            self.committer.vote(voted.name)
            self.committer.wait(voted.name)
        self.last_wait_s = time.perf_counter() - started_at_s
        return self.apply_voted()

    @property
    def voted_name(self) -> StepName | None:
        """The state that a step which was not applied here yet would lead to."""
        return self._voted.name if self._voted is not None else None

    def apply_voted(self) -> StepOutcome:
        """Apply the step that was exchanged; the commit of it is known."""
        voted, self._voted = self._voted, None
        assert voted is not None
        basis = self._basis(voted.trailer)
        return self._apply(voted, basis, self._terms.factor_for(basis.counts))

    def replay(self, step: ReducedStep) -> StepOutcome:
        """Apply a step that others have computed and applied.

        Args:
            step: As their ``on_reduced`` was told, of the step after this rank's last.
        """
        layout = self._agree_layout()
        assert self._buckets is not None, "more than one rank takes part"
        for own, given in zip(self._buckets.flats, step.flats, strict=True):
            own.copy_(given)
        # It may have been made before this rank's device was in the fleet.
        trailer = layout.of_length(step.vector.numel()).unpack(step.vector)
        voted = VotedStep(trailer, step.vector, self.name.after(step.vector), 0.0)
        outcome = self._apply(voted, trailer, step.factor)
        self._buckets.begin_step()  # also points all gradients at the buffers again
        return outcome

    def _apply(self, voted: VotedStep, basis: Trailer, factor: float) -> StepOutcome:
        trailer = voted.trailer
        if self.on_reduced is not None and self._buckets is not None:
            flats = self._buckets.flats
            self.on_reduced(
                ReducedStep(
                    vector=voted.vector, factor=factor, flats=flats, name=voted.name
                )
            )
        self.name, self._last_vector = voted.name, voted.vector
        self._gradient_code = voted.code
        exchanged_at_s = time.perf_counter()
        grad_norm, skipped = self._update(basis, factor)
        if self.residuals is not None:
            self.residuals.end_step(applied=not skipped)
        self.synchronize()
        self._optimizer_s = time.perf_counter() - exchanged_at_s
        if self.averager is not None:
            started_at_s = time.perf_counter()
            self.averager.after_step([rank.num_samples for rank in trailer.ranks])
            self.last_wait_s += time.perf_counter() - started_at_s
        return make_outcome(trailer, grad_norm, skipped=skipped)

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
        self._last_vector, self._voted = vector, None
        self.name, self._gradient_code = self.name.after(vector), 0.0
        if self.residuals is not None:
            self.residuals.adopt_step()
        return make_outcome(self._layout.unpack(vector), None, skipped=False)

    @property
    def term_names(self) -> tuple[str, ...]:
        """Loss terms of all ranks; empty before the first step."""
        return self._layout.term_names if self._layout is not None else ()

    def take_shape(self, term_names: tuple[str, ...], bucket_bytes: int) -> None:
        """Take on what the others have agreed on, where this rank joins them."""
        self.resize_buckets(bucket_bytes)
        if term_names:
            self._layout = self._make_layout(term_names)

    def regroup(self, world: Collective, members: tuple[int, ...], num_ranks: int) -> None:
        """Go on among those that take part; gradients held are lost.

        Args:
            world: All of them.
            members: Their ranks.
            num_ranks: That there are in all; grows with the fleet.
        """
        self.world, self.members = world, members
        if num_ranks != self._num_ranks:
            self._num_ranks = num_ranks
            if self._layout is not None:
                self._layout = self._make_layout(self._layout.term_names)
        self.gradient_group = self._voted = None
        self._open = False
        if self._buckets is not None:
            self._buckets.renew()

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in self._named]

    # -- backward ---------------------------------------------------------------

    def _backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        check_differentiable(loss)
        scaled = self._scaler.scale(loss) if self._scaler is not None else loss
        scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def _make_buckets(self) -> None:
        self._buckets = GradientBuckets(self._named, self.settings.bucket_bytes)
        self._buckets.begin_step()

    # -- exchange ---------------------------------------------------------------

    def _exchange(self, figures: RankFigures, *, stop: bool) -> VotedStep:
        layout = self._agree_layout()
        if self._terms.gradients or self._terms.are_weighed_late(layout.term_names):
            self._combine_terms(layout)
        sums_counts = self._terms.sums_counts(layout.term_names)
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
        check_sums(trailer, self._num_samples, self._terms.known_counts)
        code = 0.0
        if self.committer is not None:
            check_same_gradients(trailer.ranks, self.members)
            if self._buckets is not None and sends:
                code = gradient_code(self._buckets.flats, self.name.step)
        return VotedStep(trailer, vector, self.name.after(vector), code)

    def _agree_layout(self) -> TrailerLayout:
        if self._layout is None:
            seen = tuple(sorted(self._terms.names))
            self._layout = self._make_layout(self.agree_names(seen) or (SINGLE_TERM,))
        return self._layout

    def _make_layout(self, term_names: tuple[str, ...]) -> TrailerLayout:
        return TrailerLayout(
            term_names=term_names,
            num_parameters=len(self._named),
            world_size=self._num_ranks,
        )

    def _touched(self) -> list[bool]:
        if self._buckets is not None:
            return self._buckets.touched
        return [parameter.grad is not None for _, parameter in self._named]

    def _combine_terms(self, layout: TrailerLayout) -> None:
        """Add up the terms' gradients, each weighted by nominal / its true count."""
        counts = self._terms.counts(layout.term_names)
        if self.averager is None:
            self.world.all_reduce(counts).wait()
        if self._buckets is not None:
            by_name = dict(zip(layout.term_names, counts.tolist(), strict=True))
            self._terms.combine_into(self._buckets.flats, by_name)

    # -- update -----------------------------------------------------------------

    def _basis(self, trailer: Trailer) -> Trailer:
        """Whose counts and gradients make up the update: all ranks', or only one's own."""
        if self.averager is None:
            return trailer
        names = self._agree_layout().term_names
        own = dict(zip(names, self._terms.counts(names).tolist(), strict=True))
        return replace(trailer, counts=own, touched=self._touched())

    def _update(self, trailer: Trailer, factor: float) -> tuple[float | None, bool]:
        had_none = self.averager is not None and not any(trailer.counts.values())
        if self.gradient_group is None or had_none:
            return None, False
        if self._buckets is not None:
            self._buckets.scale_(factor)
            self._buckets.drop_untouched(trailer.touched)
        else:
            multiply_gradients(self._parameters, factor)
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        grad_norm = clip(self._parameters, self.settings.max_grad_norm)
        if self._scaler is None:
            self.optimizer.step()
            return grad_norm, False
        factor = step_scaled(self.optimizer, self._scaler)
        if self.residuals is not None:
            self.residuals.scale_(factor)
        return grad_norm, factor < 1.0
