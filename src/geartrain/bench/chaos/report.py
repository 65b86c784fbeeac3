"""The report of a chaos run: one page that opens from disk, light and dark."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from geartrain.bench.chaos.kinds import KINDS
from geartrain.bench.chaos.result import ChaosResult
from geartrain.bench.chaos.timeline import draw_throughput, draw_timeline, kind_class
from geartrain.telemetry.documents import write_atomically
from geartrain.units import format_seconds

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #667; --line:
#d5d9df; --band: #0072B2; --pause: #d55e0033; --bad: #c0392b; --good: #1e8449; --epoch:
#777; } @media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e4e7eb;
--soft: #9aa4b0; --line: #333a43; --band: #56B4E9; --pause: #e69f0044; --bad: #ff7b6b;
--good: #58d68d; --epoch: #999; } } body { font: 15px/1.5 system-ui, sans-serif; color:
var(--ink); background: var(--page); margin: 2rem auto; max-width: 1150px; padding: 0
1rem; } h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem;
margin-top: 2rem; } table { border-collapse: collapse; font-variant-numeric: tabular-nums;
width: 100%; } th, td { text-align: left; padding: .25rem .9rem .25rem 0; vertical-align:
top; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; } .passed { color:
var(--good); font-weight: 600; } .failed { color: var(--bad); font-weight: 600; }
.skipped, .soft { color: var(--soft); } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 12px system-ui; } svg text.soft { fill: var(--soft); }
.axis { stroke: var(--line); } .epoch { stroke: var(--epoch); stroke-dasharray: 3 3; }
.band { fill: var(--band); } .rate { fill: none; stroke: var(--band); stroke-width: 1.5; }
.pause { fill: var(--pause); } .kill { --c: #d55e00; } .stop { --c: #e69f00; } .slow {
--c: #cc79a7; } .link { --c: #009e73; } .disk { --c: #8e6bbf; } .coordinator { --c:
#b8860b; } .mark { fill: var(--c); stroke: var(--page); } .span { fill: var(--c); opacity:
.35; } .key { display: inline-block; width: .8em; height: .8em; background: var(--c);
border-radius: 50%; margin: 0 .3em 0 1em; }
"""


def write_chaos_report(result: ChaosResult, path: Path) -> None:
    """Write the page.

    Raises:
        ConfigError: If it can't be written.
    """
    write_atomically(path, render_chaos_report(result).encode())


def render_chaos_report(result: ChaosResult) -> str:
    """The page; it refers to nothing outside of itself."""
    verdict = "passed" if result.has_passed else "failed"
    began = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(result.began_at_s))
    title = f"Chaos, seed {result.seed}"
    what = f"{_text(result.script)} on {_text(result.devices)}"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            '<meta name="viewport" content="width=device-width">',
            f"<style>{_STYLE}</style></head><body>",
            f'<h1>{title}: <span class="{verdict}">{verdict}</span></h1>',
            f'<p class="soft">{what}, {began}</p>',
            _table(("", ""), _summary(result)),
            "<h2>Checks</h2>",
            _checks(result),
            "<h2>Timeline</h2>",
            _legend(result),
            draw_timeline(result),
            "<h2>Committed steps per second</h2>",
            draw_throughput(result),
            "<h2>Longest pauses</h2>",
            _table(
                ("before step", "lasted", "allowed", "faults near"),
                [
                    (
                        str(pause.step),
                        format_seconds(pause.seconds),
                        format_seconds(pause.limit_s),
                        ", ".join(pause.kinds) or "none",
                    )
                    for pause in result.pauses[:10]
                ],
            ),
            "<h2>Faults</h2>",
            _table(("at", "kind", "device", "lasted", "what came of it"), _faults(result)),
            "<h2>What the run told</h2>",
            _table(("at", "kind", "device", "what"), _events(result)),
            "<h2>Run</h2>",
            _table(("", ""), _origin(result)),
            "</body></html>\n",
        ]
    )


def _summary(result: ChaosResult) -> list[tuple[str, str]]:
    counts = ", ".join(f"{number} {kind}" for kind, number in result.num_by_kind.items())
    return [
        ("steps committed", f"{result.num_steps}, {result.steps_per_s:g} a second"),
        ("faults", f"{result.num_faults} in {result.duration_s:g} s ({counts or 'none'})"),
        ("devices left", f"{result.num_left} of {len(result.device_ids)}"),
        ("longest pause", format_seconds(result.longest_pause_s)),
        ("step without faults", format_seconds(result.calm_step_s)),
        ("load average of the machine", f"{result.load_average:g}"),
    ]


def _checks(result: ChaosResult) -> str:
    rows = []
    for check in result.checks:
        figures = ", ".join(f"{name} {value}" for name, value in check.figures.items())
        details = "".join(f"<br>{_text(text)}" for text in check.details[1:])
        rows.append(
            f"<tr><td>{_text(check.name)}</td>"
            f'<td class="{check.status}">{check.status}</td>'
            f"<td>{_text(check.summary)}{details}</td>"
            f'<td class="soft">{_text(figures)}</td></tr>'
        )
    head = "<tr><th>check</th><th></th><th>what was found</th><th>figures</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _legend(result: ChaosResult) -> str:
    kinds = list(dict.fromkeys(deed.fault.kind for deed in result.deeds if deed.was_done))
    keys = [
        f'<span class="{kind_class(kind)}"><span class="key"></span></span>{kind}: '
        f"{_text(KINDS[kind].summary)}"
        for kind in kinds
    ]
    shown = "".join(keys) or "no fault was made"
    return (
        f'<p class="soft">{shown}. Bars: the device has the steps committed then. Shaded: '
        "no step was committed anywhere. Dashed: the members changed.</p>"
    )


def _faults(result: ChaosResult) -> Iterable[tuple[str, ...]]:
    for deed in result.deeds:
        lasted = ""
        if deed.ended_at_s is not None:
            lasted = format_seconds(deed.ended_at_s - deed.began_at_s)
        at_s = deed.began_at_s - result.began_at_s
        outcome = "done" if deed.was_done else f"left out: {deed.note}"
        yield (f"{at_s:.2f} s", deed.fault.kind, deed.fault.device_id, lasted, outcome)


def _events(result: ChaosResult) -> Iterable[tuple[str, ...]]:
    for event in result.events:
        yield (f"{event.at_s:.2f} s", event.kind, event.device_id, event.message)


def _origin(result: ChaosResult) -> list[tuple[str, str]]:
    rows = [("command", result.command), ("commit", result.commit)]
    return rows + [(f"{name} version", text) for name, text in result.versions.items()]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = []
    if any(head):
        lines.append(f"<tr>{''.join(f'<th>{_text(cell)}</th>' for cell in head)}</tr>")
    lines += [
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows
    ]
    return f"<table>{''.join(lines)}</table>"


def _text(value: str) -> str:
    return html.escape(value)
