"""Faults from a trace, among them a real one where its data is there."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from geartrain.bench.chaos.kinds import KINDS
from geartrain.bench.chaos.trace import (
    ReplaySettings,
    TraceEntry,
    parse_trace,
    replay,
    write_trace,
)
from geartrain.errors import ConfigError
from run_command import REPOSITORY

REAL_TRACE = REPOSITORY.parent / "shared/data/failures/infinitehbd_fault_trace.json"
DAY_S = 86_400.0
DEVICES = tuple(f"emulated:{index}" for index in range(6))
KIND_OF_CLASS = {
    "Parameter Plane Cable": "link_cut",
    "Parameter Plane Network": "link_cut",
    "Network": "link_cut",
    "CPU": "freeze",
    "Memory": "freeze",
}
"""What is not named here took the server away at once."""


def convert_real_trace(path: Path) -> tuple[TraceEntry, ...]:
    """The starts of faults of the InfiniteHBD trace; its clock counts days."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    entries = [
        TraceEntry(
            at_s=float(event["event_time"]) * DAY_S,
            node_id=event["node_id"],
            kind=KIND_OF_CLASS.get(event["fault_type"]["Class"], "kill"),
        )
        for event in events
        if event["event_type"] == "fault_start"
    ]
    return tuple(sorted(entries, key=lambda entry: entry.at_s))


def settings(**changes: Any) -> ReplaySettings:
    fields: dict[str, Any] = {
        "device_ids": DEVICES,
        "kinds": tuple(KINDS.values()),
        "speed": 10.0,
        "duration_s": 60.0,
    }
    return ReplaySettings(**(fields | changes))


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(["at_s,node_id,kind", *lines]) + "\n")
    return path


def test_trace_is_replayed_with_its_clock_compressed(tmp_path: Path) -> None:
    path = written(tmp_path, "# two nodes", "130,n2,stop", "100,n1,kill", "", "150,n2,kill")

    replayed = replay(parse_trace(path), settings())

    assert [(f.at_s, f.kind, f.device_id) for f in replayed.faults] == [
        (0.0, "kill", "emulated:0"),
        (3.0, "stop", "emulated:1"),
        (5.0, "kill", "emulated:1"),
    ]
    stop = replayed.faults[1]
    assert KINDS["stop"].least_s < stop.duration_s < KINDS["stop"].most_s


def test_node_that_is_called_as_a_device_is_that_device(tmp_path: Path) -> None:
    path = written(tmp_path, "0,emulated:4,kill", "1,x,kill")

    replayed = replay(parse_trace(path), settings(seed=2))

    assert replayed.device_of_node == {"emulated:4": "emulated:4", "x": "emulated:3"}


def test_what_is_too_late_or_not_possible_is_left_out_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path, "0,n1,kill", "1,n2,link_cut", "700,n3,kill")

    replayed = replay(parse_trace(path), settings(kinds=(KINDS["kill"],)))

    assert len(replayed.faults) == 1
    assert replayed.num_left_out == 2


def test_written_trace_reads_back_equal(tmp_path: Path) -> None:
    entries = (
        TraceEntry(at_s=0.5, node_id="a,b", kind="kill"),
        TraceEntry(at_s=2.0, node_id="c", kind="freeze"),
    )

    write_trace(tmp_path / "t.csv", entries)

    assert parse_trace(tmp_path / "t.csv") == entries


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("soon,n1,kill", r"line 2: at_s='soon' is not a number"),
        ("-1,n1,kill", r"line 2: at_s=-1 must be finite and >= 0"),
        ("nan,n1,kill", r"line 2: at_s=nan must be finite"),
        ("1,,kill", r"line 2: node_id is empty"),
        ("1,n1,meteor", r"line 2: unknown kind 'meteor'; known are kill"),
        ("1,n1", r"line 2: 2 values; expected at_s,node_id,kind"),
    ],
)
def test_wrong_line_is_refused_with_its_number(
    tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_trace(written(tmp_path, line))


def test_other_header_absent_file_and_wrong_speed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("t,node\n")

    with pytest.raises(ConfigError, match="line 1: 't,node'; expected the header"):
        parse_trace(tmp_path / "x.csv")
    with pytest.raises(ConfigError, match="cannot read the trace"):
        parse_trace(tmp_path / "absent.csv")
    with pytest.raises(ConfigError, match="speed=0"):
        settings(speed=0.0)


@pytest.mark.skipif(
    not REAL_TRACE.exists(), reason=f"the recorded trace is not there ({REAL_TRACE})"
)
def test_real_trace_of_a_year_is_replayed_within_a_minute(tmp_path: Path) -> None:
    entries = convert_real_trace(REAL_TRACE)
    write_trace(tmp_path / "year.csv", entries)
    span_s = entries[-1].at_s - entries[0].at_s

    replayed = replay(parse_trace(tmp_path / "year.csv"), settings(speed=span_s / 59.0))

    assert len(entries) == 584
    assert len(replayed.faults) + replayed.num_left_out == 584
    assert len(replayed.faults) > 550  # equal times are rounded by the file
    assert set(replayed.device_of_node.values()) == set(DEVICES)
    assert all(a.at_s <= b.at_s for a, b in pairwise(replayed.faults))
    assert replayed.faults[-1].at_s < 60.0
