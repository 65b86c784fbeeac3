"""Agents on loopback: who may call, what garbage does, and what unreachable hosts say."""

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from geartrain.errors import CommunicationError, ConfigError
from geartrain.topology.agent import AgentSettings, LinkAgent
from geartrain.topology.agent_client import AgentClient
from geartrain.topology.agent_protocol import AgentAddress
from geartrain.topology.host_identity import make_host_identity
from geartrain.topology.limits import ProbeLimits, ProbeProgress
from geartrain.topology.local import local_topology
from geartrain.topology.probe import probe_topology
from geartrain.topology.reprobe import reprobe

TOKEN = "only for this test"
LIMITS = ProbeLimits(timeout_s=2.0, memory_bytes=1 << 20)


def make_agent(name: str, **settings: object) -> LinkAgent:
    identity = make_host_identity(name, "boot", name)
    chosen = AgentSettings(**settings)  # type: ignore[arg-type]  # of the test's choosing
    return LinkAgent(TOKEN, chosen, identity)


@pytest.fixture
def agents() -> Iterator[list[LinkAgent]]:
    made = [make_agent(name) for name in ("a", "b", "c")]
    yield made
    for agent in made:
        agent.close()


def test_three_agents_on_loopback_are_one_rack(agents: list[LinkAgent]) -> None:
    steps: list[ProbeProgress] = []
    topology = probe_topology(
        [agent.address for agent in agents], TOKEN, on_progress=steps.append, limits=LIMITS
    )
    assert [host.tier_id for host in topology.hosts] == [a.identity.host_id for a in agents]
    assert len(topology.racks) == 1
    assert topology.probe_bytes <= 64_000_000
    assert {step.stage for step in steps} >= {"connect", "pairs", "nics"}
    assert topology.hosts[0].interface == "lo"


def test_a_hosts_link_is_measured_again(agents: list[LinkAgent]) -> None:
    addresses = [agent.address for agent in agents]
    topology = probe_topology(addresses, TOKEN, limits=LIMITS)
    known = {a.identity.host_id: a.address for a in agents}
    again = reprobe(topology, known, TOKEN, [agents[1].identity.host_id], LIMITS)
    assert again.fingerprint == topology.fingerprint
    with pytest.raises(ConfigError, match="has no uplink to measure"):
        reprobe(topology, known, TOKEN, ["nobody"], LIMITS)


def test_a_lone_host_has_nothing_to_be_measured_against() -> None:
    alone = local_topology()
    with pytest.raises(ConfigError, match="the topology has one host"):
        reprobe(alone, {}, TOKEN, [alone.hosts[0].tier_id], LIMITS)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs IPv6")
def test_hosts_of_two_address_families_are_named(agents: list[LinkAgent]) -> None:
    with make_agent("six", addresses=("::1",)) as six:
        addresses = [agents[0].address, six.address]
        with pytest.raises(ConfigError) as caught:
            probe_topology(addresses, TOKEN, limits=LIMITS)
    message = str(caught.value)
    assert f"{agents[0].identity.host_id} ({agents[0].address}) listen on IPv4" in message
    assert f"{six.identity.host_id} ({six.address}) on IPv6" in message


def test_missing_token_is_asked_for(agents: list[LinkAgent]) -> None:
    with pytest.raises(CommunicationError, match="give its --token-file"):
        AgentClient(agents[0].address, "", 2.0)


def test_another_token_is_refused(agents: list[LinkAgent]) -> None:
    with pytest.raises(CommunicationError, match="refused the token"):
        AgentClient(agents[0].address, "wrong", 2.0)


def test_an_agent_open_to_the_network_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        LinkAgent("", AgentSettings(addresses=("198.18.77.1",)))


def test_an_agent_does_not_listen_on_all_interfaces() -> None:
    with pytest.raises(ConfigError, match="chosen interfaces"):
        AgentSettings(addresses=("0.0.0.0",))


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigError, match="numeric address of this host"):
        LinkAgent(TOKEN, AgentSettings(addresses=("198.18.77.1",)))


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 1 << 31), b"\0\0\0\2{]", b"", b"\0\0"],
    ids=["http", "endless", "no json", "nothing", "half a length"],
)
def test_garbage_does_not_hurt_an_agent(agents: list[LinkAgent], garbage: bytes) -> None:
    address = agents[0].address
    with socket.create_connection((address.host, address.port), timeout=5) as caller:
        caller.sendall(garbage)
        client = AgentClient(address, TOKEN, 5.0)
        assert client.description.host_id == agents[0].identity.host_id
        client.close()


def test_two_agents_of_one_host_are_refused(agents: list[LinkAgent]) -> None:
    twin = make_agent("a")
    with twin, pytest.raises(ConfigError, match="agents on one host"):
        probe_topology([agents[0].address, twin.address], TOKEN, limits=LIMITS)


def test_an_agent_that_is_not_there_is_named() -> None:
    with make_agent("gone") as agent:
        address = agent.address
    with pytest.raises(CommunicationError, match=f"{address} cannot be reached"):
        probe_topology([address], TOKEN, limits=LIMITS)


def test_a_silent_listener_is_named_by_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = AgentAddress(host="127.0.0.1", port=silent.getsockname()[1])
        with pytest.raises(CommunicationError, match=f"{address.port}.*no answer in time"):
            probe_topology([address], TOKEN, limits=ProbeLimits(timeout_s=0.5))


def test_one_way_unreachable_hosts_are_both_named(
    agents: list[LinkAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(own: str, host: str, port: int, timeout_s: float) -> socket.socket:
        if port == agents[1].address.port:
            raise ConnectionRefusedError(111, "Connection refused")
        return socket.create_connection((host, port), timeout=timeout_s)

    monkeypatch.setattr("geartrain.topology.agent_flows.connect_from", refuse)
    pair = agents[:2]
    with pytest.raises(CommunicationError) as caught:
        probe_topology([a.address for a in pair], TOKEN, limits=LIMITS)
    message = str(caught.value)
    assert all(a.identity.host_id in message for a in pair)
    assert all(str(a.address) in message for a in pair)
    assert "the other way round works" in message
    assert "firewall" in message


def test_a_closed_agent_takes_no_calls() -> None:
    agent = make_agent("closing")
    client = AgentClient(agent.address, TOKEN, 2.0)
    agent.close()
    with pytest.raises(CommunicationError):
        client.measure_memory(1 << 16)
    client.close()


def test_no_agents_are_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="no link agents"):
        probe_topology([], TOKEN)
