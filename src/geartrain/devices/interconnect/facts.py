"""What a maker's software says about the links between devices. Never reaches torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LinkKind = Literal["nvlink", "xgmi", "hccs", "xelink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink:
    """All links of a kind from one device to another one, or to a switch."""

    source: str
    """PCI address (``0000:17:00.0``), or the name in the maker's own table (``NPU0``)."""
    target: str
    """As ``source``; ``switch`` where the link ends at an NVSwitch."""
    kind: LinkKind
    num_links: int
    num_active: int
    version: str | None = None
    bytes_per_s: float | None = None
    """One direction, all active links together; None where nothing tells it."""
    read_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentFact:
    """Something that could not be read, and why: never an error, never a zero."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InterconnectFacts:
    """Links between devices, and what could not be asked."""

    links: tuple[DeviceLink, ...] = ()
    absent: tuple[AbsentFact, ...] = field(default_factory=tuple)
