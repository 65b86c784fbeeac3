"""What a fault cost is read from what the members wrote; here they wrote by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from geartrain.bench.chaos.witness_log import (
    Commit,
    Goodbye,
    Hello,
    Record,
    WitnessWriter,
    Work,
)
from geartrain.bench.elastic.history import History, started_at_s
from geartrain.bench.elastic.outcome import (
    Fault,
    calm_step_s,
    first_commit_after,
    join_outcome,
    joiners,
    next_commit_s,
    num_steps_lost,
    percentile,
)
from geartrain.errors import ConfigError

BEGAN_AT_S = 1000.0
STEP_S = 0.1


def hello(device: str, at_s: float = BEGAN_AT_S) -> Hello:
    return Hello(at_s=at_s, pid=2**22 + 1, rank=0, device_id=device)


def work(step: int, at_s: float) -> Work:
    """The beginning of the step that makes ``step`` steps of it."""
    return Work(
        at_s=at_s,
        step=step - 1,
        plan="",
        epoch=0,
        step_in_epoch=step - 1,
        start=0,
        stop=1,
        count=1,
        num_tail=0,
        samples=(step,),
        epoch_steps=100,
    )


def commit(step: int, at_s: float, digest: str = "same") -> Commit:
    return Commit(at_s=at_s, step=step, plan="", loss=0.5, digest=digest)


def steps(first: int, last: int, since_s: float, digest: str = "same") -> list[Record]:
    """Steps of STEP_S each, the first one begun at ``since_s``."""
    records: list[Record] = []
    for index, step in enumerate(range(first, last + 1)):
        begun_at_s = since_s + index * STEP_S
        records += [work(step, begun_at_s), commit(step, begun_at_s + STEP_S, digest)]
    return records


def history_of(folder: Path, statements: dict[str, Sequence[Record]]) -> History:
    for name, records in statements.items():
        writer = WitnessWriter(folder, name)
        for record in records:
            writer.write(record)
    history = History(folder)
    history.poll()
    return history


def fault(at_s: float, *victims: str) -> Fault:
    return Fault(case="kill_one_of_four", at_s=at_s, victims=victims, device_ids=("b",))


def test_time_ends_with_the_first_step_that_was_begun_again(tmp_path: Path) -> None:
    killed_at_s = BEGAN_AT_S + 5.5 * STEP_S
    survivor: list[Record] = [
        hello("a"),
        *steps(1, 5, BEGAN_AT_S),
        work(6, BEGAN_AT_S + 5 * STEP_S),
        work(6, killed_at_s + 0.03),  # with more samples, since b has gone
        commit(6, killed_at_s + 0.25),
    ]
    victim: list[Record] = [hello("b"), *steps(1, 5, BEGAN_AT_S)]
    history = history_of(tmp_path, {"a-1": survivor, "b-2": victim})

    at_s = next_commit_s(history, fault(killed_at_s, "b-2.jsonl"))

    assert at_s == pytest.approx(killed_at_s + 0.25)


def test_step_that_all_had_voted_for_says_nothing(tmp_path: Path) -> None:
    killed_at_s = BEGAN_AT_S + 6 * STEP_S - 0.001
    voted = [hello("a"), *steps(1, 6, BEGAN_AT_S)]  # the sixth ends 1 ms after the kill
    history = history_of(tmp_path, {"a-1": voted})

    assert next_commit_s(history, fault(killed_at_s, "b-2.jsonl")) is None
    assert first_commit_after(history, killed_at_s) == pytest.approx(killed_at_s + 0.001)


def test_steps_of_who_was_hit_do_not_count(tmp_path: Path) -> None:
    history = history_of(tmp_path, {"b-2": [hello("b"), *steps(1, 9, BEGAN_AT_S)]})

    assert next_commit_s(history, fault(BEGAN_AT_S + STEP_S, "b-2.jsonl")) is None


def test_join_is_timed_from_the_start_and_the_others_pause_is_in_steps(
    tmp_path: Path,
) -> None:
    born_at_s = BEGAN_AT_S + 10 * STEP_S + 0.01
    others: list[Record] = [
        hello("a"),
        *steps(1, 12, BEGAN_AT_S),
        # The thirteenth takes as long as three.
        work(13, BEGAN_AT_S + 12 * STEP_S),
        commit(13, BEGAN_AT_S + 15 * STEP_S),
        *steps(14, 16, BEGAN_AT_S + 15 * STEP_S),
    ]
    joiner: list[Record] = [
        hello("b", born_at_s),
        work(13, BEGAN_AT_S + 14.5 * STEP_S),
        commit(13, BEGAN_AT_S + 15 * STEP_S),
    ]
    history = history_of(tmp_path, {"a-1": others, "b-2": joiner})

    (came,) = joiners(history, BEGAN_AT_S + STEP_S)
    outcome = join_outcome(history, came)

    assert outcome.seconds == pytest.approx(5 * STEP_S - 0.01)
    assert outcome.step_s == pytest.approx(STEP_S)
    assert outcome.steps == pytest.approx(2.0)


def test_joiner_that_makes_no_step_has_failed(tmp_path: Path) -> None:
    history = history_of(tmp_path, {"b-2": [hello("b")]})

    assert join_outcome(history, history.members[0]).seconds is None


def test_step_made_twice_is_lost(tmp_path: Path) -> None:
    again = [hello("a"), *steps(1, 5, BEGAN_AT_S), *steps(4, 8, BEGAN_AT_S + 1)]

    assert num_steps_lost(history_of(tmp_path / "again", {"a-1": again})) == 2
    once = [hello("a"), *steps(1, 5, BEGAN_AT_S)]
    assert num_steps_lost(history_of(tmp_path / "once", {"a-1": once})) == 0


def test_different_states_after_a_step_are_counted(tmp_path: Path) -> None:
    history = history_of(
        tmp_path,
        {
            "a-1": [hello("a"), *steps(1, 4, BEGAN_AT_S)],
            "b-2": [
                hello("b"),
                *steps(1, 2, BEGAN_AT_S),
                *steps(3, 4, BEGAN_AT_S + 2 * STEP_S, "other"),
            ],
        },
    )

    assert history.num_diverged() == 2


def test_long_pauses_do_not_move_the_calm_step(tmp_path: Path) -> None:
    records = [hello("a"), *steps(1, 6, BEGAN_AT_S), *steps(7, 12, BEGAN_AT_S + 60)]
    history = history_of(tmp_path, {"a-1": records})

    assert calm_step_s(history, BEGAN_AT_S + 99) == pytest.approx(STEP_S)
    assert calm_step_s(history, BEGAN_AT_S) == 0


def test_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    history = history_of(tmp_path, {"a-1": [hello("a"), *steps(1, 2, BEGAN_AT_S)]})
    path = tmp_path / "a-1.jsonl"
    line = b'{"type":"commit","at_s":1000.3,"step":3,"plan":"","loss":null,"digest":null}\n'
    with path.open("ab") as stream:
        stream.write(line[:40])
    history.poll()
    assert history.last_step == 2

    with path.open("ab") as stream:
        stream.write(line[40:])
    history.poll()
    assert history.last_step == 3


def test_member_that_said_goodbye_has_ended(tmp_path: Path) -> None:
    goodbye = Goodbye(at_s=BEGAN_AT_S, step=2, digest=None, why="finished")
    history = history_of(tmp_path, {"a-1": [hello("a"), goodbye], "b-2": [hello("b")]})

    assert [m.has_ended for m in history.members] == [True, False]


def test_foreign_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a-1.jsonl").write_text("hello\n")

    with pytest.raises(ConfigError, match="'hello', which no witness writes"):
        History(tmp_path).poll()


def test_start_of_a_process_is_known_until_it_has_gone() -> None:
    own_s = started_at_s(os.getpid())

    assert own_s is not None
    assert own_s < time.time()
    assert started_at_s(2**22 + 1) is None  # beyond the largest process id


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.5, 10.0), (0.95, 19.0), (0.96, 20.0), (1.0, 20.0)]
)
def test_percentile_is_one_of_the_values(fraction: float, expected: float) -> None:
    assert percentile([float(v) for v in range(20, 0, -1)], fraction) == expected
