"""Draw the result of ``geartrain bench macro``: throughput against the bound.

python benchmarks/plot_macro.py benchmarks/results/macro-....json docs/images/macro.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

VARIANTS = {
    "DDP, equal batches": "ddp",
    "DDP, batches by core fraction": "ddp_uneven",
    "geartrain": "geartrain",
}
COLORS = ("#999999", "#E69F00", "#0072B2")  # Okabe and Ito: told apart by everybody


def draw(source: Path, target: Path) -> None:
    """Draw one raw result file."""
    document = json.loads(source.read_text())
    result = document["result"]
    bound = result["sum_speeds_samples_per_s"]
    names = list(VARIANTS)
    speeds = [result[f"{key}_samples_per_s"] for key in VARIANTS.values()]
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(8.0, 2.4), layout="constrained")
    bars = axes.barh(names, speeds, color=COLORS)
    labels = [f"{speed:.0f} samples/s ({speed / bound:.0%})" for speed in speeds]
    axes.axvline(bound, color="#D55E00", linestyle="--")
    for text in axes.bar_label(bars, labels, padding=4):
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    axes.annotate(
        f"bound: {bound:.0f}",
        (bound, 1.0),
        (0, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        color="#D55E00",
    )
    axes.set_xlim(0, bound * 1.25)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    where = f"{result['fleet']} ({result['labels']})"
    axes.set_xlabel(f"samples/s on {where}, global batch {result['global_batch_size']}")
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
