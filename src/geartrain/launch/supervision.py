"""Decides what the launcher does next. Pure: facts in, verdict out."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Literal

from geartrain.launch.settings import Outcome
from geartrain.launch.situation import (
    CAUSE_GRACE_S,
    Situation,
    WorkerState,
    has_left,
    loss_reason,
    lost_workers,
    signal_name,
)
from geartrain.parallel.worker_spec import STOPPED_EXIT_CODE

EXIT_GRACE_S = 2.0
"""How long the others get to end by themselves after a script's own sys.exit(n)."""
LOSS_GRACE_S = 20.0
"""How long the others get to say that they go on without a worker that was killed."""
INTERRUPTED_EXIT_CODE = 130
"""Shells report 128 + SIGINT for a program that Ctrl-C ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do, and with which result."""

    action: Literal["watch", "end", "restore"]
    """restore: nobody holds the state any more; go on from the last save, if any."""
    outcome: Outcome = "finished"
    exit_code: int = 0
    cause: WorkerState | None = None
    """The worker whose failure ended the run; None where it was none."""
    reason: str = ""
    others: tuple[WorkerState, ...] = ()
    """Workers that failed in consequence."""


WATCH = Verdict(action="watch")
INTERRUPTED_EARLY = Verdict(
    action="end", outcome="stopped", exit_code=INTERRUPTED_EXIT_CODE
)


def decide(situation: Situation) -> Verdict:
    """Watch on, or end the run: with which outcome and because of whom.

    A worker's own failure counts before those that only lost their peers; among
    several, the earliest. Lost peers alone end the run after a grace in which the
    cause may still show.
    """
    if situation.kill_requested:
        return _stopped("killed on request")
    if situation.broken is not None:
        return _broken(situation.broken)
    return _decide_by_workers(situation)


def _decide_by_workers(situation: Situation) -> Verdict:
    lost = lost_workers(situation)
    failed = [w for w in situation.workers if w not in lost and _has_failed(w, situation)]
    if failed:
        return _decide_failure(situation, failed, lost)
    if lost and _is_in_vain(situation, lost):
        return _failure(situation, _first_lost(lost), list(lost))
    if _has_no_holder(situation, lost):
        last = max((w for w in lost if not has_left(w)), key=_failed_at_s)
        others = tuple(w for w in lost if w is not last and not has_left(w))
        reason = (
            f"{loss_reason(last)}; it held the state as the last one, and the run can't go "
            "on from a save"
        )
        failure = _failure(situation, last, [last, *others])
        return replace(failure, action="restore", reason=reason)
    waiting = [w for w in situation.workers if w.exit_code is None and w not in lost]
    if _is_over(situation, lost, waiting):
        return _all_ended(situation, lost)
    asked_at_s = situation.stop_requested_at_s
    if asked_at_s is not None and situation.now_s > asked_at_s + situation.stop_timeout_s:
        names = ", ".join(w.name for w in waiting)
        return _stopped(
            f"killed {names}, which did not stop within {situation.stop_timeout_s:.0f} s"
        )
    return WATCH


def _is_in_vain(situation: Situation, lost: tuple[WorkerState, ...]) -> bool:
    if _num_left(situation, lost) < situation.min_devices:
        return any(not has_left(w) for w in lost) or _num_left(situation, lost) > 0
    if situation.has_coordinator:
        return False
    return any(
        w.loss is None and situation.now_s > _failed_at_s(w) + LOSS_GRACE_S for w in lost
    )


def _has_no_holder(situation: Situation, lost: tuple[WorkerState, ...]) -> bool:
    """Whether all that held the state are lost, and others wait for it in vain."""
    if not situation.has_coordinator or situation.stop_requested_at_s is not None:
        return False
    if not any(w.has_entered and not has_left(w) for w in lost):
        return False
    others = [w for w in situation.workers if w not in lost]
    if any(w.has_entered or w.exit_code is not None for w in others):
        return False
    return bool(others) or any(w.returns for w in lost)


def _first_lost(lost: tuple[WorkerState, ...]) -> WorkerState:
    """Whose loss counts as the cause: the earliest one that was no leave."""
    return min(lost, key=lambda w: (has_left(w), _failed_at_s(w)))


def _num_left(situation: Situation, lost: tuple[WorkerState, ...]) -> int:
    """Devices that train or will again."""
    return sum(w.returns or w not in lost for w in situation.workers)


def _is_over(
    situation: Situation, lost: tuple[WorkerState, ...], waiting: list[WorkerState]
) -> bool:
    """Whether nothing is left to wait for; who has not entered by now never will."""
    if any(w.has_entered for w in waiting):
        return False
    if any(w not in lost and w.exit_code is not None for w in situation.workers):
        return True
    return not waiting and not any(w.returns for w in lost)


