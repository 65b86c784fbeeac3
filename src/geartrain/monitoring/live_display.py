"""The live display of a run in a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from geartrain.monitoring.progress import ProgressSnapshot, RunProgress
from geartrain.monitoring.run_summary import DeviceSummary
from geartrain.units import format_seconds

_REFRESH_S = 0.5
"""Drawing costs some 5 ms of a core that the workers could use."""
_BAR_CELLS = 30
_PARTS = (
    # Okabe-Ito colours, and shapes that can be told apart without colour.
    ("busy", "█", "#0072B2"),
    ("exchange", "▓", "#E69F00"),
    ("input", "▒", "#CC79A7"),
    ("idle", "░", "#999999"),
)


class LiveDisplay:
    """Redraws the run's state below what the script prints."""

    def __init__(
        self,
        run_dir: Path,
        title: str,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = RunProgress(run_dir)
        self._title = title
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._rest: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._clock = clock
        self._drawn_at_s = -_REFRESH_S  # at once

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()
        for stream, rest in self._rest.items():
            if rest:
                self._print_lines(stream, [rest])
        self._progress.close()

    def on_output(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Print what the script printed, whole lines only, above the display."""
        with self._lock:
            *lines, rest = (self._rest.get(stream, b"") + data).split(b"\n")
            self._rest[stream] = rest
            if lines:
                self._print_lines(stream, lines)

    def on_notice(self, text: str) -> None:
        """Print a line of the launcher's."""
        self._console.print(Text(text, style="bold"))

    def on_tick(self) -> None:
        """Redraw if it is time to."""
        now_s = self._clock()
        if now_s - self._drawn_at_s < _REFRESH_S:
            return
        self._drawn_at_s = now_s
        if self._progress.poll():
            shown = render(self._progress.snapshot(), self._title)
            self._live.update(shown, refresh=True)

    def _print_lines(self, _stream: str, lines: list[bytes]) -> None:
        for line in lines:
            # A progress bar rewrites its line: what it wrote last is what counts.
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            self._console.print(Text.from_ansi(text), soft_wrap=True)


def render(snapshot: ProgressSnapshot, title: str) -> RenderableType:
    """Draw a snapshot: a line of numbers, a row a device, the last event."""
    parts: list[RenderableType] = [Text(headline(snapshot)), _device_table(snapshot)]
    event = snapshot.last_event
    if event is not None:
        parts.append(Text(f"{event.kind} at step {event.step}: {event.message}"))
    return Panel(Group(*parts), title=Text(title), title_align="left")


def headline(snapshot: ProgressSnapshot) -> str:
    """The run's state in one line."""
    if snapshot.last_step is None:
        event = snapshot.last_event
        return f"{event.kind}: {event.message}" if event else "starting"
    recent = snapshot.recent
    done = str(snapshot.last_step + 1)
    if snapshot.total_steps is not None:
        done += f"/{snapshot.total_steps}"
    words = [f"step {done}"]
    if snapshot.epoch is not None:
        words.append(f"epoch {snapshot.epoch}")
    if recent.last_loss is not None:
        words.append(f"loss {recent.last_loss:.4f}")
    words.append(f"{recent.samples_per_s:.1f} samples/s")
    if recent.efficiency is not None:
        words.append(f"efficiency {recent.efficiency:.2f} of the bound")
    if snapshot.remaining_s is not None:
        words.append(f"ETA {format_seconds(snapshot.remaining_s)}")
    return "  ".join(words)


def _device_table(snapshot: ProgressSnapshot) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("device", no_wrap=True)
    table.add_column("share", justify="right")
    table.add_column(_legend(), no_wrap=True)
    table.add_column("busy", justify="right")
    for device in snapshot.recent.devices:
        table.add_row(
            Text(device.device_id),
            str(device.last_share) if device.lost_at_step is None else "lost",
            _bar(device),
            f"{device.busy_fraction:.2f}",
        )
    return table


def _bar(device: DeviceSummary) -> Text:
    fractions = (
        device.busy_fraction,
        device.exchange_fraction,
        device.data_fraction,
        device.idle_fraction,
    )
    bar = Text()
    drawn, end = 0, 0.0
    for fraction, (_, cell, colour) in zip(fractions, _PARTS, strict=True):
        end += fraction
        upto = min(_BAR_CELLS, round(end * _BAR_CELLS))
        bar.append(cell * (upto - drawn), style=colour)
        drawn = max(drawn, upto)
    return bar


def _legend() -> Text:
    legend = Text()
    for name, cell, colour in _PARTS:
        legend.append(cell, style=colour)
        legend.append(f" {name} ")
    return legend
