"""Turns what a user's script raised into the facts that the launcher reports."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

from geartrain import errors
from geartrain.parallel.worker_spec import WorkerFailure

_LOST_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Connection refused",
)
_MEMORY_TYPES = {"OutOfMemoryError", "MemoryError"}
_DELIBERATE = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.GeartrainError)
}


def describe(
    error: BaseException, *, script: Path, rank: int, device_id: str, at_s: float
) -> WorkerFailure:
    """Write down why a script failed; the traceback starts in the script.

    ``secondary`` is true for errors that a lost peer causes: geartrain's own
    CommunicationError, and torch.distributed's where the script calls it itself.
    """
    return WorkerFailure(
        rank=rank,
        device_id=device_id,
        at_s=at_s,
        error=f"{type(error).__name__}: {error}",
        traceback="".join(
            traceback.format_exception(type(error), error, _skip_to(error, script))
        ),
        secondary=_is_lost_peer(error),
        out_of_memory=any(kind.__name__ in _MEMORY_TYPES for kind in type(error).__mro__),
    )


def is_deliberate(failure: WorkerFailure) -> bool:
    """Whether geartrain raised it on purpose: its message says all a user needs."""
    return failure.error.partition(":")[0] in _DELIBERATE


def message_of(failure: WorkerFailure) -> str:
    """The error's message without its type."""
    return failure.error.partition(": ")[2]


def _is_lost_peer(error: BaseException) -> bool:
    if isinstance(error, errors.CommunicationError):
        return True
    if any(kind.__name__ in _LOST_PEER_TYPES for kind in type(error).__mro__):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(t in text for t in _LOST_PEER_TEXTS)


def _skip_to(error: BaseException, script: Path) -> TracebackType | None:
    if isinstance(error, SyntaxError) and error.filename == str(script):
        return None  # it names the line itself; the frames are those of runpy
    where = error.__traceback__
    while where is not None and where.tb_frame.f_code.co_filename != str(script):
        where = where.tb_next
    return where or error.__traceback__