def _all_ended(situation: Situation, lost: tuple[WorkerState, ...]) -> Verdict:
    if len(lost) == len(situation.workers):
        return _stopped("all devices have left")
    codes = {w.exit_code for w in situation.workers if w not in lost}
    if situation.stop_requested_at_s is None and STOPPED_EXIT_CODE not in codes:
        return Verdict(action="end")
    unsaved = [
        w.name
        for w in situation.workers
        if w.exit_code == -signal.SIGUSR1 and w.has_entered
    ]
    if unsaved:
        return _stopped(f"stopped before {', '.join(unsaved)} had a session")
    return _stopped("stopped")


def _decide_failure(
    situation: Situation, failed: list[WorkerState], lost: tuple[WorkerState, ...]
) -> Verdict:
    primary = [w for w in failed if w.failure is None or not w.failure.secondary]
    running = [w for w in situation.workers if w.exit_code is None]
    if not primary:
        first_at_s = min(_failed_at_s(w) for w in failed)
        if running and situation.now_s < first_at_s + CAUSE_GRACE_S:
            return WATCH
        if lost:  # the others could not go on
            return _failure(situation, _first_lost(lost), [*lost, *failed])
        return _failure(situation, min(failed, key=_failed_at_s), failed)
    cause = min(primary, key=_failed_at_s)
    left_by_itself = cause.failure is None and (cause.exit_code or 0) > 0
    if (
        left_by_itself
        and any(w not in failed for w in running)
        and situation.now_s < _failed_at_s(cause) + EXIT_GRACE_S
    ):
        return WATCH
    return _failure(situation, cause, failed)


def _failure(
    situation: Situation, cause: WorkerState, failed: list[WorkerState]
) -> Verdict:
    others = tuple(w for w in failed if w is not cause)
    code = cause.exit_code
    if cause in lost_workers(situation):
        exit_code = 1
        reason = _loss_reason(cause, others, situation)
    elif cause.failure is not None:
        name = cause.failure.error.partition(":")[0]
        exit_code = 2 if name == "ConfigError" else 1
        reason = _lost_peer_reason(situation, failed) if cause.failure.secondary else ""
        reason = reason or cause.failure.error
    elif cause.out_of_memory_kills:
        exit_code = 1
        reason = (
            "the kernel killed it: out of memory of that device; "
            "use smaller micro-batches or give the device more memory"
        )
    elif code is not None and code < 0:
        exit_code = 1
        reason = f"was killed by {signal_name(-code)}"
    else:
        exit_code = code or 1
        reason = f"ended with exit code {code}"
    return Verdict(
        action="end",
        outcome="failed",
        exit_code=exit_code,
        cause=cause,
        reason=reason,
        others=others,
    )


def _loss_reason(
    cause: WorkerState, others: tuple[WorkerState, ...], situation: Situation
) -> str:
    """How a worker was lost, and why the others could not go on without it."""
    reason = loss_reason(cause)
    if cause.loss is not None and not cause.out_of_memory_kills:
        reason = f"was lost: {reason}"
    num_left = _num_left(situation, lost_workers(situation))
    if num_left < situation.min_devices:
        return (
            f"{reason}; {num_left} devices are left, at least {situation.min_devices} must"
        )
    told = [w for w in others if w.failure is not None and w.loss is None]
    errors = [w.failure.error for w in sorted(told, key=lambda w: w.rank) if w.failure]
    if not errors:
        return f"{reason}, and the others did not go on without it"
    said = errors[0].partition(": ")[2] or errors[0]
    if cause.loss is not None:
        return said  # it begins with what was noticed
    return f"{reason}; {said}"


def _lost_peer_reason(situation: Situation, failed: list[WorkerState]) -> str:
    silent = [w for w in situation.workers if w.exit_code is None and w not in failed]
    if silent:
        names = ", ".join(w.name for w in silent)
        return f"lost its peers: {names} did not answer and gave no reason"
    early = [w for w in situation.workers if w.exit_code == 0]
    if early:
        names = ", ".join(w.name for w in early)
        return (
            f"lost its peers: {names} had already ended with exit code 0; "
            "every rank must run the same number of steps"
        )
    return ""


def _has_failed(worker: WorkerState, situation: Situation) -> bool:
    if worker.failure is not None:
        # Ranks that a stop reached before their session drop out under the others.
        stopping = situation.stop_requested_at_s is not None
        unsaved = any(w.exit_code == -signal.SIGUSR1 for w in situation.workers)
        return not (stopping and unsaved and worker.failure.secondary)
    if situation.stop_requested_at_s is not None and worker.exit_code == -signal.SIGUSR1:
        return False
    return worker.exit_code not in (None, 0, STOPPED_EXIT_CODE)


def _failed_at_s(worker: WorkerState) -> float:
    if worker.failure is not None:
        return worker.failure.at_s
    if worker.ended_at_s is not None:
        return worker.ended_at_s
    assert worker.loss is not None
    return worker.loss.at_s


def _broken(reason: str) -> Verdict:
    return Verdict(action="end", outcome="failed", exit_code=1, reason=reason)


def _stopped(reason: str) -> Verdict:
    return Verdict(
        action="end", outcome="stopped", exit_code=INTERRUPTED_EXIT_CODE, reason=reason
    )
