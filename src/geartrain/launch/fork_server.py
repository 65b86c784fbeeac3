"""A process that has imported all a worker needs, and becomes workers in milliseconds.

``python -m geartrain.launch.fork_server``, started by the launcher only. It imports
what workers preload, makes an optimizer's first step, and waits. Asked for a worker it
forks, or, with ``--once``, becomes that worker itself: what cannot be forked is an
accelerator's runtime, so for those a process is kept warm instead.

It holds no device context and runs no second thread, since a fork keeps only the
thread that forks, and with it every lock that another one held.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from geartrain.launch.parent_death import die_with_parent
from geartrain.launch.spare_messages import (
    MessageChannel,
    ReapWorker,
    SpareReady,
    StartWorker,
    WorkerEnded,
    WorkerRefused,
    WorkerStarted,
)

_SEND_S = 5.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""OpenBLAS starts its threads while numpy is imported; all others when first used."""
_TASKS_DIR = Path("/proc/self/task")


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """What a process is to become, and by which files it talks."""

    order: StartWorker
    files: tuple[int, ...]
    """stdout, stderr, socket to the launcher, claim."""
    parent_id: int
    is_forked: bool


def main() -> None:
    """Warm up, then serve until the launcher goes or a worker is to begin."""
    options = _parse(sys.argv[1:])
    die_with_parent(options.owner_pid)
    if not options.once and options.kept is None:
        _begin_again()
    channel = MessageChannel(socket.socket(fileno=options.control_fd))
    if options.emulated_hosts:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # see launch.worker
    began_s = time.monotonic()
    warm_up(options.preload, forks=not options.once)
    if options.kept is not None:
        _give_back(options.kept)
    ready = SpareReady(warm_up_s=time.monotonic() - began_s, num_threads=count_threads())
    channel.send(ready, within_s=_SEND_S)
    if options.once:
        birth = _wait_for_order(channel, options.owner_pid)
    else:
        birth = ForkServer(channel).serve()
    if birth is None:
        os._exit(0)  # nothing to save, and dismantling torch takes seconds
    become(birth)


def warm_up(preload: list[str], *, forks: bool) -> None:
    """Import what workers need and make an optimizer's first step.

    The first AdamW loads torch._dynamo, which takes as long as torch itself. Gradients
    are given, not computed: on a machine with accelerators the first backward starts
    autograd's threads, after which torch refuses to work in a fork.

    Args:
        preload: Modules to import.
        forks: Whether this process will fork.
    """
    for name in preload:
        importlib.import_module(name)
    torch = sys.modules.get("torch")
    if torch is not None:
        _first_step(torch)
    gc.collect()
    if forks:
        # What is alive now is never freed in a fork: pages stay shared, and the
        # collector has nothing to go through. Source: the documentation of gc.freeze.
        gc.freeze()


def count_threads() -> int:
    """Threads of this process, those of libraries included; 1 where nobody says."""
    try:
        return len(os.listdir(_TASKS_DIR))  # noqa: PTH208 - counted, never opened
    except OSError:
        return 1


def become(birth: Birth) -> None:
    """Turn this process into the worker: its output, its place, its device's limits.

    Does not return before the user's script has ended.
    """
    from geartrain.launch import worker  # noqa: PLC0415 - launch.worker is a main module

    order, claim = birth.order, birth.files[3]
    if not os.read(claim, 1):
        os._exit(0)  # the order was withdrawn: this process woke up too late
    os.close(claim)
    for target, file in zip((1, 2), birth.files[:2], strict=True):
        os.dup2(file, target)
        os.close(file)
    try:
        if birth.is_forked:
            _leave_the_server_behind()
        _take_place(order)
    except Exception:  # noqa: BLE001 - told to whoever reads the worker's output
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.argv = [
        "geartrain.launch.worker",
        f"--launcher-fd={birth.files[2]}",
        f"--launcher-pid={birth.parent_id}",
        *order.arguments,
    ]
    worker.main()


