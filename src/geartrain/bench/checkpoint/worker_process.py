"""Runs one of the benchmark's modules in a process of its own. Torch-free."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from geartrain.errors import DeviceError

Say = Callable[[str], None]
T = TypeVar("T")

_PACKAGE = "geartrain.bench.checkpoint"
_LOOK_S = 0.2
_SHOWN_BYTES = 3000


def run_workers(module: str, orders: Sequence[object], limit_s: float) -> None:
    """Run a module once for each order, all at the same time.

    Args:
        module: Of this package.
        orders: Dataclasses of ``orders``.
        limit_s: For all of them.

    Raises:
        DeviceError: If one fails, with the end of what it wrote, or they take longer.
    """
    deadline_at_s = time.monotonic() + limit_s
    with ExitStack() as stack:
        started = [stack.enter_context(_Worker(module, order)) for order in orders]
        for worker in started:
            # One that fails leaves the others waiting for it: look at all in turn.
            while not worker.has_ended(_LOOK_S):
                for other in started:
                    other.check()
                if time.monotonic() > deadline_at_s:
                    msg = f"{module} took longer than {limit_s:g} s; try with less load"
                    raise DeviceError(msg)
            worker.check()


def read_result(path: str | Path, kind: type[T]) -> T:
    """Read what a worker found."""
    return msgspec.json.decode(Path(path).read_bytes(), type=kind)


def read_order(kind: type[T]) -> T:
    """In a worker: what it is told."""
    return msgspec.json.decode(sys.argv[1], type=kind)


def write_result(path: str, found: object) -> None:
    """In a worker: tell."""
    Path(path).write_bytes(msgspec.json.encode(found))


class _Worker:
    def __init__(self, module: str, order: object) -> None:
        self._name = module
        self._errors = b""
        command = (sys.executable, "-m", f"{_PACKAGE}.{module}")
        self._process = subprocess.Popen(
            (*command, msgspec.json.encode(order).decode()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def has_ended(self, limit_s: float) -> bool:
        try:
            _, self._errors = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def check(self) -> None:
        if self._process.poll():
            if not self._errors:
                self.has_ended(_LOOK_S)
            text = self._errors[-_SHOWN_BYTES:].decode(errors="replace")
            msg = f"{self._name} failed with {self._process.returncode}: {text}"
            raise DeviceError(msg)
