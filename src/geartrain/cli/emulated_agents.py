"""Agents on emulated hosts: links to try the probe on, where there is no cluster."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from geartrain.devices.emulation.network import HUB, NetworkLab, parse_links
from geartrain.errors import DeviceError
from geartrain.topology.agent_protocol import AgentAddress

_START_S = 120.0
"""Dozens of interpreters may start on few cores."""
_END_S = 5.0
_BOUND_TO_PARENT = """
import sys
from geartrain.launch.parent_death import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from geartrain.cli import main
main(prog_name="geartrain")
"""
"""An agent of this program that does not outlive it, also after kill -9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedAgents:
    """An agent on each host, and what they were started with."""

    addresses: tuple[AgentAddress, ...]
    token: str


@contextmanager
def emulated_agents(links: str) -> Iterator[EmulatedAgents]:
    """Make a network and start agents; in the block this thread is on its hub.

    Args:
        links: ``RACKSxHOSTS:NIC:UPLINK``, as ``geartrain run --links`` takes it.

    Raises:
        ConfigError: If the links can't be read.
        DeviceError: If networks can't be emulated here, or an agent does not start.
    """
    spec = parse_links(links)
    token = secrets.token_hex(16)
    with ExitStack() as stack:
        lab = stack.enter_context(NetworkLab(spec))
        agents = [_start(lab, host.index, token, stack) for host in lab.hosts]
        deadline_s = time.monotonic() + _START_S
        addresses = tuple(_address(agent, deadline_s) for agent in agents)
        stack.enter_context(lab.entered(HUB))
        yield EmulatedAgents(addresses=addresses, token=token)


def _start(
    lab: NetworkLab, host_index: int, token: str, stack: ExitStack
) -> subprocess.Popen[str]:
    python = [sys.executable, "-c", _BOUND_TO_PARENT, str(os.getpid())]
    where = ["--interface", lab.host(host_index).interface]
    probe = ["probe", "--agent", "--json", "--token-file", "/dev/stdin", *where]
    agent = subprocess.Popen(
        lab.command(host_index, [*python, *probe]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the probe, which ends them in turn
    )
    stack.callback(_end, agent)
    assert agent.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended: what it said is read later
        agent.stdin.write(token)
        agent.stdin.close()
    return agent


def _address(agent: subprocess.Popen[str], deadline_s: float) -> AgentAddress:
    assert agent.stdout is not None
    assert agent.stderr is not None
    left_s = max(0.0, deadline_s - time.monotonic())
    ready, _, _ = select.select([agent.stdout], [], [], left_s)
    line = agent.stdout.readline() if ready else ""
    if not line:
        if ready:  # it ended; else reading its errors would wait for it
            agent.wait(timeout=_END_S)
        said = agent.stderr.read().strip() if agent.poll() is not None else "no answer"
        msg = (
            f"an agent on an emulated host did not start: {said}; try again with less load"
        )
        raise DeviceError(msg)
    return AgentAddress.parse(json.loads(line)["address"])


def _end(agent: subprocess.Popen[str]) -> None:
    agent.terminate()
    try:
        agent.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait(timeout=_END_S)
    for pipe in (agent.stdout, agent.stderr):
        if pipe is not None:
            pipe.close()
