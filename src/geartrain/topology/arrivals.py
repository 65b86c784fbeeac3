"""From the arrival times of bytes to the rate of a link. Pure.

A burst's first bytes say little of a link: a token bucket, or a switch's buffer, lets
them pass at any speed. So a rate is the slope *between two sizes* of a burst, of what
arrived after its first half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Arrivals = Sequence[tuple[float, int]]
"""(seconds, bytes so far), both rising."""

_STARTS = (0.4, 0.6)
"""Of a burst's bytes. Shapers commonly hold 4 ms of a link's rate, which the first two
fifths of a burst of 10 ms outlast."""
_TOGETHER = 0.4
_LONG_PART = 0.35
_MAX_POINTS = 128
_SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RateReading:
    """A slope, and how much it rests on."""

    bytes_per_s: float
    window_s: float
    """The time between the two sizes."""
    num_bytes: int
    """Between the two sizes."""


def tail_rate(arrivals: Arrivals) -> RateReading | None:
    """The slope of one flow's later part.

    Args:
        arrivals: Of one flow; bytes count from 0.

    Returns:
        The least slope from a start among ``_STARTS`` to the end, None if nothing
        arrived. The least, since a sender that paused finds its shaper's bucket full
        again: a slope that begins right after the pause reads too high.

    >>> tail_rate([(0.0, 500), (0.0, 600), (1.0, 700), (5.0, 1100)]).bytes_per_s
    100.0
    """
    if not arrivals:
        return None
    total = arrivals[-1][1]
    low, high = (fraction * total for fraction in _STARTS)
    starts = [point for point in arrivals[:-1] if low <= point[1] <= high]
    if not starts:  # a few large readings: begin at the one before the later part
        before = [point for point in arrivals[:-1] if point[1] < low]
        starts = before[-1:] or [*arrivals[:-1][:1]] or [(arrivals[-1][0], 0)]
    return min(
        (_slope(start, arrivals[-1]) for start in starts), key=lambda r: r.bytes_per_s
    )


def joint_rate(flows: Sequence[Arrivals]) -> RateReading | None:
    """The slope of several flows together.

    Args:
        flows: Arrivals of each, by one clock.

    Returns:
        The slope while all of them ran, of the later part of it. Where they hardly ran
        at the same time, the steepest long slope instead. None if nothing arrived.

    >>> slow, fast = [(0.0, 0), (2.0, 200), (4.0, 400)], [(0.0, 0), (1.0, 300), (2.0, 600)]
    >>> joint_rate([slow, fast]).bytes_per_s
    400.0
    """
    running = [flow for flow in flows if flow]
    if len(running) <= 1:
        return tail_rate(running[0]) if running else None
    together = _add_up(running)
    start_s = max(flow[0][0] for flow in running)
    end_s = min(flow[-1][0] for flow in running)
    while_all = [point for point in together if start_s <= point[0] <= end_s]
    total = together[-1][1]
    if len(while_all) > 1 and while_all[-1][1] - while_all[0][1] >= _TOGETHER * total:
        first = while_all[0][1]
        reading = tail_rate([(at_s, count - first) for at_s, count in while_all])
        if reading is not None:
            return reading
    return _steepest(together)


def _slope(start: tuple[float, int], end: tuple[float, int]) -> RateReading:
    window_s = max(end[0] - start[0], _SHORTEST_S)
    num_bytes = max(end[1] - start[1], 1)
    return RateReading(
        bytes_per_s=num_bytes / window_s, window_s=window_s, num_bytes=num_bytes
    )


def _add_up(flows: Sequence[Arrivals]) -> list[tuple[float, int]]:
    """Bytes of all flows by the time of every arrival."""
    steps = [
        (at_s, count - before)
        for flow in flows
        for (at_s, count), before in zip(
            flow, [0, *(count for _, count in flow)], strict=False
        )
    ]
    together: list[tuple[float, int]] = []
    total = 0
    for at_s, step in sorted(steps):
        total += step
        together.append((at_s, total))
    return together


def _steepest(arrivals: Arrivals) -> RateReading:
    """The steepest slope over a long part, after the start."""
    points = thin_out(list(arrivals), _MAX_POINTS)
    total = points[-1][1]
    readings = [
        _slope(start, end)
        for index, start in enumerate(points)
        if start[1] >= _LONG_PART * total
        for end in points[index + 1 :]
        if end[1] - start[1] >= _LONG_PART * total
    ]
    if not readings:
        return _slope((points[0][0], 0), points[-1])
    return max(readings, key=lambda r: r.bytes_per_s)


def thin_out(arrivals: Sequence[tuple[float, int]], limit: int) -> list[tuple[float, int]]:
    """At most ``limit`` of the points, evenly chosen, the first and last among them.

    >>> thin_out([(0.0, 1), (1.0, 2), (2.0, 3), (3.0, 4)], 3)
    [(0.0, 1), (1.0, 2), (3.0, 4)]
    """
    if len(arrivals) <= limit:
        return list(arrivals)
    last = len(arrivals) - 1
    return [arrivals[i * last // (limit - 1)] for i in range(limit)]
