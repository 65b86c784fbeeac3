"""The language model example: it learns, and a saved run goes on as if it never stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from run_command import EXAMPLES, run_command

TINY = [
    "--dim",
    "32",
    "--layers",
    "1",
    "--context",
    "32",
    "--global-batch-size",
    "32",
    "--eval-samples",
    "64",
]
BITS_OF_A_UNIFORM_GUESS = 8.0


def train(cwd: Path, *arguments: str | Path) -> dict[str, float]:
    output = run_command(
        "python", EXAMPLES / "train_gpt.py", *TINY, "--json", *arguments, cwd=cwd
    )
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def test_model_learns_the_standard_library(tmp_path: Path) -> None:
    result = train(tmp_path, "--steps", "60")

    assert result["steps"] == 60
    assert result["bits_per_byte"] < 0.8 * BITS_OF_A_UNIFORM_GUESS


def test_resumed_training_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(b"line %d of a short text\n" % i for i in range(600)))
    data = ["--data", str(text)]
    unbroken = train(tmp_path, *data, "--steps", "24")

    train(tmp_path, *data, "--steps", "24", "--stop-at", "17", "--save", tmp_path / "half")
    resumed = train(tmp_path, *data, "--steps", "24", "--resume", tmp_path / "half")

    assert resumed == pytest.approx(unbroken, rel=1e-6)


def test_data_too_short_for_a_window_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_bytes(b"too short")

    with pytest.raises(AssertionError, match="lower --context"):
        train(tmp_path, "--data", text)
