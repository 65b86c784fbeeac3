"""Predicted time of any size, between the sizes that a book has figures for."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geartrain.planner.exchange.schedule import ScheduleBook


def predict_s(book: ScheduleBook, num_bytes: int) -> float:
    """Seconds of one all-reduce, in a straight line between the book's predictions.

    Below the smallest size its own time holds, which is mostly latency; above the largest
    one the time grows with the size.

    Args:
        book: Its predictions; where it has none, its schedules' own.
        num_bytes: float32 bytes.
    """
    # A schedule may stand for many sizes, and its own figures are those of the largest.
    points = sorted(
        set(book.predictions) or {(s.num_bytes, s.predicted_s) for s in book.schedules}
    )
    first_bytes, first_s = points[0]
    last_bytes, last_s = points[-1]
    if num_bytes <= first_bytes:
        return first_s
    if num_bytes >= last_bytes:
        return last_s * num_bytes / max(1, last_bytes)
    for (low, low_s), (high, high_s) in pairwise(points):
        if low <= num_bytes <= high:
            part = (num_bytes - low) / max(1, high - low)
            return low_s + part * (high_s - low_s)
    return last_s
