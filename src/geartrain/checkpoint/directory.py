"""Replace a directory in one step, so that a crash leaves the old one or the new.

A directory is written beside its final place under a hidden name and renamed. An
old one steps aside under a fixed name first, where readers look while the place is
empty: two renames and a rule are portable, an atomic exchange is Linux's alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """Give an empty directory to fill; it becomes ``path`` when the block succeeds.

    The caller makes the files durable; the renames are made so here. When the block
    raises, ``path`` is as it was.

    Raises:
        OSError: If the file system refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    draft = Path(tempfile.mkdtemp(dir=path.parent, prefix=_draft_prefix(path)))
    lock = os.open(draft, os.O_RDONLY)
    try:
        with suppress(OSError):  # without locks, a sweep can't lock either and keeps it
            fcntl.flock(lock, fcntl.LOCK_EX)  # tells a sweep that the owner is alive
        draft.chmod(0o755)  # mkdtemp's 0700 would shut out who could read the old one
        yield draft
        os.fsync(lock)
        _publish(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def current_directory(path: Path) -> Path:
    """Return where the last complete directory is, also after a crash."""
    stepped_aside = _previous(path)
    return stepped_aside if not path.exists() and stepped_aside.is_dir() else path


def _publish(draft: Path, path: Path) -> None:
    previous = _previous(path)
    if path.is_dir() and any(path.iterdir()):
        path.rename(previous)
    try:
        draft.rename(path)
    except OSError:
        if previous.exists() and not path.exists():
            previous.rename(path)
        raise
    _sync(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _sweep(path: Path) -> None:
    """Clean up after writers that died."""
    previous = _previous(path)
    if previous.is_dir():
        if path.exists():
            shutil.rmtree(previous)
        else:
            previous.rename(path)
    for draft in path.parent.glob(f"{_draft_prefix(path)}*"):
        if _has_no_owner(draft):
            shutil.rmtree(draft, ignore_errors=True)


def _has_no_owner(draft: Path) -> bool:
    try:
        handle = os.open(draft, os.O_RDONLY)
    except OSError:
        return False  # gone meanwhile, or somebody else's
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(handle)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _draft_prefix(path: Path) -> str:
    return f".{path.name}.saving-"


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
