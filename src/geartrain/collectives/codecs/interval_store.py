"""Vectors kept by bucket interval, with a way back to what they were a step ago."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class Kept:
    """One interval's planes now, and as they were before the step under way."""

    start: int
    now: torch.Tensor
    """float32, shape (num_planes, num_elements)."""
    other: torch.Tensor
    """Same shape: room for the step under way, or what that step replaced."""
    changed: bool = False
    """Whether ``other`` is what was there before the step."""

    @property
    def stop(self) -> int:
        """End of the interval."""
        return self.start + self.now.shape[1]

    def flip(self, *, changed: bool) -> None:
        """Make the written planes the current ones, or go back."""
        self.now, self.other = self.other, self.now
        self.changed = changed


@dataclass(slots=True)
class IntervalStore:
    """Planes by bucket and interval; zero where nothing was written.

    Asked for an interval that is kept in other pieces, it cuts anew, so that a plan may
    change the number of chunks without losing anything.
    """

    num_planes: int
    _kept: dict[str, dict[int, Kept]] = field(default_factory=dict)

    def at(self, key: str, start: int, num_elements: int) -> Kept:
        """What is kept for this interval of a bucket; cut or made if need be."""
        pieces = self._kept.setdefault(key, {})
        found = pieces.get(start)
        if found is None or found.now.shape[1] != num_elements:
            found = self._cut_out(pieces, start, start + num_elements)
        return found

    def __iter__(self) -> Iterator[tuple[str, Kept]]:
        for key, pieces in self._kept.items():
            for kept in pieces.values():
                yield key, kept

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return sum(2 * kept.now.numel() * kept.now.element_size() for _, kept in self)

    def end_step(self, *, applied: bool) -> None:
        """Close a step; go back to before it unless it was applied."""
        for _, kept in self:
            if kept.changed and not applied:
                kept.flip(changed=False)
            kept.changed = False

    def scale_(self, factor: float) -> None:
        """Multiply everything."""
        for _, kept in self:
            kept.now.mul_(factor)
            kept.other.mul_(factor)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def _cut_out(self, pieces: dict[int, Kept], start: int, stop: int) -> Kept:
        whole = self._zeros(start, stop)
        touching = [k for k in pieces.values() if k.start < stop and start < k.stop]
        for kept in touching:
            del pieces[kept.start]
            for low, high in ((kept.start, start), (stop, kept.stop)):
                if low < high:
                    rest = pieces[low] = self._zeros(low, high)
                    _copy(kept, rest)
            _copy(kept, whole)
        pieces[start] = whole
        return whole

    def _zeros(self, start: int, stop: int) -> Kept:
        shape = (self.num_planes, stop - start)
        return Kept(start, torch.zeros(shape), torch.zeros(shape))


def _copy(source: Kept, target: Kept) -> None:
    """Copy the elements that both hold, and their way back."""
    low, high = max(source.start, target.start), min(source.stop, target.stop)
    from_columns = slice(low - source.start, high - source.start)
    to_columns = slice(low - target.start, high - target.start)
    before = source.other if source.changed else source.now
    target.now[:, to_columns] = source.now[:, from_columns]
    target.other[:, to_columns] = before[:, from_columns]
    target.changed = target.changed or source.changed
