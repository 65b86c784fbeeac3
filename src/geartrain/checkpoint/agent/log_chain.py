"""Which steps of a gradient log are kept: pure; an unbroken chain or nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from geartrain.checkpoint.agent.messages import LogEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChain:
    """The kept steps of one member, oldest first, each the next of the one before."""

    limit_bytes: int
    entries: tuple[LogEntry, ...] = ()
    is_broken: bool = False
    """A step was refused: the log goes on only after another snapshot."""

    @property
    def num_bytes(self) -> int:
        """Of all kept steps."""
        return sum(entry.num_bytes for entry in self.entries)

    def with_entry(
        self, entry: LogEntry, *, anchors: Collection[str], newest_step: int
    ) -> LogChain:
        """Take a step, if it follows from what is held and there is room.

        Args:
            entry: The step.
            anchors: Lineages of the snapshots that are held or about to be.
            newest_step: Of the newest snapshot; steps up to it give way when it is full.

        Returns:
            The chain with it, or the chain marked as broken.
        """
        chain = self
        follows = (
            bool(self.entries)
            and not self.is_broken
            and entry.previous_lineage == self.entries[-1].lineage
            and entry.step == self.entries[-1].step + 1
        )
        if not follows:
            if entry.previous_lineage not in anchors:
                return replace(self, is_broken=True)
            # It starts at a snapshot; what was before leads somewhere else.
            chain = replace(self, entries=(), is_broken=False)
        if chain.num_bytes + entry.num_bytes > self.limit_bytes:
            chain = chain.trimmed(newest_step)
        if chain.num_bytes + entry.num_bytes > self.limit_bytes:
            return replace(chain, is_broken=True)
        return replace(chain, entries=(*chain.entries, entry))

    def trimmed(self, step: int) -> LogChain:
        """Drop what a snapshot of that step makes needless."""
        return replace(
            self, entries=tuple(entry for entry in self.entries if entry.step > step)
        )

    def wants_snapshot(self, newest_step: int) -> bool:
        """Whether a snapshot is needed soon: broken, or half full since the last."""
        since = sum(entry.num_bytes for entry in self.entries if entry.step > newest_step)
        return self.is_broken or 2 * since > self.limit_bytes

    def path(self, step: int, lineage: str) -> tuple[LogEntry, ...]:
        """Steps that lead on from a state; empty where none does."""
        found: list[LogEntry] = []
        for entry in self.entries:
            expected = found[-1].lineage if found else lineage
            if entry.step == step + 1 + len(found) and entry.previous_lineage == expected:
                found.append(entry)
        return tuple(found)
