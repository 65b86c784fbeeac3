"""What the launcher knows of a run, and what follows for each worker. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from geartrain.parallel.worker_spec import LEFT_EXIT_CODE, WorkerFailure, WorkerLoss

CAUSE_GRACE_S = 1.5
"""How long workers that only lost a peer wait for the peer's own failure to show."""
LEAVE_GRACE_S = 30.0
"""How long a worker that the others go on without in order gets to end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What is known of one worker."""

    rank: int
    device_id: str
    exit_code: int | None = None
    """None while it runs; minus the signal's number where a signal ended it."""
    ended_at_s: float | None = None
    failure: WorkerFailure | None = None
    out_of_memory_kills: int = 0
    loss: WorkerLoss | None = None
    """That the others go on without it; they may do so before it has ended."""
    has_entered: bool = True
    """False for a process that was started later and does not take part yet."""
    is_away: bool = False
    """It was found to be lost or to have left before; that is not taken back."""
    returns: bool = False
    """Another process of its rank is to be started."""

    @property
    def name(self) -> str:
        """What people call it."""
        return f"rank {self.rank} ({self.device_id})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known of the run."""

    workers: tuple[WorkerState, ...]
    now_s: float
    stop_requested_at_s: float | None = None
    kill_requested: bool = False
    stop_timeout_s: float = 60.0
    goes_on: bool = False
    """Whether the workers can go on by now where one of them is lost."""
    min_devices: int = 1
    has_coordinator: bool = False
    """Whether somebody else than the workers notices losses and waits for comebacks."""
    broken: str | None = None
    """Why the run can't go on whatever its workers do; None: it can."""


def lost_workers(situation: Situation) -> tuple[WorkerState, ...]:
    """Workers that the others go on without, or will; also those that left in order."""
    return tuple(w for w in situation.workers if _is_lost(w, situation))


def has_left(worker: WorkerState) -> bool:
    """Whether a worker that is lost to the others went in order: it is no failure."""
    if worker.loss is not None:
        return not worker.loss.is_failure
    return worker.exit_code == LEFT_EXIT_CODE


def leader(situation: Situation, so_far: int | None = None) -> WorkerState:
    """Whose output is shown: the one that leads so far, while the others have it.

    Args:
        situation: Now.
        so_far: The rank that led before, if its process is still the same. After it the
            lowest one that takes part leads; who comes back does not take over.
    """
    there = [
        w for w in situation.workers if w.loss is None and not w.is_away and w.has_entered
    ]
    for worker in there:
        if worker.rank == so_far:
            return worker
    return min(there or situation.workers, key=lambda w: w.rank)


def excluded_workers(situation: Situation) -> tuple[WorkerState, ...]:
    """Lost workers that still run: frozen or cut off, and to be killed.

    Who leaves in order gets the time to end by itself.
    """
    return tuple(
        w
        for w in situation.workers
        if w.loss is not None
        and w.exit_code is None
        and (w.loss.is_failure or situation.now_s > w.loss.at_s + LEAVE_GRACE_S)
    )


def loss_reason(worker: WorkerState) -> str:
    """How a worker was lost, in words for people."""
    if worker.out_of_memory_kills:
        return "the kernel killed it: out of memory of that device"
    if worker.loss is not None:
        return worker.loss.reason
    if worker.failure is not None:
        return worker.failure.error
    if worker.exit_code == LEFT_EXIT_CODE:
        return "it left in order"
    assert worker.exit_code is not None, "without a loss told it has ended"
    return f"was killed by {signal_name(-worker.exit_code)}"


def _is_lost(worker: WorkerState, situation: Situation) -> bool:
    if worker.is_away or worker.loss is not None:
        return True
    code, can_be_lost = worker.exit_code, situation.goes_on or not worker.has_entered
    if worker.failure is not None:
        return situation.has_coordinator and _lost_only_peers(worker, situation)
    if code == LEFT_EXIT_CODE:
        return situation.has_coordinator
    was_killed = code is not None and code < 0 and code != -signal.SIGUSR1
    return can_be_lost and was_killed


def _lost_only_peers(worker: WorkerState, situation: Situation) -> bool:
    """Whether a worker that failed is no reason for the others to end."""
    assert worker.failure is not None
    if not worker.failure.secondary:
        return False
    if not worker.has_entered:
        return True
    others_go_on = any(
        w.exit_code is None and w.failure is None and w.has_entered and not w.is_away
        for w in situation.workers
    )
    # At first its cause may still show: the others may be about to end, too.
    return others_go_on and situation.now_s >= worker.failure.at_s + CAUSE_GRACE_S


def signal_name(number: int) -> str:
    """What a signal is called."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
