"""Measures what a snapshot costs the trainer, beside ``dcp.save``, in turn."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from geartrain.bench.checkpoint.orders import StallFound, StallRound, StateOrder
from geartrain.bench.checkpoint.square_model import SquareTraining
from geartrain.bench.checkpoint.worker_process import read_order, write_result
from geartrain.checkpoint.agent.link import AgentLink, Reservation
from geartrain.checkpoint.agent.messages import PeerAddress, SnapshotFacts
from geartrain.checkpoint.agent.process import AgentProcess, start_agent
from geartrain.checkpoint.agent.settings import AgentSettings
from geartrain.checkpoint.agent.shadow_copy import ShadowCopy
from geartrain.checkpoint.agent.shard_layout import (
    SnapshotLabel,
    copy_shard,
    lay_out,
    make_facts,
)
from geartrain.checkpoint.ranges import whole_ranges
from geartrain.errors import CheckpointError

Variant = Literal["plain", "copy", "shadow"]

_MEMBER, _INCARNATION = "d0", "bench"
_WARMUP_STEPS = 2
_COPIED_S = 60.0
_LOOK_S = 0.005
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class _Bench:
    """A training, its node's agent, and a peer of that on a pretended other host."""

    def __init__(self, order: StateOrder, stack: ExitStack) -> None:
        self._order = order
        self._training = SquareTraining(order.dim, order.batch_size)
        self._state = self._training.state()
        sizes = {name: tensor.numel() for name, tensor in self._state.items()}
        self._layout = lay_out(self._state, whole_ranges(sizes))
        self.state_bytes = self._layout.num_bytes
        self._agents = [_start(index, 3 * self.state_bytes, stack) for index in range(2)]
        reservation = Reservation(
            member_id=_MEMBER,
            incarnation=_INCARNATION,
            snapshot_bytes=self._layout.num_bytes,
        )
        self._link = AgentLink(self._agents[0].place.local_address, reservation)
        stack.callback(self._link.close)
        self._link.set_peers(
            [
                PeerAddress(
                    node_id=f"n{index}", host_id=f"h{index}", address=a.place.peer_address
                )
                for index, a in enumerate(self._agents)
            ],
            1,
        )
        self._step = 0
        for variant in ("copy", "shadow", "copy"):  # both buffers of both are touched
            self.block(variant, _WARMUP_STEPS)

    def round(self) -> StallRound:
        """Everything once; the machine's drifts hit all alike."""
        num_steps = self._order.steps_per_block
        before_s = self._processor_s()
        plain_s, _, _ = self.block("plain", num_steps)
        shadow_s, shadow_stall_s, send_s = self.block("shadow", num_steps)
        agents_s = self._processor_s() - before_s
        _, copy_stall_s, _ = self.block("copy", 2)
        return StallRound(
            dcp_save_s=self._save_dcp(),
            copy_stall_s=copy_stall_s,
            shadow_stall_s=shadow_stall_s,
            plain_steps_s=tuple(plain_s),
            shadow_steps_s=tuple(shadow_s),
            send_s=send_s,
            agents_processor_s=agents_s,
        )

    def block(self, variant: Variant, num_steps: int) -> tuple[list[float], float, float]:
        """Train; with a snapshot of the state before the block.

        Returns:
            Seconds of each step, of what the trainer waited, and of sending to the peer.
        """
        steps_s, stall_s = [], 0.0
        buffer = None if variant == "plain" else self._take_buffer()
        facts, shadow = self._facts(), None
        for index in range(num_steps):
            start_s = time.perf_counter()
            if index == 0 and buffer is not None:
                if variant == "copy":
                    copy_shard(self._layout, self._state, buffer)
                    self._link.seal(facts)
                else:
                    shadow = ShadowCopy(self._layout, self._state, buffer)
                stall_s += time.perf_counter() - start_s
            self._training.compute()
            if shadow is not None:
                waiting_s = time.perf_counter()
                shadow.finish()
                self._link.seal(facts)
                shadow = None
                stall_s += time.perf_counter() - waiting_s
            self._training.apply()
            self._step += 1
            steps_s.append(time.perf_counter() - start_s)
        return steps_s, stall_s, 0.0 if buffer is None else self._await_copy(facts.step)

    def _take_buffer(self) -> memoryview:
        """Ask before it is needed, as a trainer does: one step earlier."""
        deadline_at_s = time.monotonic() + _COPIED_S
        while (buffer := self._link.begin()) is None:
            if time.monotonic() > deadline_at_s:
                msg = f"the agent gave no buffer for {_COPIED_S:g} s; lower the load"
                raise CheckpointError(msg)
        return buffer

    def _facts(self) -> SnapshotFacts:
        label = SnapshotLabel(
            member_id=_MEMBER,
            incarnation=_INCARNATION,
            step=self._step,
            lineage=f"{self._step:x}",
            extras={},
        )
        return make_facts(self._layout, label)

    def _await_copy(self, step: int) -> float:
        deadline_at_s = time.monotonic() + _COPIED_S
        while True:
            copies = self._link.read_status().copies
            if copies and copies[0].snapshot_step >= step:
                return copies[0].send_s
            if time.monotonic() > deadline_at_s:
                msg = (
                    f"step {step} was not at the peer after {_COPIED_S:g} s; lower the load"
                )
                raise CheckpointError(msg)
            time.sleep(_LOOK_S)

    def _save_dcp(self) -> float:
        target = Path(self._order.folder, f"dcp-{self._step}")
        start_s = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one rank is as meant
            save_dcp(self._training.state_dicts(), checkpoint_id=target, no_dist=True)
        seconds = time.perf_counter() - start_s
        shutil.rmtree(target)
        return seconds

    def _processor_s(self) -> float:
        return sum(_processor_s(agent.process.pid) for agent in self._agents)


def _start(index: int, limit_bytes: int, stack: ExitStack) -> AgentProcess:
    settings = AgentSettings(
        node_id=f"n{index}", host_id=f"h{index}", memory_limit_bytes=limit_bytes
    )
    agent = start_agent(settings)
    stack.callback(agent.close)
    return agent


def _processor_s(process_id: int) -> float:
    text = Path(f"/proc/{process_id}/stat").read_text()
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def main() -> None:
    """Measure all rounds."""
    order = read_order(StateOrder)
    until_s = time.monotonic() + order.budget_s
    with ExitStack() as stack:
        bench = _Bench(order, stack)
        rounds = [bench.round()]
        while len(rounds) < order.num_rounds and time.monotonic() < until_s:
            rounds.append(bench.round())
        found = StallFound(state_bytes=bench.state_bytes, rounds=tuple(rounds))
    write_result(order.result, found)


if __name__ == "__main__":
    main()
