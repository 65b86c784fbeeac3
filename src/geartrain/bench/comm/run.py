"""``geartrain bench comm``: the gradient exchange against Gloo, over emulated links.

Torch-free: all that computes runs in worker processes. geartrain is told addresses and
nothing else; the baselines are told what they need to be at their best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from geartrain.bench.comm.judge import LabMeasurement, judge_lab
from geartrain.bench.comm.labs import Say, measure_lab
from geartrain.bench.comm.link_drop import measure_link_drop
from geartrain.bench.comm.overlap import measure_overlap
from geartrain.bench.comm.result import CaseResult
from geartrain.bench.comm.same_host import measure_same_host
from geartrain.bench.comm.settings import CommOptions, cases_of, labs_of
from geartrain.bench.provenance import command_line, current_commit
from geartrain.devices.emulation.network import missing_for_networks
from geartrain.launch.run_directory import collect_versions

_OTHERS: dict[str, Callable[[Say], CaseResult]] = {
    "same_host": measure_same_host,
    "overlap": measure_overlap,
    "link_drop": measure_link_drop,
}
"""Cases with workers or a lab of their own kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommResult:
    """The raw result file."""

    cases: tuple[CaseResult, ...]
    labels: str
    seed: int
    quick: bool
    versions: dict[str, str]
    command: str
    commit: str
    started_at_s: float
    wall_s: float
    labs: tuple[LabMeasurement, ...]
    schema_version: int = 1

    @property
    def has_failures(self) -> bool:
        """Whether a result was wrong or bytes were missing, so that times mean nothing."""
        return any(case.failures for case in self.cases)

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "cases": [case.as_json() for case in self.cases],
            "labels": self.labels,
            "seed": self.seed,
            "quick": self.quick,
            "wall_s": self.wall_s,
            "command": self.command,
            "commit": self.commit,
            **{f"version_{name}": text for name, text in self.versions.items()},
        }


def run_comm(options: CommOptions, say: Say) -> CommResult:
    """Measure the cases that are asked for.

    Args:
        options: What the user asks for.
        say: Told what goes on.

    Raises:
        ConfigError: If there is no such case, or the racks or rates can't be read.
        DeviceError: If a lab can't be made or a worker failed.
        KeyboardInterrupt: If the benchmark was interrupted; nothing is left behind.
    """
    started_at_s = time.time()
    wanted = cases_of(options)
    setups = labs_of(options)
    results: dict[str, CaseResult] = {}
    labs = []
    missing = missing_for_networks()
    if missing is None:
        for setup in setups:
            measured = measure_lab(setup, options.seed, say)
            labs.append(measured)
            has_targets = options.is_default_lab or setup.measures_small
            judged = judge_lab(measured, uses_targets=has_targets)
            results |= {result.case: result for result in judged}
    for case, measure in _OTHERS.items():
        if case in wanted and (missing is None or case == "same_host"):
            results[case] = measure(say)
    reason = f"needs {missing}"
    for case in wanted:
        if case not in results:
            say(f"{case}: skipped, {reason}")
            results[case] = CaseResult(case=case, skipped=reason)
    return CommResult(
        cases=tuple(results[case] for case in wanted),
        labels="emulated",
        seed=options.seed,
        quick=options.quick,
        versions=collect_versions(),
        command=command_line(),
        commit=current_commit(Path.cwd()),
        started_at_s=started_at_s,
        wall_s=time.time() - started_at_s,
        labs=tuple(labs),
    )
