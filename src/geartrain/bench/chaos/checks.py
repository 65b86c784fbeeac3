"""What must hold after a chaos run, each check a pure function of the evidence."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from geartrain.bench.chaos.evidence import Deed, Evidence, Life
from geartrain.bench.chaos.kinds import KINDS
from geartrain.bench.chaos.pauses import find_pauses, worst_pause
from geartrain.bench.chaos.samples import find_sample_faults
from geartrain.bench.chaos.witness_log import Commit, Restore
from geartrain.elastic.limits import Limits
from geartrain.units import format_seconds

Figure = float | int | str
_MOST_DETAILS = 8
_SHORTEST_SILENCE_S = Limits().shortest_s
_ONCE = ("profiled", "planned", "lost", "epoch")
"""Events that come once, for a device and step; others may come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check of one run."""

    name: str
    status: Literal["passed", "failed", "skipped"]
    summary: str
    """One line for people."""
    figures: dict[str, Figure] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    """What was found wrong, the first of many."""


def check_all(evidence: Evidence) -> tuple[CheckResult, ...]:
    """Make all checks."""
    return tuple(check(evidence) for check in CHECKS.values())


def check_ending(evidence: Evidence) -> CheckResult:
    """The run went on until it was asked to stop, and then ended in order."""
    ending = evidence.ending
    good = ending.outcome in {"finished", "stopped"}
    text = f"the run {'was ' if ending.outcome == 'stopped' else ''}{ending.outcome}"
    return _result(
        "run_goes_on",
        [] if good else [ending.message or f"exit code {ending.exit_code}"],
        text,
        {"exit_code": ending.exit_code, "stop_s": round(ending.stop_s, 3)},
    )


def check_one_state(evidence: Evidence) -> CheckResult:
    """After every committed step all members held the same weights and optimizer."""
    faults, num_compared = [], 0
    by_step = [i for life in evidence.lives() for i in life.commits_by_step().items()]
    for step, commits in by_step:
        states: dict[str, list[str]] = {}
        for statement, commit in commits:
            if commit.digest is not None:
                states.setdefault(commit.digest, []).append(statement.device_id)
        num_compared += sum(map(len, states.values())) > 1
        if len(states) > 1:
            groups = "; ".join(f"{d[:8]} on {', '.join(w)}" for d, w in states.items())
            faults.append(f"step {step}: {groups}")
    figures: dict[str, Figure] = {
        "steps": len(by_step),
        "steps_compared": num_compared,
        "diverged_steps": len(faults),
    }
    text = f"{num_compared} of {len(by_step)} steps compared between members"
    if not by_step:
        faults.append("no step was committed")
    return _result("one_state_hash", faults, text, figures)


def check_samples(evidence: Evidence) -> CheckResult:
    """Every sample of an epoch went into exactly one committed step."""
    found = find_sample_faults(evidence)
    if found.why_not:
        return CheckResult(name="samples_once", status="skipped", summary=found.why_not)
    text = f"{found.num_samples} samples in {found.num_steps} steps, each once an epoch"
    figures: dict[str, Figure] = {
        "samples": found.num_samples,
        "whole_epochs": found.num_whole_epochs,
        "steps_by_lost_members_too": found.num_with_lost_members,
    }
    return _result("samples_once", list(found.faults), text, figures)


def check_steps_forward(evidence: Evidence) -> CheckResult:
    """Steps rise by one, unless a state was loaded, given, or the run was restored."""
    lives = evidence.lives()
    faults = [fault for life in lives for fault in _steps_back(life)]
    for statement in evidence.statements:
        expected: int | None = None
        for record in statement.records:
            if isinstance(record, Restore):
                expected = record.step + 1
            if not isinstance(record, Commit):
                continue
            if expected is not None and record.step != expected:
                faults.append(
                    f"{statement.name}: step {record.step} came where {expected} was next"
                )
            expected = record.step + 1
    steps = sorted(evidence.commits_by_step())
    if steps and steps != list(range(steps[0], steps[-1] + 1)):
        gaps = sorted(set(range(steps[0], steps[-1] + 1)) - set(steps))
        faults.append(f"steps {gaps[:_MOST_DETAILS]} were committed by nobody")
    text = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
    text += ", none skipped, none twice"
    num_again = sum(len(life.commits_by_step()) for life in lives) - len(steps)
    if len(lives) > 1:
        text += f", {num_again} again after {len(lives) - 1} restores"
    figures: dict[str, Figure] = {
        "restores": len(lives) - 1,
        "steps_made_again": num_again,
    }
    return _result("steps_forward", faults, text, figures)


def _steps_back(life: Life) -> list[str]:
    """Processes that begin before what the fleet had when they came."""
    firsts = sorted(
        (min(commit.at_s for _, commit in commits), step)
        for step, commits in life.commits_by_step().items()
    )
    times = [at_s for at_s, _ in firsts]
    faults = []
    for statement in life.statements:
        known = firsts[: bisect_left(times, statement.hello.at_s)]
        reached = max((step for _, step in known), default=0)
        first = min((commit.step for commit in statement.commits), default=reached)
        if first < reached:
            faults.append(
                f"{statement.name} began with step {first} where {reached} was reached"
            )
    return faults


def check_records(evidence: Evidence) -> CheckResult:
    """The log has every committed step once a device, and no event twice."""
    name = "run_log"
    if any(d.was_done and d.fault.kind == "disk_full" for d in evidence.deeds):
        text = "the disk was full: the log of such a run ends there, as it says"
        return CheckResult(name=name, status="skipped", summary=text)
    begins = [life.began_at_s for life in evidence.lives()[1:]]
    by_life: dict[tuple[int, int], list[str]] = {}
    for record in evidence.records:  # what a restore took back is made, and told, again
        key = (bisect_left(begins, record.at_s), record.step)
        by_life.setdefault(key, []).append(record.device_id)
    seen = {step for _, step in by_life}
    faults = [
        f"step {step}: {device_id} is recorded {devices.count(device_id)} times"
        for (_, step), devices in sorted(by_life.items())
        for device_id in sorted(set(devices))
        if devices.count(device_id) > 1
    ]
    # A record's step is the number of steps before it; a commit's is with it.
    missing = [s for s in evidence.commits_by_step() if s - 1 not in seen]
    if missing:
        faults.append(f"committed but not recorded: steps {missing[:_MOST_DETAILS]}")
    order = [(bisect_left(begins, r.at_s), r.step) for r in evidence.records]
    if order != sorted(order):
        faults.append("records are not in the order of their steps")
    told = Counter(
        (bisect_left(begins, e.at_s), e.kind, e.step, e.device_id) for e in evidence.events
    )
    faults += [
        f"the event {kind!r} of step {step} is recorded {number} times"
        for (_, kind, step, _), number in sorted(told.items())
        if number > 1 and kind in _ONCE
    ]
    text = f"{len(evidence.records)} records of {len(seen)} steps"
    return _result(name, faults, text, {"missing_steps": len(missing)})


def check_losses(evidence: Evidence) -> CheckResult:
    """Only devices that a fault took away were given up: slow is not dead.

    One that stood still, or was cut off, for longer than the shortest limit of a silence
    may be given up: it comes back.
    """
    hit = {deed.fault.device_id for deed in evidence.deeds if _takes_away(deed)}
    if any(d.was_done and d.fault.kind == "kill_all" for d in evidence.deeds):
        hit |= set(evidence.device_ids)
    reasons = {e.device_id: e.message for e in evidence.events if e.kind == "lost"}
    if evidence.ending.outcome in {"finished", "stopped"}:  # else nobody ended in order
        reasons = _without_goodbye(evidence) | reasons
    false_deaths = sorted(reasons.keys() - hit)
    faults = [f"{device_id} {reasons[device_id]}" for device_id in false_deaths]
    text = f"{len(reasons)} devices were lost, {len(hit)} were taken away"
    figures: dict[str, Figure] = {"lost": len(reasons), "false_deaths": len(faults)}
    return _result("no_false_deaths", faults, text, figures)


def _takes_away(deed: Deed) -> bool:
    may_be_lost = KINDS[deed.fault.kind].may_lose_device and deed.was_done
    is_long = deed.fault.duration_s >= _SHORTEST_SILENCE_S
    return deed.loses_device or (may_be_lost and is_long)


def _without_goodbye(evidence: Evidence) -> dict[str, str]:
    """Devices whose last process did not end in order, and how it ended."""
    last = {s.device_id: s.goodbye for s in evidence.statements}
    return {
        device_id: "ended without a word" if goodbye is None else goodbye.message
        for device_id, goodbye in last.items()
        if goodbye is None or goodbye.why == "failed"
    }


def check_pauses(evidence: Evidence) -> CheckResult:
    """Between two commits never passes more time than the faults meanwhile allow."""
    pauses = find_pauses(evidence)
    faults = [pause.describe() for pause in pauses if pause.is_too_long]
    longest_s = max((pause.seconds for pause in pauses), default=0.0)
    worst = worst_pause(pauses)
    text = f"longest pause {format_seconds(longest_s)}"
    if worst is not None:
        text += f"; nearest to its limit: {worst.describe()}"
    figures: dict[str, Figure] = {
        "longest_s": round(longest_s, 4),
        "calm_step_s": round(evidence.calm_step_s, 4),
        "too_long": len(faults),
    }
    return _result("pauses", faults, text, figures)


def check_weights(evidence: Evidence) -> CheckResult:
    """The final weights are those of the same training to which nothing happened."""
    name, reference = "weights", evidence.reference
    if reference.statement is None:
        return CheckResult(name=name, status="skipped", summary=reference.why_not)
    expected = _states(reference.statement.commits)
    found = _states(
        [c for commits in evidence.commits_by_step().values() for _, c in commits]
    )
    common = sorted(expected.keys() & found.keys())
    if not common:
        text = "the run and its reference have no step in common"
        return _result(name, [text], text, {})
    differing = [step for step in common if expected[step] != found[step]]
    last = common[-1]
    figures: dict[str, Figure] = {
        "steps_compared": len(common),
        "steps_differing": len(differing),
        "last_step": last,
    }
    if max(found) > last:
        text = f"the reference ends at step {last}, the run at step {max(found)}"
        return _result(name, [text], text, figures)
    if not differing:
        return _result(
            name, [], f"bit for bit equal after all {len(common)} steps", figures
        )
    figures["first_differing_step"] = differing[0]
    if reference.relative_difference is not None:
        figures["relative_difference"] = reference.relative_difference
    return _judge_close(name, evidence, figures)


def check_bit_flips(evidence: Evidence) -> CheckResult:
    """Every bit that was turned in a saved state is found when it is read."""
    name, flips = "bit_flips_found", evidence.flips
    if not flips:
        text = "no bit was turned"
        return CheckResult(name=name, status="skipped", summary=text)
    faults = [f"bit {f.bit} of {f.file} was not noticed" for f in flips if not f.was_found]
    faults += [f"{f.file} was unreadable before" for f in flips if not f.was_sound]
    text = f"{sum(f.was_found for f in flips)} of {len(flips)} turned bits were found"
    return _result(name, faults, text, {"flips": len(flips)})


def check_nothing_left(evidence: Evidence) -> CheckResult:
    """No process, cgroup, namespace, shared memory or registration is left behind."""
    left = list(evidence.leftovers)
    return _result("nothing_left", left, "nothing is left behind", {"leftovers": len(left)})


CHECKS: Mapping[str, Callable[[Evidence], CheckResult]] = {
    "run_goes_on": check_ending,
    "one_state_hash": check_one_state,
    "samples_once": check_samples,
    "steps_forward": check_steps_forward,
    "run_log": check_records,
    "no_false_deaths": check_losses,
    "pauses": check_pauses,
    "weights": check_weights,
    "bit_flips_found": check_bit_flips,
    "nothing_left": check_nothing_left,
}


def _judge_close(name: str, evidence: Evidence, figures: dict[str, Figure]) -> CheckResult:
    reference = evidence.reference
    first = figures["first_differing_step"]
    if reference.needs_same_bits:
        text = f"other weights than without faults from step {first} on"
        return _result(name, [text], text, figures)
    difference = reference.relative_difference
    if difference is None:
        text = f"bits differ from step {first} on, and the final weights are not there"
        return _result(name, [text], text, figures)
    text = (
        f"relative difference {difference:.2e}, at most {reference.tolerance:.0e} allowed"
    )
    is_close = difference <= reference.tolerance
    return _result(name, [] if is_close else [text], text, figures)


def _states(commits: Iterable[Commit]) -> dict[int, set[str]]:
    """The states that anybody had after each step: one, as it should be."""
    found: dict[int, set[str]] = {}
    for commit in commits:
        if commit.digest is not None:
            found.setdefault(commit.step, set()).add(commit.digest)
    return found


def _result(
    name: str, faults: list[str], text: str, figures: dict[str, Figure]
) -> CheckResult:
    shown = tuple(faults[:_MOST_DETAILS])
    if len(faults) > _MOST_DETAILS:
        shown = (*shown, f"and {len(faults) - _MOST_DETAILS} more")
    return CheckResult(
        name=name,
        status="failed" if faults else "passed",
        summary=faults[0] if faults else text,
        figures=figures,
        details=shown,
    )
