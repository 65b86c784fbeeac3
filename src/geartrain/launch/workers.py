"""The workers of one run: started together, let go together, ended together."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from geartrain.launch.emulated_network import EmulatedNetwork
from geartrain.launch.handshake import GO, READY
from geartrain.launch.output import OutputPump
from geartrain.launch.processes import end_groups, peek_exit_code, start_module
from geartrain.launch.run_directory import (
    Contacts,
    incarnation_of,
    log_path,
    read_failure,
    read_loss,
    spec_path,
    threads_of,
    write_worker_spec,
)
from geartrain.launch.settings import LaunchObserver, LaunchSettings
from geartrain.launch.supervision import WorkerState
from geartrain.parallel.worker_spec import WorkerFailure, WorkerLoss


class Worker:
    """One worker process as the launcher sees it."""

    def __init__(
        self,
        settings: LaunchSettings,
        rank: int,
        observer: LaunchObserver,
        network: EmulatedNetwork,
    ) -> None:
        self._settings = settings
        self._network = network
        self._run_dir = settings.run_dir
        self._rank = rank
        self._device = settings.fleet.devices[rank]
        self._channel, remote = socket.socketpair()
        self._ready = False
        self._ended_at_s: float | None = None
        self._failure: WorkerFailure | None = None
        self._loss: WorkerLoss | None = None
        self._pumps: list[OutputPump] = []
        with remote:
            self.process = self._start(settings, remote.fileno(), rank)
        self._attach_pumps(observer)

    def _start(
        self, settings: LaunchSettings, remote_fd: int, rank: int
    ) -> subprocess.Popen[bytes]:
        threads = threads_of(self._device)
        options = [f"--launcher-fd={remote_fd}", f"--launcher-pid={os.getpid()}"]
        options += [] if threads is None else [f"--threads={threads}"]
        if self._network.host_of(self._device.device_id) is not None:
            options.append("--emulated-host")
        options += [f"--preload={name}" for name in settings.preload]
        return start_module(
            "geartrain.launch.worker",
            [
                *options,
                str(spec_path(self._run_dir, rank)),
                str(settings.script),
                *settings.arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(remote_fd,),
            place=partial(self._network.worker_command, self._device.device_id),
        )

    def _attach_pumps(self, observer: LaunchObserver) -> None:
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        assert err is not None
        path = log_path(self._run_dir, self._rank)
        self._pumps = [
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

    def write_spec(self, contacts: Contacts) -> None:
        """Write down what the worker reads once it is let go."""
        host = self._network.host_of(self._device.device_id)
        write_worker_spec(self._settings, self._rank, contacts, host=host)

    def poll_ready(self) -> bool:
        """Whether it has imported what it preloads and waits to be let go."""
        if not self._ready and select.select([self._channel], [], [], 0)[0]:
            self._ready = self._channel.recv(1) == READY
        return self._ready

    def let_go(self) -> None:
        """Have it run the script."""
        with suppress(BrokenPipeError):  # it ended meanwhile; the next state says so
            self._channel.sendall(GO)

    def ask_to_stop(self) -> None:
        """Ask its session to save and stop at the next step boundary."""
        if self.process.returncode is None and peek_exit_code(self.process) is None:
            # Not the group: what the script started does not know the signal.
            os.kill(self.process.pid, signal.SIGUSR1)

    def state(self, out_of_memory_kills: int) -> WorkerState:
        """What is known of it now."""
        exit_code = peek_exit_code(self.process)
        if exit_code is not None and self._ended_at_s is None:
            self._ended_at_s = time.time()
        if self._failure is None:
            self._failure = read_failure(self._run_dir, self._rank)
        if self._loss is None:
            self._loss = read_loss(self._run_dir, incarnation_of(self._rank, 0))
        return WorkerState(
            rank=self._rank,
            device_id=self._device.device_id,
            exit_code=exit_code,
            ended_at_s=self._ended_at_s,
            failure=self._failure,
            out_of_memory_kills=out_of_memory_kills,
            loss=self._loss,
        )

    def kill(self) -> None:
        """Kill it and all that it started: the others go on without it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def finish_output(self) -> None:
        """Close the channel and hand on the rest of the output, once it has ended."""
        self._channel.close()
        for pump in self._pumps:
            pump.join()


class WorkerGroup:
    """All workers of a run."""

    def __init__(
        self, settings: LaunchSettings, observer: LaunchObserver, network: EmulatedNetwork
    ) -> None:
        self.workers: list[Worker] = []
        with ExitStack() as on_error:
            on_error.callback(self.close)
            for rank in range(len(settings.fleet.devices)):
                self.workers.append(Worker(settings, rank, observer, network))
            on_error.pop_all()

    def close(self) -> None:
        """End those that still run and all they started."""
        end_groups([worker.process for worker in self.workers])
        for worker in self.workers:
            worker.finish_output()


def tail_of_log(run_dir: Path, rank: int, num_lines: int = 20) -> str:
    """The last lines that a worker printed."""
    try:
        text = log_path(run_dir, rank).read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:])