class ForkServer:
    """Forks workers, watches them, and says how they ended.

    A worker that has ended stays a zombie until it is reaped on request, so that its
    number, which is also its group's, can't be given to somebody else before.
    """

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._handles: dict[int, int] = {}  # of living workers, by process id
        self._dead: set[int] = set()
        self._unwanted: set[int] = set()

    def serve(self) -> Birth | None:
        """Serve until the launcher is gone.

        Returns:
            None then; in a forked process what it is to become.
        """
        while not self._channel.has_ended:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._tell_end(key.data)
                    continue
                for message, files in self._channel.receive():
                    if isinstance(message, ReapWorker):
                        self._reap(message.process_id)
                    elif isinstance(message, StartWorker):
                        birth = self._start(message, files)
                        if birth is not None:
                            return birth
        return None

    def _start(self, order: StartWorker, files: tuple[int, ...]) -> Birth | None:
        num_threads = count_threads()
        if num_threads != 1:
            reason = f"{num_threads} threads run in the fork server; 1 can be forked"
            self._refuse(order, files, reason)
            return None
        parent_id = os.getpid()
        try:
            process_id = os.fork()
        except OSError as error:
            self._refuse(order, files, f"fork: {error.strerror}")
            return None
        if process_id == 0:
            self._close()
            return Birth(order=order, files=files, parent_id=parent_id, is_forked=True)
        for file in files:
            os.close(file)
        handle = os.pidfd_open(process_id)
        self._handles[process_id] = handle
        self._selector.register(handle, selectors.EVENT_READ, process_id)
        answer = WorkerStarted(order_id=order.order_id, process_id=process_id)
        self._channel.send(answer, within_s=_SEND_S)
        return None

    def _refuse(self, order: StartWorker, files: tuple[int, ...], reason: str) -> None:
        for file in files:
            os.close(file)
        answer = WorkerRefused(order_id=order.order_id, reason=reason)
        self._channel.send(answer, within_s=_SEND_S)

    def _tell_end(self, process_id: int) -> None:
        status = os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return  # not quite dead yet; the handle stays readable
        handle = self._handles.pop(process_id)
        self._selector.unregister(handle)
        os.close(handle)
        self._dead.add(process_id)
        exited = status.si_code == os.CLD_EXITED
        exit_code = status.si_status if exited else -status.si_status
        ended = WorkerEnded(process_id=process_id, exit_code=exit_code)
        self._channel.send(ended, within_s=_SEND_S)
        if process_id in self._unwanted:
            self._reap(process_id)

    def _reap(self, process_id: int) -> None:
        if process_id in self._dead:
            os.waitpid(process_id, 0)
            self._dead.discard(process_id)
            self._unwanted.discard(process_id)
        elif process_id in self._handles:
            self._unwanted.add(process_id)  # as soon as it has ended

    def _close(self) -> None:
        """Close what is the server's, in a process that was forked from it."""
        self._selector.close()
        self._channel.close()
        for handle in self._handles.values():
            os.close(handle)


def _wait_for_order(channel: MessageChannel, owner_id: int) -> Birth | None:
    """Wait for the one order of a process that does not fork."""
    while not channel.has_ended:
        # No deadline: it ends with the launcher, which the kernel sees to.
        for message, files in channel.receive(within_s=3600.0):
            if isinstance(message, StartWorker):
                started = WorkerStarted(order_id=message.order_id, process_id=os.getpid())
                channel.send(started, within_s=_SEND_S)
                channel.close()
                return Birth(
                    order=message, files=files, parent_id=owner_id, is_forked=False
                )
    return None


def _leave_the_server_behind() -> None:
    """Undo what a fork shares with its server and a new process would not."""
    os.setsid()  # the launcher signals a worker and all it starts as one group
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    gc.enable()
    # From the system, as in a new process; else all workers would draw the same.
    # Python's own generator does it by itself.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _take_place(order: StartWorker) -> None:
    for path in order.cgroup_files:
        procs = os.open(path, os.O_WRONLY)  # never creates it
        try:
            os.write(procs, b"0")  # the process that writes
        finally:
            os.close(procs)
    if order.namespace is not None:
        from geartrain.devices.emulation.network.namespaces import (  # noqa: PLC0415
            enter,
        )

        enter(order.namespace)
    os.chdir(order.directory)
    torch = sys.modules.get("torch")
    if torch is not None and order.threads is not None:
        torch.set_num_threads(order.threads)


def _first_step(torch: Any) -> None:  # Any: a module
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()


def _begin_again() -> None:
    """Start this program anew, in an environment in which libraries start no threads.

    OpenBLAS, which numpy brings, starts its own while it is loaded, and that was before
    ``main``: the package around this module needs numpy.
    """
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    kept = msgspec.json.encode(before).decode()
    environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, "1")
    command = [sys.executable, *sys.orig_argv[1:], f"--kept={kept}"]
    os.execve(command[0], command, environment)  # noqa: S606 - itself


def _give_back(kept: str) -> None:
    """Put the variables back, for what scripts start, once the libraries are loaded."""
    for name, value in msgspec.json.decode(kept, type=dict[str, str | None]).items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="geartrain.launch.fork_server")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--owner-pid", type=int, required=True)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--emulated-hosts", action="store_true")
    parser.add_argument("--kept")
    parser.add_argument("--preload", action="append", default=[])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
