"""A chaos run as its files tell it, which a test then doctors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from geartrain.bench.chaos.evidence import Deed, Ending, Evidence, Reference
from geartrain.bench.chaos.schedule import Fault
from geartrain.bench.chaos.witness_log import (
    Commit,
    Goodbye,
    Hello,
    Record,
    Work,
    read_statements,
    write_statement,
)
from geartrain.telemetry import RunEvent, RunLogReader, RunLogWriter, StepRecord

STEP_S = 0.1
BATCH = 8
EPOCH_STEPS = 4
BEGAN_AT_S = 1000.0
SHARES = {3: ((0, 4), (4, 6), (6, 8)), 2: ((0, 5), (5, 8))}

Change = Callable[[str, list[Record]], list[Record]]


@dataclass(frozen=True, kw_only=True)
class Doctored:
    """Where the run lies, and what is said of it."""

    folder: Path
    num_steps: int = 10
    members: tuple[str, ...] = ("a", "b", "c")
    lost_at_step: int | None = None
    """From that step on the last member is gone: killed after it had begun it."""
    lost_after_its_part: bool = False
    deeds: tuple[Deed, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of the evidence."""

    def write(self, change: Change = lambda _, records: records) -> Evidence:
        """Write the files, each statement changed, and read them back."""
        log = RunLogWriter(self.folder / "run")
        for index, name in enumerate(self.members):
            records = change(name, self._records(index, name))
            write_statement(self.folder / "witness", f"{name}-{index}", records)
        for step in range(self.num_steps):
            log.add_steps([step_record(step, name) for name in self._present(step)])
        if self.lost_at_step is not None:
            log.add_event(lost_event(self.members[-1], self.lost_at_step))
        log.close()
        return self.read()

    def read(self) -> Evidence:
        """Read what lies there."""
        reader = RunLogReader(self.folder / "run")
        records, events = tuple(reader.new_steps()), tuple(reader.new_events())
        reader.close()
        statements = read_statements(self.folder / "witness")
        evidence = Evidence(
            folder=self.folder,
            device_ids=self.members,
            began_at_s=BEGAN_AT_S,
            ended_at_s=BEGAN_AT_S + (self.num_steps + 0.5) * STEP_S,
            calm_step_s=STEP_S,
            deeds=self.deeds,
            statements=statements,
            records=records,
            events=events,
            ending=Ending(outcome="stopped", exit_code=130, message="stopped"),
            reference=Reference(statement=statements[0]),
        )
        return replace(evidence, **self.options)

    def _present(self, step: int) -> Sequence[str]:
        is_less = self.lost_at_step is not None and step >= self.lost_at_step
        return self.members[:-1] if is_less else self.members

    def _records(self, index: int, name: str) -> list[Record]:
        records: list[Record] = [hello(name, index)]
        is_last = index == len(self.members) - 1
        for step in range(self.num_steps):
            if step == self.lost_at_step:
                # Begun by all; then again by those left, unless all had given their part.
                records.append(work(step, index, len(self.members)))
                if is_last:
                    return records
                if self.lost_after_its_part:
                    records.append(commit(step + 1, f"plan{len(self.members)}"))
                    continue
            num_members = len(self._present(step))
            records.append(work(step, index, num_members))
            records.append(commit(step + 1, f"plan{num_members}"))
        last = records[-1]
        assert isinstance(last, Commit)
        records.append(
            Goodbye(at_s=last.at_s, step=self.num_steps, digest=last.digest, why="stopped")
        )
        return records


def hello(name: str, index: int) -> Hello:
    return Hello(at_s=BEGAN_AT_S - 1 + index / 10, pid=index, rank=index, device_id=name)


def work(step: int, index: int, num_members: int) -> Work:
    start, stop = SHARES[num_members][index]
    epoch, step_in_epoch = divmod(step, EPOCH_STEPS)
    first = step_in_epoch * BATCH
    return Work(
        at_s=BEGAN_AT_S + step * STEP_S,
        step=step,
        plan=f"plan{num_members}",
        epoch=epoch,
        step_in_epoch=step_in_epoch,
        start=start,
        stop=stop,
        count=BATCH,
        num_tail=0,
        samples=tuple(range(first + start, first + stop)),
        epoch_steps=EPOCH_STEPS,
    )


def commit(step: int, plan: str) -> Commit:
    return Commit(
        at_s=BEGAN_AT_S + step * STEP_S,
        step=step,
        plan=plan,
        loss=1.0 / step,
        digest=f"state{step}",
    )


def step_record(step: int, device_id: str) -> StepRecord:
    return StepRecord(
        step=step,
        device_id=device_id,
        at_s=BEGAN_AT_S + step * STEP_S,
        step_s=STEP_S,
        num_samples=1,
        compute_s=0.0,
        comm_s=0.0,
        idle_s=0.0,
        data_s=0.0,
        peak_memory_bytes=0,
        loss=1.0,
    )


def lost_event(device_id: str, step: int) -> RunEvent:
    return RunEvent(
        step=step,
        at_s=BEGAN_AT_S + step * STEP_S,
        kind="lost",
        message="was lost: closed the connection",
        device_id=device_id,
    )


def done(kind: str, device_id: str, at_s: float, lasted_s: float | None = None) -> Deed:
    began_at_s = BEGAN_AT_S + at_s
    return Deed(
        fault=Fault(at_s=at_s, kind=kind, device_id=device_id),
        outcome="done",
        began_at_s=began_at_s,
        ended_at_s=None if lasted_s is None else began_at_s + lasted_s,
    )
