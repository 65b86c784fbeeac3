"""What geartrain costs while nothing happens: against plain DDP, in turn, in one run.

Two jobs of two ranks each live at the same time, geartrain's with its coordinator; one of
them computes, the other waits in its script for an order. So a slow drift of the machine
meets both, and neither starts anew between two measurements.
"""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import msgspec

from geartrain.bench.chaos.leftovers import end_marked, marked_processes
from geartrain.bench.chaos.run_process import RunProcess, RunSettings
from geartrain.errors import DeviceError

Say = Callable[[str], None]
Variant = Literal["ddp", "geartrain"]

WORLD_SIZE = 2
WORKER = Path(__file__).with_name("overhead_worker.py")
_FLEET = "emulated:1,1"
_START_S = 180.0
_PHASE_S = 120.0
_STOP_S = 30.0
_WARMUP_STEPS = 12
_OPTIONS: dict[Variant, tuple[str, ...]] = {
    "geartrain": (),
    # No coordinator, no saves: the script never sets a session up, it only asks its rank.
    "ddp": ("--on-loss=stop",),
}


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a worker."""

    variant: Variant
    rank: int


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to an order."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What was measured."""

    fraction: float
    """Median over the rounds of geartrain's time over DDP's, less 1, and what geartrain's
    processes took from DDP meanwhile."""
    background_fraction: float
    """That part, as a fraction of both cores; may be below 0 by what can't be measured."""
    step_s: float
    ddp_step_s: float
    num_rounds: int
    steps_per_phase: int
    ratios: tuple[float, ...]
    """Of each round."""

    def as_json(self) -> dict[str, object]:
        """Without the single rounds."""
        return {
            "fraction": self.fraction,
            "background_fraction": self.background_fraction,
            "step_s": self.step_s,
            "ddp_step_s": self.ddp_step_s,
            "num_rounds": self.num_rounds,
            "steps_per_phase": self.steps_per_phase,
            "spread": max(self.ratios) - min(self.ratios),
        }


