"""The charts of a report: loss, throughput, each device's time, shares."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import ConfigError
from geartrain.monitoring.run_files import RunFiles
from geartrain.monitoring.run_summary import Step, bounds_per_step, group_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

_MAX_BINS = 400
"""More columns than this can't be told apart on the page."""
# Okabe-Ito: told apart by people with any colour vision.
_BUSY, _EXCHANGE, _INPUT, _IDLE = "#0072B2", "#E69F00", "#CC79A7", "#D9D9D9"
_BOUND, _EVENT = "#D55E00", "#555555"
_DEVICES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_HATCHES = ("", "//", "..", "xx")
"""From the eighth device on colours repeat, with another hatch."""
_PLAIN_EVENTS = 8
"""More of them are drawn fainter, so that the curves below can be seen."""
_WIDTH_INCHES = 11.0
_BESIDE: dict[str, Any] = {  # Any: keyword arguments of Axes.legend
    "loc": "upper left",
    "bbox_to_anchor": (1.01, 1.0),
    "frameon": False,
}
_ABOVE: dict[str, Any] = {  # Any: as above
    "loc": "lower right",
    "bbox_to_anchor": (1.0, 1.0),
    "frameon": False,
    "borderaxespad": 0.1,
    "ncols": 4,
}


def draw_charts(run: RunFiles, file_format: Literal["png", "svg"]) -> bytes:
    """Draw the charts of a run.

    Args:
        run: What the run has written down, at least one step.
        file_format: Of the image returned.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        msg = f"a report needs matplotlib ({error}); pip install 'geartrain[report]'"
        raise ConfigError(msg) from error
    steps = group_steps(run.records)
    device_ids = _device_ids(run, steps)
    with mpl.rc_context(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.hashsalt": run.manifest.run_id,
        }
    ):
        heights = [2.3, 2.3, *([0.62] * len(device_ids)), 2.3]
        figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 1.6), layout="constrained")
        axes: Sequence[Axes] = figure.subplots(
            len(heights), 1, sharex=True, height_ratios=heights
        )
        _draw(figure, axes, run, steps, device_ids)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=file_format, dpi=110, metadata=None)
    return buffer.getvalue()


def _draw(
    figure: Figure,
    axes: Sequence[Axes],
    run: RunFiles,
    steps: tuple[Step, ...],
    device_ids: list[str],
) -> None:
    bins = _Bins(steps)
    figure.suptitle(_literal(f"{run.manifest.run_id} ({', '.join(run.manifest.labels)})"))
    _draw_loss(axes[0], bins)
    _draw_throughput(axes[1], bins, run)
    strips = axes[2:-1]
    for ax, device_id in zip(strips, device_ids, strict=True):
        _draw_device(ax, bins, device_id)
    strips[0].set_title("time of each device in a step", loc="left")
    strips[0].legend(**_ABOVE)
    _draw_shares(axes[-1], bins, device_ids)
    for ax in (axes[1], axes[-1]):
        _mark_replans(ax, run)
    axes[1].legend(**_ABOVE)
    axes[-1].legend(**_BESIDE)
    axes[-1].set_xlabel("step")
    axes[-1].set_xlim(bins.edges[0], bins.edges[-1])


class _Bins:
    """Steps, brought together where there are more than the page has columns."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps
        num_bins = min(len(steps), _MAX_BINS)
        self.starts = np.linspace(0, len(steps), num_bins, endpoint=False).astype(int)
        numbers = np.array([step.step for step in steps], dtype=float)
        self.edges = np.append(numbers[self.starts], numbers[-1] + 1)

    def sums(self, values: Sequence[float]) -> Array:
        """Sum of each bin, shape (num_bins,)."""
        return np.add.reduceat(np.asarray(values, dtype=float), self.starts)

    def means(self, values: Sequence[float]) -> Array:
        """Mean of each bin, shape (num_bins,)."""
        return self.sums(values) / self.sums([1.0] * len(self.steps))

    @property
    def centres(self) -> Array:
        """Middle of each bin, shape (num_bins,)."""
        middle: Array = (self.edges[:-1] + self.edges[1:]) / 2
        return middle

    def stairs(self, values: Array) -> tuple[Array, Array]:
        """Points of a line with a tread a bin."""
        return self.edges.repeat(2)[1:-1], values.repeat(2)


