"""``python -m geartrain.checkpoint.agent.process``: a node agent as a process.

Settings and token come through stdin, one JSON object on one line; stdin then stays open
as a lifeline. Where it listens is said on stdout, one JSON object on one line. When the
lifeline ends, so does the agent after ``linger_s``; memory goes back with it.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from geartrain.checkpoint.agent.server import AgentServer
from geartrain.checkpoint.agent.settings import AgentSettings
from geartrain.errors import CommunicationError, GeartrainError

START_LIMIT_S = 30.0
_NICENESS = 10
"""Below the trainer's priority: what an agent does is never urgent. It gets a tenth of a
core that a trainer wants, too, which is enough to answer in time."""
_AUTOGROUP = Path("/proc/self/autogroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Orders:
    settings: AgentSettings
    token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """Where an agent is reached."""

    local_address: str
    """By trainers of this host."""
    peer_address: str
    """By other agents: ``HOST:PORT``."""


@dataclass(slots=True, eq=False)
class AgentProcess:
    """A running agent; ``close`` ends it, and so does the end of this process."""

    process: subprocess.Popen[bytes]
    place: AgentPlace

    def close(self, limit_s: float = 5.0) -> None:
        """Let it end, at the latest after the limit."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def start_agent(
    settings: AgentSettings,
    token: str = "",
    place: Callable[[Sequence[str]], Sequence[str]] = list,
) -> AgentProcess:
    """Start an agent and wait until it listens.

    Args:
        settings: How it listens.
        token: Shared by all agents of a run; goes through a pipe, never by argument.
        place: Turns its command line into one that runs where it is to listen, such as in
            an emulated host's network.

    Raises:
        ConfigError: If it would listen beyond loopback without a token.
        CommunicationError: If it does not come up in time.
    """
    settings.check_token(token)
    process = subprocess.Popen(
        place([sys.executable, "-m", "geartrain.checkpoint.agent.process"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the trainer; the agent outlives it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    orders = _Orders(settings=settings, token=token)
    try:
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        process.stdin.flush()
        line = _read_line(process.stdout.fileno(), time.monotonic() + START_LIMIT_S)
        found = msgspec.json.decode(line, type=AgentPlace)
    except (OSError, msgspec.DecodeError) as error:
        process.kill()
        process.wait()
        msg = (
            f"the agent of {settings.node_id} did not come up ({error}); see what it wrote "
            "to this process's error stream"
        )
        raise CommunicationError(msg) from error
    return AgentProcess(process, found)


def main() -> int:
    """Run an agent until its lifeline ends."""
    logging.basicConfig(level=logging.WARNING, format="agent: %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Orders)
        server = AgentServer(orders.settings, orders.token)
    except (msgspec.DecodeError, GeartrainError) as error:
        logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - for a person
        return 2
    _step_back()
    place = {"local_address": server.local_address, "peer_address": server.peer_address}
    sys.stdout.write(json.dumps(place) + "\n")
    sys.stdout.flush()
    while sys.stdin.buffer.read(1 << 16):
        pass
    time.sleep(orders.settings.linger_s)
    return 0


def _step_back() -> None:
    """Leave the cores to the trainer.

    An agent has a session of its own. Where the kernel groups by session (autogroup, on
    by default), cores are shared between sessions first, whatever the processes' niceness,
    so that the session steps back as well: see sched(7).
    """
    os.nice(_NICENESS)
    with suppress(OSError):  # no such grouping here
        _AUTOGROUP.write_text(str(_NICENESS))


def _read_line(descriptor: int, deadline_at_s: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        left_s = deadline_at_s - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            msg = f"nothing within {START_LIMIT_S:g} s"
            raise TimeoutError(msg)
        piece = os.read(descriptor, 1 << 12)
        if not piece:
            msg = "it ended"
            raise ConnectionError(msg)
        line += piece
    return line


if __name__ == "__main__":
    # Daemon threads may hold memory in a copy; nothing is worth waiting for.
    os._exit(main())
