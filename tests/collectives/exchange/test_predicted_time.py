"""What an all-reduce of any size is predicted to take."""

from __future__ import annotations

import pytest

from geartrain.collectives.exchange.predicted_time import predict_s
from geartrain.planner.exchange import CommSchedule, ScheduleBook
from geartrain.planner.exchange.schedule import RackPart

RACK = RackPart(rack_id="rack0", hosts=((0,), (1,)), share=1.0, host_shares=(0.5, 0.5))
LARGEST = CommSchedule(
    algorithm="hierarchical",
    num_members=2,
    racks=(RACK,),
    num_bytes=10_000,
    predicted_s=10.0,
)


def test_one_schedule_for_all_sizes_does_not_make_small_ones_slow() -> None:
    book = ScheduleBook(
        up_to_bytes=(10_000,),
        schedules=(LARGEST,),
        predictions=((100, 0.5), (1_000, 1.0), (10_000, 10.0)),
    )

    assert predict_s(book, 10) == 0.5
    assert predict_s(book, 550) == pytest.approx(0.75)
    assert predict_s(book, 20_000) == pytest.approx(20.0)


def test_book_without_a_curve_is_read_at_its_schedules() -> None:
    book = ScheduleBook(up_to_bytes=(10_000,), schedules=(LARGEST,))

    assert predict_s(book, 5_000) == 10.0
    assert predict_s(book, 20_000) == pytest.approx(20.0)
