"""Gradients in flat buckets, summed over ranks while backward still runs.

Every parameter's ``grad`` is a view into a flat buffer, so that a bucket is sent
without a copy. In the last micro-batch of a step a bucket is sent as soon as
backward has filled it; all ranks send buckets in index order, whatever order their
backward filled them in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from geartrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from geartrain.collectives.protocol import Collective, Pending

DEFAULT_BUCKET_BYTES = 8 * 2**20
"""Smaller than DDP's 25 MiB, which leaves small models nothing to overlap."""

_SUMMED_IN_FLOAT32 = (torch.float16, torch.bfloat16)
"""Sums of many ranks lose too much in these, so they travel as float32."""


@dataclass(slots=True)
class _Bucket:
    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    wire: torch.Tensor | None = None
    missing: int = 0
    pending: Pending | None = None


@dataclass(slots=True)
class _Place:
    bucket_index: int
    view: torch.Tensor
    name: str
    touched: bool = False
    ready: bool = False


@dataclass(slots=True)
class GradientBuckets:
    """Flat gradient buffers of a model and their exchange.

    Args:
        named_parameters: Those that take a gradient, in the model's order.
        bucket_bytes: Largest size of a bucket, except for a larger parameter;
            ``choose_bucket_bytes`` finds it from what an exchange takes.

    Raises:
        ConfigError: If no parameter takes a gradient.
    """

    named_parameters: Sequence[tuple[str, torch.nn.Parameter]]
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    collective: Collective | None = None
    weight: float = 1.0
    """What this rank's gradients are multiplied by in the exchange; 0 counts them as
    zeros, whatever they hold."""
    _buckets: list[_Bucket] = field(default_factory=list)
    _places: dict[torch.nn.Parameter, _Place] = field(default_factory=dict)
    _sending: bool = False
    _next_index: int = 0

    def __post_init__(self) -> None:
        if not self.named_parameters:
            msg = "the model has no parameter that takes a gradient; expected at least one"
            raise ConfigError(msg)
        self._group()
        for _, parameter in self.named_parameters:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._on_gradient
            )

    def regroup(self, bucket_bytes: int) -> None:
        """Cut the gradients into buckets of another size; gradients held are lost.

        Args:
            bucket_bytes: As in the constructor.
        """
        if bucket_bytes != self.bucket_bytes:
            self.bucket_bytes = bucket_bytes
            self._group()
            self.begin_step()

    def renew(self) -> None:
        """Take new buffers: an exchange that was given up may still write to the old."""
        self._group()
        self.begin_step()

    def _group(self) -> None:
        self._buckets.clear()
        for group in _group_parameters(self.named_parameters, self.bucket_bytes):
            self._add_bucket(group)

    @property
    def num_bytes(self) -> int:
        """Bytes that one exchange sums."""
        return sum(b.flat.numel() * b.flat.element_size() for b in self._buckets)

    @property
    def flats(self) -> list[torch.Tensor]:
        """The flat buffers, one a bucket, shape (num_elements,)."""
        return [bucket.flat for bucket in self._buckets]

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """Each parameter's part of the buffers, by name, of the parameter's shape."""
        return {place.name: place.view for place in self._places.values()}

    @property
    def contents(self) -> dict[str, tuple[int, ...]]:
        """The parameters of each bucket that a codec may be applied to.

        By the key that it is exchanged by: positions in the model's order.
        """
        places = {parameter: i for i, (_, parameter) in enumerate(self.named_parameters)}
        return {
            f"bucket{index}": tuple(places[p] for p in bucket.parameters)
            for index, bucket in enumerate(self._buckets)
            if bucket.flat.dtype != torch.float64
        }

    @property
    def touched(self) -> list[bool]:
        """Which parameters got a gradient here this step, in the model's order."""
        return [self._places[p].touched for _, p in self.named_parameters]

    def begin_step(self) -> None:
        """Zero the buffers and point every parameter's ``grad`` at its view."""
        self._sending = False
        self._next_index = 0
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.missing = len(bucket.parameters)
            bucket.pending = None
        for parameter, place in self._places.items():
            place.touched = place.ready = False
            parameter.grad = place.view

    def send_during_backward(self) -> None:
        """From now on send each bucket as soon as backward has filled it."""
        self._sending = self.collective is not None and self.collective.num_members > 1

    def send_rest(self) -> None:
        """Send the buckets that backward did not fill (unused parameters, no samples)."""
        if self.collective is None or self.collective.num_members == 1:
            return
        while self._next_index < len(self._buckets):
            self._send(self._next_index)

    def wait(self) -> None:
        """Block until every bucket holds the sum over all members.

        Raises:
            CommunicationError: If a peer was lost or the deadline passed.
        """
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None
            if bucket.wire is not None:
                bucket.flat.copy_(bucket.wire)
                bucket.wire = None

    def scale_(self, factor: float) -> None:
        """Multiply all gradients."""
        if factor != 1.0:
            torch._foreach_mul_(self.flats, factor)

    def drop_untouched(self, touched: Iterable[bool]) -> None:
        """Set ``grad`` to None where no rank had a gradient, as one device would."""
        for (_, parameter), used in zip(self.named_parameters, touched, strict=True):
            if not used:
                parameter.grad = None

    def _add_bucket(self, group: list[tuple[str, torch.nn.Parameter]]) -> None:
        first = group[0][1]
        total = sum(parameter.numel() for _, parameter in group)
        flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        offset = 0
        for name, parameter in group:
            view = flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
            self._places[parameter] = _Place(len(self._buckets), view, name)
        self._buckets.append(_Bucket([p for _, p in group], flat))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        place = self._places[parameter]  # type: ignore[index]  # hooks get the Parameter
        if parameter.grad is not place.view:
            self._adopt(parameter, place)
        place.touched = True
        if not self._sending:
            return
        if place.ready:
            msg = (
                f"{place.name} got its gradient twice in one backward (reentrant "
                "checkpointing of a shared parameter?); call setup(overlap=False)"
            )
            raise ConfigError(msg)
        place.ready = True
        self._buckets[place.bucket_index].missing -= 1
        while (
            self._next_index < len(self._buckets)
            and self._buckets[self._next_index].missing == 0
        ):
            self._send(self._next_index)

    def _adopt(self, parameter: torch.Tensor, place: _Place) -> None:
        """Copy a gradient that autograd or the user put elsewhere into its bucket."""
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            msg = (
                f"{place.name} has a sparse gradient; expected a dense one. "
                "Make its module with sparse=False"
            )
            raise ConfigError(msg)
        place.view.copy_(parameter.grad)
        parameter.grad = place.view

    def _send(self, index: int) -> None:
        assert self.collective is not None
        bucket = self._buckets[index]
        if bucket.flat.dtype in _SUMMED_IN_FLOAT32:
            bucket.wire = bucket.flat.float()
        wire = bucket.flat if bucket.wire is None else bucket.wire
        bucket.pending = self.collective.all_reduce(wire, self.weight, key=f"bucket{index}")
        self._next_index = index + 1


def _group_parameters(
    named_parameters: Sequence[tuple[str, torch.nn.Parameter]], bucket_bytes: int
) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """Group by dtype and device, last parameters first: backward's usual order."""
    groups: list[list[tuple[str, torch.nn.Parameter]]] = []
    used = 0
    for name, parameter in reversed(named_parameters):
        size = parameter.numel() * parameter.element_size()
        previous = groups[-1][-1][1] if groups else None
        fits = (
            previous is not None
            and used + size <= bucket_bytes
            and (previous.dtype, previous.device) == (parameter.dtype, parameter.device)
        )
        if fits:
            groups[-1].append((name, parameter))
            used += size
        else:
            groups.append([(name, parameter)])
            used = size
    return groups
