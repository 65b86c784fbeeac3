"""What a run has left behind on the machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from geartrain.bench.chaos.run_process import MARK_VARIABLE
from geartrain.devices.emulation.control import default_state_dir
from geartrain.devices.emulation.network.namespaces import NAMESPACES_DIR

_GRACE_S = 3.0
"""A process that was just killed needs a moment to be gone."""
_POLL_S = 0.05
_NUMBER = re.compile(r"\d+")
_CGROUPS = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, never written to


def find_leftovers(mark: str, launcher_id: int, process_ids: Iterable[int]) -> list[str]:
    """Find what is left of a run that has ended, each in words.

    Args:
        mark: In the environment of all its processes.
        launcher_id: Process id of its launcher, which cgroups, namespaces and
            registrations are named after.
        process_ids: Of its workers, which files in shared memory are named after.
    """
    deadline_s = time.monotonic() + _GRACE_S
    while (left := marked_processes(mark)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    found = [f"process {process_id} ({_name_of(process_id)})" for process_id in left]
    found += [f"cgroup {path}" for path in _cgroups_of(launcher_id)]
    owner = f"geartrain-{launcher_id}-"
    found += [f"network namespace {path.name}" for path in _named(NAMESPACES_DIR, owner)]
    registrations = _named(default_state_dir(), f"{launcher_id}-")
    found += [f"registration {path}" for path in registrations]
    ids = {launcher_id, *process_ids}
    found += [f"shared memory {path}" for path in shared_memory_of(ids)]
    return found


def marked_processes(mark: str) -> list[int]:
    """Process ids that have the mark in their environment; the dead do not count."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return sorted(found)


def end_marked(mark: str) -> None:
    """Kill what a run has left running; nothing else has its mark."""
    for process_id in marked_processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)


def shared_memory_of(
    process_ids: Iterable[int], folder: Path = _SHARED_MEMORY
) -> list[Path]:
    """Files of shared memory that carry one of these process ids in their name."""
    wanted = set(process_ids)
    return [
        path
        for path in _named(folder, "")
        if wanted & {int(number) for number in _NUMBER.findall(path.name)}
    ]


def _cgroups_of(launcher_id: int) -> list[Path]:
    # v1 has a hierarchy a controller, v2 only one; ours lie at the top of either.
    pattern = f"geartrain-{launcher_id}-*"
    return sorted([*_CGROUPS.glob(pattern), *_CGROUPS.glob(f"*/{pattern}")])


def _named(folder: Path, prefix: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith(prefix))


def _name_of(process_id: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/comm").read_text().strip()
    return "gone meanwhile"
