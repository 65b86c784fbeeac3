"""The user's model as the planner sees it: measured curves, no tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from geartrain.errors import ConfigError
from geartrain.planner.exchange.request import HostGroupKind
from geartrain.planner.exchange.schedule import CodecProfile
from geartrain.topology.profile import Topology

DEFAULT_BACKWARD_FRACTION = 2 / 3
"""Where it was not measured; a matrix product has two gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Peak tensor bytes of a training step: fixed + per sample of a micro-batch."""

    fixed_bytes: int
    bytes_per_sample: float
    limit_bytes: int

    def bytes_for(self, micro_batch_size: int) -> int:
        """Predicted peak bytes with this micro-batch size."""
        return round(self.fixed_bytes + self.bytes_per_sample * micro_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCurve:
    """Forward + backward time of one device over the micro-batch size.

    Through the measured points runs a piecewise linear curve; beyond the last one
    the fit alpha + beta * b continues it. Sizes above ``max_micro_batch_size`` do
    not fit in the device's memory.
    """

    device_id: str
    micro_batch_sizes: tuple[int, ...]
    """Measured sizes, rising, shape (num_points,)."""
    seconds: tuple[float, ...]
    """Time of one micro-batch of that size, shape (num_points,)."""
    max_micro_batch_size: int
    alpha_s: float = 0.0
    """Fixed time of one micro-batch (least squares over the points)."""
    beta_s: float = 0.0
    """Time a sample adds."""
    spread_fraction: float = 0.0
    """Largest (max - min) / median over the repeats of a point."""
    memory: MemoryCurve | None = None
    backward_fraction: float = DEFAULT_BACKWARD_FRACTION
    """Backward's part of the time."""

    def __post_init__(self) -> None:
        if len(self.micro_batch_sizes) != len(self.seconds) or not self.seconds:
            msg = (
                f"{self.device_id}: {len(self.micro_batch_sizes)} micro-batch sizes and "
                f"{len(self.seconds)} times; expected as many of each, at least one"
            )
            raise ConfigError(msg)
        rising = all(
            a < b
            for a, b in zip(
                (0, *self.micro_batch_sizes), self.micro_batch_sizes, strict=False
            )
        )
        if not rising:
            msg = f"{self.device_id}: sizes {self.micro_batch_sizes} must rise from >= 1"
            raise ConfigError(msg)
        if min(self.seconds) <= 0:
            msg = f"{self.device_id}: times {self.seconds} must be > 0; profile again"
            raise ConfigError(msg)
        if not 0 <= self.backward_fraction <= 1:
            msg = (
                f"{self.device_id}: backward_fraction={self.backward_fraction} must lie in "
                "0..1; profile again"
            )
            raise ConfigError(msg)
        if self.max_micro_batch_size < 1:
            msg = (
                f"{self.device_id}: max_micro_batch_size={self.max_micro_batch_size}; "
                "not even one sample fits in its memory"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeProfile:
    """What one gradient exchange costs, measured with the user's gradient bytes."""

    num_bytes: int
    all_devices_s: float
    """One exchange among all devices."""
    device_ids: tuple[str, ...] = ()
    with_device_s: tuple[float, ...] = ()
    """An exchange between rank 0's device and this one, same order as device_ids.

    The slowest member gates an exchange, so a set costs its largest entry, scaled
    such that the set of all devices costs ``all_devices_s``.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeNetwork:
    """Where the devices are, how their hosts are linked, and what may be compressed."""

    topology: Topology
    device_ids: tuple[str, ...]
    host_ids: tuple[str, ...]
    """Of each device, same order."""
    codecs: tuple[CodecProfile, ...] = ()
    policy: str | None = None
    """As ``ExchangeRequest.policy``."""
    host_group: HostGroupKind = "lone"
    core_fraction: float = 1.0
    """Processor cores that each host has for the exchange."""
    core_fractions: tuple[float, ...] = ()
    """The same of each device's host, same order as ``device_ids``; empty: all alike."""
    num_buckets: int = 8
    """Parts in which gradients are exchanged while backward fills the next ones; 1: only
    after backward."""

    def __post_init__(self) -> None:
        if self.num_buckets < 1:
            msg = f"exchange network: num_buckets={self.num_buckets} must be >= 1"
            raise ConfigError(msg)
        if len(self.device_ids) != len(self.host_ids):
            msg = (
                f"exchange network: {len(self.device_ids)} devices on "
                f"{len(self.host_ids)} hosts; expected a host for each device"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The measured model on a fleet."""

    name: str
    num_parameters: int
    gradient_bytes: int
    curves: tuple[ComputeCurve, ...]
    """One a device, in rank order."""
    exchange: ExchangeProfile
    optimizer_s: tuple[float, ...] = ()
    """Time of an optimizer step, a device each; empty where not measured."""
    network: ExchangeNetwork | None = None
    """Where known, exchanges are predicted from it and not from ``exchange``."""
    schema_version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of a plan."""

    global_batch_size: int
    uniform_micro_batches: bool = False
    """All devices run the same number of micro-batches (synchronized BatchNorm)."""
    tail_samples: int = 0
    """Samples at the end of each global batch left to whoever is free."""
    required_device_ids: tuple[str, ...] = ()
    """Devices that may not be left out (rank 0's always is)."""

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            msg = f"global_batch_size={self.global_batch_size} must be >= 1"
            raise ConfigError(msg)
        if not 0 <= self.tail_samples <= self.global_batch_size:
            msg = (
                f"tail_samples={self.tail_samples} must lie in 0.."
                f"{self.global_batch_size}, the global batch size"
            )
            raise ConfigError(msg)


def merge_profiles(
    known: ModelProfile, current: ModelProfile, order: Sequence[str]
) -> ModelProfile:
    """All devices that either profile knows; those of the current one as it says.

    Args:
        known: Perhaps of more devices, measured earlier.
        current: What is known of exchanges is taken from it.
        order: Of the devices, by id; the profile has them in rank order.
    """
    curves: dict[str, ComputeCurve] = {}
    optimizer_s: dict[str, float] = {}
    for profile in (known, current):
        curves |= {curve.device_id: curve for curve in profile.curves}
        if profile.optimizer_s:
            ids = [curve.device_id for curve in profile.curves]
            optimizer_s |= dict(zip(ids, profile.optimizer_s, strict=True))
    names = [name for name in order if name in curves]
    is_timed = all(name in optimizer_s for name in names)
    return replace(
        current,
        curves=tuple(curves[name] for name in names),
        optimizer_s=tuple(optimizer_s[name] for name in names) if is_timed else (),
    )


def with_curves(
    profile: ModelProfile, curves: Sequence[ComputeCurve], order: Sequence[str]
) -> ModelProfile:
    """The profile with more devices; updates take as long there as on the slowest.

    Args:
        profile: Of at least one device.
        curves: Of devices that it may not have.
        order: Of the devices, by id.
    """
    known = {curve.device_id for curve in profile.curves}
    added = [curve for curve in curves if curve.device_id not in known]
    slowest_s = max(profile.optimizer_s, default=0.0)
    more = replace(
        profile,
        curves=tuple(added),
        optimizer_s=(slowest_s,) * len(added) if profile.optimizer_s else (),
    )
    return merge_profiles(more, profile, order)


def guess_curve(profile: ModelProfile, device_id: str) -> ComputeCurve:
    """A device that could not be measured is taken for as slow as the slowest known."""
    slowest = max(profile.curves, key=lambda curve: curve.seconds[-1])
    return replace(slowest, device_id=device_id)


def only_devices(profile: ModelProfile, device_ids: Collection[str]) -> ModelProfile:
    """The profile of some of its devices; what is known of exchanges stays."""
    kept = [i for i, c in enumerate(profile.curves) if c.device_id in device_ids]
    return replace(
        profile,
        curves=tuple(profile.curves[i] for i in kept),
        optimizer_s=tuple(profile.optimizer_s[i] for i in kept if profile.optimizer_s),
    )
