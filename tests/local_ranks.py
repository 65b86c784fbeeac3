"""Runs a test's function on several ranks: real processes over loopback.

The processes are forked from a clean server that has torch imported, so a rank starts in
tens of milliseconds and inherits no thread and no lock from the test's own process.
"""

import contextlib
import ctypes
import datetime as dt
import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

R = TypeVar("R")

_PR_SET_PDEATHSIG = 1
_JOIN_S = 5.0


class RankError(Exception):
    """A rank died, or raised what cannot be pickled; the text is all there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What a rank runs; the arguments are unpickled after the module is there."""

    rank: int
    world_size: int
    module_name: str
    module_path: str
    qualname: str
    pickled_args: bytes
    store_port: int
    stack_path: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How a rank ended."""

    at_s: float
    pickled_result: bytes | None = None
    pickled_error: bytes | None = None
    traceback_text: str = ""


def run_ranks(
    function: Callable[..., R],
    world_size: int,
    *args: object,
    timeout_s: float = 60.0,
    may_die: Collection[int] = (),
) -> list[R]:
    """Run ``function(rank, world_size, *args)`` on every rank at the same time.

    Every rank is a process of its own with one torch thread and gloo as the default process
    group. Arguments and results are pickled, so tensors are copied.

    Args:
        function: A function at the top level of the test's module.
        world_size: Processes to start.
        args: Further arguments, the same for all ranks.
        timeout_s: Deadline of the whole call.
        may_die: Ranks that may end without a result; theirs is None.

    Returns:
        The results, in the order of the ranks.

    Raises:
        Exception: What the first failing rank raised, its traceback added as a note.
        RankError: If a rank died.
        TimeoutError: After the deadline; the message says where the ranks were.
    """
    if "<locals>" in function.__qualname__:
        msg = f"{function.__qualname__} must be at the top level of its module"
        raise ValueError(msg)
    deadline_s = time.monotonic() + timeout_s
    # The store lives here, so that no rank's death takes it down.
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch doesn't re-export it
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        tasks = [
            _Task(
                rank=rank,
                world_size=world_size,
                module_name=function.__module__,
                module_path=inspect.getfile(function),
                qualname=function.__qualname__,
                pickled_args=pickle.dumps(args),
                store_port=store.port,
                stack_path=str(Path(folder) / f"{rank}.stack"),
                timeout_s=timeout_s,
            )
            for rank in range(world_size)
        ]
        with _started(tasks) as ranks:
            outcomes = _collect(ranks, tasks, deadline_s, may_die)
            for _, connection in ranks:
                with contextlib.suppress(OSError):
                    connection.send_bytes(b"end")
            for process, _ in ranks:
                process.join(_JOIN_S)
    return [_result(outcome) for outcome in outcomes]


@contextlib.contextmanager
def _started(tasks: list[_Task]) -> Iterator[list[tuple[ForkServerProcess, Connection]]]:
    context = multiprocessing.get_context("forkserver")
    # pytest is preloaded because each process imports the main module of its parent.
    context.set_forkserver_preload(
        [
            "torch",
            "torch.distributed",
            "pytest",
            "geartrain.session",
            "torch._dynamo",
            __name__,
        ]
    )
    ranks = []
    try:
        for task in tasks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_task, args=(task, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        yield ranks
    finally:
        for process, connection in ranks:
            process.kill()
            process.join()
            process.close()
            connection.close()


def _collect(
    ranks: list[tuple[ForkServerProcess, Connection]],
    tasks: list[_Task],
    deadline_s: float,
    may_die: Collection[int],
) -> list[_Outcome | None]:
    """Wait for every rank's outcome; the earliest error is raised at once."""
    outcomes: dict[int, _Outcome | None] = {}
    by_connection = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while len(outcomes) < len(ranks):
        waiting = [c for c, rank in by_connection.items() if rank not in outcomes]
        ready = wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            late = [by_connection[connection] for connection in waiting]
            raise TimeoutError(_timeout_message(tasks, late))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = by_connection[connection]
            outcomes[rank] = _receive(connection)
        _raise_earliest_error(outcomes)
        for rank, outcome in outcomes.items():
            if outcome is None and rank not in may_die:
                process = ranks[rank][0]
                process.join(_JOIN_S)
                msg = f"rank {rank} died with exit code {process.exitcode}"
                raise RankError(msg)
    return [outcomes[rank] for rank in range(len(ranks))]


