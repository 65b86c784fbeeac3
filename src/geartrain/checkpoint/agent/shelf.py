"""What an agent holds: complete snapshots and unbroken logs, of its own and of guests."""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import msgspec

from geartrain.checkpoint.agent.log_chain import LogChain
from geartrain.checkpoint.agent.memory_budget import MemoryBudget
from geartrain.checkpoint.agent.messages import (
    Held,
    LogEntry,
    Reserve,
    ShardChunk,
    SnapshotFacts,
)
from geartrain.checkpoint.agent.shared_buffer import SharedBuffer
from geartrain.errors import CheckpointError


@dataclass(slots=True, eq=False)
class Kept:
    """A complete snapshot."""

    facts: SnapshotFacts
    buffer: SharedBuffer
    num_readers: int = 0
    """While there are any, its buffer is not written."""

    def chunk(self, index: int) -> memoryview:
        """Bytes of a chunk."""
        chunk = self.facts.chunks[index]
        return self.buffer.view[chunk.offset : chunk.offset + chunk.num_bytes]


@dataclass(slots=True)
class _Member:
    """What is held of one member: two snapshots at most, the newest last."""

    chain: LogChain = field(default_factory=lambda: LogChain(limit_bytes=0))
    snapshots: list[Kept] = field(default_factory=list)
    spares: list[SharedBuffer] = field(default_factory=list)
    blobs: dict[tuple[int, str], bytes] = field(default_factory=dict)
    pending_anchor: str | None = None
    is_guest: bool = False
    incarnation: str = ""
    """Of the trainer that this node serves; empty for a guest."""


