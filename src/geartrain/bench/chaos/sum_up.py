"""From evidence to a result: checks, figures, and the timeline."""

from __future__ import annotations

from pathlib import Path

from geartrain.bench.chaos.checks import check_all
from geartrain.bench.chaos.evidence import Evidence
from geartrain.bench.chaos.kinds import KINDS
from geartrain.bench.chaos.pauses import find_pauses
from geartrain.bench.chaos.result import ChaosResult, EventLine, StepLine
from geartrain.bench.chaos.settings import ChaosOptions
from geartrain.bench.provenance import command_line, current_commit
from geartrain.launch.run_directory import collect_versions

_MOST_PAUSES = 20


def sum_up(evidence: Evidence, options: ChaosOptions, load_average: float) -> ChaosResult:
    """Make all checks and put the rest in order."""
    steps = step_lines(evidence)
    pauses = find_pauses(evidence)
    seconds = max(evidence.ended_at_s - evidence.began_at_s, 1e-9)
    during = [s for s in steps if 0 <= s.at_s <= seconds]
    last_members = steps[-1].device_ids if steps else ()
    done = [deed for deed in evidence.deeds if deed.was_done]
    by_kind = {kind: sum(d.fault.kind == kind for d in done) for kind in KINDS}
    return ChaosResult(
        seed=options.seed,
        script=str(options.script or "the built-in training"),
        devices=options.devices,
        duration_s=options.duration_s,
        device_ids=evidence.device_ids,
        began_at_s=evidence.began_at_s,
        watched_s=round(seconds, 3),
        num_faults=len(done),
        num_by_kind={kind: number for kind, number in by_kind.items() if number},
        num_steps=len(steps),
        num_left=len(set(last_members)),
        longest_pause_s=round(max((p.seconds for p in pauses), default=0.0), 4),
        calm_step_s=round(evidence.calm_step_s, 4),
        steps_per_s=round(len(during) / seconds, 3),
        load_average=round(load_average, 2),
        checks=check_all(evidence),
        deeds=evidence.deeds,
        pauses=tuple(sorted(pauses, key=lambda p: -p.seconds)[:_MOST_PAUSES]),
        steps=steps,
        events=event_lines(evidence),
        command=command_line(),
        commit=current_commit(Path.cwd()),
        versions=collect_versions(),
    )


def step_lines(evidence: Evidence) -> tuple[StepLine, ...]:
    """Every committed step: when, and who has it."""
    times = evidence.commit_times()
    return tuple(
        StepLine(
            step=step,
            at_s=round(times[step] - evidence.began_at_s, 4),
            device_ids=tuple(dict.fromkeys(t.device_id for t, _ in commits)),
        )
        for step, commits in evidence.commits_by_step().items()
    )


def event_lines(evidence: Evidence) -> tuple[EventLine, ...]:
    """What the run told about itself; places as its own folder calls them."""
    folder = f"{evidence.folder}/"
    return tuple(
        EventLine(
            at_s=round(event.at_s - evidence.began_at_s, 4),
            kind=event.kind,
            device_id=event.device_id,
            message=event.message.replace(folder, ""),
        )
        for event in evidence.events
    )
