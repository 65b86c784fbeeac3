"""The coordinator as a process: ``python -m geartrain.elastic.process --journal FILE ...``.

It is started by the launcher and comes back from its journal, at the port that it had if
that is free. What it needs to say goes to stderr, where it listens into a file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from geartrain.elastic.address_file import (
    CoordinatorAddress,
    read_address,
    write_address,
)
from geartrain.elastic.awake_clock import AwakeClock
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.journal import Journal
from geartrain.elastic.limits import Limits
from geartrain.elastic.machine import handle
from geartrain.elastic.server import LONGEST_AWAKE_STEP_S, Decisions, Server, bind
from geartrain.elastic.state import resume
from geartrain.errors import CommunicationError, ConfigError, GeartrainError

if TYPE_CHECKING:
    import socket

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.02
# A predecessor that is being killed gives its lock and port up within this.
_PATIENCE_S = 3.0
_SHORTEST_TOKEN_BYTES = 16
_OTHERS_MODE = 0o077


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; the exit status."""
    options = _parse(arguments)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    try:
        if options.parent is not None:
            _die_with(options.parent)
        _allow_many_connections()
        _await_predecessor(Path(f"{options.journal}.lock"))
        asyncio.run(_serve(options))
    except (GeartrainError, OSError) as error:
        logger.error("the coordinator ends: %s", error)  # noqa: TRY400 - for people
        return 1
    return 0


async def _serve(options: argparse.Namespace) -> None:
    credentials = Credentials(run_id=options.run_id, token=read_token(options.token_file))
    limits = _read_limits(options.limits)
    # The journal first: it is what a second coordinator is refused by.
    with (
        contextlib.closing(Journal(options.journal)) as journal,
        contextlib.closing(_listen(options, credentials)) as listening,
    ):
        clock = AwakeClock(LONGEST_AWAKE_STEP_S)
        state = resume(journal.records, limits, clock.now_s())
        decisions = Decisions(handle=handle, state=state, ledger=journal, clock=clock)
        server = Server(listening, credentials, decisions)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
        host, port = listening.getsockname()[:2]
        address = CoordinatorAddress(host=host, port=port, process_id=os.getpid())
        write_address(options.address_file, address)
        await server.serve()


def read_token(path: Path | None) -> bytes:
    """The run's token, from a file that nobody else may read.

    Raises:
        ConfigError: If others may read it, or it is too short to be one.
        OSError: If it can't be read.
    """
    if path is None:
        return b""
    if path.stat().st_mode & _OTHERS_MODE:
        msg = f"{path} may be read by others; chmod 600 {path}"
        raise ConfigError(msg)
    token = path.read_bytes().strip()
    if len(token) < _SHORTEST_TOKEN_BYTES:
        msg = (
            f"{path} holds {len(token)} bytes, a token has at least "
            f"{_SHORTEST_TOKEN_BYTES}; write secrets.token_hex(16) into it"
        )
        raise ConfigError(msg)
    return token


def _read_limits(text: str | None) -> Limits:
    try:
        return msgspec.json.decode(text, type=Limits) if text else Limits()
    except msgspec.DecodeError as error:
        msg = f"--limits {text!r} is not understood ({error}); see elastic/limits.py"
        raise ConfigError(msg) from error


def _listen(options: argparse.Namespace, credentials: Credentials) -> socket.socket:
    """At the port asked for, else at the one of the predecessor, else at any."""
    if options.port:
        return _bind_patiently(options.host, options.port, credentials)
    with contextlib.suppress(CommunicationError):
        before = read_address(options.address_file)
        if before.host == options.host:
            with contextlib.suppress(OSError):
                return _bind_patiently(options.host, before.port, credentials)
    return bind(options.host, 0, credentials)


def _bind_patiently(host: str, port: int, credentials: Credentials) -> socket.socket:
    gives_up_at_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return bind(host, port, credentials)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > gives_up_at_s:
                raise
        time.sleep(_LOOK_S)


def _await_predecessor(lock_path: Path) -> None:
    """Wait a moment for a coordinator that ends; the journal refuses one that does not."""
    gives_up_at_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < gives_up_at_s:
        try:
            with lock_path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
        except FileNotFoundError:
            return
        except BlockingIOError:
            time.sleep(_LOOK_S)


def _die_with(parent_id: int) -> None:
    """End when the process that has started this one does (Linux; prctl(2))."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_id:
        os.kill(os.getpid(), signal.SIGKILL)


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="geartrain.elastic.process")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--address-file", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: the last one, or any")
    parser.add_argument("--token-file", type=Path, help="mode 0600; needed beyond loopback")
    parser.add_argument("--limits", help="JSON; what is not in it has its default")
    parser.add_argument("--parent", type=int, help="process id; end when it does")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