def _receive(connection: Connection) -> _Outcome | None:
    try:
        outcome = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return None
    assert isinstance(outcome, _Outcome)
    return outcome


def _raise_earliest_error(outcomes: dict[int, _Outcome | None]) -> None:
    """Losing a peer raises too, later: the earliest error is the cause."""
    failed = [
        (outcome.at_s, rank, outcome)
        for rank, outcome in outcomes.items()
        if outcome is not None and outcome.pickled_result is None
    ]
    if not failed:
        return
    _, rank, outcome = min(failed, key=lambda entry: entry[:2])
    note = f"on rank {rank}:\n{outcome.traceback_text}"
    if outcome.pickled_error is None:
        raise RankError(note)
    error = pickle.loads(outcome.pickled_error)
    assert isinstance(error, BaseException)
    error.add_note(note)
    raise error


def _timeout_message(tasks: list[_Task], late: list[int]) -> str:
    stacks = []
    for rank in late:
        path = Path(tasks[rank].stack_path)
        text = path.read_text() if path.exists() else "(not started)"
        stacks.append(f"rank {rank}:\n{text}")
    return f"ranks {late} were not done after {tasks[0].timeout_s} s\n" + "\n".join(stacks)


def _result(outcome: _Outcome | None) -> Any:  # the caller's type
    if outcome is None:
        return None
    assert outcome.pickled_result is not None
    return pickle.loads(outcome.pickled_result)


def _run_task(task: _Task, connection: Connection) -> None:
    """Run in the child: all of the task, then wait until every rank is done."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may not resolve
    with Path(task.stack_path).open("w") as stack_file:
        faulthandler.dump_traceback_later(0.9 * task.timeout_s, file=stack_file)
        outcome = _outcome_of(task)
        faulthandler.cancel_dump_traceback_later()
    connection.send_bytes(pickle.dumps(outcome))
    # A rank that leaves early would break a peer's last collective.
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    if dist.is_initialized():
        dist.destroy_process_group()


def _outcome_of(task: _Task) -> _Outcome:
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch doesn't re-export it
            "127.0.0.1", task.store_port, is_master=False
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=task.rank,
            world_size=task.world_size,
            timeout=dt.timedelta(seconds=task.timeout_s),
        )
        function = _load(task)
        args = pickle.loads(task.pickled_args)
        result = pickle.dumps(function(task.rank, task.world_size, *args))
        return _Outcome(at_s=time.monotonic(), pickled_result=result)
    except BaseException as error:  # noqa: BLE001 - all of it goes to the test
        at_s = time.monotonic()
        text = traceback.format_exc()
        return _Outcome(at_s=at_s, pickled_error=_pickle_error(error), traceback_text=text)


def _load(task: _Task) -> Callable[..., object]:
    """Import the test's module from its file, under the name its pickles have."""
    if task.module_name not in sys.modules:
        parents = task.module_name.split(".")[:-1]
        for end in range(1, len(parents) + 1):
            # Unpickling looks at the packages too; pytest makes them up the same way.
            _ensure_package(".".join(parents[:end]))
        spec = importlib.util.spec_from_file_location(task.module_name, task.module_path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[task.module_name] = module
        spec.loader.exec_module(module)
    found: Any = sys.modules[task.module_name]  # any attribute may follow
    for name in task.qualname.split("."):
        found = getattr(found, name)
    assert callable(found)
    return found  # type: ignore[no-any-return]  # callable as checked


def _ensure_package(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        sys.modules[name] = types.ModuleType(name)


def _pickle_error(error: BaseException) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - an exception's own pickling may fail in any way
        return None
    return pickled
