"""What a macro benchmark runs and what its workers bring back. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from geartrain.errors import ConfigError

Variant = Literal["alone", "ddp", "ddp_uneven", "geartrain"]

HEAD_DIM = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The benchmark's GPT."""

    dim: int = 96
    num_layers: int = 5
    context: int = 112
    """Bytes of a sample."""

    def __post_init__(self) -> None:
        if self.dim < HEAD_DIM or self.dim % HEAD_DIM:
            msg = f"dim={self.dim} must be a multiple of {HEAD_DIM}, the size of a head"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """One launch: variants in turn on one fleet."""

    variants: tuple[Variant, ...]
    """Measured in this order in each round."""
    global_batch_size: int = 256
    seed: int = 0
    model: ModelSize = field(default_factory=ModelSize)
    warmup_steps: int = 12
    """Of geartrain, left out: the first look at the measured rates comes after 11."""
    num_rounds: int = 3
    scanned_sizes: tuple[int, ...] = (2, 4, 8, 16, 32)
    """Micro-batch sizes among which each device's fastest is looked for."""
    largest_micro_batch_size: int | None = None
    """Geartrain measures and plans up to this one; None leaves it to the session."""
    alone_s: float = 3.0
    ddp_steps: int = 1
    ddp_uneven_steps: int = 2
    geartrain_steps: int = 5
    slowdown_factor: float | None = None
    """After the rounds the fastest device gets its core fraction / this; None: never."""
    slowdown_max_steps: int = 12
    slowdown_steps_after: int = 6
    """Steps measured under the new plan."""

    def __post_init__(self) -> None:
        if self.num_rounds < 1 or self.global_batch_size < 1:
            msg = (
                f"num_rounds={self.num_rounds} and global_batch_size="
                f"{self.global_batch_size} must be >= 1"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDeviceSettings:
    """A session against a plain loop, and the losses of one device."""

    num_pairs: int = 40
    """Pairs of a session's step and a plain one; the first is left out."""
    batch_size: int = 32
    reference_steps: int = 0
    """Steps of the plain loop over the fleet run's global batches."""
    reference_batch_size: int = 256
    seed: int = 0
    model: ModelSize = field(default_factory=ModelSize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One variant in one round."""

    variant: Variant
    round_index: int
    num_samples: int
    seconds: float
    """From all ranks ready to all ranks done."""

    @property
    def samples_per_s(self) -> float:
        """Throughput of the whole fleet."""
        return self.num_samples / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AlonePhase:
    """One device on its own in one round, while all others work as well."""

    device_id: str
    round_index: int
    micro_batch_size: int
    num_samples: int
    compute_s: float
    """Forward and backward of the samples."""
    optimizer_s: float
    """One optimizer step."""

    def samples_per_s(self, global_batch_size: int) -> float:
        """Speed of a device that trains alone: an update each global batch.

        >>> phase = AlonePhase(device_id="a", round_index=0, micro_batch_size=2,
        ...                    num_samples=10, compute_s=1.0, optimizer_s=2.0)
        >>> phase.samples_per_s(20)
        5.0
        """
        update_s = self.optimizer_s * self.num_samples / global_batch_size
        return self.num_samples / (self.compute_s + update_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A device was slowed while geartrain trained."""

    device_id: str
    fraction_before: float
    fraction_after: float
    changed_at_step: int
    """Steps completed when it was slowed."""
    replanned_at_step: int | None
    """Steps completed when another plan came into force; None: it never did."""
    step_s: tuple[float, ...]
    """Wall time of each step since the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMeasurement:
    """What one launch measured; rank 0 writes it to ``macro.json``."""

    device_ids: tuple[str, ...]
    """In rank order, as all tuples here."""
    core_fractions: tuple[float, ...]
    num_parameters: int
    micro_batch_sizes: tuple[int, ...]
    """Each device's fastest, by a scan before the rounds; DDP uses it."""
    ddp_shares: tuple[int, ...]
    ddp_uneven_shares: tuple[int, ...]
    geartrain_shares: tuple[int, ...]
    """At the end of the rounds."""
    phases: tuple[Phase, ...]
    alone: tuple[AlonePhase, ...]
    losses: tuple[float, ...]
    """Of geartrain's steps from the first one to the end of the rounds."""
    num_warmup_steps: int
    slowdown: Slowdown | None = None
    schema_version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDeviceMeasurement:
    """Seconds of each step, pair by pair."""

    session_s: tuple[float, ...]
    plain_s: tuple[float, ...]
    clock: str
    """``process CPU time`` or ``wall time``."""
    schema_version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceLosses:
    """What one device's plain loop came to."""

    losses: tuple[float, ...]
    schema_version: int = 1
