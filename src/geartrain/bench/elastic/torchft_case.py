"""torchft's recovery beside ours, in the same run, where it is installed.

It is no dependency: its workers run in whatever Python has it. The limits that they are
given were found to recover fastest without changes to torchft; its own defaults, 60 s
each, are what an interrupted ring waits for.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import geartrain
from geartrain.bench.chaos.leftovers import end_marked
from geartrain.bench.chaos.run_process import marked
from geartrain.bench.elastic.history import History
from geartrain.bench.elastic.outcome import (
    Fault,
    calm_step_s,
    next_commit_s,
    percentile,
)
from geartrain.errors import DeviceError

Say = Callable[[str], None]

WORKER = Path(__file__).with_name("torchft_worker.py")
_PACKAGES = Path(geartrain.__file__).parents[1]
_NUM_REPLICAS = 4
_NUM_KILLS, _NUM_QUICK = 6, 1
_CALM_STEPS = 12
_START_S = 90.0
_COMMIT_S = 90.0
"""By default everything in torchft takes 60 s."""
_LOOK_S = 0.02
_FIND_S = 60.0
_FIND = (
    "import importlib.metadata as m, importlib.util as u;"
    "print(next((d.version for d in m.distributions() if d.metadata['Name'] in "
    "('torchft', 'torchft-nightly')), '') if u.find_spec('torchft') else '')"
)
_SETTINGS = (
    "4 replicas, at least 2, group and connection limits 1 s, heartbeats of 30 ms with a "
    "limit of 500 ms, join 200 ms"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchftResult:
    """What was measured, or why not."""

    skipped: str = ""
    version: str = ""
    settings: str = ""
    seconds: tuple[float, ...] = ()
    """Of each kill of one of four until the next commit of another replica."""
    num_failed: int = 0
    """Kills after which nobody made a step."""
    diverged_steps: int = 0
    step_s: float | None = None

    def as_json(self) -> dict[str, object]:
        """Flat."""
        if self.skipped:
            return {"skipped": self.skipped}
        return {
            "skipped": None,
            "version": self.version,
            "settings": self.settings,
            "p50_s": percentile(self.seconds, 0.5) if self.seconds else None,
            "p95_s": percentile(self.seconds, 0.95) if self.seconds else None,
            "num_events": len(self.seconds) + self.num_failed,
            "num_failed": self.num_failed,
            "diverged_steps": self.diverged_steps,
            "step_s": self.step_s,
        }


def measure_torchft(
    python: Path | None, folder: Path, say: Say, *, quick: bool
) -> TorchftResult:
    """Kill one of four replicas, several times.

    Args:
        python: That has torchft; None: this one.
        folder: For what is written.
        say: Told what goes on.
        quick: A single kill.
    """
    program = Path(sys.executable) if python is None else python
    version = _find_version(program)
    if not version:
        return TorchftResult(skipped="torchft is not installed")
    num_kills = _NUM_QUICK if quick else _NUM_KILLS
    where = folder / "torchft"
    where.mkdir()
    try:
        with _Replicas(program, where) as replicas:
            return replicas.kill_some(num_kills, version, say)
    except DeviceError as error:
        say(str(error))
        return TorchftResult(skipped=str(error), version=version, settings=_SETTINGS)


def _find_version(program: Path) -> str:
    found = subprocess.run(
        [str(program), "-c", _FIND],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_FIND_S,
        check=False,
    )
    return found.stdout.strip()


class _Replicas:
    """Four replicas and their lighthouse."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program, self._folder = program, folder
        self._mark = secrets.token_hex(8)
        self._all: list[subprocess.Popen[bytes]] = []
        self._witness_dir = folder / "witness"
        self._history = History(self._witness_dir)
        self._lighthouse = ""

    def __enter__(self) -> Self:
        address = self._folder / "lighthouse"
        self._start("lighthouse", str(address))
        if not self._wait(address.exists, _START_S):
            msg = "torchft's lighthouse did not start; is its version another?"
            raise DeviceError(msg)
        self._lighthouse = address.read_text()
        for index in range(_NUM_REPLICAS):
            self._restart(index)
        return self

    def __exit__(self, *exception: object) -> None:
        end_marked(self._mark)
        for process in self._all:
            process.wait()

    def kill_some(self, num_kills: int, version: str, say: Say) -> TorchftResult:
        """Kill one replica after the other; each comes back before the next kill."""
        dice = random.Random(0)  # noqa: S311 - repeatable, no secret
        seconds: list[float] = []
        steps_s: list[float] = []
        num_failed = 0
        for number in range(num_kills):
            if not self._await_whole():
                num_failed += number > 0
                say("torchft: its replicas do not all take part")
                break
            step_s = calm_step_s(self._history, time.time())
            time.sleep(dice.uniform(0.0, 2 * step_s))
            took = self._kill(dice.randrange(_NUM_REPLICAS))
            if took is None:
                num_failed += 1
                break
            say(f"torchft {number + 1} of {num_kills}: {took:.3f} s")
            seconds.append(took)
            steps_s.append(step_s)
        if not seconds and not num_failed:
            msg = f"torchft {version} made no steps with {_NUM_REPLICAS} replicas"
            raise DeviceError(msg)
        return TorchftResult(
            version=version,
            settings=_SETTINGS,
            seconds=tuple(seconds),
            num_failed=num_failed,
            diverged_steps=self._history.num_diverged(),
            step_s=percentile(steps_s, 0.5) if steps_s else None,
        )

    def _kill(self, index: int) -> float | None:
        """Kill a replica and start it again; seconds to the next commit of another."""
        member = self._history.newest()[f"replica:{index}"]
        fault = Fault(
            case="torchft",
            at_s=time.time(),
            victims=(member.name,),
            device_ids=(member.device_id,),
        )
        with suppress(ProcessLookupError):
            os.kill(member.process_id, signal.SIGKILL)
        self._wait(lambda: next_commit_s(self._history, fault) is not None, _COMMIT_S)
        at_s = next_commit_s(self._history, fault)
        self._restart(index)
        return None if at_s is None else at_s - fault.at_s

    def _await_whole(self) -> bool:
        """Whether all replicas make some more steps together."""
        since_step = self._history.last_step + _CALM_STEPS
        return self._wait(lambda: self._is_whole(since_step), _START_S)

    def _is_whole(self, since_step: int) -> bool:
        newest = self._history.newest()
        return len(newest) == _NUM_REPLICAS and all(
            m.commits and m.commits[-1].step > since_step for m in newest.values()
        )

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self._history.poll()
            if condition():
                return True
            time.sleep(_LOOK_S)
        return False

    def _restart(self, index: int) -> None:
        where = str(self._witness_dir)
        self._start("replica", self._lighthouse, where, str(index))

    def _start(self, *arguments: str) -> None:
        # The other Python has what geartrain needs, but perhaps not geartrain itself.
        found = ["env", f"PYTHONPATH={_PACKAGES}"]
        command = [*found, str(self._program), str(WORKER), *arguments]
        self._all.append(
            subprocess.Popen(
                marked(self._mark, command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
