"""The whole benchmark, from the options to what was found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from geartrain.bench.elastic.cases import CASE_NAMES, CASES
from geartrain.bench.elastic.drive import Asked, CaseRuns, run_cases
from geartrain.bench.elastic.overhead import Overhead, measure_overhead
from geartrain.bench.elastic.result import (
    CaseResult,
    ElasticResult,
    judge_case,
    judge_joins,
)
from geartrain.bench.elastic.torchft_case import TorchftResult, measure_torchft
from geartrain.bench.fleet_run import scratch_directory
from geartrain.bench.provenance import command_line, current_commit
from geartrain.errors import ConfigError
from geartrain.launch.run_directory import collect_versions

Say = Callable[[str], None]

OTHER_NAMES = ("overhead", "torchft")
_JOINS_OF = "kill_one_of_four"
"""In the other cases a join is disturbed on purpose, or several come at once."""
_ROUNDS, _QUICK_ROUNDS = 12, 2
_STEPS, _QUICK_STEPS = 20, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """What the user asks for."""

    quick: bool = False
    only: tuple[str, ...] = ()
    """Names of cases, ``overhead`` and ``torchft``; empty: all."""
    seed: int = 0
    torchft_python: Path | None = None
    """A Python that has torchft and this torch; None: the one that runs."""

    def __post_init__(self) -> None:
        known = (*CASE_NAMES, *OTHER_NAMES)
        for name in self.only:
            if name not in known:
                msg = f"unknown case {name!r}; known are {', '.join(known)}"
                raise ConfigError(msg)
        if self.torchft_python is not None and not self.torchft_python.is_file():
            msg = f"no program at {self.torchft_python}; name a Python that has torchft"
            raise ConfigError(msg)

    def wants(self, name: str) -> bool:
        """Whether a case is asked for; joins come of the kills."""
        is_source = name == _JOINS_OF and "warm_join" in self.only
        return not self.only or name in self.only or is_source


def run_elastic(options: ElasticOptions, say: Say) -> ElasticResult:
    """Measure all cases that are asked for.

    Args:
        options: What is asked for.
        say: Told what goes on.

    Raises:
        DeviceError: If the overhead can't be measured.
    """
    started_at_s = time.time()
    load = os.getloadavg()[0]
    with scratch_directory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        runs = [
            found
            for group in groups(options)
            for found in run_cases(group, folder, options.seed, say)
        ]
        overhead = _overhead(options, folder, say)
        torchft = _torchft(options, folder, say)
    return ElasticResult(
        cases=judge(options, runs),
        overhead=overhead,
        torchft=torchft,
        quick=options.quick,
        seed=options.seed,
        labels=("emulated",),
        started_at_s=started_at_s,
        wall_s=time.time() - started_at_s,
        load_average=load,
        command=command_line(),
        commit=current_commit(Path.cwd()),
        versions=collect_versions(),
    )


def groups(options: ElasticOptions) -> list[list[Asked]]:
    """Cases that share runs: none do, but with ``quick`` all on small fleets.

    >>> [len(group) for group in groups(ElasticOptions(quick=True))]
    [1, 4]
    """
    wanted = [case for name, case in CASES.items() if options.wants(name)]
    if not options.quick:
        return [[Asked(case=case, num_events=case.num_events)] for case in wanted]
    alone = [case for case in wanted if case.num_victims > 1]
    # The one whose script saves comes last: the runs are as the last case wants them.
    together = sorted(
        (case for case in wanted if case.num_victims == 1), key=lambda case: case.saves
    )
    small = min((c.core_fractions for c in together), key=len, default=())
    together = [replace(case, core_fractions=small) for case in together]
    asked = [
        [Asked(case=case, num_events=case.num_quick) for case in group]
        for group in (alone, together)
    ]
    return [group for group in asked if group]


def judge(options: ElasticOptions, runs: Sequence[CaseRuns]) -> tuple[CaseResult, ...]:
    """Sum up all cases, in the order in which they are told of."""
    by_name = {one.case: judge_case(one) for one in runs}
    if options.wants("warm_join"):
        by_name["warm_join"] = judge_joins(runs, _JOINS_OF)
    wanted = [name for name in CASE_NAMES if not options.only or name in options.only]
    return tuple(by_name[name] for name in wanted if name in by_name)


def _overhead(options: ElasticOptions, folder: Path, say: Say) -> Overhead | None:
    if not options.wants("overhead"):
        return None
    rounds = _QUICK_ROUNDS if options.quick else _ROUNDS
    steps = _QUICK_STEPS if options.quick else _STEPS
    return measure_overhead(folder, rounds, steps, say)


def _torchft(options: ElasticOptions, folder: Path, say: Say) -> TorchftResult:
    if not options.wants("torchft"):
        return TorchftResult(skipped="not asked for")
    return measure_torchft(options.torchft_python, folder, say, quick=options.quick)
