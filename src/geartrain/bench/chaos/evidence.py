"""What is known of a chaos run once it has ended: what the checks judge."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from geartrain.bench.chaos.kinds import KINDS
from geartrain.bench.chaos.schedule import Fault
from geartrain.bench.chaos.witness_log import Commit, Statement
from geartrain.telemetry import RunEvent, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """A fault as it was made, or why not."""

    fault: Fault
    outcome: Literal["done", "skipped"]
    began_at_s: float
    """Unix time."""
    ended_at_s: float | None = None
    """When it was undone; None where it has no end."""
    note: str = ""

    @property
    def was_done(self) -> bool:
        """Whether anything was done."""
        return self.outcome == "done"

    @property
    def loses_device(self) -> bool:
        """Whether the others had to go on without the device."""
        return self.was_done and KINDS[self.fault.kind].loses_device


@dataclass(frozen=True, slots=True, kw_only=True)
class FlippedBit:
    """A bit that was turned in a copy of a saved state."""

    file: str
    bit: int
    """Counted from the file's first."""
    was_found: bool
    """Reading the state failed, as it must."""
    was_sound: bool
    """With the bit turned back the same state could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How ``geartrain run`` ended."""

    outcome: Literal["finished", "stopped", "failed", "hung"]
    """hung: it did not end when asked to, and was killed."""
    exit_code: int
    message: str
    stop_s: float = 0.0
    """From the request to stop until it had ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The same training to which nothing happens."""

    statement: Statement | None
    why_not: str = ""
    """Where there is none."""
    needs_same_bits: bool = False
    """Weights must be equal to the bit, not only close."""
    relative_difference: float | None = None
    """Of the final weights, in the 2-norm; None where both could not be read."""
    tolerance: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A part of a run in which its steps only rise."""

    began_at_s: float
    """Unix time; 0 of the first one."""
    step: int
    """After which it goes on."""
    statements: list[Statement] = field(default_factory=list)

    def first_step(self) -> int:
        """That it makes: steps that were logged are in the state that it goes on from."""
        return min(
            (c.step for s in self.statements for c in s.commits), default=self.step + 1
        )

    def commits_by_step(self) -> dict[int, list[tuple[Statement, Commit]]]:
        """Who has each step, in order of steps."""
        found: dict[int, list[tuple[Statement, Commit]]] = {}
        for statement in self.statements:
            for commit in statement.commits:
                found.setdefault(commit.step, []).append((statement, commit))
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All of it."""

    folder: Path
    """With all that was written."""
    device_ids: tuple[str, ...]
    began_at_s: float
    """Unix time at which the first fault could come."""
    ended_at_s: float
    """When no more faults came; the run was asked to stop then."""
    calm_step_s: float
    """Median time between commits before the first fault."""
    deeds: tuple[Deed, ...]
    statements: tuple[Statement, ...]
    records: tuple[StepRecord, ...]
    events: tuple[RunEvent, ...]
    ending: Ending
    reference: Reference
    flips: tuple[FlippedBit, ...] = ()
    leftovers: tuple[str, ...] = ()
    max_pause_s: float | None = None
    """Takes the place of every kind's own limit."""
    can_rejoin: bool = False

    def lives(self) -> tuple[Life, ...]:
        """The run from its begin, and from each restore on, in order.

        A run is restored where all its workers were lost; so no process has two lives.
        """
        begins = sorted((e.at_s, e.step) for e in self.events if e.kind == "resumed")
        lives = [Life(began_at_s=0.0, step=0)]
        lives += [Life(began_at_s=at_s, step=step) for at_s, step in begins]
        for statement in self.statements:
            last_at_s = statement.records[-1].at_s
            of = [life for life in lives if life.began_at_s <= last_at_s]
            of[-1].statements.append(statement)
        return tuple(replace(life, step=life.first_step() - 1) for life in lives)

    def commits_by_step(self) -> dict[int, list[tuple[Statement, Commit]]]:
        """Who has each step, in order of steps; not those that a restore took back."""
        found: dict[int, list[tuple[Statement, Commit]]] = {}
        for life in self.lives():
            found = {step: commits for step, commits in found.items() if step <= life.step}
            found |= life.commits_by_step()
        return dict(sorted(found.items()))

    def commit_times(self) -> dict[int, float]:
        """When each step was first committed anywhere."""
        return {
            step: min(commit.at_s for _, commit in commits)
            for step, commits in self.commits_by_step().items()
        }

    def progress(self) -> list[tuple[float, int]]:
        """When a step was first committed, and which; also those taken back."""
        return sorted(
            (min(commit.at_s for _, commit in commits), step)
            for life in self.lives()
            for step, commits in life.commits_by_step().items()
        )
