"""Draw the result of ``geartrain bench comm``: each case's time over the best ring's.

python benchmarks/plot_comm.py benchmarks/results/comm-emulated.json docs/images/comm.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

MET, MISSED = "#0072B2", "#D55E00"  # Okabe and Ito: told apart by everybody
FIGURE = "ratio_to_best_ring"


def draw(source: Path, target: Path) -> None:
    """Draw one raw result file."""
    document = json.loads(source.read_text())
    cases = [case for case in document["cases"] if case[FIGURE] is not None]
    names = [case["case"] for case in cases]
    ratios = [case[FIGURE] for case in cases]
    limits = [
        next((t["at_most"] for t in case["targets"] if t["figure"] == FIGURE), None)
        for case in cases
    ]
    colors = [
        MISSED if limit is not None and ratio > limit else MET
        for ratio, limit in zip(ratios, limits, strict=True)
    ]
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(8.0, 3.6), layout="constrained")
    bars = axes.barh(names, ratios, color=colors)
    axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=4)
    for position, limit in enumerate(limits):
        if limit is not None:
            axes.plot([limit, limit], [position - 0.4, position + 0.4], color="black")
    axes.axvline(1.0, color="#999999", linestyle="--")
    axes.set_xlim(0, 1.15 * max(1.0, *ratios))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(
        "time / best-ordered Gloo ring (same_host: Gloo over loopback); "
        f"black: target ({document['labels']})"
    )
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
