"""Draw the result of ``geartrain bench elastic``: every event, with each case's limit.

python benchmarks/plot_elastic.py RESULT.json docs/images/elastic.svg

The suffix of the target says the format. Times are on a logarithmic axis; a case's events
are spread out in the order in which they came, so that a drift would show.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

MET, MISSED, OTHER = "#0072B2", "#D55E00", "#999999"  # Okabe and Ito
_LEAST_S = 1e-3
_TICKS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def draw(source: Path, target: Path) -> None:
    """Draw one raw result file."""
    document = json.loads(source.read_text())
    cases = [case for case in document["cases"] if case["outcomes"]]
    rows = [_row(case) for case in cases]
    if document["torchft"]["seconds"]:
        rows.append(("torchft", document["torchft"]["seconds"], None, OTHER))
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "elastic"  # the same result, the same file
    figure, axes = plt.subplots(figsize=(8.0, 0.6 * len(rows) + 1.2), layout="constrained")
    for index, (_, seconds, limit_s, color) in enumerate(rows):
        _draw_row(axes, index, seconds, limit_s, color)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks(_TICKS_S, [f"{tick:g}" for tick in _TICKS_S])
    axes.minorticks_off()
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(
        "seconds to the next commit (emulated); line: limit of the 95th percentile, "
        "ring: 95th percentile"
    )
    figure.savefig(target, dpi=110, metadata={"Date": None} if _is_svg(target) else None)


def _row(case: dict[str, Any]) -> tuple[str, list[float], float | None, str]:
    seconds = [o["seconds"] for o in case["outcomes"] if o["seconds"] is not None]
    color = MET if case["is_met"] else MISSED
    return f"{case['case']} ({case['num_events']})", seconds, case["limit_s"], color


def _draw_row(
    axes: Axes, index: int, seconds: list[float], limit_s: float | None, color: str
) -> None:
    spread = [
        index + 0.5 * (number / max(len(seconds) - 1, 1) - 0.5)
        for number in range(len(seconds))
    ]
    shown = [max(value, _LEAST_S) for value in seconds]
    axes.plot(shown, spread, ".", color=color, markersize=4)
    if seconds:
        p95_s = sorted(shown)[math.ceil(0.95 * len(shown)) - 1]
        axes.plot([p95_s], [index], "o", color=color, fillstyle="none", markersize=9)
        axes.annotate(
            f"{p95_s:.2f} s",
            (p95_s, index),
            (7, 5),
            textcoords="offset points",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8},
        )
    if limit_s is not None:
        axes.plot([limit_s, limit_s], [index - 0.4, index + 0.4], color="black")


def _is_svg(target: Path) -> bool:
    return target.suffix == ".svg"


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
