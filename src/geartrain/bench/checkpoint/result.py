"""What the benchmark found, against its targets, for programs, files and people."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from geartrain.bench.checkpoint.orders import (
    ADAM_BYTES,
    LOG_MEMBERS,
    FlipCount,
    FlipsFound,
    KillsFound,
    LogFound,
    ReshardFound,
    StallFound,
)
from geartrain.checkpoint.agent.interval import (
    IntervalLimits,
    SnapshotCost,
    choose_interval,
)

CASE_NAMES = ("stall", "slowdown", "log", "flips", "kills", "reshard")
MAX_STALL = 0.02
MAX_SLOWDOWN = 0.05
MAX_LOG_FLOAT32 = 0.25
MAX_LOG_INT8 = 0.02
MAX_RESHARD = 1.2

Value = float | int | bool | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case: its numbers, and whether they are within the targets."""

    case: str
    values: dict[str, Value]
    missed: tuple[str, ...] = ()
    """What is beyond its target, in words."""
    failures: tuple[str, ...] = ()
    """What must never be, such as a version that does not load."""
    shown: str = ""
    """The case in a line, for people."""

    @property
    def is_met(self) -> bool:
        """Whether all targets are."""
        return not self.missed and not self.failures

    def as_json(self) -> dict[str, object]:
        """Flat."""
        found: dict[str, object] = {**self.values, "is_met": self.is_met}
        return {**found, "missed": list(self.missed), "failures": list(self.failures)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResult:
    """The whole benchmark."""

    cases: tuple[CaseResult, ...]
    quick: bool
    seed: int
    started_at_s: float
    wall_s: float
    load_average: float
    """Of the machine, before anything was started."""
    command: str
    commit: str
    versions: dict[str, str]
    label: str = "measured"
    """Nothing is emulated; agents and members are processes of one machine."""
    raw: dict[str, object] = field(default_factory=dict)
    """Every round, as the workers told it."""
    schema_version: int = 1

    def as_json(self) -> dict[str, object]:
        """One object: a key a case, and what concerns all."""
        return {
            **{case.case: case.as_json() for case in self.cases},
            "label": self.label,
            "quick": self.quick,
            "seed": self.seed,
            "wall_s": self.wall_s,
            "load_average": self.load_average,
            "num_cores": os.cpu_count(),
            "command": self.command,
            "commit": self.commit,
            "versions": self.versions,
        }

    @property
    def has_failures(self) -> bool:
        """Whether a version was lost, or damage was not found."""
        return any(case.failures for case in self.cases)


def judge_stall(found: StallFound) -> CaseResult:
    """What the trainer waits for, against ``dcp.save``: the medians over the rounds."""
    dcp_s = statistics.median(one.dcp_save_s for one in found.rounds)
    stall_s = statistics.median(one.shadow_stall_s for one in found.rounds)
    copy_s = statistics.median(one.copy_stall_s for one in found.rounds)
    fraction = stall_s / dcp_s
    return CaseResult(
        case="stall",
        values={
            "state_bytes": found.state_bytes,
            "stall_fraction": fraction,
            "stall_s": stall_s,
            "waiting_copy_stall_s": copy_s,
            "waiting_copy_stall_fraction": copy_s / dcp_s,
            "dcp_save_s": dcp_s,
            "num_rounds": len(found.rounds),
        },
        missed=_beyond("stall", fraction, MAX_STALL),
        shown=f"{stall_s * 1e3:.1f} ms of {dcp_s:.2f} s: {fraction:.2%} of dcp.save",
    )


def judge_slowdown(found: StallFound) -> CaseResult:
    """What a snapshot costs the steps, at the interval that the tuner chooses."""
    rounds = found.rounds
    plain_s = _typical_steps([one.plain_steps_s for one in rounds])
    shadow_s = _typical_steps([one.shadow_steps_s for one in rounds])
    step_s = statistics.median(plain_s)
    extra_s = sum(shadow_s) - sum(plain_s)
    meanwhile = extra_s / sum(plain_s)
    cost = SnapshotCost(
        copy_s=statistics.median(one.shadow_stall_s for one in rounds),
        send_s=statistics.median(one.send_s for one in rounds),
    )
    interval = choose_interval(step_s, cost, IntervalLimits())
    between_s = interval.num_steps * step_s
    agents_s = statistics.median(one.agents_processor_s for one in rounds)
    fraction = extra_s / between_s
    return CaseResult(
        case="slowdown",
        values={
            "slowdown_fraction": fraction,
            "interval_steps": interval.num_steps,
            "step_s": step_s,
            "extra_s": extra_s,
            "block_steps": len(rounds[0].plain_steps_s),
            "block_slowdown_fraction": meanwhile,
            "send_s": cost.send_s,
            "agents_processor_s": agents_s,
            "agents_processor_fraction": agents_s / (between_s * (os.cpu_count() or 1)),
        },
        missed=_beyond("slow-down", fraction, MAX_SLOWDOWN),
        shown=f"{fraction:+.1%} with a snapshot every {interval.num_steps} steps of "
        f"{step_s * 1e3:.0f} ms; {meanwhile:+.1%} in the steps meanwhile",
    )


def judge_log(found: LogFound) -> CaseResult:
    """Bytes of a logged step; the targets are for what one member writes."""
    values: dict[str, Value] = {
        "num_parameters": found.num_parameters,
        "adam_bytes_per_parameter": ADAM_BYTES,
        "num_members": LOG_MEMBERS,
    }
    for name, log in (("float32", found.float32), ("int8", found.int8)):
        values[f"{name}_member_fraction"] = log.member_fraction
        values[f"{name}_all_members_fraction"] = log.all_fraction
        values[f"{name}_entropy_fraction"] = log.entropy_fraction
    exact, coded = found.float32, found.int8
    return CaseResult(
        case="log",
        values=values,
        missed=(
            *_beyond("float32, a member", exact.member_fraction, MAX_LOG_FLOAT32),
            *_beyond("float32, all members", exact.all_fraction, MAX_LOG_FLOAT32),
            *_beyond("int8, a member", coded.member_fraction, MAX_LOG_INT8),
            *_beyond("int8, all members", coded.all_fraction, MAX_LOG_INT8),
        ),
        failures=() if found.is_exact else ("a logged step gave other bits back",),
        shown=f"float32 {exact.member_fraction:.1%} a member, {exact.all_fraction:.1%} all "
        f"{LOG_MEMBERS}; int8 {coded.member_fraction:.2%}, {coded.all_fraction:.1%}",
    )


def judge_flips(found: FlipsFound) -> CaseResult:
    """Whether every flip was found."""
    ours = {
        "store": found.store,
        "large": found.large,
        "memory": found.memory,
        "log": found.log,
    }
    values: dict[str, Value] = {}
    for name, count in (*ours.items(), ("dcp", found.dcp)):
        values[f"{name}_flips"] = count.num_flips
        values[f"{name}_found"] = count.num_found
        values[f"{name}_wrong"] = count.num_wrong
    total = sum(count.num_flips for count in ours.values())
    total_found = sum(count.num_found for count in ours.values())
    dcp = found.dcp
    return CaseResult(
        case="flips",
        values=values,
        failures=tuple(
            text for name, count in ours.items() for text in _unfound(name, count)
        ),
        shown=f"{total_found} of {total} found; dcp.load: {dcp.num_found} of "
        f"{dcp.num_flips}, {dcp.num_wrong} loaded wrong",
    )


def judge_kills(found: Sequence[KillsFound]) -> CaseResult:
    """Whether a whole version loaded after every kill."""
    names = ("num_trials", "num_killed", "num_before", "num_new")
    values: dict[str, Value] = {n: sum(getattr(one, n) for one in found) for n in names}
    return CaseResult(
        case="kills",
        values=values,
        failures=tuple(text for one in found for text in one.failures),
        shown=f"{values['num_trials']} saves, {values['num_killed']} killed: "
        f"{values['num_before']} times the version before, {values['num_new']} the new one",
    )


def judge_reshard(found: ReshardFound) -> CaseResult:
    """Loading with three what two have saved, against DCP: the median of the ratios."""
    ratio = statistics.median(
        ours / dcp for ours, dcp in zip(found.load_s, found.dcp_load_s, strict=True)
    )
    load_s = statistics.median(found.load_s)
    dcp_s = statistics.median(found.dcp_load_s)
    return CaseResult(
        case="reshard",
        values={
            "state_bytes": found.state_bytes,
            "load_ratio": ratio,
            "load_s": load_s,
            "dcp_load_s": dcp_s,
            "save_s": found.save_s,
            "dcp_save_s": found.dcp_save_s,
            "num_rounds": len(found.load_s),
        },
        missed=()
        if ratio <= MAX_RESHARD
        else (f"{ratio:.2f} of DCP's time, {MAX_RESHARD:g} may",),
        failures=() if found.is_equal else ("bits differ after the load",),
        shown=f"{load_s:.2f} s, DCP {dcp_s:.2f} s: ratio {ratio:.2f}",
    )


def _typical_steps(blocks: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of the first step of a block, the second and so on: medians over blocks.

    Other programs disturb single steps, and a sum would hold every disturbance.
    """
    return [statistics.median(steps_s) for steps_s in zip(*blocks, strict=True)]


def _beyond(what: str, fraction: float, limit: float) -> tuple[str, ...]:
    return () if fraction <= limit else (f"{what} {fraction:.2%}, {limit:.0%} may",)


def _unfound(name: str, count: FlipCount) -> list[str]:
    missing = count.num_flips - count.num_found
    found = []
    if missing:
        found.append(f"{missing} flips in {name} not found: {', '.join(count.unfound)}")
    if count.num_wrong:
        found.append(f"{count.num_wrong} flips in {name} loaded wrong bits")
    return found


TABLE_HEAD = ("case", "target", "found", "")
NUM_TEXT_COLUMNS = 4


def table_rows(result: CheckpointResult) -> list[tuple[str, ...]]:
    """A row a case, for people."""
    return [
        (
            case.case,
            "met" if case.is_met else "MISSED",
            case.shown,
            "; ".join((*case.missed, *case.failures[:2])),
        )
        for case in result.cases
    ]
