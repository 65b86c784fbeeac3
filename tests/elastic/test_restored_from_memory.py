"""Members with hand-made, unequal parts of a state: agents still have what one takes away.

The coordinator knows who holds which range. When the only holder of one is lost, it says
who is to load it from the node agents, and training goes on from the same step.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from geartrain.checkpoint.agent.link import AgentLink, Reservation
from geartrain.checkpoint.agent.recovery import Recovery
from geartrain.checkpoint.agent.server import AgentServer
from geartrain.checkpoint.agent.shard_layout import (
    SnapshotLabel,
    copy_shard,
    lay_out,
    make_facts,
)
from geartrain.checkpoint.ranges import StateRange
from geartrain.elastic.limits import Limits
from geartrain.elastic.messages import NewEpoch
from geartrain.elastic.outcome import Interrupted, MembershipEnded
from geartrain.elastic.view import HeldState
from geartrain.errors import CheckpointError
from node_agents import (
    LIMIT_S,
    TOKEN,
    addresses_of,
    agent_settings,
    connect_to,
    until_changed,
)
from running_coordinator import (
    START,
    Coordinator,
    Member,
    commit_together,
    coordinator,
)

OWNED = {
    "a": (StateRange(name="w", start=0, stop=10),),
    "b": (StateRange(name="w", start=10, stop=70), StateRange(name="v", start=0, stop=5)),
    "c": (StateRange(name="w", start=60, stop=100), StateRange(name="v", start=5, stop=40)),
}
LOST = (StateRange(name="v", start=0, stop=5), StateRange(name="w", start=10, stop=60))


def state_after(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.randn(100, generator=generator),
        "v": torch.randn(40, generator=generator).to(torch.bfloat16),
    }


class Shard(Member):
    """A member that keeps its part at the agent of its node as well."""

    def __init__(self, name: str, place: Coordinator, agent: AgentServer) -> None:
        super().__init__(name, place.settings(), wants=OWNED[name], place="abc".index(name))
        self.agent = agent
        self.link = AgentLink(
            agent.local_address,
            Reservation(member_id=name, incarnation=f"{name}-1", snapshot_bytes=1 << 12),
        )

    def start(self) -> Member:
        held = HeldState(step=0, lineage=START, ranges=OWNED[self.name])
        self.client.start(held)
        return self

    def snapshot(self) -> None:
        state = state_after(self.step)
        layout = lay_out(state, OWNED[self.name])
        buffer = self.link.begin()
        assert buffer is not None
        copy_shard(layout, state, buffer)
        label = SnapshotLabel(
            member_id=self.name,
            incarnation=f"{self.name}-1",
            step=self.step,
            lineage=self.lineage,
            extras={},
        )
        self.link.seal(make_facts(layout, label))
        self.link.wait_kept(self.step, LIMIT_S)

    def restore(
        self, epoch: NewEpoch, agents: list[AgentServer]
    ) -> dict[StateRange, bytes]:
        """Load what this member was told to, at exactly the step that is in force."""
        (order,) = epoch.restores
        recovery = Recovery(connect_to(agents))
        source = recovery.find(
            order.ranges, lambda *key: key == (epoch.step, epoch.lineage)
        )
        sizes = {"w": 4, "v": 2}
        found = {
            part: bytearray(part.num_elements * sizes[part.name]) for part in order.ranges
        }
        recovery.read(source, {part: memoryview(data) for part, data in found.items()})
        return {part: bytes(data) for part, data in found.items()}


@pytest.fixture
def agents() -> Iterator[list[AgentServer]]:
    started = [AgentServer(agent_settings(index), TOKEN) for index in range(3)]
    yield started
    for server in started:
        server.close()


@pytest.fixture
def place() -> Iterator[Coordinator]:
    limits = Limits(expected_members=3, build_s=5.0, restores_from_tier_1=True)
    with coordinator(limits) as running:
        yield running


@pytest.fixture
def shards(place: Coordinator, agents: list[AgentServer]) -> Iterator[list[Shard]]:
    found = [Shard(name, place, agent) for name, agent in zip("abc", agents, strict=True)]
    for shard in found:
        shard.start()
    for shard in found:
        shard.enter_epoch()
    yield found
    for shard in found:
        shard.client.close()
        shard.link.close()


def lose_b(shards: list[Shard]) -> dict[str, NewEpoch]:
    """Its process ends; the others go on to the next epoch."""
    first, lost, last = shards
    lost.client.abandon()
    lost.link.close()
    epochs = {}
    for shard in (first, last):
        assert isinstance(shard.settle(), Interrupted)
        epochs[shard.name] = shard.client.next_epoch(shard.epoch, LIMIT_S)
        shard.epoch = epochs[shard.name].epoch
    return epochs


def test_lost_ranges_come_back_from_the_agents_at_the_committed_step(
    shards: list[Shard], agents: list[AgentServer]
) -> None:
    commit_together(shards)
    for shard in shards:
        shard.snapshot()
    first, _, last = shards

    epochs = lose_b(shards)

    assert epochs["a"].restores == epochs["c"].restores
    (order,) = epochs["a"].restores
    assert order.ranges == LOST
    receiver = first if order.receiver == "a" else last
    found = receiver.restore(epochs[receiver.name], agents)
    state = state_after(1)
    for part, data in found.items():
        expected = state[part.name][part.start : part.stop].view(torch.uint8)
        assert data == expected.numpy().tobytes()
    for shard in (first, last):
        shard.client.ready(shard.epoch)
    commit_together([first, last])
    assert first.step == 2


def test_copy_at_another_host_serves_where_the_node_is_lost_too(
    shards: list[Shard], agents: list[AgentServer]
) -> None:
    commit_together(shards)
    for shard in shards:
        shard.link.set_peers(addresses_of(agents), 1)
        shard.snapshot()
    wait_for_copy(shards[1])
    agents[1].close()

    epochs = lose_b(shards)

    (order,) = epochs["a"].restores
    receiver = shards[0] if order.receiver == "a" else shards[2]
    others = [agents[0], agents[2]]
    assert set(receiver.restore(epochs[receiver.name], others)) == set(LOST)


def wait_for_copy(shard: Shard) -> None:
    def is_there() -> bool:
        copies = shard.link.read_status().copies
        return any(copy.snapshot_step == shard.step for copy in copies)

    until_changed(shard.agent, is_there, "a copy at a peer")


def test_older_snapshot_is_not_taken_for_the_committed_state(
    shards: list[Shard], agents: list[AgentServer]
) -> None:
    commit_together(shards)
    for shard in shards:
        shard.snapshot()
    commit_together(shards)  # nothing was copied since

    epochs = lose_b(shards)

    (order,) = epochs["a"].restores
    receiver = shards[0] if order.receiver == "a" else shards[2]
    with pytest.raises(CheckpointError, match="no state is left in memory"):
        receiver.restore(epochs[receiver.name], agents)
    receiver.client.not_restored(receiver.epoch, order.ranges, "no snapshot of that step")
    with pytest.raises(MembershipEnded, match="tier 1 does not have step 2"):
        receiver.client.next_epoch(receiver.epoch, LIMIT_S)
