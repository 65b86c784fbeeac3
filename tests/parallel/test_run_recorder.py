"""A run log goes on where whoever wrote it was lost: nothing missing, nothing twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.parallel.run_recorder import RunRecorder, StepFacts
from geartrain.parallel.trailer import RankFigures
from geartrain.telemetry import RunEvent, RunLogReader, StepRecord

IDS = ("cpu:0", "cpu:1", "cpu:2")


def facts(step: int) -> StepFacts:
    figures = RankFigures(compute_s=0.1, previous_wait_s=0.01, num_samples=4)
    return StepFacts(
        step=step,
        at_s=100.0 + step,
        step_s=1.0,
        loss=1.0 / (step + 1),
        figures=(figures,) * 3,
    )


def read(run_dir: Path) -> tuple[list[StepRecord], list[RunEvent]]:
    reader = RunLogReader(run_dir)
    records, events = reader.new_steps(), reader.new_events()
    reader.close()
    return records, events


def check(run_dir: Path, num_steps: int) -> None:
    records, _ = read(run_dir)
    found = [(record.step, record.device_id) for record in records]
    assert sorted(found) == [(step, name) for step in range(num_steps) for name in IDS]


@settings(deadline=None, max_examples=60)
@given(
    seen_by_lead=st.integers(1, 6),
    behind=st.integers(0, 1),
    cut_bytes=st.integers(0, 700),
    num_after=st.integers(1, 3),
)
def test_next_lead_writes_what_is_missing_and_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory,
    seen_by_lead: int,
    behind: int,
    cut_bytes: int,
    num_after: int,
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    first, second = RunRecorder(IDS, run_dir), RunRecorder(IDS)
    for step in range(seen_by_lead):
        first.add_step(facts(step))
    for step in range(seen_by_lead - behind):
        second.add_step(facts(step))
    path = run_dir / "run.jsonl"
    size = path.stat().st_size
    # It was killed within its last write, which holds the records of one step.
    one_step = size // max(seen_by_lead - 1, 1)
    with path.open("r+b") as stream:
        stream.truncate(size - min(cut_bytes, one_step))

    second.lead(run_dir)
    last = seen_by_lead - behind + num_after
    for step in range(seen_by_lead - behind, last):
        second.add_step(facts(step))
    second.flush([0.1, 0.1, 0.1])

    check(run_dir, last)


def test_reader_that_saw_half_a_line_reads_on_after_it_was_cut_off(tmp_path: Path) -> None:
    first, second = RunRecorder(IDS, tmp_path), RunRecorder(IDS)
    for step in range(3):
        first.add_step(facts(step))
        second.add_step(facts(step))
    path = tmp_path / "run.jsonl"
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 40)
    reader = RunLogReader(tmp_path)
    before = reader.new_steps()

    second.lead(tmp_path)

    after = reader.new_steps()
    reader.close()
    assert len(before) == 5
    assert [(r.step, r.device_id) for r in after] == [(1, "cpu:2")]


def test_events_of_the_lost_lead_are_not_written_again(tmp_path: Path) -> None:
    first, second = RunRecorder(IDS, tmp_path), RunRecorder(IDS)
    for recorder in (first, second):
        recorder.add_event(0, "planned", "as planned")
        recorder.add_step(facts(0))
        recorder.add_step(facts(1))
        recorder.add_event(2, "slowdown", "slower", "cpu:1")
    second.add_event(2, "slowdown", "slower", "cpu:2")

    second.lead(tmp_path)

    _, events = read(tmp_path)
    assert [(e.kind, e.device_id) for e in events] == [
        ("planned", ""),
        ("slowdown", "cpu:1"),
        ("slowdown", "cpu:2"),
    ]


def test_who_was_left_out_writes_nothing_more(tmp_path: Path) -> None:
    recorder = RunRecorder(IDS, tmp_path)
    recorder.add_step(facts(0))

    recorder.retire()
    recorder.add_step(replace(facts(1), loss=2.0))
    recorder.flush([0.0, 0.0, 0.0])
    recorder.lead(tmp_path)

    assert read(tmp_path) == ([], [])
