"""What a device is and how fast it was measured to be. Never reaches torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from geartrain.errors import ConfigError

Source = Literal["measured", "emulated", "datasheet", "recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """A rate, the median of repeats, and how far the repeats lay apart."""

    per_s: float
    spread_fraction: float
    """(largest - smallest repeat) / median."""
    num_repeats: int

    def __post_init__(self) -> None:
        if self.per_s <= 0:
            msg = f"per_s={self.per_s} must be > 0; probe that device again"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One accelerator, or the CPU, of one node."""

    device_id: str
    """Unique in the fleet, ``kind:index``, such as ``cuda:0`` or ``emulated:2``."""
    node_id: str
    vendor: str
    kind: str
    """The adapter's name: cpu, cuda, rocm, mps, xpu, npu, xla or emulated."""
    name: str
    memory_bytes: int
    flop_per_s: dict[str, MeasuredRate] = field(default_factory=dict)
    """Matrix multiplication, by dtype name (``float32``), supported dtypes only."""
    memory_bytes_per_s: MeasuredRate | None = None
    host_to_device_bytes_per_s: MeasuredRate | None = None
    """None where the device works in host memory."""
    device_to_host_bytes_per_s: MeasuredRate | None = None
    collective_backends: tuple[str, ...] = ("gloo",)
    core_fraction: float | None = None
    """Emulated devices only: the share of one core it is held to."""
    memory_limit_bytes: int | None = None
    """Emulated devices only: the enforced limit on tensor bytes, if any."""
    power_watts: float | None = None
    source: Source = "measured"
    measured_at_s: float = 0.0
    fingerprint: str = ""
    """Changes with hardware, driver, torch and probe version; keys the cache."""

    def __post_init__(self) -> None:
        if not self.device_id:
            msg = "device_id='' must name a device, such as cuda:0"
            raise ConfigError(msg)
        if self.memory_bytes <= 0:
            msg = f"{self.device_id}: memory_bytes={self.memory_bytes} must be > 0"
            raise ConfigError(msg)
        if self.core_fraction is not None and self.core_fraction <= 0:
            msg = f"{self.device_id}: core_fraction={self.core_fraction} must be > 0"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All devices of a run, in rank order: device i is worked by rank i."""

    extension_names: ClassVar[frozenset[str]] = frozenset({"topology", "fabric"})
    """What a ``fleet.json`` may hold besides: see ``topology.fleet_document``."""

    devices: tuple[DeviceProfile, ...]
    spec: str = ""
    """What the user asked for, such as ``emulated:1.0,0.5``."""
    oversubscribed: bool = False
    schema_version: int = 1

    def __post_init__(self) -> None:
        if not self.devices:
            msg = "a fleet needs at least one device; got none"
            raise ConfigError(msg)
        ids = [device.device_id for device in self.devices]
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            msg = f"a fleet lists {', '.join(twice)} more than once; name each once"
            raise ConfigError(msg)

    @property
    def labels(self) -> tuple[str, ...]:
        """Words that every result from this fleet must carry."""
        emulated = any(device.kind == "emulated" for device in self.devices)
        words = ("emulated" if emulated else "measured",)
        return (*words, "oversubscribed") if self.oversubscribed else words
