"""The coordinator's memory: what was written is there, what was damaged is found."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from geartrain.elastic.journal import COMPACT_BYTES, Journal, read_journal
from geartrain.elastic.records import (
    HISTORY_STEPS,
    Committed,
    EpochFormed,
    Facts,
    Incarnation,
    JournalRecord,
    MemberLost,
    RunBegan,
    replay,
)
from geartrain.errors import CheckpointError
from small_disk import small_disk


def commits(first: int, last: int) -> list[JournalRecord]:
    return [
        Committed(epoch=1, step=step, lineage=f"{step:032x}") for step in range(first, last)
    ]


RECORDS: list[JournalRecord] = [
    RunBegan(step=0, lineage="00" * 16),
    EpochFormed(
        epoch=1, members=(Incarnation("a", "1"), Incarnation("b", "2")), reason="x"
    ),
    *commits(1, 4),
    MemberLost(member_id="b", incarnation="2", reason="gone", at_s=1.5),
    EpochFormed(epoch=2, members=(Incarnation("a", "1"),), reason="b is lost"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal"


def write(path: Path, records: list[JournalRecord] = RECORDS) -> bytes:
    journal = Journal(path)
    for record in records:
        journal.append([record])
    journal.close()
    return path.read_bytes()


def test_what_was_appended_is_read_back(path: Path) -> None:
    write(path)
    journal = Journal(path)
    assert list(journal.records) == RECORDS
    journal.append(commits(4, 6))
    journal.close()
    assert list(read_journal(path)) == [*RECORDS, *commits(4, 6)]


def test_records_are_in_the_file_when_append_returns(path: Path) -> None:
    journal = Journal(path)
    journal.append(RECORDS)
    assert list(read_journal(path)) == RECORDS  # as after kill -9
    journal.close()


def test_line_that_was_cut_off_is_dropped_and_the_journal_goes_on(
    path: Path,
) -> None:
    data = write(path)
    begin = data[:-1].rindex(b"\n") + 1
    for end in range(begin, len(data)):
        path.write_bytes(data[:end])
        journal = Journal(path)
        assert list(journal.records) == RECORDS[:-1]
        journal.append([RECORDS[-1]])
        journal.close()
        assert path.read_bytes() == data


def test_every_damaged_byte_is_found_and_its_line_named(
    path: Path,
) -> None:
    data = write(path)
    lines = data.splitlines(keepends=True)
    # Without the end of the line before the last: the two would pass for a torn one.
    for index in range(len(data) - len(lines[-1]) - 1):
        damaged = bytearray(data)
        damaged[index] ^= 0x01
        path.write_bytes(damaged)
        number = data[:index].count(b"\n") + 1
        with pytest.raises(CheckpointError, match=rf"line {number} "):
            read_journal(path)


def test_line_that_is_missing_or_doubled_is_found(path: Path) -> None:
    lines = write(path).splitlines(keepends=True)
    for changed in ([*lines[:2], *lines[3:]], [*lines[:3], lines[2], *lines[3:]]):
        path.write_bytes(b"".join(changed))
        with pytest.raises(CheckpointError, match="checksum"):
            read_journal(path)


def test_damaged_journal_stays_as_it_is_and_is_not_locked(path: Path) -> None:
    data = bytearray(write(path))
    data[20] ^= 0x40
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="damaged"):
            Journal(path)
    assert path.read_bytes() == data


def test_two_coordinators_on_one_journal_are_refused(path: Path) -> None:
    journal = Journal(path)
    with pytest.raises(CheckpointError, match="another coordinator"):
        Journal(path)
    journal.close()
    journal.close()
    Journal(path).close()


def test_long_journal_is_replaced_by_what_it_adds_up_to(path: Path) -> None:
    records = [*RECORDS, *commits(4, 2 * HISTORY_STEPS)]
    journal = Journal(path, compact_bytes=100_000)
    sizes = []
    for record in records:
        journal.append([record])
        sizes.append(path.stat().st_size)
    journal.append([RECORDS[-1]])
    journal.close()
    kept = read_journal(path)
    assert isinstance(kept[0], Facts)
    assert max(sizes) < 300_000
    assert replay(kept) == replay([*records, RECORDS[-1]])
    assert sorted(p.name for p in path.parent.iterdir()) == ["journal", "journal.lock"]


def test_full_disk_is_told_and_leaves_the_journal_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(path)
    journal = Journal(path)

    def write_half(file: int, part: bytes, offset: int) -> int:
        if offset > len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, part[:5]) if not os.lseek(file, offset, 0) < 0 else 0

    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", write_half)
        with pytest.raises(CheckpointError, match="No space left"):
            journal.append(commits(4, 5))
    assert path.read_bytes() == data
    journal.append(commits(4, 5))
    journal.close()
    assert list(read_journal(path)) == [*RECORDS, *commits(4, 5)]


@pytest.mark.root
def test_disk_that_others_fill_up_holds_no_step(tmp_path: Path) -> None:
    with small_disk(tmp_path, "12m") as disk:
        journal = Journal(disk / "journal")
        journal.append(RECORDS[:2])
        filler = (disk / "filler").open("wb", buffering=0)
        with filler, contextlib.suppress(OSError):
            while filler.write(bytes(4096)):
                pass

        journal.append(commits(1, 20_000))

        assert list(read_journal(disk / "journal")) == RECORDS[:2] + commits(1, 20_000)
        journal.close()
        assert (disk / "journal").stat().st_size < COMPACT_BYTES


def test_reserved_room_of_a_killed_coordinator_is_no_damage(path: Path) -> None:
    data = write(path)
    path.write_bytes(data + bytes(5000))

    assert list(read_journal(path)) == RECORDS
    journal = Journal(path)
    assert list(journal.records) == RECORDS
    journal.append(commits(4, 6))
    journal.close()

    assert list(read_journal(path)) == RECORDS + commits(4, 6)


def test_membership_is_on_disk_before_append_returns_and_steps_soon_after(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    journal = Journal(path)
    journal.append([RECORDS[0]])
    assert len(synced) == 1
    journal.append(commits(1, 3))
    assert len(synced) == 1
    journal.sync()
    journal.sync()
    assert len(synced) == 2
    journal.close()
    strict = Journal(path, sync_commits=True)
    strict.append(commits(3, 4))
    assert len(synced) == 3
    strict.close()


def test_journal_of_another_version_is_refused(path: Path) -> None:
    write(path, [Facts(schema_version=99)])
    with pytest.raises(CheckpointError, match="schema_version=99"):
        Journal(path)


def test_directory_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match="journal"):
        Journal(tmp_path / "run" / "journal")