class Shelf:
    """Keeps them within a limit of memory; every method is safe in any thread.

    Args:
        limit_bytes: Of all snapshots, buffers and logs.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.changed = threading.Condition()
        self._budget = MemoryBudget(limit_bytes=limit_bytes)
        self._members: dict[str, _Member] = defaultdict(_Member)

    @property
    def free_bytes(self) -> int:
        """What could still be given away."""
        with self.changed:
            return self._budget.free_bytes

    def held(self) -> Held:
        """Everything that can be fetched, in the order of members and steps."""
        with self.changed:
            members = sorted(self._members.items())
            return Held(
                snapshots=tuple(k.facts for _, m in members for k in m.snapshots),
                log=tuple(entry for _, m in members for entry in m.chain.entries),
            )

    def own_members(self) -> tuple[str, ...]:
        """Members whose trainer is or was on this node."""
        with self.changed:
            return tuple(
                sorted(name for name, m in self._members.items() if not m.is_guest)
            )

    def own_bytes(self) -> int:
        """What a peer needs to hold copies of all own members."""
        with self.changed:
            return sum(
                2 * max((k.facts.num_bytes for k in m.snapshots), default=0)
                + m.chain.limit_bytes
                for m in self._members.values()
                if not m.is_guest
            )

    def adopt(self, request: Reserve, num_bytes: int) -> None:
        """Take an own member in, or take it in again after its trainer came back.

        Of an earlier trainer one snapshot stays, the newest or that which the new one was
        restored from, in the old buffer, which that one may still have mapped: the new one
        writes elsewhere.

        Raises:
            CheckpointError: If there is no room.
        """
        member_id, log_limit_bytes = request.member_id, request.log_limit_bytes
        with self.changed:
            member = self._members[member_id]
            base = (request.base_step, request.base_lineage)
            bases = [k for k in member.snapshots if (k.facts.step, k.facts.lineage) == base]
            kept = (bases or member.snapshots)[-1:]
            kept_bytes = sum(k.buffer.num_bytes for k in kept)
            self._budget = self._budget.reserve(
                member_id, num_bytes + log_limit_bytes + kept_bytes
            ).release(f"guest {member_id}")
            member.snapshots = kept
            member.spares.clear()
            member.is_guest = False
            member.incarnation = request.incarnation
            member.chain = replace(member.chain, limit_bytes=log_limit_bytes)

    def settle(
        self, member_id: str, num_bytes: int, buffers: Collection[SharedBuffer]
    ) -> None:
        """Give back what an earlier trainer's snapshot took, once it is no longer held."""
        with self.changed:
            member = self._members[member_id]
            older = [k.buffer for k in member.snapshots if k.buffer not in buffers]
            size = sum(buffer.num_bytes for buffer in older) + member.chain.limit_bytes
            self._budget = self._budget.reserve(member_id, num_bytes + size)

    def expect(self, member_id: str, lineage: str) -> None:
        """Let the log go on from a snapshot that is being checked."""
        with self.changed:
            self._members[member_id].pending_anchor = lineage

    def add(self, kept: Kept) -> None:
        """Serve a snapshot, with at most one older one beside it."""
        with self.changed:
            member = self._members[kept.facts.member_id]
            others = [k for k in member.snapshots if k.buffer is not kept.buffer]
            newest = others[-1].facts.incarnation if others else ""
            if newest == member.incarnation != kept.facts.incarnation and newest:
                return  # an earlier trainer's, checked only now: it is out of date
            member.snapshots = [*others[-1:], kept]
            if member.is_guest:
                member.spares += [k.buffer for k in others[:-1]][:1]
            oldest_step = min(k.facts.step for k in member.snapshots)
            self._set_chain(member, kept.facts.member_id, member.chain.trimmed(oldest_step))
            self.changed.notify_all()

    def withdraw(self, member_id: str, buffer: SharedBuffer) -> bool:
        """Stop serving what is in a buffer, unless somebody reads it; says whether."""
        with self.changed:
            member = self._members[member_id]
            for kept in member.snapshots:
                if kept.buffer is buffer:
                    # The newest complete one never gives way to one half written.
                    if kept.num_readers or kept is member.snapshots[-1]:
                        return False
                    member.snapshots.remove(kept)
                    return True
            return True

    def take_guest_buffer(self, facts: SnapshotFacts) -> SharedBuffer:
        """A buffer to receive a copy into; what lay in it is no longer served.

        Raises:
            CheckpointError: If there is no room, or nothing newer is offered.
        """
        name = facts.member_id
        with self.changed:
            member = self._members[name]
            newest = member.snapshots[-1].facts if member.snapshots else None
            if newest and newest.incarnation == facts.incarnation:
                if newest.step >= facts.step:
                    msg = f"step {newest.step} of {name} is held already"
                    raise CheckpointError(msg)
            elif not member.snapshots:
                member.is_guest = True
            self._budget = self._budget.reserve(f"guest {name}", 2 * facts.num_bytes)
            older = [k for k in member.snapshots[:-1] if not k.num_readers]
            spares = member.spares + [k.buffer for k in older if member.is_guest]
            member.spares = []
            if member.is_guest:
                member.snapshots = [k for k in member.snapshots if k not in older]
        for buffer in spares:
            if buffer.num_bytes >= facts.num_bytes:
                return buffer
        return SharedBuffer.create(facts.num_bytes)

    def give_back(self, member_id: str, buffer: SharedBuffer) -> None:
        """Keep a buffer whose content did not arrive whole for the next try."""
        with self.changed:
            self._members[member_id].spares = [buffer]

    def add_log(self, entry: LogEntry, data: bytes) -> bool:
        """Keep a step, of a guest as far as memory is free; says whether it could be kept.

        Args:
            entry: The step.
            data: Its bytes, coded.
        """
        with self.changed:
            name = entry.member_id
            member = self._members[name]
            if member.is_guest:
                room = member.chain.num_bytes + max(0, self._budget.free_bytes)
                member.chain = replace(member.chain, limit_bytes=room)
            anchors = {k.facts.lineage for k in member.snapshots}
            anchors |= (
                {member.pending_anchor} if member.pending_anchor is not None else set()
            )
            before = member.chain
            after = before.with_entry(
                entry, anchors=anchors, newest_step=self._newest_step(member)
            )
            is_kept = bool(after.entries) and after.entries[-1] is entry
            if is_kept:
                member.blobs[entry.step, entry.lineage] = data
            self._set_chain(member, name, after)
            self.changed.notify_all()
            return is_kept

    def log_state(self, member_id: str) -> tuple[int, bool]:
        """Bytes of a member's log, and whether it wants a snapshot."""
        with self.changed:
            member = self._members[member_id]
            newest_step = self._newest_step(member)
            return member.chain.num_bytes, member.chain.wants_snapshot(newest_step)

    def chain(self, member_id: str) -> LogChain:
        """A member's log."""
        with self.changed:
            return self._members[member_id].chain

    def log_bytes(self, member_id: str, step: int, lineage: str) -> bytes:
        """One step of a log.

        Raises:
            CheckpointError: If it is not held.
        """
        with self.changed:
            member = self._members.get(member_id, _Member())
            data = member.blobs.get((step, lineage))
            if data is None:
                msg = (
                    f"step {step} of the log of {member_id} is not held; ask another agent"
                )
                raise CheckpointError(msg)
            return data

    def newest(self, member_id: str) -> SnapshotFacts | None:
        """A member's newest complete snapshot."""
        with self.changed:
            snapshots = self._members[member_id].snapshots
            return snapshots[-1].facts if snapshots else None

    @contextmanager
    def reading(self, member_id: str, step: int, lineage: str) -> Iterator[Kept]:
        """Hold a snapshot while it is read.

        Raises:
            CheckpointError: If it is not held.
        """
        with self.changed:
            found = [
                kept
                for kept in self._members.get(member_id, _Member()).snapshots
                if (kept.facts.step, kept.facts.lineage) == (step, lineage)
            ]
            if not found:
                msg = f"step {step} of {member_id} is not held any more; list again"
                raise CheckpointError(msg)
            found[-1].num_readers += 1
        try:
            yield found[-1]
        finally:
            with self.changed:
                found[-1].num_readers -= 1
                self.changed.notify_all()

    def _newest_step(self, member: _Member) -> int:
        return member.snapshots[-1].facts.step if member.snapshots else -1

    def _set_chain(self, member: _Member, name: str, chain: LogChain) -> None:
        member.chain = chain
        kept = {(entry.step, entry.lineage) for entry in chain.entries}
        member.blobs = {key: blob for key, blob in member.blobs.items() if key in kept}
        if member.is_guest:
            self._budget = self._budget.release(f"guest {name}: log")
            self._budget = self._budget.reserve(f"guest {name}: log", chain.num_bytes)


