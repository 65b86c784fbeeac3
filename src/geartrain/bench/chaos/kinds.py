"""The faults that chaos knows: one entry in a table each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from geartrain.errors import ConfigError

Capability = Literal[
    "emulated devices",
    "emulated links",
    "small disk",
    "saves",
    "coordinator",
    "rejoining",
    "restoring",
]
"""What a kind may need of the engine, the run or the machine."""
Moment = Literal["now", "rebuild", "save", "heal"]
"""now: as scheduled. The others wait until the engine is in the middle of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One way in which a run is disturbed."""

    name: str
    summary: str
    loses_device: bool = False
    """The others are expected to go on without the device."""
    may_lose_device: bool = False
    """They may, where it lasts."""
    hits_device: bool = True
    """It is done to one device, not to the whole run."""
    by_default: bool = True
    """It is drawn where no kind is named."""
    least_s: float = 0.0
    most_s: float = 0.0
    """How long it lasts, drawn between these; 0: it has no end."""
    moment: Moment = "now"
    patience_s: float = 1.0
    """How long it waits where it is not possible at once, before it is left out."""
    pause_s: float = 3.0
    """How long no step may be committed after it, steps' own time left out."""
    slows_by: float = 1.0
    """Steps that go on meanwhile may take this many times as long."""
    needs: tuple[Capability, ...] = ()

    @property
    def silences(self) -> bool:
        """Whether the device can't be counted on meanwhile."""
        return self.loses_device or self.may_lose_device


_FREEZE_PAUSE_S = 6.0
"""Silence is noticed after 2.4 to 3 s; a roll call waits for at most 3 s more."""
_RESTORE_PAUSE_S = 60.0
"""All processes start anew, find the state and measure."""
_MOMENT_S = 10.0
_SHAPED = 8.0
_SLOWED = 12.0

KINDS: Mapping[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind(name="kill", summary="SIGKILL of a worker", loses_device=True),
        FaultKind(
            name="stop",
            summary="SIGSTOP, and SIGCONT a moment later, when others may have given it up",
            may_lose_device=True,
            least_s=0.05,
            most_s=1.5,
        ),
        FaultKind(
            name="freeze",
            summary="SIGSTOP for good: the others must notice by themselves",
            loses_device=True,
            pause_s=_FREEZE_PAUSE_S,
        ),
        FaultKind(
            name="slow",
            summary="a fifth of the device's share of a core for a while (cgroup quota)",
            least_s=1.0,
            most_s=4.0,
            slows_by=_SLOWED,
            needs=("emulated devices",),
        ),
        FaultKind(
            name="link_slow",
            summary="the device's link at an eighth of its rate for a while",
            least_s=1.0,
            most_s=4.0,
            slows_by=_SHAPED,
            needs=("emulated links",),
        ),
        FaultKind(
            name="link_cut",
            summary="the device's cable pulled and plugged in again",
            may_lose_device=True,
            least_s=0.1,
            most_s=1.0,
            needs=("emulated links",),
        ),
        FaultKind(
            name="disk_full",
            summary="no space left where the run is written, for a while",
            hits_device=False,
            least_s=1.0,
            most_s=4.0,
            needs=("small disk",),
        ),
        FaultKind(
            name="bit_flip",
            summary="one bit of a saved state turned; reading must find it",
            hits_device=False,
            patience_s=_MOMENT_S,
            needs=("saves",),
        ),
        FaultKind(
            name="kill_in_rebuild",
            summary="SIGKILL of a second worker while the others regroup",
            loses_device=True,
            moment="rebuild",
        ),
        FaultKind(
            name="kill_in_save",
            summary="SIGKILL of a worker while the state is being saved",
            loses_device=True,
            moment="save",
            patience_s=_MOMENT_S,
            needs=("saves",),
        ),
        FaultKind(
            name="kill_in_heal",
            summary="SIGKILL of a worker while another is given the state",
            loses_device=True,
            moment="heal",
            patience_s=_MOMENT_S,
            needs=("rejoining",),
        ),
        FaultKind(
            name="coordinator_kill",
            summary="SIGKILL of the coordinator, which must come back from its journal",
            hits_device=False,
            pause_s=4.0,
            needs=("coordinator",),
        ),
        FaultKind(
            name="kill_all",
            summary="SIGKILL of all workers at once: the run goes on from memory or a save",
            hits_device=False,
            by_default=False,
            pause_s=_RESTORE_PAUSE_S,
            needs=("restoring",),
        ),
    )
}
"""To add a kind: an entry here, and its deed in ``deeds.py``."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "link": ("link_slow", "link_cut"),
    "disk": ("disk_full", "bit_flip"),
    "timed": ("kill_in_rebuild", "kill_in_save", "kill_in_heal"),
}
"""Short for several."""


def choose_kinds(
    names: Sequence[str], missing: Mapping[Capability, str]
) -> tuple[FaultKind, ...]:
    """The kinds asked for; the usual ones that are possible where none is named.

    Args:
        names: Of kinds or groups; empty: whatever is possible.
        missing: Capabilities that are not there, and why.

    Raises:
        ConfigError: If a name is unknown, or a kind that was named is not possible.

    >>> [kind.name for kind in choose_kinds(["kill", "stop"], {})]
    ['kill', 'stop']
    """
    if not names:
        usual = (kind for kind in KINDS.values() if kind.by_default)
        return tuple(kind for kind in usual if not _lacks(kind, missing))
    chosen: dict[str, FaultKind] = {}
    for name in names:
        members = GROUPS.get(name, (name,))
        found = [_known(member) for member in members]
        possible = [kind for kind in found if not _lacks(kind, missing)]
        if not possible:
            raise ConfigError(_refusal(found[0], missing))
        chosen |= {kind.name: kind for kind in possible}
    return tuple(chosen.values())


def _lacks(kind: FaultKind, missing: Mapping[Capability, str]) -> bool:
    return any(need in missing for need in kind.needs)


def _known(name: str) -> FaultKind:
    if name not in KINDS:
        msg = (
            f"unknown kind of fault {name!r}; known are {', '.join(KINDS)}, and "
            f"{', '.join(GROUPS)} for several"
        )
        raise ConfigError(msg)
    return KINDS[name]


def _refusal(kind: FaultKind, missing: Mapping[Capability, str]) -> str:
    reasons = "; ".join(missing[need] for need in kind.needs if need in missing)
    return f"{kind.name} ({kind.summary}) is not possible: {reasons}"
