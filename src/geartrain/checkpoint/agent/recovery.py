"""Bring a state back from what agents hold: own first, then peers', by element range."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from geartrain.checkpoint.agent.caller import AgentCaller
from geartrain.checkpoint.agent.messages import Held, Json, LogEntry, SnapshotFacts
from geartrain.checkpoint.gradient_log import LoggedStep, decode_step
from geartrain.checkpoint.manifest import TensorFacts
from geartrain.checkpoint.ranges import (
    StateRange,
    describe_ranges,
    intersect_ranges,
    merge_ranges,
    subtract_ranges,
    whole_ranges,
)
from geartrain.errors import CheckpointError, CommunicationError

logger = logging.getLogger(__name__)

STRUCTURE_EXTRA = "structure"
"""In the extras of the member that leads: what components hold beside their tensors."""

_CHUNKS_A_REQUEST = 16

_Key = tuple[int, str]  # step and lineage
_Target = tuple[StateRange, memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one agent said that it holds."""

    caller: AgentCaller
    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySource:
    """A state that can be brought back whole."""

    base_step: int
    base_lineage: str
    step: int
    """After the log was replayed."""
    lineage: str
    num_members: int
    """Whose logs have to be put together for a step."""


class Recovery:
    """Reads a state from agents; those that can't be reached are named in errors.

    Args:
        callers: Connected agents, the nearest first.
        unreachable: Why others could not be asked.
    """

    def __init__(
        self, callers: Iterable[AgentCaller], unreachable: Sequence[str] = ()
    ) -> None:
        self._problems = list(unreachable)
        self._holdings: list[Holding] = []
        for caller in callers:
            try:
                self._holdings.append(Holding(caller=caller, held=caller.held()))
            except CommunicationError as error:
                self._problems.append(str(error))

    def find(
        self,
        want: Iterable[StateRange],
        is_committed: Callable[[int, str], bool] = lambda _step, _lineage: True,
    ) -> RecoverySource:
        """Find the latest state that is held whole, logs included.

        Args:
            want: Ranges that are needed, whoever has written them.
            is_committed: Whether a step and lineage belong to the run's history. Without
                it the highest step wins, also one that a restore has left behind.

        Raises:
            CheckpointError: If no state holds them all; names what is missing of the
                newest, and who could not be asked.
        """
        wanted = merge_ranges(want)
        found: list[RecoverySource] = []
        missing: dict[_Key, tuple[StateRange, ...]] = {}
        for key in {(s.step, s.lineage) for _, s in self._snapshots()}:
            if not is_committed(*key):
                continue
            parts = [c.range for _, s in self._snapshots(key) for c in s.chunks]
            left = subtract_ranges(wanted, parts)
            if left:
                missing[key] = left
            else:
                found.append(self._extend(key, wanted, is_committed))
        if found:
            return max(found, key=lambda s: (s.step, s.base_step, s.lineage))
        raise CheckpointError(self._explain(wanted, missing))

    def find_whole(self) -> RecoverySource:
        """Find the latest state of which everything is held, logs included.

        What everything is, the snapshots of a step say themselves.

        Raises:
            CheckpointError: If there is none; names what is missing of the newest.
        """
        keys = sorted({(s.step, s.lineage) for _, s in self._snapshots()}, reverse=True)
        if not keys:
            raise CheckpointError(self._explain((), {}))
        found, problem = [], None
        for key in keys:
            try:
                found.append(self._find_at(key, self._wanted(key)))
            except CheckpointError as error:
                problem = problem or error
        if not found:
            assert problem is not None
            raise problem
        return max(found, key=lambda s: (s.step, s.base_step, s.lineage))

    def find_step(self, step: int, lineage: str) -> RecoverySource:
        """Find the state after a step, as it was copied, without a log.

        Raises:
            CheckpointError: If it is not held whole, naming what is missing.
        """
        key = (step, lineage)
        return self._find_at(key, self._wanted(key), lambda *_next: False)

    def tensors(self, source: RecoverySource) -> dict[str, TensorFacts]:
        """Dtype and shape of every tensor of which a part is held."""
        key = (source.base_step, source.base_lineage)
        return {n: f for _, s in self._snapshots(key) for n, f in s.tensors.items()}

    def extras(self, source: RecoverySource) -> dict[str, dict[str, Json]]:
        """What members kept beside their tensors, by member; of the base."""
        key = (source.base_step, source.base_lineage)
        return {s.member_id: s.extras for _, s in self._snapshots(key)}

    def read(
        self, source: RecoverySource, targets: Mapping[StateRange, memoryview]
    ) -> None:
        """Fill buffers with ranges of the base; every byte is checked on arrival.

        Args:
            source: What ``find`` gave.
            targets: Ranges and where to put each, format ``B`` and of its size.

        Raises:
            CheckpointError: If no agent has a part undamaged, naming it.
        """
        key = (source.base_step, source.base_lineage)
        left = merge_ranges(targets)
        damage: list[str] = []
        for holding, facts in self._snapshots(key):
            if left:
                left = subtract_ranges(
                    left, self._read_from(holding, facts, left, targets, damage)
                )
        if left:
            reasons = "; ".join([*damage, *self._problems]) or "nobody holds them any more"
            msg = (
                f"{describe_ranges(left)} of step {source.base_step} can't be read from "
                f"memory: {reasons}; restore from disk (tier 2)"
            )
            raise CheckpointError(msg)

    def logged_steps(self, source: RecoverySource) -> Iterator[list[LoggedStep]]:
        """The steps to replay on the base, each with what every member logged of it.

        Raises:
            CheckpointError: If a step can't be read any more.
        """
        for records in self.coded_steps(source):
            yield [decode_step(data) for data in records]

    def coded_steps(self, source: RecoverySource) -> Iterator[list[bytes]]:
        """The same, coded, which takes less memory; ``decode_step`` reads them.

        Raises:
            CheckpointError: If a step can't be read any more.
        """
        lineage = source.base_lineage
        for step in range(source.base_step + 1, source.step + 1):
            by_member = self._entries(step, lineage)
            if len(by_member) < source.num_members:
                msg = f"step {step} of the log is not held any more; restore from disk"
                raise CheckpointError(msg)
            yield [self._read_log(entries) for entries in by_member.values()]
            lineage = next(iter(by_member.values()))[0][1].lineage

    def close(self) -> None:
        """End the connections."""
        for holding in self._holdings:
            holding.caller.close()

    def _snapshots(self, key: _Key | None = None) -> list[tuple[Holding, SnapshotFacts]]:
        return [
            (holding, facts)
            for holding in self._holdings
            for facts in holding.held.snapshots
            if key is None or (facts.step, facts.lineage) == key
        ]

    def _wanted(self, key: _Key) -> tuple[StateRange, ...]:
        """All of the state that a step's snapshots are parts of."""
        facts = {n: t for _, s in self._snapshots(key) for n, t in s.tensors.items()}
        return whole_ranges({n: t.num_elements for n, t in facts.items()})

    def _find_at(
        self,
        key: _Key,
        wanted: Sequence[StateRange],
        is_committed: Callable[[int, str], bool] = lambda _step, _lineage: True,
    ) -> RecoverySource:
        """The state that a snapshot and the log after it lead to."""
        parts = [c.range for _, s in self._snapshots(key) for c in s.chunks]
        left = subtract_ranges(wanted, parts)
        if left or not wanted:
            raise CheckpointError(self._explain(wanted, {key: left} if left else {}))
        return self._extend(key, wanted, is_committed)

    def _entries(
        self, step: int, previous_lineage: str
    ) -> dict[str, list[tuple[Holding, LogEntry]]]:
        """Who holds a step, by the member that logged it."""
        found: dict[str, list[tuple[Holding, LogEntry]]] = {}
        for holding in self._holdings:
            for entry in holding.held.log:
                if (entry.step, entry.previous_lineage) == (step, previous_lineage):
                    found.setdefault(entry.member_id, []).append((holding, entry))
        return found

    def _extend(
        self,
        key: _Key,
        wanted: Sequence[StateRange],
        is_committed: Callable[[int, str], bool],
    ) -> RecoverySource:
        """Follow the log as far as every member whose part is needed has logged."""
        needed = {
            facts.member_id
            for _, facts in self._snapshots(key)
            if intersect_ranges(wanted, [c.range for c in facts.chunks])
        }
        step, lineage = key
        while True:
            entries = self._entries(step + 1, lineage)
            lineages = {e.lineage for m in needed for _, e in entries.get(m, [])}
            if not needed <= entries.keys() or len(lineages) != 1:
                break
            following = lineages.pop()
            if not is_committed(step + 1, following):
                break
            step, lineage = step + 1, following
        return RecoverySource(
            base_step=key[0],
            base_lineage=key[1],
            step=step,
            lineage=lineage,
            num_members=len(needed),
        )

    def _read_from(
        self,
        holding: Holding,
        facts: SnapshotFacts,
        left: Sequence[StateRange],
        targets: Mapping[StateRange, memoryview],
        damage: list[str],
    ) -> list[StateRange]:
        """Read what one agent has of what is left; returns what came undamaged."""
        by_name: dict[str, list[StateRange]] = {}
        for part in left:
            by_name.setdefault(part.name, []).append(part)
        wanted: list[tuple[int, list[StateRange]]] = []
        for index, chunk in enumerate(facts.chunks):
            useful = intersect_ranges([chunk.range], by_name.get(chunk.name, []))
            if useful:
                wanted.append((index, list(useful)))
        places: dict[str, list[_Target]] = {}
        for part, target in targets.items():
            places.setdefault(part.name, []).append((part, target))
        done: list[StateRange] = []
        for first in range(0, len(wanted), _CHUNKS_A_REQUEST):
            some = wanted[first : first + _CHUNKS_A_REQUEST]
            try:
                bad = self._fetch(holding.caller, facts, [i for i, _ in some], places)
            except (CommunicationError, CheckpointError) as error:
                damage.append(str(error))
                break
            for index in bad:
                what = f"{facts.chunks[index].range} is damaged at {holding.caller.label}"
                damage.append(what)
                logger.warning("%s", what)
            done += [part for index, parts in some if index not in bad for part in parts]
        return done

    def _fetch(
        self,
        caller: AgentCaller,
        facts: SnapshotFacts,
        indexes: list[int],
        places: Mapping[str, list[_Target]],
    ) -> tuple[int, ...]:
        """Fetch chunks to where they belong; returns the indexes of the damaged ones."""
        buffers, copies = [], []
        for index in indexes:
            chunk = facts.chunks[index]
            item_bytes = facts.tensors[chunk.name].item_bytes
            whole = [
                target[(chunk.start - part.start) * item_bytes :][: chunk.num_bytes]
                for part, target in places[chunk.name]
                if part.start <= chunk.start and chunk.stop <= part.stop
            ]
            if len(whole) == 1 and len(places[chunk.name]) == 1:
                buffers.append(whole[0])  # no copy in between
                continue
            buffers.append(memoryview(bytearray(chunk.num_bytes)))
            copies.append((index, buffers[-1], item_bytes))
        bad = caller.fetch(facts, indexes, buffers)
        for index, data, item_bytes in copies:
            chunk = facts.chunks[index]
            for part, target in places[chunk.name] if index not in bad else []:
                _copy(chunk.range, data, part, target, item_bytes)
        return bad

    def _read_log(self, entries: Sequence[tuple[Holding, LogEntry]]) -> bytes:
        reasons = []
        for holding, entry in entries:
            try:
                return holding.caller.fetch_log(entry)
            except (CommunicationError, CheckpointError) as error:
                reasons.append(str(error))
        step = entries[0][1].step
        msg = f"step {step} of the log can't be read: {'; '.join(reasons)}; "
        msg += "restore to the step before, or from disk (tier 2)"
        raise CheckpointError(msg)

    def _explain(
        self, wanted: Sequence[StateRange], missing: Mapping[_Key, tuple[StateRange, ...]]
    ) -> str:
        asked = ", ".join(h.caller.label for h in self._holdings) or "no agent"
        if missing:
            (step, _), left = max(missing.items())
            what = f"of step {step}, the newest, nobody holds {describe_ranges(left)}"
        else:
            what = f"nobody holds a snapshot; wanted {describe_ranges(wanted)}"
        reasons = "".join(f"; {problem}" for problem in self._problems)
        return (
            f"no state is left in memory: {what} (asked {asked}{reasons}); restore from "
            "disk (tier 2)"
        )


def find_extra(recovery: Recovery, source: RecoverySource, name: str) -> Json:
    """What a member has put beside its part of the base.

    Raises:
        CheckpointError: If none has.
    """
    for extras in recovery.extras(source).values():
        if name in extras:
            return extras[name]
    msg = f"step {source.base_step} in memory lacks its {name}; restore from disk (tier 2)"
    raise CheckpointError(msg)


def _copy(
    have: StateRange,
    data: memoryview,
    want: StateRange,
    target: memoryview,
    item_bytes: int,
) -> None:
    start, stop = max(have.start, want.start), min(have.stop, want.stop)
    if start < stop:
        source = data[(start - have.start) * item_bytes : (stop - have.start) * item_bytes]
        target[(start - want.start) * item_bytes : (stop - want.start) * item_bytes] = (
            source
        )
