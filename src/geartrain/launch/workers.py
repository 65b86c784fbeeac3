"""The workers of one run: started together, let go together, ended together."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from geartrain.devices.profile import DeviceProfile, Fleet
from geartrain.launch.emulated_network import EmulatedNetwork
from geartrain.launch.handshake import GO, READY
from geartrain.launch.output import OutputPump
from geartrain.launch.run_directory import (
    Contacts,
    Seat,
    failure_path,
    grow_fleet,
    log_path,
    read_failure,
    read_loss,
    spec_path,
    threads_of,
    write_worker_spec,
)
from geartrain.launch.settings import LaunchObserver, LaunchSettings
from geartrain.launch.situation import WorkerState
from geartrain.launch.spare_pool import SparePool
from geartrain.launch.spares import WorkerOrder
from geartrain.launch.started_worker import StartedWorker, Way, end_workers
from geartrain.parallel.worker_spec import WorkerFailure, WorkerLoss


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all workers of a run share."""

    settings: LaunchSettings
    observer: LaunchObserver
    network: EmulatedNetwork
    spares: SparePool
    """Where workers come from that are started later."""


class Worker:
    """One process of one rank, as the launcher sees it.

    Args:
        around: Of the run.
        seat: Which device it works.
    """

    def __init__(self, around: Surroundings, seat: Seat) -> None:
        self.seat = seat
        self.rank = seat.rank
        self.device = around.settings.fleet.devices[seat.rank]
        self.started_at_s = time.monotonic()
        self.has_entered = not seat.joins
        """Whether it takes part; who joins does not at once."""
        self.is_away = False
        """Whether the others go on without it, for good; it may still run."""
        self.was_let_go = False
        self._settings = around.settings
        self._network = around.network
        self._run_dir = around.settings.run_dir
        self._channel, remote = socket.socketpair()
        self._ready = False
        self._ended_at_s: float | None = None
        self._failure: WorkerFailure | None = None
        self._loss: WorkerLoss | None = None
        with remote:
            self._process = self._start(around, remote)
        try:
            self._pumps = self._attach_pumps(around.observer)
        except OSError:  # its log can't be written
            end_workers([self._process], grace_s=0.0)
            self._channel.close()
            raise

    @property
    def process_id(self) -> int:
        """Of the process, which is also that of its group."""
        return self._process.pid

    @property
    def way(self) -> Way:
        """How it was started."""
        return self._process.way

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self._process.peek_exit_code() is None

    @property
    def process(self) -> StartedWorker:
        """The process itself."""
        return self._process

    def _start(self, around: Surroundings, remote: socket.socket) -> StartedWorker:
        host = self._network.host_of(self.device.device_id)
        order = WorkerOrder(
            spec=spec_path(self._run_dir, self.rank),
            script=self._settings.script,
            arguments=self._settings.arguments,
            threads=threads_of(self.device),
            namespace=None if host is None else host.namespace,
        )
        outputs = (subprocess.PIPE, subprocess.PIPE)
        place = partial(self._network.worker_command, self.device.device_id)
        return around.spares.start(order, remote, outputs, place=place)

    def _attach_pumps(self, observer: LaunchObserver) -> list[OutputPump]:
        out, err = self._process.stdout, self._process.stderr
        assert out is not None
        assert err is not None
        path = log_path(self._run_dir, self.rank)
        return [
            OutputPump(out, "stdout", path, observer),
            OutputPump(err, "stderr", path, observer),
        ]

    def show_output(self, since_s: float) -> None:
        """Show the user what it prints; it leads.

        Args:
            since_s: Unix time from when on it does.
        """
        for pump in self._pumps:
            pump.show_since(since_s)

    def hide_output(self) -> None:
        """Show no more of it: another one leads."""
        for pump in self._pumps:
            pump.hide()

    def poll_ready(self) -> bool:
        """Whether it has imported what it preloads and waits to be let go."""
        if not self._ready and select.select([self._channel], [], [], 0)[0]:
            with suppress(ConnectionResetError):  # it was killed
                self._ready = self._channel.recv(1) == READY
        return self._ready

    def let_go(self) -> None:
        """Have it run the script."""
        self.was_let_go = True
        with suppress(BrokenPipeError):  # it ended meanwhile; the next state says so
            self._channel.sendall(GO)

    def ask_to_stop(self) -> None:
        """Ask its session to save and stop at the next step boundary."""
        if self._process.peek_exit_code() is None:
            # Not the group: what the script started does not know the signal.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)

    def state(self, out_of_memory_kills: int, *, returns: bool = False) -> WorkerState:
        """What is known of it now.

        Args:
            out_of_memory_kills: Of its device, so far.
            returns: Whether the rank is to get another process.
        """
        exit_code = self._process.peek_exit_code()
        if exit_code is not None and self._ended_at_s is None:
            self._ended_at_s = time.time()
        if self._failure is None:
            self._failure = read_failure(self._run_dir, self.rank)
        if self._loss is None:
            self._loss = read_loss(self._run_dir, self.seat.incarnation)
        return WorkerState(
            rank=self.rank,
            device_id=self.device.device_id,
            exit_code=exit_code,
            ended_at_s=self._ended_at_s,
            failure=self._failure,
            out_of_memory_kills=out_of_memory_kills,
            loss=self._loss,
            has_entered=self.has_entered,
            is_away=self.is_away,
            returns=returns,
        )

    def kill(self) -> None:
        """Kill it and all that it started: the others go on without it."""
        self._process.signal_group(signal.SIGKILL)

    def dismiss(self) -> None:
        """Take away what is left of one that has ended; its output is still read."""
        end_workers([self._process], grace_s=0.0)
        self._channel.close()

    def finish_output(self) -> None:
        """Close the channel and hand on the rest of the output, once it has ended."""
        self._channel.close()
        for pump in self._pumps:
            pump.join()


