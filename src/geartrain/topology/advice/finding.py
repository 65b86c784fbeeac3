"""What advice consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from geartrain.devices.interconnect.facts import AbsentFact
from geartrain.topology.fabric.affinity import NicAffinity
from geartrain.topology.fabric.facts import FabricFacts

Severity = Literal["error", "warning", "hint", "good"]
"""error: loses packets or does not work; warning: costs much; hint: costs a little or
depends; good: checked and as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule, applied to one thing."""

    rule: str
    severity: Severity
    subject: str
    """``mlx5_0``, ``eth0``, ``host``."""
    found: str
    """The value that was seen."""
    read_from: str
    expected: str
    action: str
    """What to do; empty where all is well."""
    why: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSetting:
    """A variable that a communication library reads, and why to set it so."""

    library: Literal["NCCL", "UCX", "Gloo"]
    name: str
    value: str
    why: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricAdvice:
    """All that there is to say about one host."""

    facts: FabricFacts
    summary: tuple[str, ...]
    findings: tuple[Finding, ...]
    environment: tuple[EnvironmentSetting, ...]
    affinities: tuple[NicAffinity, ...] = ()
    unchecked: tuple[AbsentFact, ...] = ()
    """What could not be checked since the fact is absent."""
    schema_version: int = 1


Rule = Callable[[FabricFacts], Iterable[Finding]]
"""A pure function; it says nothing where it does not apply or the fact is absent."""
