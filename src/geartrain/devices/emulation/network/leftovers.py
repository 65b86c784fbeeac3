"""Names of namespaces tell their owner; those of dead owners are removed."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from geartrain.devices.emulation.network.kernel import missing_for_networks, run_batch
from geartrain.devices.emulation.network.namespaces import NAMESPACES_DIR, kill_inside
from geartrain.devices.emulation.owner import Owner, current_owner, parse_owner

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<owner>geartrain-\d+-\d+)\.(?P<pids>\d+)\.(?P<lab>\d+)\.")


def lab_prefix(lab_index: int) -> str:
    """What the names of this process's lab of that number begin with.

    The pid namespace is named too, since process ids mean nothing outside of it.
    """
    return f"{current_owner().name}.{_pid_namespace()}.{lab_index}."


def sweep_networks() -> list[str]:
    """Remove the namespaces of dead owners, ending the processes left inside.

    Those of living owners stay, and those of another pid namespace (another
    container), whose owners can't be told dead or alive from here.

    Returns:
        The namespaces removed.
    """
    if not NAMESPACES_DIR.is_dir() or missing_for_networks() is not None:
        return []
    dead = [
        path.name
        for path in sorted(NAMESPACES_DIR.iterdir())
        if (owner := _owner_of(path.name)) is not None and not owner.is_alive()
    ]
    return remove_namespaces(dead)


def remove_namespaces(names: Sequence[str]) -> list[str]:
    """End what runs inside, then remove the namespaces and so all their links.

    Returns:
        Those that are gone now; a warning names the others.
    """
    if not names:
        return []
    surviving = kill_inside(*names)
    if surviving:
        logger.warning("processes %s in %s survive SIGKILL", surviving, ", ".join(names))
    failure = run_batch("ip", [f"netns del {name}" for name in names], force=True)
    gone = [name for name in names if not (NAMESPACES_DIR / name).exists()]
    if len(gone) < len(names):
        left = ", ".join(sorted(set(names) - set(gone)))
        logger.warning("cannot remove the namespaces %s: %s", left, failure)
    return gone


def _owner_of(name: str) -> Owner | None:
    match = _NAME.match(name)
    if match is None or int(match["pids"]) != _pid_namespace():
        return None
    return parse_owner(match["owner"])


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
