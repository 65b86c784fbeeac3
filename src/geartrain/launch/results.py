"""What a run's end is called, for the user."""

from __future__ import annotations

from geartrain.launch.run_directory import CHECKPOINT_NAME
from geartrain.launch.script_failure import is_deliberate, message_of
from geartrain.launch.settings import LaunchResult, LaunchSettings
from geartrain.launch.situation import WorkerState
from geartrain.launch.supervision import INTERRUPTED_EXIT_CODE, Verdict
from geartrain.launch.workers import tail_of_log


def interrupted_early(settings: LaunchSettings) -> LaunchResult:
    """A run that was stopped before its workers were let go."""
    return LaunchResult(
        outcome="stopped",
        exit_code=INTERRUPTED_EXIT_CODE,
        run_dir=settings.run_dir,
        message="stopped before the script began; nothing to save",
    )


def result_of(settings: LaunchSettings, verdict: Verdict, *, saved: bool) -> LaunchResult:
    """Describe how a run ended.

    Args:
        settings: Of the run.
        verdict: Why it ended.
        saved: Whether the state was saved when it was asked to stop.
    """
    checkpoint = settings.run_dir / CHECKPOINT_NAME if saved else None
    if verdict.outcome == "failed":
        message = _failed_message(settings, verdict)
    elif verdict.outcome == "stopped":
        fate = "nothing was saved" if checkpoint is None else f"saved in {checkpoint}"
        message = f"{verdict.reason}; {fate}"
    else:
        message = f"finished; the run is in {settings.run_dir}"
    return LaunchResult(
        outcome=verdict.outcome,
        exit_code=verdict.exit_code,
        run_dir=settings.run_dir,
        message=message,
        details=_details(settings, verdict),
        checkpoint_dir=checkpoint,
    )


def _failed_message(settings: LaunchSettings, verdict: Verdict) -> str:
    cause = verdict.cause
    if cause is None:
        return f"{verdict.reason}; logs are in {settings.run_dir}"
    failure = cause.failure
    alike = [w for w in verdict.others if _error_of(w) == _error_of(cause) is not None]
    names = ", ".join(w.name for w in sorted([cause, *alike], key=lambda w: w.rank))
    if failure is not None and is_deliberate(failure) and not failure.secondary:
        text = f"{message_of(failure)}\n  raised by {names}"
    else:
        text = f"{names}: {verdict.reason}"
    if cause.out_of_memory_kills and failure is not None:
        text += "; the kernel killed a process of it for lack of memory"
    rest = [other.name for other in verdict.others if other not in alike]
    if rest:
        text += f"; {', '.join(rest)} failed in consequence"
    return f"{text}; logs are in {settings.run_dir}"


def _error_of(worker: WorkerState) -> str | None:
    return None if worker.failure is None else worker.failure.error


def _details(settings: LaunchSettings, verdict: Verdict) -> str:
    cause = verdict.cause
    if cause is None:
        return ""
    if cause.failure is None:
        return "" if cause.rank == 0 else tail_of_log(settings.run_dir, cause.rank)
    if is_deliberate(cause.failure) and not cause.failure.secondary:
        return ""
    return cause.failure.traceback
