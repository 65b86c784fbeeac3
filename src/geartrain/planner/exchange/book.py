"""Write the schedule of every message size."""

from __future__ import annotations

import logging

from geartrain.planner.exchange.choice import choose_among
from geartrain.planner.exchange.request import ExchangeRequest
from geartrain.planner.exchange.schedule import CommSchedule, ScheduleBook
from geartrain.planner.exchange.ways import Ways

logger = logging.getLogger(__name__)

SIZE_CLASSES = tuple(2**exponent for exponent in range(12, 31))
"""Upper ends, 4 KiB to 1 GiB: below all is latency, above all is rate."""


def write_book(request: ExchangeRequest) -> ScheduleBook:
    """Choose for each size class; neighbours that are carried out alike become one.

    Args:
        request: Members, links and policy; its ``num_bytes`` is not looked at.

    Raises:
        ConfigError: As ``choose``.
    """
    ways = Ways(request)
    chosen = [choose_among(ways, request.policy, size) for size in SIZE_CLASSES]
    predictions = tuple((s.num_bytes, s.predicted_s) for s in chosen)
    kept: list[CommSchedule] = []
    for schedule in chosen:
        if kept and kept[-1].fingerprint == schedule.fingerprint:
            kept.pop()
        kept.append(schedule)
    logger.debug("%d schedules for %d size classes", len(kept), len(SIZE_CLASSES))
    return ScheduleBook(
        up_to_bytes=tuple(schedule.num_bytes for schedule in kept),
        schedules=tuple(kept),
        predictions=predictions,
    )
