"""A book holds a schedule for every size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.planner.exchange import ExchangeRequest, ScheduleBook, choose, write_book
from geartrain.telemetry.documents import decode_document, encode_document
from planner.exchange.exchange_cases import INT8, make_topology, placement_of

TOPOLOGY = make_topology([[500] * 3, [500] * 5], [50, 50], latency_s=2e-3)


def ask(num_bytes: int = 0, policy: str | None = "auto") -> ExchangeRequest:
    return ExchangeRequest(
        topology=TOPOLOGY,
        placement=placement_of(TOPOLOGY),
        num_bytes=num_bytes,
        codecs=(INT8,),
        policy=policy,
    )


BOOK = write_book(ask())
EXACT_BOOK = write_book(ask(policy=None))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40))
def test_every_size_has_a_schedule_and_a_rising_prediction(num_bytes: int) -> None:
    assert EXACT_BOOK.schedule_for(num_bytes).num_members == 8
    larger_s = EXACT_BOOK.predict_s(num_bytes + 4096)
    assert EXACT_BOOK.predict_s(num_bytes) <= 1.02 * larger_s


@pytest.mark.parametrize("num_bytes", [2**12, 2**18, 2**22, 25_000_000, 2**30, 2**33])
def test_the_book_says_what_choosing_says(num_bytes: int) -> None:
    chosen = choose(ask(num_bytes))

    assert BOOK.schedule_for(num_bytes).algorithm == chosen.algorithm
    assert BOOK.predict_s(num_bytes) == pytest.approx(chosen.predicted_s, rel=0.1)


def test_small_and_large_messages_differ_and_equal_neighbours_are_one() -> None:
    algorithms = [schedule.algorithm for schedule in BOOK.schedules]
    prints = [schedule.fingerprint for schedule in BOOK.schedules]

    assert algorithms[0] == "leader"
    assert algorithms[-1] == "hierarchical"
    assert all(a != b for a, b in itertools.pairwise(prints))


def test_auto_compresses_from_some_size_on() -> None:
    codecs = [schedule.codec for schedule in BOOK.schedules]

    assert codecs == sorted(codecs, reverse=True)  # none... before int8...
    assert {"none", "int8"} == set(codecs)


def test_a_book_reads_back_equal() -> None:
    assert decode_document(encode_document(BOOK), ScheduleBook) == BOOK


def test_a_book_without_a_curve_predicts_from_its_schedules() -> None:
    bare = ScheduleBook(up_to_bytes=BOOK.up_to_bytes, schedules=BOOK.schedules)

    assert bare.predict_s(2**30) == BOOK.predict_s(2**30)
    assert bare.fingerprint == BOOK.fingerprint
