"""The timeline of a chaos run as SVG: a row a device, faults, pauses, members."""

from __future__ import annotations

import html
from collections.abc import Iterable
from itertools import pairwise

from geartrain.bench.chaos.evidence import Deed
from geartrain.bench.chaos.result import ChaosResult
from geartrain.units import format_seconds

_WIDTH = 1100.0
_LEFT = 110.0
_ROW = 26.0
_TOP = 14.0
_PLOT = 140.0
_SHOWN_PAUSE = 4.0
"""Times a calm step: what is longer is shaded."""
_LEAST_PAUSE_S = 0.3
_TICKS = (0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
_MOST_TICKS = 14
_BINS = 120

_CLASSES = {
    "stop": "stop",
    "freeze": "stop",
    "slow": "slow",
    "link_slow": "link",
    "link_cut": "link",
    "disk_full": "disk",
    "bit_flip": "disk",
    "coordinator_kill": "coordinator",
}


def kind_class(kind: str) -> str:
    """The style of a kind of fault.

    >>> kind_class("link_cut"), kind_class("kill_in_save")
    ('link', 'kill')
    """
    return _CLASSES.get(kind, "kill")


class _Axis:
    """Seconds to pixels."""

    def __init__(self, result: ChaosResult) -> None:
        times = [step.at_s for step in result.steps]
        self.start_s = min([0.0, *times])
        self.end_s = max([result.watched_s, *times, self.start_s + 1e-3])

    def x(self, at_s: float) -> float:
        """Where a time lies."""
        inside = min(max(at_s, self.start_s), self.end_s)
        fraction = (inside - self.start_s) / (self.end_s - self.start_s)
        return _LEFT + fraction * (_WIDTH - _LEFT - 10)

    def ticks(self, height: float) -> Iterable[str]:
        """Lines and seconds below."""
        span_s = self.end_s - self.start_s
        step_s = next((t for t in _TICKS if span_s / t <= _MOST_TICKS), span_s / 10)
        number = int(self.start_s // step_s) + 1
        while number * step_s <= self.end_s:
            x = self.x(number * step_s)
            yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height:.0f}"/>'
            yield (
                f'<text class="soft" x="{x:.1f}" y="{height + 14:.0f}" '
                f'text-anchor="middle">{number * step_s:g} s</text>'
            )
            number += 1


def draw_timeline(result: ChaosResult) -> str:
    """A row a device: when it had the steps, what was done to it."""
    axis = _Axis(result)
    height = _TOP + _ROW * len(result.device_ids)
    parts = [*axis.ticks(height), *_pauses(result, axis, height)]
    for index, device_id in enumerate(result.device_ids):
        parts += _row(result, axis, device_id, _TOP + _ROW * index)
    parts += _member_changes(result, axis, height)
    return _svg(parts, height + 20, "timeline of the devices")


def draw_throughput(result: ChaosResult) -> str:
    """Committed steps per second over time."""
    axis = _Axis(result)
    span_s = axis.end_s - axis.start_s
    bin_s = span_s / _BINS
    counts = [0] * _BINS
    for step in result.steps:
        counts[min(int((step.at_s - axis.start_s) / bin_s), _BINS - 1)] += 1
    most = max([*counts, 1])
    points = []
    for index, count in enumerate(counts):
        y = _PLOT - count / most * (_PLOT - _TOP)
        edges = (axis.start_s + edge * bin_s for edge in (index, index + 1))
        points += [f"{axis.x(at_s):.1f},{y:.1f}" for at_s in edges]
    rate = most / bin_s
    place = f'x="{_LEFT - 8:.0f}" y="{_TOP + 4:.0f}" text-anchor="end"'
    label = f"<text {place}>{rate:.3g}/s</text>"
    line = f'<polyline class="rate" points="{" ".join(points)}"/>'
    return _svg([*axis.ticks(_PLOT), label, line], _PLOT + 20, "committed steps per second")


def _row(result: ChaosResult, axis: _Axis, device_id: str, y: float) -> list[str]:
    name = html.escape(device_id)
    parts = [f'<text x="{_LEFT - 8:.0f}" y="{y + 14:.0f}" text-anchor="end">{name}</text>']
    for start_s, stop_s in _presence(result, device_id):
        x, width = axis.x(start_s), max(axis.x(stop_s) - axis.x(start_s), 1.0)
        parts.append(
            f'<rect class="band" x="{x:.1f}" y="{y + 6:.0f}" width="{width:.1f}" '
            'height="8" rx="2" opacity=".55"/>'
        )
    for deed in result.deeds:
        if deed.was_done and deed.fault.device_id == device_id:
            parts += _fault(result, axis, deed, y)
    return parts


def _presence(result: ChaosResult, device_id: str) -> list[tuple[float, float]]:
    """From when to when a device had each step that was committed."""
    spans: list[tuple[float, float]] = []
    was_there = False
    before_s = result.steps[0].at_s if result.steps else 0.0
    for step in result.steps:
        is_there = device_id in step.device_ids
        if is_there and was_there:
            spans[-1] = (spans[-1][0], step.at_s)
        elif is_there:
            spans.append((before_s, step.at_s))
        was_there, before_s = is_there, step.at_s
    return spans


def _fault(result: ChaosResult, axis: _Axis, deed: Deed, y: float) -> list[str]:
    style = kind_class(deed.fault.kind)
    start_s = deed.began_at_s - result.began_at_s
    parts = []
    told = f"{deed.fault.kind} at {start_s:.2f} s"
    if deed.ended_at_s is not None:
        stop_s = deed.ended_at_s - result.began_at_s
        x, width = axis.x(start_s), max(axis.x(stop_s) - axis.x(start_s), 1.0)
        parts.append(
            f'<g class="{style}"><rect class="span" x="{x:.1f}" y="{y + 1:.0f}" '
            f'width="{width:.1f}" height="18"/></g>'
        )
        told += f" for {format_seconds(stop_s - start_s)}"
    parts.append(
        f'<g class="{style}"><circle class="mark" cx="{axis.x(start_s):.1f}" '
        f'cy="{y + 10:.0f}" r="4.5"><title>{html.escape(told)}</title></circle></g>'
    )
    return parts


def _pauses(result: ChaosResult, axis: _Axis, height: float) -> Iterable[str]:
    shown_s = max(_SHOWN_PAUSE * result.calm_step_s, _LEAST_PAUSE_S)
    times = [step.at_s for step in result.steps]
    for before_s, after_s in pairwise([*times, max([result.watched_s, *times])]):
        if after_s - before_s > shown_s:
            x = axis.x(before_s)
            width = axis.x(after_s) - x
            told = f"{format_seconds(after_s - before_s)} from {before_s:.2f} s on"
            yield (
                f'<rect class="pause" x="{x:.1f}" y="0" width="{width:.1f}" '
                f'height="{height:.0f}"><title>{told}</title></rect>'
            )


def _member_changes(result: ChaosResult, axis: _Axis, height: float) -> Iterable[str]:
    for event in result.events:
        if event.kind == "epoch":
            x = axis.x(event.at_s)
            yield (
                f'<line class="epoch" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height:.0f}">'
                f"<title>{html.escape(event.message)}</title></line>"
            )


def _svg(parts: Iterable[str], height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )
