"""Who and what an agent takes in, and whom it turns away."""

import dataclasses
import socket
from contextlib import suppress

import pytest
from msgspec.structs import replace

from geartrain.checkpoint.agent.caller import AgentCaller
from geartrain.checkpoint.agent.messages import ShardChunk
from geartrain.checkpoint.agent.recovery import Recovery
from geartrain.checkpoint.agent.server import AgentServer
from geartrain.checkpoint.agent.settings import AgentSettings
from geartrain.checkpoint.agent.shard_layout import SnapshotLabel, make_facts
from geartrain.errors import CheckpointError, CommunicationError, ConfigError
from geartrain.topology.agent_protocol import introduce
from node_agents import (
    LIMIT_S,
    TOKEN,
    Trainer,
    agent_settings,
    connect_to,
    make_state,
    read_back,
    until_heard,
)


def test_too_much_memory_is_refused_with_what_would_help() -> None:
    server = AgentServer(agent_settings(0, limit_bytes=30_000), TOKEN)
    try:
        with pytest.raises(CheckpointError, match="raise the agent's memory limit"):
            Trainer(server.local_address)
    finally:
        server.close()


def test_strangers_get_nothing(servers: list[AgentServer]) -> None:
    with pytest.raises(CommunicationError, match="token"):
        AgentCaller.connect(servers[0].peer_address, "wrong", "n0")
    host, port = servers[0].peer_address.rsplit(":", 1)
    for garbage in (b"\xff" * 64, b"\x00\x00\x00\x05hello", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(garbage)
            with suppress(OSError):  # it may hang up before it was sent all
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        introduce(sock, TOKEN, 5.0)
        sock.sendall(b"\xff\xff\xff\xff")  # 4 GiB of JSON
        assert sock.recv(1) == b""
    assert AgentCaller.connect(servers[0].peer_address, TOKEN, "n0").describe().node_id
    with pytest.raises(ConfigError, match="without a token"):
        AgentServer(
            AgentSettings(
                node_id="n", host_id="h", address="192.0.2.1", memory_limit_bytes=1
            ),
            "",
        )


def test_an_older_process_of_a_member_is_turned_away(servers: list[AgentServer]) -> None:
    old = Trainer(servers[0].local_address)
    old.snapshot(1)
    new = Trainer(servers[0].local_address)

    with pytest.raises(CommunicationError):
        until_heard(
            old.link, lambda: old.link.begin() is None and False, "the old one to be told"
        )
    new.snapshot(2)

    read_back(Recovery(connect_to(servers[:1])), make_state(2), 2)


def test_a_seal_that_does_not_fit_is_refused(servers: list[AgentServer]) -> None:
    trainer = Trainer(servers[0].local_address)
    trainer.begin()
    label = SnapshotLabel(
        member_id="d0", incarnation=trainer.incarnation, step=1, lineage="l1", extras={}
    )
    facts = make_facts(trainer.layout, label)
    chunk = ShardChunk("model/w", 0, 10, facts.num_bytes - 1, 40)
    trainer.link.seal(replace(facts, chunks=(chunk,)))
    with pytest.raises(CheckpointError, match="does not fit step 1"):
        trainer.link.wait_kept(1, LIMIT_S)
    assert servers[0].shelf.held().snapshots == ()
    # The buffer that was refused is free again.
    trainer.link.state = dataclasses.replace(trainer.link.state, problem="")
    for step in (2, 3, 4):
        trainer.snapshot(step)
    read_back(Recovery(connect_to(servers[:1])), make_state(4), 4)
