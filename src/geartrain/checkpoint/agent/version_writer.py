"""Writes a state that agents hold to the local disk, beside the trainers.

The trainers have copied their parts into memory; one agent puts them together. It may take
its time: nobody waits, and a trainer that dies meanwhile does not end it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import msgspec

from geartrain.checkpoint.agent.caller import AgentCaller
from geartrain.checkpoint.agent.messages import VersionWritten, WriteVersion
from geartrain.checkpoint.agent.recovery import (
    STRUCTURE_EXTRA,
    Recovery,
    RecoverySource,
    find_extra,
)
from geartrain.checkpoint.chunks import cut_elements
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.manifest import TensorFacts
from geartrain.checkpoint.pieces import HeldPiece, StateFacts
from geartrain.checkpoint.prune import prune_store
from geartrain.checkpoint.ranges import StateRange
from geartrain.checkpoint.retention import RetentionPolicy
from geartrain.errors import CheckpointError, CommunicationError

logger = logging.getLogger(__name__)

_WHOLE_S = 60.0
"""For all parts to be sealed: those that have them are at the same step."""
_LOOK_EVERY_S = 0.2
_READ_BYTES = 64 << 20
"""Read at once; the memory that writing takes."""


class VersionWriter:
    """Writes versions one after the other.

    Args:
        local_address: Of the agent that it belongs to, whose own parts it reads.
        token: Asked for by the others.
    """

    def __init__(self, local_address: str, token: str) -> None:
        self._local_address = local_address
        self._token = token
        self._lock = threading.Lock()

    def start(self, order: WriteVersion, tell: Callable[[msgspec.Struct], None]) -> None:
        """Write a version in a thread.

        Args:
            order: Which, and where to.
            tell: Told how it went; whoever asked may be gone by then.
        """
        threading.Thread(
            target=self._run, args=(order, tell), name="geartrain-version", daemon=True
        ).start()

    def _run(self, order: WriteVersion, tell: Callable[[msgspec.Struct], None]) -> None:
        began_s, problem = time.monotonic(), ""
        try:
            with self._lock:
                self._write(order)
        except (CheckpointError, CommunicationError, OSError) as error:
            problem = str(error)
            logger.warning("step %d was not written: %s", order.step, error)
        with suppress(OSError):
            tell(
                VersionWritten(
                    step=order.step, save_s=time.monotonic() - began_s, problem=problem
                )
            )

    def _write(self, order: WriteVersion) -> None:
        recovery, source = self._find(order)
        try:
            tensors = recovery.tensors(source)
            facts = StateFacts(
                step=order.step,
                lineage=order.lineage,
                created_at_s=order.created_at_s,
                tensors=tensors,
                structure=find_extra(recovery, source, STRUCTURE_EXTRA),
                config=order.config,
            )
            tier = LocalTier(order.directory)
            tier.save(facts, _pieces(recovery, source, tensors))
        finally:
            recovery.close()
        prune_store(tier.store, RetentionPolicy(keep_last=order.keep_last))

    def _find(self, order: WriteVersion) -> tuple[Recovery, RecoverySource]:
        """Wait until all parts of the version are held."""
        deadline_at_s = time.monotonic() + _WHOLE_S
        while True:
            recovery = self._ask(order)
            try:
                return recovery, recovery.find_step(order.step, order.lineage)
            except CheckpointError:
                recovery.close()
                if time.monotonic() > deadline_at_s:
                    raise
            time.sleep(_LOOK_EVERY_S)

    def _ask(self, order: WriteVersion) -> Recovery:
        callers, problems = [AgentCaller.connect_here(self._local_address)], []
        for peer in order.others:
            try:
                callers.append(AgentCaller.connect(peer.address, self._token, peer.node_id))
            except CommunicationError as error:
                problems.append(str(error))
        return Recovery(callers, problems)


def _pieces(
    recovery: Recovery, source: RecoverySource, tensors: Mapping[str, TensorFacts]
) -> Iterator[HeldPiece]:
    """Read the state, some of it at a time."""
    group: dict[StateRange, memoryview] = {}
    size = 0
    for name, facts in tensors.items():
        for start, stop in cut_elements(0, facts.num_elements, facts.item_bytes):
            part = StateRange(name=name, start=start, stop=stop)
            group[part] = memoryview(bytearray(part.num_elements * facts.item_bytes))
            size += len(group[part])
            if size >= _READ_BYTES:
                yield from _read(recovery, source, group)
                group, size = {}, 0
    yield from _read(recovery, source, group)


def _read(
    recovery: Recovery, source: RecoverySource, group: dict[StateRange, memoryview]
) -> Iterator[HeldPiece]:
    recovery.read(source, group)
    for part, data in group.items():
        yield HeldPiece(range=part, data=data)