def write_spec(around: Surroundings, seat: Seat, contacts: Contacts) -> None:
    """Write down what a worker reads once it is let go.

    Raises:
        ConfigError: If the file can't be written.
    """
    settings = around.settings
    host = around.network.host_of(settings.fleet.devices[seat.rank].device_id)
    write_worker_spec(settings, seat, contacts, host=host)


class WorkerGroup:
    """All workers of a run.

    Attributes:
        workers: The latest one of each rank.
    """

    def __init__(self, around: Surroundings) -> None:
        self.workers: list[Worker] = []
        self._around = around
        self._past: list[Worker] = []
        with ExitStack() as on_error:
            on_error.callback(self.close)
            for rank in range(len(around.settings.fleet.devices)):
                self.workers.append(Worker(around, Seat(rank)))
            on_error.pop_all()

    @property
    def fleet(self) -> Fleet:
        """All devices that have been in the run, in rank order."""
        return self._around.settings.fleet

    def add(self, device: DeviceProfile, contacts: Contacts) -> None:
        """Start a worker of one more device, to be let go later.

        Args:
            device: The last one of the fleet from now on.
            contacts: Whom its worker turns to.

        Raises:
            ConfigError: If the fleet can't grow.
            OSError: If there is no process to be had, or no log.
        """
        fleet = replace(self.fleet, devices=(*self.fleet.devices, device))
        settings = replace(self._around.settings, fleet=fleet)
        grow_fleet(settings.run_dir, device)
        self._around = replace(self._around, settings=settings)
        seat = Seat(len(self.workers), joins=True)
        write_spec(self._around, seat, contacts)
        self.workers.append(Worker(self._around, seat))

    def write_specs(self, contacts: Contacts) -> None:
        """Write down what all workers read once they are let go."""
        for worker in self.workers:
            write_spec(self._around, worker.seat, contacts)

    def start_again(self, rank: int, contacts: Contacts) -> Worker:
        """Start another process of a rank whose last one has ended, to be let go later.

        Raises:
            ConfigError: If its files can't be written.
            OSError: If there is no process to be had, or no log.
        """
        before = self.workers[rank]
        before.dismiss()
        seat = Seat(rank, before.seat.num_starts + 1, joins=True)
        write_spec(self._around, seat, contacts)
        failure_path(self._around.settings.run_dir, rank).unlink(missing_ok=True)
        worker = Worker(self._around, seat)
        self._past.append(before)
        self.workers[rank] = worker
        return worker

    def close(self) -> None:
        """End those that still run and all they started."""
        end_workers([worker.process for worker in self.workers])
        for worker in (*self.workers, *self._past):
            worker.finish_output()


def tail_of_log(run_dir: Path, rank: int, num_lines: int = 20) -> str:
    """The last lines that a worker printed."""
    try:
        text = log_path(run_dir, rank).read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:])
