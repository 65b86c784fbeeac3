"""Finding a state that is held whole, and writing it to disk by an agent."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from geartrain.checkpoint.agent.link import AgentLink, Reservation
from geartrain.checkpoint.agent.messages import SnapshotFacts, WriteVersion
from geartrain.checkpoint.agent.recovery import Recovery
from geartrain.checkpoint.agent.server import AgentServer
from geartrain.checkpoint.agent.shard_layout import (
    SnapshotLabel,
    copy_shard,
    lay_out,
    make_facts,
)
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.ranges import split_ownership
from geartrain.checkpoint.state_tensors import load_components, take_apart
from geartrain.errors import CheckpointError
from node_agents import LIMIT_S, addresses_of, connect_to, until_heard

MEMBERS = ("d0", "d1", "d2")
WEIGHTS = {"d0": 1.0, "d1": 3.0, "d2": 0.5}


class Members:
    """Three members with unequal parts of one training's state, each with an agent."""

    def __init__(self, servers: list[AgentServer]) -> None:
        self.servers = servers
        self.named = take_apart(components(1))
        sizes = {name: tensor.numel() for name, tensor in self.named.tensors.items()}
        self.owned = split_ownership(sizes, WEIGHTS)
        self.links = {
            name: self.connect(name, server)
            for name, server in zip(MEMBERS, servers, strict=True)
        }

    def connect(
        self, name: str, server: AgentServer, base: tuple[int, str] = (0, "")
    ) -> AgentLink:
        layout = lay_out(self.named.tensors, self.owned[name])
        reservation = Reservation(
            member_id=name,
            incarnation=f"{name}.{time.monotonic_ns()}",
            snapshot_bytes=layout.num_bytes,
            base=base,
        )
        return AgentLink(server.local_address, reservation)

    def snapshot(self, step: int, *names: str) -> None:
        named = take_apart(components(step))
        for name in names or MEMBERS:
            layout = lay_out(named.tensors, self.owned[name])
            link = self.links[name]
            buffer = buffer_of(link)
            copy_shard(layout, named.tensors, buffer)
            label = SnapshotLabel(
                member_id=name,
                incarnation=link.reservation.incarnation,
                step=step,
                lineage=f"l{step}",
                extras={"structure": named.structure} if name == "d0" else {},
            )
            link.seal(make_facts(layout, label, named.facts))
            link.wait_kept(step, LIMIT_S)

    def recovery(self) -> Recovery:
        return Recovery(connect_to(self.servers))


def buffer_of(link: AgentLink) -> memoryview:
    until_heard(link, lambda: link.begin() is not None, "a buffer")
    buffer = link.begin()
    assert buffer is not None
    return buffer


def components(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    weights = {"w": torch.randn(301, 7, generator=generator), "n": torch.tensor(step)}
    return {"model": weights, "training": {"step_index": step, "loaders": [{"epoch": 2}]}}


@pytest.fixture
def members(servers: list[AgentServer]) -> Members:
    return Members(servers)


def test_state_that_lacks_a_part_gives_way_to_an_older_one(members: Members) -> None:
    members.snapshot(3)
    members.snapshot(5, "d0", "d2")

    found = members.recovery().find_whole()

    assert (found.step, found.base_lineage) == (3, "l3")


def test_tensor_of_which_no_part_is_held_is_missed_too(members: Members) -> None:
    """The one that has all of it is gone; the others know that it exists."""
    members.owned = split_ownership({"model/n": 1, "model/w": 2107}, WEIGHTS)
    members.snapshot(3, "d1", "d2")

    with pytest.raises(CheckpointError, match=r"model/n\[0:1\]"):
        members.recovery().find_whole()


def test_no_snapshot_is_said_so(members: Members) -> None:
    with pytest.raises(CheckpointError, match="nobody holds a snapshot"):
        members.recovery().find_whole()


def test_trainer_that_was_restored_keeps_what_it_was_restored_from(
    members: Members,
) -> None:
    """Its newest snapshot may be one that others never took."""
    members.snapshot(3)
    members.snapshot(5, "d0")

    members.links["d0"] = members.connect("d0", members.servers[0], (3, "l3"))

    assert members.recovery().find_whole().step == 3


def order(members: Members, directory: Path, step: int) -> WriteVersion:
    return WriteVersion(
        step=step,
        lineage=f"l{step}",
        directory=str(directory),
        created_at_s=1.0,
        keep_last=2,
        config={"script": "train.py"},
        others=tuple(addresses_of(members.servers)[1:]),
    )


def test_agent_writes_what_all_hold_as_a_version(members: Members, tmp_path: Path) -> None:
    link = members.links["d0"]
    for step in (3, 5, 7):
        members.snapshot(step)
        link.write_version(order(members, tmp_path, step))
        until_heard(link, partial(has_written, link, step), "a version")
        assert link.state.written is not None
        assert link.state.written.problem == ""

    tier = LocalTier(tmp_path)
    version = tier.latest()
    assert version is not None
    found = load_components(tier.reader(version), version.manifest)
    expected = components(7)
    assert found["training"] == expected["training"]
    assert torch.equal(found["model"]["w"], expected["model"]["w"])  # type: ignore[index]
    assert (version.manifest.lineage, version.manifest.config) == (
        "l7",
        {"script": "train.py"},
    )


def has_written(link: AgentLink, step: int) -> bool:
    state = link.poll()
    return state.written is not None and state.written.step == step


def test_disk_that_refuses_is_told_and_the_next_version_is_written(
    members: Members, tmp_path: Path
) -> None:
    link = members.links["d0"]
    members.snapshot(3)
    place = tmp_path / "store"
    place.write_text("a file where the directory is to be")

    link.write_version(order(members, place, 3))
    until_heard(link, lambda: has_written(link, 3), "an answer")

    assert link.state.written is not None
    assert str(place) in link.state.written.problem
    place.unlink()
    link.write_version(order(members, place, 3))
    until_heard(link, lambda: link.poll().written.problem == "", "a version")  # type: ignore[union-attr]


def test_damaged_part_is_not_written(members: Members, tmp_path: Path) -> None:
    members.snapshot(3)
    with members.servers[1].shelf.reading("d1", 3, "l3") as kept:
        kept.buffer.view[100] ^= 1
    link = members.links["d0"]

    link.write_version(order(members, tmp_path / "store", 3))
    until_heard(link, lambda: has_written(link, 3), "an answer")

    assert link.state.written is not None
    assert "damaged" in link.state.written.problem
    assert LocalTier(tmp_path / "store").latest() is None


def test_facts_survive_the_wire() -> None:
    """All tensors are named, also those of which a member has no part."""
    named = take_apart(components(1))
    layout = lay_out(named.tensors, ())
    label = SnapshotLabel(member_id="d", incarnation="i", step=1, lineage="l", extras={})

    facts = make_facts(layout, label, named.facts)

    assert msgspec.json.decode(msgspec.json.encode(facts), type=SnapshotFacts) == facts
    assert set(facts.tensors) == set(named.tensors)