def measure_overhead(
    folder: Path, num_rounds: int, steps_per_phase: int, say: Say
) -> Overhead:
    """Measure in rounds of four phases: DDP, geartrain, geartrain, DDP.

    Args:
        folder: For what the jobs write.
        num_rounds: How many; each says one ratio.
        steps_per_phase: Steps of one order.
        say: Told what goes on.

    Raises:
        DeviceError: If a job does not start, or does not answer.
    """
    say(f"overhead: DDP and geartrain in turn on {_FLEET}")
    with ExitStack() as stack:
        desk = stack.enter_context(_Desk(folder / "orders"))
        jobs = {
            variant: stack.enter_context(_Job(variant, folder, desk))
            for variant in _OPTIONS
        }
        desk.await_workers([job.run for job in jobs.values()])
        for job in jobs.values():
            job.make_steps(_WARMUP_STEPS)
        rounds = []
        for index in range(num_rounds):
            rounds.append(_Round.measured(jobs, steps_per_phase))
            say(f"overhead {index + 1} of {num_rounds}: {rounds[-1].ratio - 1:+.1%}")
    background = statistics.mean(one.background_fraction for one in rounds)
    each = 2 * steps_per_phase
    return Overhead(
        fraction=statistics.median(one.ratio for one in rounds) - 1 + background,
        background_fraction=background,
        step_s=statistics.median(one.ours_s for one in rounds) / each,
        ddp_step_s=statistics.median(one.ddp_s for one in rounds) / each,
        num_rounds=num_rounds,
        steps_per_phase=steps_per_phase,
        ratios=tuple(one.ratio for one in rounds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Two phases of each, and what the job that waited used meanwhile."""

    ddp_s: float
    ours_s: float
    waiting_ours_s: float
    """Processor time of geartrain's processes while DDP computed."""
    waiting_ddp_s: float

    @property
    def ratio(self) -> float:
        """Geartrain's time over DDP's."""
        return self.ours_s / self.ddp_s

    @property
    def background_fraction(self) -> float:
        """What must be added, since each job was disturbed by the other one.

        A plain DDP job has no launcher; what that one used is taken off again.
        """
        ours = self.waiting_ours_s / (self.ddp_s * WORLD_SIZE)
        return ours - self.waiting_ddp_s / (self.ours_s * WORLD_SIZE)

    @classmethod
    def measured(cls, jobs: Mapping[Variant, _Job], num_steps: int) -> _Round:
        """Measure one: DDP, geartrain, geartrain, DDP."""
        ddp, ours = jobs["ddp"], jobs["geartrain"]
        first_s, first_used_s = _beside(ddp, ours, num_steps)
        second_s, second_used_s = _beside(ours, ddp, num_steps)
        third_s, third_used_s = _beside(ours, ddp, num_steps)
        last_s, last_used_s = _beside(ddp, ours, num_steps)
        return cls(
            ddp_s=first_s + last_s,
            ours_s=second_s + third_s,
            waiting_ours_s=first_used_s + last_used_s,
            waiting_ddp_s=second_used_s + third_used_s,
        )


def _beside(working: _Job, waiting: _Job, num_steps: int) -> tuple[float, float]:
    """Seconds of a phase, and processor time of the job that waited meanwhile."""
    before_s = waiting.processor_s()
    seconds = working.make_steps(num_steps)
    return seconds, max(0.0, waiting.processor_s() - before_s)


class _Desk:
    """Where the workers of both jobs fetch their orders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.workers: dict[tuple[Variant, int], socket.socket] = {}
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in self.workers.values():
            connection.close()
        self._listening.close()

    def await_workers(self, runs: Sequence[RunProcess]) -> None:
        deadline_s = time.monotonic() + _START_S
        self._listening.settimeout(1.0)
        while len(self.workers) < len(_OPTIONS) * WORLD_SIZE:
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                if any(run.has_ended for run in runs) or time.monotonic() > deadline_s:
                    msg = (
                        f"{len(self.workers)} of {len(_OPTIONS) * WORLD_SIZE} workers "
                        f"came within {_START_S:.0f} s; see {self.path.parent}"
                    )
                    raise DeviceError(msg) from None
                continue
            connection.settimeout(_PHASE_S)
            greeting = msgspec.json.decode(read_line(connection), type=Greeting)
            self.workers[greeting.variant, greeting.rank] = connection


class _Job:
    """One of the two jobs."""

    def __init__(self, variant: Variant, folder: Path, desk: _Desk) -> None:
        self._variant = variant
        self._desk = desk
        self._mark = secrets.token_hex(8)
        run_dir = folder / variant
        arguments = (f"--fleet={_FLEET}", f"--run-dir={run_dir}", "--oversubscribe")
        script = ("--json", str(WORKER), variant, str(desk.path))
        self.run = RunProcess(
            RunSettings(
                mark=self._mark,
                arguments=("run", *arguments, *_OPTIONS[variant], *script),
                run_dir=run_dir,
                log_path=folder / f"{variant}.log",
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in self._connections():  # the script ends at the end of its orders
            connection.close()
        self.run.stop(_STOP_S)
        self.run.close()
        end_marked(self._mark)

    def make_steps(self, num_steps: int) -> float:
        """Have all ranks make steps; the seconds of the slowest one."""
        connections = self._connections()
        for connection in connections:
            connection.sendall(b"%d\n" % num_steps)
        try:
            lines = [read_line(connection) for connection in connections]
        except (OSError, EOFError) as error:
            msg = f"{self._variant} did not make {num_steps} steps ({error})"
            raise DeviceError(msg) from error
        return max(msgspec.json.decode(line, type=Told).seconds for line in lines)

    def processor_s(self) -> float:
        """Processor time of all its processes so far."""
        return sum(_processor_s(process_id) for process_id in marked_processes(self._mark))

    def _connections(self) -> list[socket.socket]:
        workers = self._desk.workers
        return [c for (variant, _), c in workers.items() if variant == self._variant]


def read_line(connection: socket.socket) -> bytes:
    """Read up to a newline.

    Raises:
        EOFError: If the other side has closed before.
        OSError: If nothing comes in time.
    """
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(4096)
        if not piece:
            msg = "the connection was closed"
            raise EOFError(msg)
        data += piece
    return data


def _processor_s(process_id: int) -> float:
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:  # it ended meanwhile
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
