"""Node agents and members with a small state, for tests."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

import torch

from geartrain.checkpoint.agent.caller import AgentCaller
from geartrain.checkpoint.agent.link import AgentLink, Reservation
from geartrain.checkpoint.agent.messages import LogStep, PeerAddress
from geartrain.checkpoint.agent.recovery import Recovery
from geartrain.checkpoint.agent.server import AgentServer
from geartrain.checkpoint.agent.settings import AgentSettings
from geartrain.checkpoint.agent.shard_layout import (
    SnapshotLabel,
    copy_gradients,
    copy_shard,
    lay_out,
    make_facts,
)
from geartrain.checkpoint.ranges import StateRange, split_ownership, whole_ranges

TOKEN = "the token of this run"
LIMIT_S = 20.0

State = dict[str, torch.Tensor]


def agent_settings(index: int, limit_bytes: int = 64 << 20) -> AgentSettings:
    return AgentSettings(
        node_id=f"n{index}", host_id=f"h{index}", memory_limit_bytes=limit_bytes
    )


def addresses_of(servers: Sequence[AgentServer]) -> list[PeerAddress]:
    return [
        PeerAddress(node_id=f"n{index}", host_id=f"h{index}", address=server.peer_address)
        for index, server in enumerate(servers)
    ]


def make_state(step: int) -> State:
    generator = torch.Generator().manual_seed(step)
    return {
        "model/w": torch.randn(300, 7, generator=generator),
        "model/h": torch.randn(41, generator=generator).bfloat16(),
        "optimizer/w.exp_avg": torch.randn(300, 7, generator=generator),
        "optimizer/w.step": torch.tensor(float(step)),
    }


def sizes_of(state: State) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in state.items()}


def until_changed(server: AgentServer, is_true: Callable[[], bool], what: str) -> None:
    """Wait until something is true that an agent of this process brings about."""
    deadline_at_s = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline_at_s, what
        with server.shelf.changed:
            server.shelf.changed.wait(0.2)  # it may have changed just before


def until_heard(link: AgentLink, is_true: Callable[[], bool], what: str) -> None:
    """Wait until something is true that an agent tells its trainer."""
    deadline_at_s = time.monotonic() + LIMIT_S
    while not is_true():
        left_s = deadline_at_s - time.monotonic()
        assert left_s > 0, what
        select.select([link._sock], [], [], left_s)


def free_slot(link: AgentLink) -> tuple[int, memoryview]:
    """A slot of the log, as soon as there is one."""
    slot = link.log_slot()
    while slot is None:
        select.select([link._sock], [], [], LIMIT_S)
        slot = link.log_slot()
    return slot


class Trainer:
    """A member with its shard of the state, linked to an agent."""

    def __init__(
        self,
        server_address: str,
        member: str = "d0",
        owned: Sequence[StateRange] | None = None,
        log_bytes: int = 0,
    ) -> None:
        self.member = member
        state = make_state(0)
        self.layout = lay_out(state, owned or whole_ranges(sizes_of(state)))
        self.incarnation = os.urandom(4).hex()
        reservation = Reservation(
            member_id=member,
            incarnation=self.incarnation,
            snapshot_bytes=self.layout.num_bytes,
            slot_bytes=1 << 14,
            num_slots=2 if log_bytes else 0,
            log_limit_bytes=log_bytes,
        )
        self.link = AgentLink(server_address, reservation)

    def begin(self) -> memoryview:
        deadline_at_s = time.monotonic() + LIMIT_S
        while (buffer := self.link.begin()) is None:
            assert time.monotonic() < deadline_at_s
        return buffer

    def snapshot(self, step: int, state: State | None = None) -> None:
        copy_shard(self.layout, state or make_state(step), self.begin())
        label = SnapshotLabel(
            member_id=self.member,
            incarnation=self.incarnation,
            step=step,
            lineage=f"l{step}",
            extras={"position": step},
        )
        self.link.seal(make_facts(self.layout, label))
        self.link.wait_kept(step, LIMIT_S)

    def wait_copied(self, server: AgentServer, step: int, num_copies: int) -> None:
        def is_copied() -> bool:
            copies = self.link.read_status().copies
            return [c.snapshot_step for c in copies] == [step] * num_copies

        until_changed(server, is_copied, f"step {step} at {num_copies} peers")


def connect_to(servers: Sequence[AgentServer]) -> list[AgentCaller]:
    return [AgentCaller.connect(s.peer_address, TOKEN, s.peer_address) for s in servers]


def read_back(recovery: Recovery, state: State, step: int) -> None:
    """Read by an ownership that nobody wrote, and compare every bit."""
    source = recovery.find(whole_ranges(sizes_of(state)))
    assert source.base_step == step
    owned = split_ownership(sizes_of(state), {"a": 1.0, "b": 2.5, "c": 0.7})
    for ranges in owned.values():
        targets = {
            part: memoryview(bytearray(part.num_elements * state[part.name].itemsize))
            for part in ranges
        }
        recovery.read(source, targets)
        for part, data in targets.items():
            expected = state[part.name].reshape(-1)[part.start : part.stop]
            assert data.tobytes() == expected.view(torch.uint8).numpy().tobytes()


def logged_step(
    slot: tuple[int, memoryview], step: int, gradient: torch.Tensor, name: str = "model/w"
) -> LogStep:
    index, view = slot
    part = StateRange(name=name, start=0, stop=gradient.numel())
    return LogStep(
        slot_index=index,
        step=step,
        previous_lineage=f"l{step - 1}",
        lineage=f"l{step}",
        update={},
        parts=copy_gradients([(part, gradient)], view),
    )
