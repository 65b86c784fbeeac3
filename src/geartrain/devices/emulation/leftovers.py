"""Removing what a killed launcher left behind: its cgroups and registrations."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from geartrain.devices.emulation.cgroup_files import CgroupFiles
from geartrain.devices.emulation.owner import parse_owner

logger = logging.getLogger(__name__)


def sweep_cgroups(roots: tuple[Path, ...], files: CgroupFiles) -> list[Path]:
    """Remove the groups of dead owners, ending the processes left inside.

    Groups of living owners stay, and so do groups with processes of another pid
    namespace (another container), whose owners can't be told dead or alive from here.

    Returns:
        The directories removed.
    """
    removed = []
    for root in roots:
        for directory in sorted(root.glob("geartrain-*-*")):
            owner = parse_owner(directory.name)
            if owner is None or owner.is_alive() or _is_foreign(directory, files):
                continue
            if _remove_tree(directory, files):
                removed.append(directory)
            else:
                logger.warning("cannot remove %s, left by a dead launcher", directory)
    return removed


def sweep_registrations(directory: Path) -> list[Path]:
    """Remove the state files of dead owners.

    Returns:
        The files removed.
    """
    removed = []
    for path in sorted(directory.glob("*.json")):
        owner = parse_owner(f"geartrain-{path.stem}")
        if owner is not None and not owner.is_alive():
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _groups(directory: Path) -> list[Path]:
    children = sorted(path for path in directory.iterdir() if path.is_dir())
    return [*children, directory]


def _is_foreign(directory: Path, files: CgroupFiles) -> bool:
    return any(0 in files.pids(group) for group in _groups(directory))


def _remove_tree(directory: Path, files: CgroupFiles) -> bool:
    for group in _groups(directory):
        for pid in files.pids(group):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("process %d of %s ended by itself", pid, group)
        if not files.remove(group):  # tries again while the killed are dying
            return False
    return True