def take_checksums(facts: SnapshotFacts, buffer: SharedBuffer) -> SnapshotFacts:
    """Fill in the crc of every chunk.

    Raises:
        CheckpointError: If the facts don't fit the buffer or each other.
    """
    check_layout(facts, buffer.num_bytes)
    view = buffer.view
    sums = tuple(zlib.crc32(view[c.offset : c.offset + c.num_bytes]) for c in facts.chunks)
    return msgspec.structs.replace(facts, crc32s=sums)


def check_layout(facts: SnapshotFacts, limit_bytes: int) -> None:
    """Check that chunks are parts of their tensors and lie in the buffer, side by side.

    Raises:
        CheckpointError: If not, naming the first chunk that does not.
    """
    if facts.num_bytes > limit_bytes:
        msg = (
            f"step {facts.step} of {facts.member_id} has {facts.num_bytes} bytes, its "
            f"buffer {limit_bytes}; reserve buffers for the whole shard"
        )
        raise CheckpointError(msg)
    end = 0
    for chunk in sorted(facts.chunks, key=lambda c: (c.offset, c.num_bytes)):
        tensor = facts.tensors.get(chunk.name)
        is_sound = (
            tensor is not None
            and chunk.range.stop <= tensor.num_elements
            and chunk.num_bytes == chunk.range.num_elements * tensor.item_bytes
            and end <= chunk.offset <= facts.num_bytes - chunk.num_bytes
        )
        if not is_sound:
            msg = (
                f"chunk {chunk.range} of {chunk.num_bytes} bytes at {chunk.offset} does "
                f"not fit step {facts.step} of {facts.member_id}; lay the shard out again"
            )
            raise CheckpointError(msg)
        end = chunk.offset + chunk.num_bytes


def find_damaged(kept: Kept) -> tuple[ShardChunk, ...]:
    """Chunks whose bytes are not those that were sealed."""
    return tuple(
        chunk
        for index, (chunk, crc32) in enumerate(
            zip(kept.facts.chunks, kept.facts.crc32s, strict=True)
        )
        if zlib.crc32(kept.chunk(index)) != crc32
    )
