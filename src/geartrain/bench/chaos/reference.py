"""The training to which nothing happens, and how far its weights are from the run's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from geartrain.bench.chaos.evidence import Reference
from geartrain.bench.chaos.run_process import marked
from geartrain.bench.chaos.witness_log import Statement, read_statements

RUNNER = Path(__file__).with_name("witnessed_script.py")
"""Runs a script with a witness; imported by workers only, since it loads torch."""
_TAIL = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """What to train again."""

    script: Path
    arguments: tuple[str, ...]
    folder: Path
    """For its statement."""
    mark: str
    timeout_s: float
    needs_same_bits: bool
    tolerance: float
    launcher_arguments: tuple[str, ...] = ()
    """Of ``geartrain``, to train on a fleet; empty: on one device."""


def train_reference(
    settings: ReferenceSettings, num_steps: int, weights_of_run: Sequence[Path]
) -> Reference:
    """Train without faults, in processes of its own, for as many steps.

    A fleet makes the optimizer steps of a single device, whatever happens to it; so one
    device says what the weights must be. Only the bits of an ordinary script depend on
    who summed what, and there the same fleet has to say it.

    Args:
        settings: What to train.
        num_steps: That the run has made.
        weights_of_run: Files with the run's final weights, of any member.
    """
    problem = _train(settings, num_steps)
    statements = read_statements(settings.folder) if settings.folder.is_dir() else ()
    if not statements:
        return Reference(
            statement=None,
            why_not=f"the reference did not train: {problem or 'no session'}",
        )
    found = sorted(settings.folder.glob("*.safetensors"))
    difference = None
    if found and weights_of_run:
        difference = relative_difference(weights_of_run[0], found[0])
    return Reference(
        statement=max(statements, key=lambda t: len(t.commits)),
        needs_same_bits=settings.needs_same_bits,
        relative_difference=difference,
        tolerance=settings.tolerance,
    )


def final_weights(folder: Path, statements: Sequence[Statement]) -> list[Path]:
    """Weights that members saved who were there until the last step."""
    last = max((t.goodbye.step for t in statements if t.goodbye is not None), default=0)
    names = [t.name for t in statements if t.goodbye and t.goodbye.step == last]
    files = [folder / f"{name}.safetensors" for name in names]
    return [file for file in files if file.exists()]


def relative_difference(ours: Path, reference: Path) -> float | None:
    """2-norm of the difference of all weights over that of the reference.

    Returns:
        None where a file can't be read or the names differ.
    """
    try:
        found, expected = load_file(ours), load_file(reference)
    except (OSError, SafetensorError):
        return None
    if found.keys() != expected.keys() or not expected:
        return None
    a = np.concatenate([found[name].ravel() for name in sorted(found)])
    b = np.concatenate([expected[name].ravel() for name in sorted(expected)])
    if a.shape != b.shape:
        return None
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-300))


def _train(settings: ReferenceSettings, num_steps: int) -> str:
    """Train; what went wrong, "" if nothing did."""
    script = str(settings.script.resolve())
    where = [str(settings.folder.resolve()), str(num_steps)]
    launcher = ["-m", "geartrain.cli", *settings.launcher_arguments]
    begin = [sys.executable, *(launcher if settings.launcher_arguments else ())]
    command = [*begin, str(RUNNER), *where, script, *settings.arguments]
    try:
        done = subprocess.run(
            marked(settings.mark, command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=settings.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{num_steps} steps were not made within {settings.timeout_s:.0f} s"
    return done.stderr.decode(errors="replace")[-_TAIL:] if done.returncode else ""
