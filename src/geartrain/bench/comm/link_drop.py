"""A link becomes four times slower while training, and fast again."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from geartrain.bench.comm.crew import Crew
from geartrain.bench.comm.labs import Say, describe_found
from geartrain.bench.comm.messages import Order, Report
from geartrain.bench.comm.rank_order import DEFAULT_SEED, shuffled_hosts
from geartrain.bench.comm.result import CaseResult
from geartrain.bench.comm.targets import TARGETS
from geartrain.devices.emulation.network import LinkRate, NetworkLab, parse_links
from geartrain.units import format_seconds

LINKS = "3x2:200Mbit:40Mbit"
"""With three racks or more the best shares depend on the uplinks; with two nothing does."""
_DROPPED = "rack1"
_FACTOR = 4.0
_NUM_BYTES = 1_048_576
_OPTIMUM_STEPS = 7
_CALM_STEPS = 8
_WATCHED_STEPS = 24
_CLOSE = 1.1
"""Within 10 % of the new optimum."""
_IN_A_ROW = 3
_TIMEOUT_S = 240.0


def steps_until(steps_s: Sequence[float], optimum_s: float) -> int | None:
    """How many steps pass until three in a row are near the optimum, by their median.

    Args:
        steps_s: From the change on.
        optimum_s: What a step takes with the links known.

    Returns:
        Steps before the first of three that, as their median, is within 10 % of the
        optimum; None where it never comes to that.

    >>> steps_until([2.0, 2.0, 1.0, 1.0, 1.05], 1.0)
    2
    """
    for first in range(len(steps_s) - _IN_A_ROW + 1):
        near = statistics.median(steps_s[first : first + _IN_A_ROW]) <= _CLOSE * optimum_s
        if near and steps_s[first] <= _CLOSE * optimum_s:
            return first
    return None


def measure_link_drop(say: Say) -> CaseResult:
    """Train over a lab, drop one uplink, and put it back.

    The optima to come to are measured in the same lab: a training that has probed and
    planned with the links as they are then.

    Raises:
        DeviceError: If the lab can't be made or a worker fails.
    """
    spec = parse_links(LINKS)
    uplink = spec.uplink(0)
    assert uplink is not None
    slow = LinkRate.both_ways(uplink.slower_bytes_per_s / _FACTOR)
    hosts = shuffled_hosts(spec.num_hosts, DEFAULT_SEED)
    say(f"link_drop: {LINKS}, {_DROPPED}'s uplink becomes {slow} and {uplink} again")
    with NetworkLab(spec) as lab, Crew(hosts, lab) as crew:
        lab.set_rate(_DROPPED, slow)
        optimum_slow_s = statistics.median(_begin(crew, _OPTIMUM_STEPS, say))
        lab.set_rate(_DROPPED, uplink)
        optimum_s = statistics.median(_begin(crew, _OPTIMUM_STEPS, say))
        say(
            f"link_drop: best steps {format_seconds(optimum_s)}, with the slow link "
            f"{format_seconds(optimum_slow_s)}"
        )
        _steps(crew, _CALM_STEPS, say)
        lab.set_rate(_DROPPED, slow)
        dropped, failures = _steps(crew, _WATCHED_STEPS, say)
        lab.set_rate(_DROPPED, uplink)
        restored, more = _steps(crew, _WATCHED_STEPS, say)
    return CaseResult(
        case="link_drop",
        seconds=statistics.median(dropped[-_IN_A_ROW:]),
        figures={
            "links": LINKS,
            "num_bytes": _NUM_BYTES,
            "optimum_s": optimum_s,
            "optimum_with_slow_link_s": optimum_slow_s,
            "steps_to_new_optimum": steps_until(dropped, optimum_slow_s),
            "steps_back": steps_until(restored, optimum_s),
            "step_s_after_drop": " ".join(f"{s:.3f}" for s in dropped),
            "step_s_after_return": " ".join(f"{s:.3f}" for s in restored),
        },
        failures=(*failures, *more),
        targets=TARGETS["link_drop"],
    )


def _begin(crew: Crew, num_steps: int, say: Say) -> list[float]:
    order = Order(verb="watch_begin", num_bytes=_NUM_BYTES)
    found = crew.ask(order, _TIMEOUT_S)[0]
    say(f"link_drop: {describe_found(found)}")
    return _steps(crew, num_steps, say)[0]


def _steps(crew: Crew, num_steps: int, say: Say) -> tuple[list[float], list[str]]:
    """Each step's time, of the slowest rank, and what went wrong."""
    order = Order(verb="watch_steps", repeats=num_steps)
    reports = crew.ask(order, _TIMEOUT_S)
    for note in reports[0].notes:
        say(f"link_drop: {note}")
    steps = [max(times) for times in zip(*(r.steps_s for r in reports), strict=True)]
    return steps, _different(reports)


def _different(reports: Sequence[Report]) -> list[str]:
    sums = {report.timings[0].checksum for report in reports}
    return [] if len(sums) == 1 else ["ranks hold different models after training"]
