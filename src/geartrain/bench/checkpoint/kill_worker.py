"""Kills saves at any of their calls to the system, and loads what is left. Torch-free."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from geartrain.bench.checkpoint.orders import KillOrder, KillsFound
from geartrain.bench.checkpoint.small_state import read_all, save_bytes
from geartrain.bench.checkpoint.worker_process import read_order, write_result
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.errors import CheckpointError

_ELEMENTS = {"model/w": 1_100_000, "model/b": 10, "optimizer/m": 270_000}
_CALLS = ("fsync", "rename", "link", "mkdir", "unlink", "open", "write", "close", "stat")
_NUM_CALLS = 100
"""More than the calls of a save, so that the last ones, which publish it, are hit, too:
kills behind them never come, and that save ends."""
_TRIAL_S = 60.0
_LOOK_S = 0.002


def _content(seed: int) -> dict[str, bytes]:
    source = random.Random(seed)  # noqa: S311 - of no secret
    return {name: source.randbytes(4 * count) for name, count in _ELEMENTS.items()}


class _Trials:
    """One directory, saved to again and again by children that are killed."""

    def __init__(self, order: KillOrder) -> None:
        self._folder = Path(order.folder)
        self._random = random.Random(order.seed)  # noqa: S311 - of no secret
        self._last = self._step = 0
        self._counts = {"killed": 0, "before": 0, "new": 0}
        self._failures: list[str] = []
        save_bytes(LocalTier(self._folder), _content(0), 0)

    def make(self) -> None:
        """Kill one save, and load; saves that end before their kill are loaded, too."""
        num_killed = self._counts["killed"]
        while self._counts["killed"] == num_killed and not self._failures:
            self._save(self._random.randint(1, _NUM_CALLS))

    def _save(self, at: int) -> None:
        self._step += 1
        step = self._step
        process_id = os.fork()
        if process_id == 0:
            _save_and_die(self._folder, step, at)
        status = _await_end(process_id)
        self._counts["killed"] += os.WIFSIGNALED(status)
        try:
            self._load(step)
        except CheckpointError as error:
            self._failures.append(f"trial {step}: {error}")

    def found(self) -> KillsFound:
        """The counts."""
        return KillsFound(
            num_trials=self._step,
            num_killed=self._counts["killed"],
            num_before=self._counts["before"],
            num_new=self._counts["new"],
            failures=tuple(self._failures),
        )

    def _load(self, step: int) -> None:
        tier = LocalTier(self._folder)
        latest = tier.latest()
        got = -1 if latest is None else latest.manifest.step
        if latest is None or got not in {self._last, step}:
            self._failures.append(f"trial {step}: step {got} instead of {self._last}")
            return
        if read_all(tier, latest) != _content(got):
            self._failures.append(f"trial {step}: step {got} has other bytes than saved")
        self._counts["new" if got == step else "before"] += 1
        self._last = got
        for name in tier.versions():
            if name != latest.name:
                tier.remove(name)
        tier.collect_garbage(min_age_s=0)


def _save_and_die(folder: Path, step: int, at: int) -> None:
    """In a child: save, and end at a call, before or after it was made."""
    left = [at]
    content = _content(step)
    for name in _CALLS:
        setattr(os, name, _dying(getattr(os, name), left, dies_after=bool(step % 2)))
    save_bytes(LocalTier(folder), content, step)
    os._exit(0)


def _dying(
    call: Callable[..., Any],  # Any: whatever the call takes and returns
    left: list[int],
    *,
    dies_after: bool,
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:  # Any: as above
        left[0] -= 1
        is_last = left[0] == 0
        if is_last and not dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return counted


def _await_end(process_id: int) -> int:
    deadline_at_s = time.monotonic() + _TRIAL_S
    while True:
        ended, status = os.waitpid(process_id, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline_at_s:
            os.kill(process_id, signal.SIGKILL)
        time.sleep(_LOOK_S)


def main() -> None:
    """Make all trials."""
    order = read_order(KillOrder)
    trials = _Trials(order)
    for _ in range(order.num_trials):
        trials.make()
    write_result(order.result, trials.found())


if __name__ == "__main__":
    main()
