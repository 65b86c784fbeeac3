"""From the arrival times of bytes to the rate of a link. Pure.

A burst's first bytes say little of a link: a token bucket, or a switch's buffer, lets
them pass at any speed. So a rate is the slope *between two sizes* of a burst: of its
longest straight stretch. On a busy host a burst halts, catches up, and halts again; what
lies between two halts still has the link's own slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Arrivals = Sequence[tuple[float, int]]
"""(seconds, bytes so far), both rising."""

_STARTS = (0.25, 0.6)
"""Of a burst's bytes: a slope must begin between these. Shapers commonly hold 4 ms of a
link's rate, which half of a burst of 10 ms outlasts."""
_MOST_ABOVE = 1.3
_LEAST_POINTS = 2
_EARLY = 0.03
"""Of a burst's bytes: so far may a point lie above a straight stretch."""
_LATE_S = 0.004
"""So late may it be: a shaper that gets its turn late catches up from its bucket, which
commonly holds 4 ms of its rate."""
_LONGEST_STEP = 0.35
"""Of a stretch's time: more is a halt, not a slope."""
_LEAST_STEPS = 3
_LEAST_PART = 0.15
"""Of a burst's time: a shorter stretch is what a bucket let pass after a halt."""
_TOGETHER = 0.4
_LEAST_JOINT_S = 1e-4
_SHORTEST_S = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class RateReading:
    """A slope, and how much it rests on."""

    bytes_per_s: float
    window_s: float
    """The time between the two sizes."""
    num_bytes: int
    """Between the two sizes."""
    is_steady: bool = True
    """Whether bytes came evenly in between. If not, the rate is a guess."""


def flow_rate(arrivals: Arrivals) -> RateReading | None:
    """The slope of one flow's longest straight stretch.

    Args:
        arrivals: Of one flow; bytes count from 0.

    Returns:
        That slope; without such a stretch that of the later part, as unsteady; None if
        too little is known.

    A halt and a catching-up do not disturb what comes before:

    >>> even = [(0.01 * i, 1000 * i) for i in range(9)]
    >>> reading = flow_rate([*even, (0.3, 9000), (0.301, 12_000)])
    >>> round(reading.bytes_per_s), reading.is_steady
    (100000, True)
    """
    return _longest_stretch(arrivals) or tail_rate(arrivals)


def _longest_stretch(arrivals: Arrivals) -> RateReading | None:
    """The stretch of the longest time in which points keep to a line.

    From each start the slopes are kept that all points so far allow: none may lie above
    the line, none be later than a bucket can make good.
    """
    points = _distinct(arrivals)
    if len(points) <= _LEAST_STEPS:
        return None
    above = _EARLY * (points[-1][1] - points[0][1])
    longest: RateReading | None = None
    for start in range(len(points) - _LEAST_STEPS):
        at_s, count = points[start]
        least, most, halt_s = 0.0, float("inf"), 0.0
        for end in range(start + 1, len(points)):
            span_s, num_bytes = points[end][0] - at_s, points[end][1] - count
            halt_s = max(halt_s, points[end][0] - points[end - 1][0])
            least = max(least, (num_bytes - above) / span_s)
            if span_s > _LATE_S:
                most = min(most, (num_bytes + above) / (span_s - _LATE_S))
            if least > most:
                break
            if (
                end - start >= _LEAST_STEPS
                and least <= num_bytes / span_s <= most
                and halt_s <= _LONGEST_STEP * span_s
                and (longest is None or span_s > longest.window_s)
            ):
                longest = _slope(points[start], points[end])
    whole_s = points[-1][0] - points[0][0]
    return longest if longest and longest.window_s >= _LEAST_PART * whole_s else None


def _distinct(arrivals: Arrivals) -> list[tuple[float, int]]:
    """Points whose times differ enough to tell a slope."""
    points: list[tuple[float, int]] = []
    for at_s, count in arrivals:
        if points and at_s - points[-1][0] < _SHORTEST_S:
            points[-1] = (points[-1][0], count)
        else:
            points.append((at_s, count))
    return points


def tail_rate(arrivals: Arrivals) -> RateReading | None:
    """The slope of one flow's later part.

    Args:
        arrivals: Of one flow; bytes count from 0.

    Returns:
        The least slope from a start among ``_STARTS`` to the end, and at most
        ``_MOST_ABOVE`` times that of the whole: where packets were held up on the way and
        then came at once, a slope that begins after the halt is far too high. None if too
        little is known: nothing arrived, or all of it was stamped at a few moments.

    >>> tail_rate([(0.0, 500), (1.0, 700), (5.0, 900), (6.0, 1100)]).bytes_per_s
    100.0
    """
    if not arrivals:
        return None
    total = arrivals[-1][1]
    low, high = (fraction * total for fraction in _STARTS)
    starts = [point for point in arrivals[:-1] if low <= point[1] <= high]
    later = [point for point in arrivals if point[1] > high]
    if not starts or len(later) < _LEAST_POINTS:
        return None
    least = min(
        (_slope(start, arrivals[-1]) for start in starts), key=lambda r: r.bytes_per_s
    )
    most = _MOST_ABOVE * _slope(arrivals[0], arrivals[-1]).bytes_per_s
    return replace(least, bytes_per_s=min(least.bytes_per_s, most), is_steady=False)


def joint_rate(flows: Sequence[Arrivals]) -> RateReading | None:
    """The slope of several flows together.

    Args:
        flows: Arrivals of each, by one clock.

    Returns:
        The slope of the longest straight stretch of the time in which all of them ran.
        None if they hardly ran at the same time, as on a busy host: run them again.

    >>> slow, fast = [(0.0, 0), (1.0, 100), (2.0, 200)], [(0.0, 0), (1.0, 300), (2.0, 600)]
    >>> joint_rate([slow, fast]).bytes_per_s
    400.0
    """
    running = [flow for flow in flows if flow]
    if len(running) <= 1:
        return flow_rate(running[0]) if running else None
    together = _add_up(running)
    start_s = max(flow[0][0] for flow in running)
    end_s = min(flow[-1][0] for flow in running)
    while_all = [point for point in together if start_s <= point[0] <= end_s]
    if len(while_all) <= 1:
        return None
    first, last = while_all[0][1], while_all[-1][1]
    if last - first < _TOGETHER * together[-1][1]:
        return None
    reading = flow_rate([(at_s, count - first) for at_s, count in while_all])
    return reading if reading is not None and reading.window_s >= _LEAST_JOINT_S else None


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


def thin_out(arrivals: Sequence[tuple[float, int]], limit: int) -> list[tuple[float, int]]:
    """At most ``limit`` of the points, evenly chosen, the first and last among them.

    >>> thin_out([(0.0, 1), (1.0, 2), (2.0, 3), (3.0, 4)], 3)
    [(0.0, 1), (1.0, 2), (3.0, 4)]
    """
    if len(arrivals) <= limit:
        return list(arrivals)
    last = len(arrivals) - 1
    return [arrivals[i * last // (limit - 1)] for i in range(limit)]
