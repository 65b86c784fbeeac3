"""Every message reads back equal; everything else is refused with a reason."""

from __future__ import annotations

import contextlib
import typing
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from geartrain.checkpoint.ranges import StateRange
from geartrain.elastic.messages import (
    LINE_LIMIT_BYTES,
    CoordinatorMessage,
    Holds,
    Join,
    MemberMessage,
    OperatorMessage,
    Vote,
    decode_from_coordinator,
    decode_to_coordinator,
    encode,
)
from geartrain.errors import CommunicationError

SAMPLES = {
    "epoch": 3,
    "step": 7,
    "lineage": "ab" * 16,
    "parent": "cd" * 16,
    "member_id": "node0/cpu:0",
    "incarnation": "f00",
    "host_id": "node0",
    "progress": 5,
    "member_ids": ["b"],
    "reason": "why \n not",
    "ranges": [{"name": "w", "start": 0, "stop": 5}],
    "request_id": 1,
    "num_members": 2,
    "beat_interval_s": 0.05,
    "build_s": 0.5,
    "min_members": 1,
    "transfers": [],
    "lost": [],
    "members": [],
    "kind": "no_state",
    "phase": "step",
    "is_accepted": True,
    "text": "yes",
}


def sample(kind: type[msgspec.Struct]) -> Any:  # Any: whichever kind it is
    info = msgspec.structs.fields(kind)
    values = {field.name: SAMPLES[field.name] for field in info if field.required}
    return msgspec.convert({"type": kind.__struct_config__.tag, **values}, kind)


@pytest.mark.parametrize(
    "kind", [*typing.get_args(MemberMessage), *typing.get_args(OperatorMessage)]
)
def test_messages_to_the_coordinator_read_back_equal(kind: type[msgspec.Struct]) -> None:
    message = sample(kind)
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_to_coordinator(line[:-1]) == message


@pytest.mark.parametrize("kind", typing.get_args(CoordinatorMessage))
def test_messages_from_the_coordinator_read_back_equal(kind: type[msgspec.Struct]) -> None:
    message = sample(kind)
    assert decode_from_coordinator(encode(message)[:-1]) == message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"type":"who"}', "who"),
        (b'{"type":"ready","epoch":1,"step":0}', "lineage"),
        (b'{"type":"ready","epoch":-1,"step":0,"lineage":""}', "epoch"),
        (b'{"type":"ready","epoch":1,"step":0,"lineage":"XYZ"}', "lineage"),
        (b'{"type":"ready","epoch":1,"step":0,"lineage":"","more":1}', "more"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 50_000, "array"),
        (b'{"type":"commit","epoch":1,"step":0,"lineage":""}', "commit"),
        (b"x" * (LINE_LIMIT_BYTES + 1), "bytes"),
    ],
)
def test_what_is_no_message_is_refused_with_its_reason(line: bytes, says: str) -> None:
    with pytest.raises(CommunicationError, match=says):
        decode_to_coordinator(line)


def test_range_that_is_none_is_refused() -> None:
    good = encode(
        Holds(epoch=0, step=0, lineage="", ranges=(StateRange(name="w", start=2, stop=3),))
    )
    with pytest.raises(CommunicationError, match="range"):
        decode_to_coordinator(good.replace(b'"start":2', b'"start":9').rstrip())


def test_message_that_is_too_long_is_not_sent() -> None:
    facts = {"x": "y" * LINE_LIMIT_BYTES}
    join = Join(
        epoch=0,
        step=0,
        lineage="",
        member_id="a",
        incarnation="b",
        host_id="c",
        facts=facts,
    )
    with pytest.raises(CommunicationError, match="bytes"):
        encode(join)


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_else(line: bytes) -> None:
    with pytest.raises(CommunicationError):
        decode_to_coordinator(line)


@given(st.data())
def test_one_flipped_byte_raises_nothing_else(data: st.DataObject) -> None:
    vote = Vote(epoch=1, step=2, lineage="ab" * 16, parent="cd" * 16)
    line = bytearray(encode(vote)[:-1])
    line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CommunicationError):
        decode_to_coordinator(bytes(line))
