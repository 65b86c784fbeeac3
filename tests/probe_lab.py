"""Agents and a probe on the hosts of a network lab."""

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from geartrain.devices.emulation.network import NetworkLab, NetworkSpec
from geartrain.errors import CommunicationError
from geartrain.telemetry.documents import decode_document
from geartrain.topology.profile import Topology

PORT = 7777
AGENT = f"""
import sys
from geartrain.topology.agent import AgentSettings, LinkAgent
with LinkAgent("lab", AgentSettings(addresses=(sys.argv[1],), port={PORT})):
    print("ready", flush=True)
    sys.stdin.read()
"""
PROBE = f"""
import sys
from geartrain.errors import GeartrainError
from geartrain.telemetry.documents import encode_document
from geartrain.topology.agent_protocol import AgentAddress
from geartrain.topology.limits import ProbeLimits
from geartrain.topology.probe import probe_topology
agents = [AgentAddress(host=host, port={PORT}) for host in sys.argv[1:]]
try:
    topology = probe_topology(agents, "lab", limits=ProbeLimits(timeout_s=3.0))
except GeartrainError as error:
    sys.exit(str(error))
sys.stdout.write(encode_document(topology).decode())
"""
GOODPUT = 0.954
"""What a TCP stream's payload is of a link's rate."""


@contextmanager
def agents_in(
    lab: NetworkLab, hosts: Sequence[int]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    running = []
    try:
        for host in hosts:
            argv = [sys.executable, "-c", AGENT, lab.host(host).address]
            running.append(
                subprocess.Popen(
                    lab.command(host, argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
        for agent in running:
            assert agent.stdout is not None
            assert agent.stdout.readline() == b"ready\n"
        yield running
    finally:
        for agent in running:
            agent.kill()
            agent.communicate()


def probe(lab: NetworkLab, hosts: Sequence[int]) -> Topology:
    argv = [sys.executable, "-c", PROBE, *(lab.host(host).address for host in hosts)]
    done = subprocess.run(
        lab.command(hosts[0], argv), capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise CommunicationError(done.stderr)
    return decode_document(done.stdout, Topology)


def racks_of(topology: Topology, hosts: Sequence[int]) -> list[list[int]]:
    index = {tier.tier_id: host for tier, host in zip(topology.hosts, hosts, strict=True)}
    return sorted(sorted(index[m] for m in rack.member_ids) for rack in topology.racks)


def true_racks(spec: NetworkSpec) -> list[list[int]]:
    racks: list[list[int]] = [[] for _ in spec.racks]
    for host in range(spec.num_hosts):
        racks[spec.rack_of(host)].append(host)
    return racks


def _spin() -> None:
    while True:
        pass


@contextmanager
def spinners(count: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile."""
    busy = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()
