"""What the engine, the fleet and this machine allow chaos to do."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from geartrain.bench.chaos.kinds import Capability
from geartrain.devices.emulation.network import missing_for_networks
from geartrain.devices.profile import Fleet
from geartrain.launch import launcher
from geartrain.launch.situation import Situation, WorkerState, lost_workers

COORDINATOR_MODULE = "geartrain.elastic.process"
"""What a coordinator's process runs."""
_PROGRAMS = ("unshare", "mount", "env")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user gave that kinds may need."""

    fleet: Fleet
    has_links: bool
    saves: bool


def find_missing(asked: Asked) -> dict[Capability, str]:
    """Capabilities that are not there, each with the reason and what to do."""
    missing: dict[Capability, str | None] = {
        "emulated devices": _emulated(asked),
        "emulated links": _links(asked),
        "small disk": _small_disk(),
        "saves": None
        if asked.saves
        else "chaos does not know where the script saves its state; say so with --saved",
        "coordinator": None
        if _launch_uses(COORDINATOR_MODULE)
        else "runs of this version have no coordinator process",
        "rejoining": None
        if can_rejoin()
        else "a lost device does not come back in this version",
        "restoring": None
        if _launch_uses("geartrain.launch.restoring")
        else "a run ends with its last worker in this version",
    }
    return {name: reason for name, reason in missing.items() if reason is not None}


def can_rejoin() -> bool:
    """Whether the launcher starts a lost worker again."""
    return _launch_uses("geartrain.launch.respawn")


def can_lose_first_rank() -> bool:
    """Whether a run goes on without rank 0, by what its supervision would decide."""
    killed = WorkerState(rank=0, device_id="a", exit_code=-signal.SIGKILL, ended_at_s=1.0)
    other = WorkerState(rank=1, device_id="b")
    situation = Situation(workers=(killed, other), now_s=1.0, goes_on=True)
    return killed in lost_workers(situation)


def _emulated(asked: Asked) -> str | None:
    real = [d.device_id for d in asked.fleet.devices if d.kind != "emulated"]
    if not real:
        return None
    return f"{', '.join(real)} can't be slowed down; use --devices emulated:0.3,0.3,..."


def _links(asked: Asked) -> str | None:
    if asked.has_links:
        return None
    missing = missing_for_networks()
    if missing is not None:
        return f"emulated links need {missing}"
    return "the devices are on no emulated hosts; give --links, such as 200Mbit"


def _small_disk() -> str | None:
    if os.geteuid() != 0:
        return "a disk of its own for the run needs root"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"a disk of its own for the run needs the programs {', '.join(absent)}"
    return None


def _launch_uses(module: str) -> bool:
    """Whether any code of the launcher names a module.

    The launcher has no list of what it can do, and to start it only to find out would
    take seconds.
    """
    folder = Path(launcher.__file__).parent
    own = f"{module.rpartition('.')[2]}.py"
    return any(
        module in path.read_text() for path in folder.glob("*.py") if path.name != own
    )
