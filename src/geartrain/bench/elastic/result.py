"""What the benchmark found, for programs, files and people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from geartrain.bench.elastic.cases import (
    JOIN_PAUSE_STEPS,
    STOP_EXCESS_S,
    limit_s,
)
from geartrain.bench.elastic.drive import CaseRuns
from geartrain.bench.elastic.outcome import Outcome, percentile
from geartrain.bench.elastic.overhead import Overhead
from geartrain.bench.elastic.torchft_case import TorchftResult

OVERHEAD_LIMIT = 0.03
OVERHEAD_LEAST_STEP_S = 0.05
_P95 = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case. None stands for what was not measured."""

    case: str
    p50_s: float | None = None
    p95_s: float | None = None
    p95_steps: float | None = None
    """In steps of the calm time before each event; of ``warm_join`` the pause of the
    others."""
    num_events: int = 0
    diverged_steps: int = 0
    """Steps after which members held different states."""
    limit_s: float | None = None
    """Of ``p95_s``; of ``stop`` the median of the events' own limits, and 0.1 s."""
    max_s: float | None = None
    step_s: float | None = None
    """Median step while nothing happened."""
    is_met: bool | None = None
    missed: tuple[str, ...] = ()
    """What is beyond its limit, in words."""
    num_failed: int = 0
    """Events after which no step was made."""
    num_runs: int = 0
    num_steps: int = 0
    steps_lost: int = 0
    state_transfers: int = 0
    """To members that had been there before the fault."""
    failures: tuple[str, ...] = ()
    skipped: str = ""
    by_moment: dict[str, float] = field(default_factory=dict)
    """Of a second fault: p95 by what the engine was in the middle of."""
    p95_beyond_limit_s: float | None = None
    """Of ``stop``: how much longer than the silence that the run allows."""
    outcomes: tuple[Outcome, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Flat, without the single events."""
        names = [n for n in self.__slots__ if n not in {"case", "outcomes"}]
        found: dict[str, object] = {name: getattr(self, name) for name in names}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticResult:
    """The whole benchmark."""

    cases: tuple[CaseResult, ...]
    overhead: Overhead | None
    torchft: TorchftResult
    quick: bool
    seed: int
    labels: tuple[str, ...]
    started_at_s: float
    wall_s: float
    load_average: float
    """Of the machine, before anything was started."""
    command: str
    commit: str
    versions: dict[str, str]
    schema_version: int = 1

    def as_json(self) -> dict[str, object]:
        """One object: a key a case, and what concerns all."""
        steps_s = {case.case: case.step_s for case in self.cases}
        overhead = self.overhead
        return {
            **{case.case: case.as_json() for case in self.cases},
            "step_s": steps_s.get("kill_one_of_four"),
            "overhead_vs_ddp_fraction": overhead.fraction if overhead else None,
            "overhead": overhead.as_json() if overhead else None,
            "torchft": self.torchft.as_json(),
            "quick": self.quick,
            "seed": self.seed,
            "labels": list(self.labels),
            "wall_s": self.wall_s,
            "load_average": self.load_average,
            "command": self.command,
            "commit": self.commit,
            "versions": self.versions,
        }

    @property
    def has_failures(self) -> bool:
        """Whether states diverged, steps were lost, or a run did not go on."""
        return any(case.failures or case.diverged_steps for case in self.cases)


def judge_case(runs: CaseRuns) -> CaseResult:
    """Sum up a case and hold it against its limits."""
    outcomes = runs.outcomes
    if not outcomes:
        reason = runs.failures[0] if runs.failures else "no event was made"
        return CaseResult(
            case=runs.case,
            skipped=reason,
            num_runs=runs.num_runs,
            failures=tuple(runs.failures),
        )
    seconds = _seconds(outcomes)
    step_s = _median([outcome.step_s for outcome in outcomes]) or 0.0
    limits = [o.limit_s for o in outcomes if o.limit_s is not None]
    fixed_s = limit_s(runs.case, step_s)
    own_s = statistics.median(limits) + STOP_EXCESS_S if limits else None
    result = CaseResult(
        case=runs.case,
        num_events=len(outcomes),
        p50_s=percentile(seconds, 0.5) if seconds else None,
        p95_s=percentile(seconds, _P95) if seconds else None,
        max_s=max(seconds, default=None),
        p95_steps=_p95([o.steps for o in outcomes]),
        limit_s=own_s if fixed_s is None else fixed_s,
        step_s=step_s,
        diverged_steps=runs.num_diverged,
        num_failed=sum(outcome.seconds is None for outcome in outcomes),
        num_runs=runs.num_runs,
        num_steps=runs.num_steps,
        steps_lost=runs.num_steps_lost,
        state_transfers=runs.num_transfers,
        failures=tuple(runs.failures),
        by_moment=_by_moment(outcomes),
        p95_beyond_limit_s=_p95(
            [o.seconds - o.limit_s if o.seconds and o.limit_s else None for o in outcomes]
        ),
        outcomes=tuple(outcomes),
    )
    return _judged(result)


def judge_joins(all_runs: Sequence[CaseRuns], case: str) -> CaseResult:
    """Every return of a device to the runs of one case, as a case of its own."""
    runs = [r for r in all_runs if r.case == case]
    joins = [outcome for r in runs for outcome in r.joins]
    if not joins:
        return CaseResult(case="warm_join", skipped="no device came back")
    pretended = CaseRuns(case="warm_join", outcomes=joins)
    for one in runs:
        pretended.num_runs += one.num_runs
        pretended.num_steps += one.num_steps
        pretended.num_diverged += one.num_diverged
    return judge_case(pretended)


def _judged(result: CaseResult) -> CaseResult:
    missed = [*_late(result), *_wrong(result)]
    values = {name: getattr(result, name) for name in result.__slots__}
    return CaseResult(**(values | {"is_met": not missed, "missed": tuple(missed)}))


def _late(result: CaseResult) -> list[str]:
    if result.case == "stop":
        beyond_s = result.p95_beyond_limit_s
        if beyond_s is None:
            return ["the run told no limit"]
        if beyond_s > STOP_EXCESS_S:
            return [f"{beyond_s:.3f} s beyond the silence allowed, {STOP_EXCESS_S:g} s may"]
        return []
    missed = []
    assert result.p95_s is not None or result.num_failed
    assert result.limit_s is not None
    if result.p95_s is not None and result.p95_s > result.limit_s:
        missed.append(f"p95 {result.p95_s:.3f} s, limit {result.limit_s:.3g} s")
    is_join = result.case == "warm_join"
    if is_join and (result.p95_steps or 0.0) > JOIN_PAUSE_STEPS:
        missed.append(f"the others paused {result.p95_steps:.1f} steps, limit 2")
    return missed


def _wrong(result: CaseResult) -> list[str]:
    counts = {
        "events without a further step": result.num_failed,
        "diverged steps": result.diverged_steps,
        "steps lost": result.steps_lost,
        "states sent to survivors": result.state_transfers,
        "failures": len(result.failures),
    }
    return [f"{number} {what}" for what, number in counts.items() if number]


def _seconds(outcomes: Sequence[Outcome]) -> list[float]:
    return [o.seconds for o in outcomes if o.seconds is not None]


def _by_moment(outcomes: Sequence[Outcome]) -> dict[str, float]:
    moments = sorted({o.moment for o in outcomes if o.moment})
    found = {}
    for moment in moments:
        seconds = _seconds([o for o in outcomes if o.moment == moment])
        if seconds:
            found[moment] = percentile(seconds, _P95)
    return found


def _p95(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return percentile(known, _P95) if known else None


def _median(values: Sequence[float]) -> float | None:
    known = [value for value in values if value > 0]
    return statistics.median(known) if known else None


TABLE_HEAD = ("case", "target", "events", "p50", "p95", "limit", "steps", "diverged", "")
NUM_TEXT_COLUMNS = 2


def table_rows(result: ElasticResult) -> list[tuple[str, ...]]:
    """A row a case, for people."""
    rows = [_row(case) for case in result.cases]
    if result.overhead is not None:
        rows.append(_overhead_row(result.overhead))
    rows.append(_torchft_row(result.torchft))
    return rows


def _row(case: CaseResult) -> tuple[str, ...]:
    if case.skipped:
        return (case.case, "skipped", *("",) * 6, case.skipped)
    return (
        case.case,
        "met" if case.is_met else "MISSED",
        str(case.num_events),
        _number(case.p50_s),
        _number(case.p95_s),
        _number(case.limit_s),
        _number(case.p95_steps, 1),
        str(case.diverged_steps),
        "; ".join((*case.missed, *case.failures[:2])),
    )


def _overhead_row(overhead: Overhead) -> tuple[str, ...]:
    is_met = overhead.fraction <= OVERHEAD_LIMIT
    note = f"steps of {overhead.ddp_step_s * 1000:.0f} ms; {OVERHEAD_LIMIT:.0%} may"
    share = f"{overhead.fraction:+.1%}"
    status = "met" if is_met else "MISSED"
    return ("overhead_vs_ddp", status, str(overhead.num_rounds), share, *("",) * 4, note)


def _torchft_row(torchft: TorchftResult) -> tuple[str, ...]:
    name = "torchft kill_one_of_four"
    if torchft.skipped:
        return (name, "skipped", *("",) * 6, torchft.skipped)
    seconds = torchft.seconds
    p50_s, p95_s = (percentile(seconds, f) if seconds else None for f in (0.5, _P95))
    failed = f"; {torchft.num_failed} failed" if torchft.num_failed else ""
    return (
        name,
        "-",
        str(len(seconds) + torchft.num_failed),
        _number(p50_s),
        _number(p95_s),
        *("",) * 2,
        str(torchft.diverged_steps),
        f"{torchft.version}{failed}",
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
