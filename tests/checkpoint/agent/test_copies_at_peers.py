"""Copies at peers: lost, damaged, refused, and read again."""

import socket

import pytest

from geartrain.checkpoint.agent.messages import Answer, Offer, Refused
from geartrain.checkpoint.agent.recovery import Recovery
from geartrain.checkpoint.agent.server import AgentServer
from geartrain.checkpoint.agent.wire import receive_message, send_message
from geartrain.checkpoint.ranges import StateRange, split_ownership, whole_ranges
from geartrain.errors import CheckpointError
from geartrain.topology.agent_protocol import introduce
from node_agents import (
    TOKEN,
    Trainer,
    addresses_of,
    agent_settings,
    connect_to,
    make_state,
    read_back,
    sizes_of,
    until_changed,
)


def test_a_lost_node_comes_back_from_peers_whatever_the_ownership(
    servers: list[AgentServer],
) -> None:
    owned = split_ownership(sizes_of(make_state(0)), {"d0": 1.0, "d1": 3.0, "d2": 0.5})
    trainers = [
        Trainer(server.local_address, member, ranges)
        for server, (member, ranges) in zip(servers, owned.items(), strict=True)
    ]
    for trainer in trainers:
        trainer.link.set_peers(addresses_of(servers), 2)
    for step in (3, 7):
        for trainer in trainers:
            trainer.snapshot(step)
    for trainer, server in zip(trainers, servers, strict=True):
        trainer.wait_copied(server, 7, 2)

    servers[0].close()
    servers[1].close()

    recovery = Recovery(connect_to(servers[2:]))
    read_back(recovery, make_state(7), 7)
    source = recovery.find(whole_ranges(sizes_of(make_state(0))))
    assert recovery.extras(source) == {f"d{i}": {"position": 7} for i in range(3)}
    assert recovery.tensors(source)["model/w"].shape == (300, 7)
    recovery.close()


def test_members_that_are_not_equally_far_give_the_last_common_step(
    servers: list[AgentServer],
) -> None:
    owned = split_ownership(sizes_of(make_state(0)), {"d0": 1.0, "d1": 1.0})
    trainers = [
        Trainer(server.local_address, member, ranges)
        for server, (member, ranges) in zip(servers, owned.items(), strict=False)
    ]
    for trainer in trainers:
        trainer.snapshot(10)
    trainers[0].snapshot(20)
    trainers[1].begin()[:100] = bytes(100)  # in the middle of it

    read_back(Recovery(connect_to(servers[:2])), make_state(10), 10)


def test_a_peer_that_dies_is_replaced(servers: list[AgentServer]) -> None:
    trainer = Trainer(servers[0].local_address)
    trainer.link.set_peers(addresses_of(servers), 1)
    trainer.snapshot(1)
    trainer.wait_copied(servers[0], 1, 1)
    first = trainer.link.read_status().copies[0].node_id

    servers[int(first[1])].close()
    trainer.snapshot(2)

    def is_replaced() -> bool:
        copies = trainer.link.read_status().copies
        return [(c.node_id != first, c.snapshot_step) for c in copies] == [(True, 2)]

    until_changed(servers[0], is_replaced, "another peer to have the copy")


def test_what_arrives_by_half_or_damaged_is_never_served(
    servers: list[AgentServer],
) -> None:
    state = make_state(1)
    trainer = Trainer(servers[0].local_address)
    trainer.snapshot(1, state)
    facts = servers[0].shelf.held().snapshots[0]
    with servers[0].shelf.reading("d0", 1, "l1") as kept:
        whole = [bytes(kept.chunk(index)) for index in range(len(facts.chunks))]
    host, port = servers[1].peer_address.rsplit(":", 1)

    def offer(payload: bytes) -> socket.socket:
        sock = socket.create_connection((host, int(port)), timeout=5)
        introduce(sock, TOKEN, 5.0)
        send_message(sock, Offer(facts=facts), 5.0)
        receive_message(sock, Answer, 5.0)
        sock.sendall(payload)
        return sock

    joined = b"".join(whole)
    offer(joined[: len(joined) // 2]).close()
    flipped = bytearray(joined)
    flipped[len(flipped) // 3] ^= 4
    with offer(bytes(flipped)) as sock:
        answer = receive_message(sock, Answer, 5.0)
    assert isinstance(answer, Refused)
    assert "arrived damaged (model/w" in answer.reason
    assert servers[1].shelf.held().snapshots == ()
    with offer(joined) as sock:
        receive_message(sock, Answer, 5.0)
    read_back(Recovery(connect_to(servers[1:2])), state, 1)


def test_damage_in_memory_is_found_and_another_copy_read(
    servers: list[AgentServer],
) -> None:
    trainer = Trainer(servers[0].local_address)
    trainer.link.set_peers(addresses_of(servers), 1)
    trainer.snapshot(4)
    trainer.wait_copied(servers[0], 4, 1)
    with servers[0].shelf.reading("d0", 4, "l4") as kept:
        kept.chunk(0)[5] ^= 1

    read_back(Recovery(connect_to(servers)), make_state(4), 4)
    alone = Recovery(connect_to(servers[:1]))
    source = alone.find([StateRange(name="model/w", start=0, stop=9)])
    with pytest.raises(CheckpointError, match=r"model/w\[0:9\] of step 4 can't be read"):
        alone.read(
            source, {StateRange(name="model/w", start=0, stop=9): memoryview(bytearray(36))}
        )


def test_when_all_are_gone_the_ranges_are_named(servers: list[AgentServer]) -> None:
    with pytest.raises(CheckpointError, match=r"nobody holds a snapshot; wanted w\[0:4\]"):
        Recovery(connect_to(servers), ["n7 is down"]).find(
            [StateRange(name="w", start=0, stop=4)]
        )
    trainer = Trainer(servers[0].local_address)
    trainer.snapshot(3)
    with pytest.raises(CheckpointError, match=r"of step 3, the newest, .*other\[0:4\]"):
        Recovery(connect_to(servers)).find([StateRange(name="other", start=0, stop=4)])


def test_a_history_that_a_restore_left_behind_is_not_taken(
    servers: list[AgentServer],
) -> None:
    trainer = Trainer(servers[0].local_address)
    trainer.snapshot(10)
    again = Trainer(servers[0].local_address)
    again.snapshot(5)
    recovery = Recovery(connect_to(servers[:1]))
    want = whole_ranges(sizes_of(make_state(0)))

    assert recovery.find(want).step == 10
    committed = recovery.find(want, lambda step, lineage: (step, lineage) == (5, "l5"))
    assert committed.step == 5
    with pytest.raises(CheckpointError, match="no state is left"):
        recovery.find(want, lambda _step, _lineage: False)


def test_a_peer_without_room_is_passed_over() -> None:
    small = AgentServer(agent_settings(1, limit_bytes=20_000), TOKEN)
    servers = [AgentServer(agent_settings(0), TOKEN), small]
    try:
        trainer = Trainer(servers[0].local_address)
        trainer.snapshot(1)
        trainer.link.set_peers(addresses_of(servers), 1)
        until_changed(
            servers[0], lambda: trainer.link.read_status().warning != "", "a warning"
        )
        assert "0 of 1 copies can be kept" in trainer.link.read_status().warning
        assert small.shelf.held().snapshots == ()
    finally:
        for server in servers:
            server.close()
