"""The worker processes of one lab: started together, asked together, ended together.

They are forked from a server that has imported torch already, since eight interpreters
that import it anew take a slow machine half a minute.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol, Self

from geartrain.bench.comm.messages import Member, Order, Report
from geartrain.devices.emulation.network import HUB, NetworkLab, enter
from geartrain.errors import DeviceError
from geartrain.launch.parent_death import die_with_parent
from geartrain.telemetry import decode_document, encode_document

_WORKER_MODULE = "geartrain.bench.comm.worker"
_PRELOAD = ("torch", "torch.distributed", _WORKER_MODULE)
_START_S = 120.0
"""The first start imports torch, on whatever the machine has left."""
_END_S = 2.0
_LOOPBACK = "127.0.0.1"


class Answers(Protocol):
    """What runs in a worker process."""

    def handle(self, order: Order) -> Report:
        """Carry an order out."""


class Crew:
    """A worker a rank, as long as a ``with`` block lasts.

    Args:
        host_of_rank: The lab's host of each rank.
        lab: Where; None: all ranks are on this host.

    Raises:
        DeviceError: If they do not start, or one fails or dies later; the message holds
            its traceback, or the end of what it printed.
    """

    def __init__(self, host_of_rank: Sequence[int], lab: NetworkLab | None) -> None:
        self._host_of_rank = tuple(host_of_rank)
        self._lab = lab
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_PRELOAD))
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []
        self._stack = ExitStack()
        self._folder = Path()

    def __enter__(self) -> Self:
        with ExitStack() as on_error:
            on_error.callback(self.close)
            folder = tempfile.TemporaryDirectory(prefix="geartrain-bench-")
            self._folder = Path(self._stack.enter_context(folder))
            port = self._start_store()
            for member in self._members(port):
                self._start(member)
            on_error.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        for connection in self._connections:
            connection.close()
        deadline_at_s = time.monotonic() + _END_S
        for process in self._processes:
            process.join(max(0.0, deadline_at_s - time.monotonic()))
            process.kill()
            process.join()
            process.close()
        self._processes.clear()
        self._connections.clear()
        self._stack.close()

    def ask(self, order: Order, timeout_s: float) -> list[Report]:
        """Have all ranks carry out an order; their reports, in rank order.

        Raises:
            DeviceError: As above, also if one does not answer in time.
        """
        data = encode_document(order)
        for rank, connection in enumerate(self._ranks):
            try:
                connection.send_bytes(data)
            except OSError as error:
                raise DeviceError(self._death(rank)) from error
        reports: dict[int, Report] = {}
        deadline_at_s = time.monotonic() + timeout_s
        while len(reports) < len(self._ranks):
            waiting = [c for rank, c in enumerate(self._ranks) if rank not in reports]
            ready = wait(waiting, max(0.0, deadline_at_s - time.monotonic()))
            if not ready:
                late = [r for r in range(len(self._ranks)) if r not in reports]
                msg = (
                    f"ranks {late} did not answer {order.verb!r} within {timeout_s:.0f} s; "
                    "try again with less load on this machine"
                )
                raise DeviceError(msg)
            for rank, connection in enumerate(self._ranks):
                if connection in ready:
                    reports[rank] = self._receive(rank, connection)
        return [reports[rank] for rank in range(len(self._ranks))]

    @property
    def _ranks(self) -> list[Connection]:
        return self._connections[1:]  # the first one is the store's

    def _receive(self, rank: int, connection: Connection) -> Report:
        try:
            report = decode_document(connection.recv_bytes(), Report, f"rank {rank}")
        except (EOFError, ConnectionError) as error:
            raise DeviceError(self._death(rank)) from error
        if report.error:
            msg = f"rank {rank} failed:\n{report.error}"
            raise DeviceError(msg)
        return report

    def _death(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            printed = self._log(rank).read_text(errors="replace").splitlines()[-20:]
            return f"rank {rank} died; it printed last:\n" + "\n".join(printed)
        return f"rank {rank} died and printed nothing"

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _members(self, store_port: int) -> list[Member]:
        lab, hosts = self._lab, self._host_of_rank
        num_ranks = len(hosts)
        if lab is None:
            racks: tuple[tuple[int, ...], ...] = (tuple(range(num_ranks)),)
        else:
            racks = tuple(
                tuple(hosts.index(h) for h in sorted(hosts) if lab.spec.rack_of(h) == rack)
                for rack in range(len(lab.spec.racks))
            )
        return [
            Member(
                rank=rank,
                world_size=num_ranks,
                address=_LOOPBACK if lab is None else lab.host(host).address,
                store_address=self._store_address,
                store_port=store_port,
                racks=racks,
                namespace="" if lab is None else lab.host(host).namespace,
            )
            for rank, host in enumerate(hosts)
        ]

    @property
    def _store_address(self) -> str:
        return _LOOPBACK if self._lab is None else self._lab.host(HUB).address

    def _start_store(self) -> int:
        namespace = "" if self._lab is None else self._lab.host(HUB).namespace
        ours, theirs = self._context.Pipe()
        self._run(_host_store, (theirs, namespace, self._store_address), ours, theirs)
        if not ours.poll(_START_S):
            msg = f"the rendezvous store did not start within {_START_S:.0f} s; try again"
            raise DeviceError(msg)
        return int(ours.recv_bytes())

    def _start(self, member: Member) -> None:
        ours, theirs = self._context.Pipe()
        log = str(self._log(member.rank))
        self._run(_work, (theirs, encode_document(member), log), ours, theirs)

    def _run(
        self, target: object, args: tuple[object, ...], ours: Connection, theirs: Connection
    ) -> None:
        process = self._context.Process(target=target, args=args, daemon=True)  # type: ignore[arg-type]  # _host_store or _work
        process.start()
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)


def _settle(namespace: str) -> None:
    """In a new process: it ends with its parent, and Ctrl-C is for the benchmark."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if namespace:
        enter(namespace)


def _host_store(connection: Connection, namespace: str, address: str) -> None:
    from geartrain.launch.store_server import open_store  # noqa: PLC0415 - beside torch

    _settle(namespace)
    store = open_store(address)
    connection.send_bytes(str(store.port).encode())
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(0)  # torch's clean-up may wait for clients


def _work(connection: Connection, member_document: bytes, log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    member = decode_document(member_document, Member)
    _settle(member.namespace)
    worker = importlib.import_module(_WORKER_MODULE)
    with contextlib.suppress(EOFError, OSError):
        worker.serve(member, connection)
    os._exit(0)  # process groups may wait for peers that are gone
