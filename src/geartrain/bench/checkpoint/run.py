"""The whole benchmark, from the options to what was found. Torch-free."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from geartrain.bench.checkpoint.orders import (
    LOADED_BY,
    FlipOrder,
    FlipsFound,
    KillOrder,
    KillsFound,
    LogFound,
    LogOrder,
    ReshardFound,
    ReshardOrder,
    StallFound,
    StateOrder,
)
from geartrain.bench.checkpoint.result import (
    CASE_NAMES,
    CaseResult,
    CheckpointResult,
    judge_flips,
    judge_kills,
    judge_log,
    judge_reshard,
    judge_slowdown,
    judge_stall,
)
from geartrain.bench.checkpoint.worker_process import read_result, run_workers
from geartrain.bench.fleet_run import scratch_directory
from geartrain.bench.provenance import command_line, current_commit
from geartrain.errors import ConfigError
from geartrain.launch.run_directory import collect_versions

Say = Callable[[str], None]

_KILL_PROCESSES = 2
_STALL_S, _RESHARD_S, _LOG_S, _FLIPS_S, _KILLS_S = 400.0, 240.0, 240.0, 240.0, 240.0
"""Deadlines, far beyond what each takes on a quiet machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSizes:
    """How much of everything."""

    dim: int = 2048
    """A state of 201 MB."""
    stall_rounds: int = 7
    stall_budget_s: float = 150.0
    steps_per_block: int = 8
    batch_size: int = 256
    reshard_rounds: int = 5
    log_steps: int = 40
    logged_steps: int = 5
    flip_every: int = 1
    large_flips: int = 40
    large_bytes: int = 64_000_000
    dcp_flips: int = 200
    kill_trials: int = 200


_QUICK = CheckpointSizes(
    dim=1024,
    stall_rounds=2,
    stall_budget_s=25.0,
    steps_per_block=3,
    batch_size=64,
    reshard_rounds=2,
    log_steps=8,
    logged_steps=2,
    flip_every=5,
    large_flips=5,
    large_bytes=16_000_000,
    dcp_flips=40,
    kill_trials=30,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """What the user asks for."""

    quick: bool = False
    only: tuple[str, ...] = ()
    """Names of cases; empty: all."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in CASE_NAMES:
                msg = f"unknown case {name!r}; known are {', '.join(CASE_NAMES)}"
                raise ConfigError(msg)

    def wants(self, *names: str) -> bool:
        """Whether one of these cases is asked for."""
        return not self.only or any(name in self.only for name in names)

    @property
    def sizes(self) -> CheckpointSizes:
        """How much of everything; with ``quick`` a state of 50 MB."""
        return _QUICK if self.quick else CheckpointSizes()


def run_checkpoint(options: CheckpointOptions, say: Say) -> CheckpointResult:
    """Measure all cases that are asked for.

    Args:
        options: What is asked for.
        say: Told what goes on.

    Raises:
        DeviceError: If a worker process fails.
    """
    started_at_s = time.time()
    load = os.getloadavg()[0]
    with scratch_directory() as name:
        bench = _Bench(options, Path(name), say)
        cases = bench.measure()
    return CheckpointResult(
        cases=tuple(case for case in cases if options.wants(case.case)),
        quick=options.quick,
        seed=options.seed,
        started_at_s=started_at_s,
        wall_s=time.time() - started_at_s,
        load_average=load,
        command=command_line(),
        commit=current_commit(Path.cwd()),
        versions=collect_versions(),
        raw=bench.raw,
    )


@dataclass(slots=True)
class _Bench:
    options: CheckpointOptions
    folder: Path
    say: Say
    raw: dict[str, object] = field(default_factory=dict)

    def measure(self) -> list[CaseResult]:
        cases: list[CaseResult] = []
        if self.options.wants("stall", "slowdown"):
            cases += self._stall()
        if self.options.wants("log"):
            cases.append(self._log())
        if self.options.wants("flips"):
            cases.append(self._flips())
        if self.options.wants("kills"):
            cases.append(self._kills())
        if self.options.wants("reshard"):
            cases.append(self._reshard())
        return cases

    def _stall(self) -> list[CaseResult]:
        order = self._state_order("stall", self.options.sizes.stall_rounds)
        self.say(f"stall, slowdown: {order.num_rounds} rounds, beside dcp.save")
        run_workers("stall_worker", [order], _STALL_S)
        found = read_result(order.result, StallFound)
        self.raw["stall"] = found
        cases = [judge_stall(found), judge_slowdown(found)]
        for case in cases:
            self._tell(case)
        return cases

    def _log(self) -> CaseResult:
        sizes = self.options.sizes
        order = LogOrder(
            result=str(self.folder / "log.json"),
            num_steps=sizes.log_steps,
            num_logged=sizes.logged_steps,
            seed=self.options.seed,
        )
        self.say(f"log: gradients of a GPT after {order.num_steps} steps")
        run_workers("log_worker", [order], _LOG_S)
        found = read_result(order.result, LogFound)
        self.raw["log"] = found
        return self._tell(judge_log(found))

    def _flips(self) -> CaseResult:
        sizes = self.options.sizes
        order = FlipOrder(
            folder=str(self._make("flips")),
            result=str(self.folder / "flips.json"),
            seed=self.options.seed,
            every=sizes.flip_every,
            num_in_large=sizes.large_flips,
            large_bytes=sizes.large_bytes,
            num_dcp=sizes.dcp_flips,
        )
        self.say("flips: a bit of one byte after the other")
        run_workers("flip_worker", [order], _FLIPS_S)
        found = read_result(order.result, FlipsFound)
        self.raw["flips"] = found
        return self._tell(judge_flips(found))

    def _kills(self) -> CaseResult:
        trials = self.options.sizes.kill_trials // _KILL_PROCESSES
        orders = [
            KillOrder(
                folder=str(self._make(f"kills-{index}")),
                result=str(self.folder / f"kills-{index}.json"),
                num_trials=trials,
                seed=self.options.seed + index,
            )
            for index in range(_KILL_PROCESSES)
        ]
        self.say(f"kills: {_KILL_PROCESSES} times {trials} saves")
        run_workers("kill_worker", orders, _KILLS_S)
        found = [read_result(order.result, KillsFound) for order in orders]
        self.raw["kills"] = found
        return self._tell(judge_kills(found))

    def _reshard(self) -> CaseResult:
        state = self._state_order("reshard", self.options.sizes.reshard_rounds)
        self.say(f"reshard: {state.num_rounds} rounds, beside dcp.load")
        orders = [ReshardOrder(state=state, rank=rank) for rank in range(LOADED_BY)]
        run_workers("reshard_worker", orders, _RESHARD_S)
        found = read_result(state.result, ReshardFound)
        self.raw["reshard"] = found
        return self._tell(judge_reshard(found))

    def _state_order(self, name: str, num_rounds: int) -> StateOrder:
        return StateOrder(
            folder=str(self._make(name)),
            result=str(self.folder / f"{name}.json"),
            dim=self.options.sizes.dim,
            num_rounds=num_rounds,
            budget_s=self.options.sizes.stall_budget_s,
            steps_per_block=self.options.sizes.steps_per_block,
            batch_size=self.options.sizes.batch_size,
        )

    def _make(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder

    def _tell(self, case: CaseResult) -> CaseResult:
        self.say(f"{case.case}: {case.shown}")
        return case
