"""Reading the members out of a coordinator's journal while it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from geartrain.elastic.journal import Journal
from geartrain.elastic.records import Committed, EpochFormed, Incarnation
from geartrain.launch.epoch_follower import EpochFollower


def epoch(number: int, *members: tuple[str, str]) -> EpochFormed:
    return EpochFormed(
        epoch=number,
        members=tuple(Incarnation(member_id=m, incarnation=i) for m, i in members),
        reason="test",
    )


def commit(step: int) -> Committed:
    return Committed(epoch=1, step=step, lineage="ab" * 16)


def test_members_of_the_latest_epoch_are_known_as_soon_as_it_is_written(
    tmp_path: Path,
) -> None:
    follower = EpochFollower(tmp_path / "journal")
    assert not follower.poll()
    journal = Journal(tmp_path / "journal")

    journal.append([epoch(1, ("cpu:0", "0.0"), ("cpu:1", "1.0")), commit(1)])
    assert follower.poll()
    assert follower.members == {"cpu:0": "0.0", "cpu:1": "1.0"}
    journal.append([commit(2)])
    assert not follower.poll()
    journal.append([epoch(2, ("cpu:0", "0.0"), ("cpu:1", "1.1"))])

    assert follower.poll()
    assert follower.members == {"cpu:0": "0.0", "cpu:1": "1.1"}
    journal.close()


def test_journal_that_was_cut_short_is_read_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", compact_bytes=2000)
    follower = EpochFollower(tmp_path / "journal")
    journal.append([epoch(1, ("cpu:0", "0.0"))])
    follower.poll()
    length = (tmp_path / "journal").stat().st_size

    journal.append([epoch(2, ("cpu:0", "0.1"))])
    for step in range(1, 20):
        journal.append([commit(step)])
    follower.poll()

    assert follower.members == {"cpu:0": "0.1"}
    assert b'"facts"' in (tmp_path / "journal").read_bytes()[:length], "it was cut short"
    journal.close()


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_line_that_is_half_written_is_read_when_it_is_whole(
    tmp_path: Path, cut: int
) -> None:
    journal = Journal(tmp_path / "whole")
    journal.append([commit(1), epoch(1, ("cpu:0", "0.0"))])
    journal.close()
    data = (tmp_path / "whole").read_bytes()
    follower = EpochFollower(tmp_path / "half")

    (tmp_path / "half").write_bytes(data[:-cut])
    assert not follower.poll()
    with (tmp_path / "half").open("ab") as rest:
        rest.write(data[-cut:])

    assert follower.poll()
    assert follower.members == {"cpu:0": "0.0"}


def test_line_of_many_members_is_read_as_a_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    follower = EpochFollower(tmp_path / "journal")

    journal.append([epoch(1, *((f"cpu:{i}", f"{i}.0") for i in range(10_000)))])

    assert follower.poll()
    assert len(follower.members) == 10_000
    journal.close()
