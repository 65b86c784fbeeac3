"""Makes the faults of a case, one after the other, in as few runs as that takes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from geartrain.bench.chaos.capabilities import can_rejoin
from geartrain.bench.elastic.cases import Case
from geartrain.bench.elastic.history import Member
from geartrain.bench.elastic.job import Job, JobSettings, coordinator_id
from geartrain.bench.elastic.outcome import (
    Fault,
    Outcome,
    calm_step_s,
    first_commit_after,
    join_outcome,
    joiners,
    next_commit_s,
    num_steps_lost,
)
from geartrain.errors import DeviceError

Say = Callable[[str], None]

_COMMIT_TIMEOUT_S = 20.0
"""A run that makes no step for so long stands still; the event counts as failed."""
_WHOLE_TIMEOUT_S = 60.0
"""For all devices to take part again, before another run is begun instead."""
_COORDINATOR_TIMEOUT_S = 20.0
_MOMENT_TIMEOUT_S = 20.0
_CALM_STEPS = 6
"""Made by all devices between two faults."""
_MOST_FAILED_STARTS = 2
_REBUILD_S = (0.02, 0.2)
"""When the second kill comes after the first one."""
_HEAL_S = (0.0, 0.1)
"""And when after a device that comes back has said hello."""
MOMENTS = ("rebuild", "heal", "save")


@dataclass(slots=True, kw_only=True)
class CaseRuns:
    """All that was found in the runs of a case."""

    case: str
    outcomes: list[Outcome] = field(default_factory=list)
    joins: list[Outcome] = field(default_factory=list)
    num_runs: int = 0
    num_steps: int = 0
    num_diverged: int = 0
    num_steps_lost: int = 0
    num_transfers: int = 0
    """States that were sent to members that had been there before."""
    failures: list[str] = field(default_factory=list)
    """What must not happen in any run: its end, steps made twice, things left behind."""
    victims: set[str] = field(default_factory=set)
    """Names of all processes that were hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How often a case is made to happen."""

    case: Case
    num_events: int


def run_cases(asked: Sequence[Asked], folder: Path, seed: int, say: Say) -> list[CaseRuns]:
    """Make the events of some cases, one case after the other in the same runs.

    A further run is begun only where one has ended, or has too few devices left.

    Args:
        asked: What, on the fleet of the last one.
        folder: For what the runs write.
        seed: Of victims and moments.
        say: Told what goes on.
    """
    plan = _Plan(
        asked=tuple(asked),
        found=[CaseRuns(case=one.case.name) for one in asked],
        dice=random.Random(f"{seed}/{asked[-1].case.name}"),  # noqa: S311 - no secret
        deadline_s=time.monotonic() + sum(one.case.budget_s for one in asked),
        say=say,
    )
    num_failed_starts = num_runs = 0
    while plan.unfinished() and time.monotonic() < plan.deadline_s:
        where = folder / f"{asked[-1].case.name}-{num_runs}"
        where.mkdir()
        num_runs += 1
        try:
            with Job(_job_settings(asked[-1].case, where)) as job:
                job.await_training()
                _drive(plan, job)
        except DeviceError as error:
            num_failed_starts += 1
            for found in plan.unfinished().values():
                found.failures.append(str(error))
            say(str(error))
            if num_failed_starts == _MOST_FAILED_STARTS:
                break
    return plan.found


@dataclass(slots=True, kw_only=True)
class _Plan:
    asked: tuple[Asked, ...]
    found: list[CaseRuns]
    dice: random.Random
    deadline_s: float
    say: Say

    def unfinished(self) -> dict[Asked, CaseRuns]:
        """Cases that have too few events yet."""
        return {
            one: found
            for one, found in zip(self.asked, self.found, strict=True)
            if len(found.outcomes) < one.num_events
        }


def _drive(plan: _Plan, job: Job) -> None:
    """Make as many events in one run as it takes."""
    taking_part = []
    for one, found in plan.unfinished().items():
        taking_part.append(found)
        found.num_runs += 1
        series = _Series(one, job, plan, found)
        series.make()
        if not series.can_go_on:
            break
    _close(job, taking_part)


@dataclass(slots=True)
class _Series:
    """The events of one run, until it has too few devices left for another one."""

    asked: Asked
    job: Job
    plan: _Plan
    found: CaseRuns
    can_go_on: bool = True
    """Whether all devices take part again, so that another fault can come."""

    @property
    def case(self) -> Case:
        return self.asked.case

    @property
    def dice(self) -> random.Random:
        return self.plan.dice

    def make(self) -> None:
        first = len(self.found.outcomes)
        while self.can_go_on and len(self.found.outcomes) < self.asked.num_events:
            if time.monotonic() > self.plan.deadline_s:
                break
            outcome = self._event()
            if outcome is None:
                self.can_go_on = False
                break
            self.found.outcomes.append(outcome)
            self._tell(outcome)
            self.can_go_on = outcome.seconds is not None and self._settle()
        self._add_limits(first)

    def _event(self) -> Outcome | None:
        """One fault and what it cost; None where its moment did not come."""
        step_s = calm_step_s(self.job.history, time.time())
        time.sleep(self.dice.uniform(0.0, 2 * step_s))  # anywhere in a step
        fault = self._make_fault()
        if fault is None:
            self.found.failures.append("a moment to hit did not come")
            return None
        return self._watch(fault, step_s)

    def _make_fault(self) -> Fault | None:
        match self.case.deed:
            case "kill":
                return self._hit(self._choose(self.case.num_victims), signal.SIGKILL)
            case "stop":
                return self._hit(self._choose(1), signal.SIGSTOP)
            case "second":
                return self._second()
            case "coordinator":
                return self._kill_coordinator()

    def _choose(self, number: int) -> list[Member]:
        living = self.job.living()
        return [living[d] for d in self.dice.sample(sorted(living), number)]

    def _hit(
        self, members: Sequence[Member], number: signal.Signals, moment: str = ""
    ) -> Fault:
        at_s = self.job.hit(members, number)
        self.found.victims.update(member.name for member in members)
        return Fault(
            case=self.case.name,
            at_s=at_s,
            victims=tuple(member.name for member in members),
            device_ids=tuple(member.device_id for member in members),
            moment=moment,
        )

    def _second(self) -> Fault | None:
        moment = MOMENTS[len(self.found.outcomes) % len(MOMENTS)]
        if moment == "save":
            if not self.job.wait(self.job.is_saving, _MOMENT_TIMEOUT_S, keenly=True):
                return None
            return self._hit(self._choose(1), signal.SIGKILL, moment)
        if moment == "heal" and not can_rejoin():
            moment = "rebuild"
        first, second = self._choose(2)
        before = self._hit([first], signal.SIGKILL)
        if moment == "rebuild":
            time.sleep(self.dice.uniform(*_REBUILD_S))
        elif not self.job.wait(
            lambda: self._is_back(first), _MOMENT_TIMEOUT_S, keenly=True
        ):
            return None
        else:
            time.sleep(self.dice.uniform(*_HEAL_S))
        fault = self._hit([second], signal.SIGKILL, moment)
        return replace(fault, victims=(*before.victims, *fault.victims))

    def _is_back(self, member: Member) -> bool:
        newest = self.job.history.newest().get(member.device_id)
        return newest is not None and newest.name != member.name

    def _kill_coordinator(self) -> Fault | None:
        known = self.job.coordinator()
        if known is None:
            return None
        process_id, address_file = known
        at_s = time.time()
        fault = Fault(case=self.case.name, at_s=at_s, victims=(), device_ids=())
        _end(process_id)
        returned = self.job.wait(
            lambda: coordinator_id(address_file) not in {None, process_id},
            _COORDINATOR_TIMEOUT_S,
            keenly=True,
        )
        return replace(fault, returned_at_s=time.time()) if returned else fault

    def _watch(self, fault: Fault, step_s: float) -> Outcome:
        history, since_s = self.job.history, fault.at_s
        if self.case.deed == "coordinator":
            if fault.returned_at_s is None:
                return self._outcome(fault, step_s, None, "it did not come back")
            since_s = fault.returned_at_s
            self.job.wait(
                lambda: first_commit_after(history, since_s) is not None,
                _COMMIT_TIMEOUT_S,
            )
            at_s = first_commit_after(history, since_s)
        else:
            self.job.wait(
                lambda: next_commit_s(history, fault) is not None, _COMMIT_TIMEOUT_S
            )
            at_s = next_commit_s(history, fault)
        if at_s is None:
            ended = "the run ended" if self.job.has_ended else "no step was made"
            self.found.failures.append(f"{ended} after {fault.moment} {fault.device_ids}")
            return self._outcome(fault, step_s, None, ended)
        return self._outcome(fault, step_s, at_s - since_s)

    def _outcome(
        self, fault: Fault, step_s: float, seconds: float | None, note: str = ""
    ) -> Outcome:
        if fault.returned_at_s is not None:
            note = f"back after {fault.returned_at_s - fault.at_s:.3f} s"
        return Outcome(
            at_s=fault.at_s,
            device_ids=fault.device_ids,
            seconds=seconds,
            step_s=step_s,
            moment=fault.moment,
            steps=seconds / step_s if seconds is not None and step_s > 0 else None,
            note=note,
        )

    def _settle(self) -> bool:
        """Wait until all devices take part again; False where they do not."""
        since_step = self.job.history.last_step
        if self.case.deed != "coordinator" and not can_rejoin():
            return False  # it is needless to wait for what does not come
        is_whole = self.job.wait(
            lambda: self.job.is_whole(_CALM_STEPS, since_step), _WHOLE_TIMEOUT_S
        )
        if not is_whole:
            left = sorted(self.job.living())
            self.found.failures.append(f"only {', '.join(left)} train after {since_step}")
        return is_whole

    def _add_limits(self, first: int) -> None:
        """Give each stop the limit that the run told of it."""
        if self.case.deed != "stop":
            return
        told = self.job.limits_told()
        for index in range(first, len(self.found.outcomes)):
            outcome = self.found.outcomes[index]
            limits = [
                limit_s
                for device_id, at_s, limit_s in told
                if device_id in outcome.device_ids and at_s > outcome.at_s
            ]
            if limits:
                self.found.outcomes[index] = replace(outcome, limit_s=limits[0])

    def _tell(self, outcome: Outcome) -> None:
        number = len(self.found.outcomes)
        took = "FAILED" if outcome.seconds is None else f"{outcome.seconds:.3f} s"
        what = " ".join(filter(None, (outcome.moment, *outcome.device_ids)))
        self.plan.say(
            f"{self.case.name} {number} of {self.asked.num_events}: {took}  {what}"
        )


def _close(job: Job, taking_part: Sequence[CaseRuns]) -> None:
    """End a run; what concerns all of it is told of each case that it was used for."""
    ending, left = job.stop()
    history = job.history
    hit = {name for found in taking_part for name in found.victims}
    came = [
        member
        for member in joiners(history, job.began_at_s)
        if member.commits or member.name not in hit  # else it was killed as it came in
    ]
    failures = [f"left behind: {what}" for what in left]
    if ending.outcome not in {"finished", "stopped"}:
        failures.append(f"the run {ending.outcome}: {ending.message}")
    for found in taking_part:
        found.joins += [join_outcome(history, member) for member in came]
        found.num_steps += len(history.first_at_s)
        found.num_diverged += history.num_diverged()
        found.num_transfers += job.num_transfers()
        found.num_steps_lost += num_steps_lost(history)
        found.failures += failures


def _job_settings(case: Case, folder: Path) -> JobSettings:
    return JobSettings(
        folder=folder,
        fleet_spec=case.fleet_spec,
        device_count=len(case.core_fractions),
        sample_s=case.sample_s,
        saves=case.saves,
    )


def _end(process_id: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)