def _draw_loss(ax: Axes, bins: _Bins) -> None:
    losses = [step.loss for step in bins.steps]
    marker = "o" if len(losses) == 1 else ""
    ax.plot(bins.centres, bins.means(losses), color=_BUSY, marker=marker)
    ax.set_title("loss of the global batch", loc="left")
    ax.grid(visible=True, alpha=0.3)


def _draw_throughput(ax: Axes, bins: _Bins, run: RunFiles) -> None:
    seconds = bins.sums([step.step_s for step in bins.steps])
    samples = bins.sums([step.num_samples for step in bins.steps])
    rates = np.divide(samples, seconds, out=np.zeros_like(samples), where=seconds > 0)
    ax.plot(*bins.stairs(rates), color=_BUSY, label="measured")
    bounds = bounds_per_step(bins.steps, run.events, run.plan)
    known = [float("nan") if bound is None else bound for bound in bounds]
    if any(bound is not None for bound in bounds):
        line = bins.stairs(bins.means(known))
        ax.plot(
            *line, color=_BOUND, linestyle="--", label="bound: sum of the devices' speeds"
        )
    ax.set_title("throughput, samples/s", loc="left")
    ax.set_ylim(bottom=0)
    ax.grid(visible=True, alpha=0.3)


def _draw_device(ax: Axes, bins: _Bins, device_id: str) -> None:
    parts = np.zeros((4, len(bins.steps)))
    for index, step in enumerate(bins.steps):
        for record in step.records:
            if record.device_id == device_id:
                times = (record.compute_s, record.comm_s, record.data_s, record.idle_s)
                parts[:, index] = times
    binned = np.stack([bins.sums(part.tolist()) for part in parts])
    total = binned.sum(axis=0)
    fractions = np.divide(binned, total, out=np.zeros_like(binned), where=total > 0)
    names = ("compute", "exchange", "input", "idle")
    colours = (_BUSY, _EXCHANGE, _INPUT, _IDLE)
    bottom = np.zeros_like(total)
    for fraction, name, colour in zip(fractions, names, colours, strict=True):
        x, upper = bins.stairs(bottom + fraction)
        lower = bottom.repeat(2)
        ax.fill_between(x, lower, upper, color=colour, linewidth=0, label=name)
        bottom = bottom + fraction
    ax.set_ylim(0, 1)
    ax.set_yticks([])
    ax.set_ylabel(_literal(device_id), rotation=0, ha="right", va="center")


def _draw_shares(ax: Axes, bins: _Bins, device_ids: list[str]) -> None:
    bottom = np.zeros(len(bins.starts))
    for index, device_id in enumerate(device_ids):
        taken = [
            sum(r.num_samples for r in step.records if r.device_id == device_id)
            for step in bins.steps
        ]
        top = bottom + bins.means(taken)
        x, upper = bins.stairs(top)
        ax.fill_between(
            x,
            bottom.repeat(2),
            upper,
            facecolor=_DEVICES[index % len(_DEVICES)],
            hatch=_HATCHES[index // len(_DEVICES) % len(_HATCHES)],
            edgecolor="white",
            linewidth=0.5,
            label=_literal(device_id),
        )
        bottom = top
    ax.set_title("samples of the global batch by device", loc="left")
    ax.set_ylim(bottom=0)


def _mark_replans(ax: Axes, run: RunFiles) -> None:
    for kind, line in (("slowdown", ":"), ("replanned", "-.")):
        found = [event for event in run.events if event.kind == kind]
        for index, event in enumerate(found):
            label = {"slowdown": "rate changed", "replanned": "re-planned"}[kind]
            ax.axvline(
                event.step,
                color=_EVENT,
                linestyle=line,
                linewidth=0.9,
                alpha=min(1.0, _PLAIN_EVENTS / len(found)),
                label=label if index == 0 else None,
            )


def _device_ids(run: RunFiles, steps: tuple[Step, ...]) -> list[str]:
    ids = [device.device_id for device in run.fleet.devices]
    seen = {record.device_id for step in steps for record in step.records}
    return [i for i in ids if i in seen] + sorted(seen - set(ids))


def _literal(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib would typeset what is between two
