"""``geartrain report``: a run as one page that opens from disk, or as an image."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from geartrain.errors import ConfigError
from geartrain.monitoring.charts import draw_charts
from geartrain.monitoring.run_files import RunFiles, read_run
from geartrain.monitoring.run_summary import RunSummary, summarise
from geartrain.telemetry import RecoveryReport
from geartrain.telemetry.documents import write_atomically
from geartrain.units import format_bytes, format_seconds

REPORT_NAME = "report.html"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto;
       max-width: 1100px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #ddd;
         vertical-align: top; }
th { font-weight: 600; } td.number, th.number { text-align: right; }
.label { background: #eee; border-radius: .3rem; padding: .1rem .5rem;
         margin-right: .4rem; }
svg { width: 100%; height: auto; } code { overflow-wrap: anywhere; }
"""


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write the report of a run.

    Args:
        run_dir: The run's directory; the run may still go on.
        output: ``.html`` or ``.png``; ``report.html`` in the run directory by default.

    Returns:
        Where the report lies.

    Raises:
        ConfigError: If there is no run, no step yet, no matplotlib, or the output
            has another suffix or can't be written.
    """
    output = run_dir / REPORT_NAME if output is None else output
    if output.suffix not in {".html", ".png"}:
        msg = f"cannot write a report as {str(output)!r}; name a .html or .png file"
        raise ConfigError(msg)
    run = read_run(run_dir)
    if output.suffix == ".png":
        write_atomically(output, draw_charts(run, "png"))
    else:
        write_atomically(output, render_html(run).encode())
    return output


def render_html(run: RunFiles) -> str:
    """One page without any reference to the network."""
    summary = summarise(run.records, run.events, run.plan)
    labels = "".join(
        f'<span class="label">{_text(word)}</span>' for word in run.manifest.labels
    )
    title = _text(run.manifest.run_id)
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1><p>{labels}</p>",
            _table(("", ""), summary_rows(summary)),
            "<h2>Charts</h2>",
            _inline_svg(draw_charts(run, "svg")),
            "<h2>Devices</h2>",
            _device_table(summary),
            "<h2>Events</h2>",
            _event_table(run),
            "<h2>Run</h2>",
            _table(("", ""), _configuration(run)),
            "</body></html>\n",
        ]
    )


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """The summary as names and values for people."""
    rows = [
        ("steps", str(summary.num_steps)),
        ("samples", str(summary.num_samples)),
        ("wall time", format_seconds(summary.wall_s)),
        ("throughput", f"{summary.samples_per_s:.1f} samples/s"),
    ]
    if summary.bound_samples_per_s is not None and summary.efficiency is not None:
        bound = f"{summary.bound_samples_per_s:.1f} samples/s (sum of the devices' speeds)"
        rows += [("bound", bound), ("efficiency", f"{summary.efficiency:.3f}")]
    rows.append(("load-balance error", f"{summary.load_balance_error:.3f}"))
    if summary.first_loss is not None and summary.last_loss is not None:
        rows.append(("loss", f"{summary.first_loss:.4f} to {summary.last_loss:.4f}"))
    rows.append(("re-plans", str(summary.num_replans)))
    return rows + [("recovery", _describe(report)) for report in summary.recoveries]


def _describe(report: RecoveryReport) -> str:
    return (
        f"{format_seconds(report.interruption_s)} (noticed after "
        f"{format_seconds(report.detect_s)}, plan {format_seconds(report.replan_s)}, "
        f"step {format_seconds(report.restore_s)}; {report.lost_samples} samples lost)"
    )


def _labels(run: RunFiles) -> tuple[str, ...]:
    return run.manifest.labels


def _device_table(summary: RunSummary) -> str:
    head = (
        "device",
        "samples",
        "last share",
        "busy",
        "exchange",
        "input",
        "idle",
        "memory",
    )
    rows = [
        (
            device.device_id,
            str(device.num_samples),
            str(device.last_share)
            if device.lost_at_step is None
            else f"lost at step {device.lost_at_step}",
            f"{device.busy_fraction:.3f}",
            f"{device.exchange_fraction:.3f}",
            f"{device.data_fraction:.3f}",
            f"{device.idle_fraction:.3f}",
            format_bytes(device.peak_memory_bytes),
        )
        for device in summary.devices
    ]
    return _table(head, rows, num_text_columns=1)


def _event_table(run: RunFiles) -> str:
    if not run.events:
        return "<p>none</p>"
    rows = [(str(e.step), e.kind, e.device_id, e.message) for e in run.events]
    return _table(("step", "kind", "device", "what"), rows)


def _configuration(run: RunFiles) -> list[tuple[str, str]]:
    manifest = run.manifest
    started = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(manifest.started_at_s))
    command = " ".join([manifest.script, *manifest.arguments])
    return [
        ("script", command),
        ("fleet", manifest.fleet_spec or "all local devices"),
        ("started", started),
        *((f"{name} version", text) for name, text in manifest.versions.items()),
    ]


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    num_text_columns: int | None = None,
) -> str:
    first_number = len(head) if num_text_columns is None else num_text_columns
    kinds = ["" if i < first_number else ' class="number"' for i in range(len(head))]
    cells = [f"<th{k}>{_text(c)}</th>" for k, c in zip(kinds, head, strict=True)]
    lines = [f"<tr>{''.join(cells)}</tr>"] if any(head) else []
    for row in rows:
        cells = [f"<td{k}>{_text(c)}</td>" for k, c in zip(kinds, row, strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _inline_svg(image: bytes) -> str:
    text = image.decode()
    return text[text.index("<svg") :]  # no XML declaration inside a page


def _text(value: str) -> str:
    return html.escape(value)
