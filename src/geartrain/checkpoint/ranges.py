"""Parts of a state: element ranges of named tensors, and who holds which.

A state is named by tensor and element, never by rank: element ``i`` is the ``i``-th of
the tensor in row-major order, whoever holds it. So a state that three unequal shards
wrote is read by two, five or one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from geartrain.errors import CheckpointError

_MAX_NAMED = 5  # ranges that an error spells out; a lost shard may miss thousands

_Spans = list[tuple[int, int]]  # sorted, disjoint, not empty


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StateRange:
    """Elements ``start`` to ``stop - 1`` of a tensor, in row-major order.

    >>> print(StateRange(name="model/embed.weight", start=0, stop=10))
    model/embed.weight[0:10]
    """

    name: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not self.name or not 0 <= self.start <= self.stop:
            msg = (
                f"a range of {self.name!r} from {self.start} to {self.stop} is none; give "
                "a tensor's name and 0 <= start <= stop"
            )
            raise CheckpointError(msg)

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"

    @property
    def num_elements(self) -> int:
        """How many elements it holds; a range without any is of no consequence."""
        return self.stop - self.start


Ownership = Mapping[str, Sequence[StateRange]]
"""Which ranges each holder has; holders are members, stores, or pieces of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRead:
    """A range to get, and from whom."""

    holder_id: str
    range: StateRange


def merge_ranges(ranges: Iterable[StateRange]) -> tuple[StateRange, ...]:
    """Sort ranges and join those that touch or overlap.

    >>> first = StateRange(name="w", start=0, stop=5)
    >>> second = StateRange(name="w", start=4, stop=9)
    >>> [str(part) for part in merge_ranges([second, first])]
    ['w[0:9]']
    """
    return _to_ranges(_group(ranges))


def intersect_ranges(
    ranges: Iterable[StateRange], others: Iterable[StateRange]
) -> tuple[StateRange, ...]:
    """Return what lies in both, merged."""
    left, right = _group(ranges), _group(others)
    return _to_ranges(
        {
            name: _intersect(spans, right[name])
            for name, spans in left.items()
            if name in right
        }
    )


def subtract_ranges(
    ranges: Iterable[StateRange], others: Iterable[StateRange]
) -> tuple[StateRange, ...]:
    """Return what lies in the first and not in the second, merged."""
    left, right = _group(ranges), _group(others)
    return _to_ranges(
        {name: _subtract(spans, right.get(name, [])) for name, spans in left.items()}
    )


def whole_ranges(num_elements: Mapping[str, int]) -> tuple[StateRange, ...]:
    """Return the range of each whole tensor that has elements.

    Args:
        num_elements: Of each tensor.
    """
    return tuple(
        StateRange(name=name, start=0, stop=count)
        for name, count in num_elements.items()
        if count
    )


def find_missing(
    held: Iterable[StateRange], num_elements: Mapping[str, int]
) -> tuple[StateRange, ...]:
    """Return what nobody holds, merged.

    Args:
        held: All that anybody holds.
        num_elements: Of each tensor.
    """
    return subtract_ranges(whole_ranges(num_elements), held)


def check_tiling(ranges: Iterable[StateRange], num_elements: Mapping[str, int]) -> None:
    """Check that ranges cover every tensor, each element once.

    Args:
        ranges: In any order; empty ones do not matter.
        num_elements: Of each tensor.

    Raises:
        CheckpointError: If one belongs to no tensor, goes beyond its end, or overlaps
            another, or if elements are left over. It names them.
    """
    ordered = sorted(part for part in ranges if part.num_elements)
    for part in ordered:
        count = num_elements.get(part.name)
        if count is None or part.stop > count:
            has = "there is no such tensor" if count is None else f"it has {count} elements"
            msg = f"{part} does not exist: {has}; name tensors as the state does"
            raise CheckpointError(msg)
    for part, after in pairwise(ordered):
        if part.name == after.name and after.start < part.stop:
            msg = f"{part} and {after} overlap; give each element to one holder"
            raise CheckpointError(msg)
    if missing := find_missing(ordered, num_elements):
        msg = f"nobody holds {describe_ranges(missing)}; give every element to a holder"
        raise CheckpointError(msg)


def plan_reads(have: Ownership, want: Iterable[StateRange]) -> tuple[RangeRead, ...]:
    """Decide who gives which part of what is wanted.

    What several hold comes from the first of them, in the order of ``have``: put the
    nearest first.

    Args:
        have: Ranges of each holder, the preferred holder first.
        want: Ranges to get; what is asked for twice is read once.

    Returns:
        Reads sorted by tensor and element. They tile what is wanted.

    Raises:
        CheckpointError: If nobody has a part of it, naming that part.

    >>> have = {"old": [StateRange(name="w", start=0, stop=6)],
    ...         "new": [StateRange(name="w", start=4, stop=9)]}
    >>> for read in plan_reads(have, [StateRange(name="w", start=2, stop=8)]):
    ...     print(read.holder_id, read.range)
    old w[2:6]
    new w[6:8]
    """
    left = merge_ranges(want)
    reads: list[RangeRead] = []
    for holder_id, held in have.items():
        found = intersect_ranges(left, held)
        reads += (RangeRead(holder_id=holder_id, range=part) for part in found)
        left = subtract_ranges(left, found)
    if left:
        msg = (
            f"nobody holds {describe_ranges(left)}; asked {', '.join(have) or 'nobody'}; "
            "restore from another tier"
        )
        raise CheckpointError(msg)
    return tuple(sorted(reads, key=lambda read: read.range))


def split_ownership(
    num_elements: Mapping[str, int], weights: Mapping[str, float]
) -> dict[str, tuple[StateRange, ...]]:
    """Share tensors out, laid end to end and cut by weight.

    Args:
        num_elements: Of each tensor, in the order in which they are laid.
        weights: Of each holder, such as its free memory.

    Returns:
        Ranges of each holder; they tile the tensors. A small weight may get none.

    Raises:
        CheckpointError: If a weight is negative, or none is positive.

    >>> split_ownership({"w": 3, "b": 1}, {"large": 3.0, "small": 1.0})["small"]
    (StateRange(name='b', start=0, stop=1),)
    """
    total_weight = sum(weights.values())
    if total_weight <= 0 or min(weights.values()) < 0:
        msg = f"weights {dict(weights)} must be >= 0 with a positive sum; correct them"
        raise CheckpointError(msg)
    total = sum(num_elements.values())
    owned: dict[str, tuple[StateRange, ...]] = {}
    weight_before, begin = 0.0, 0
    for holder_id, weight in weights.items():
        weight_before += weight
        end = min(total, round(total * weight_before / total_weight))
        owned[holder_id] = _window(num_elements, begin, end)
        begin = end
    return owned


def describe_ranges(ranges: Sequence[StateRange]) -> str:
    """Spell out ranges for a person, the first few of many."""
    named = ", ".join(str(part) for part in ranges[:_MAX_NAMED])
    rest = len(ranges) - _MAX_NAMED
    return f"{named} and {rest} more ranges" if rest > 0 else named


def _window(
    num_elements: Mapping[str, int], begin: int, end: int
) -> tuple[StateRange, ...]:
    parts, offset = [], 0
    for name, count in num_elements.items():
        start, stop = max(begin - offset, 0), min(end - offset, count)
        if start < stop:
            parts.append(StateRange(name=name, start=start, stop=stop))
        offset += count
    return tuple(parts)


def _group(ranges: Iterable[StateRange]) -> dict[str, _Spans]:
    grouped: dict[str, _Spans] = {}
    for part in sorted(part for part in ranges if part.num_elements):
        spans = grouped.setdefault(part.name, [])
        if spans and part.start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], part.stop))
        else:
            spans.append((part.start, part.stop))
    return grouped


def _to_ranges(grouped: Mapping[str, _Spans]) -> tuple[StateRange, ...]:
    return tuple(
        StateRange(name=name, start=start, stop=stop)
        for name, spans in sorted(grouped.items())
        for start, stop in spans
    )


def _intersect(spans: _Spans, others: _Spans) -> _Spans:
    found: _Spans = []
    i = j = 0
    while i < len(spans) and j < len(others):
        start = max(spans[i][0], others[j][0])
        stop = min(spans[i][1], others[j][1])
        if start < stop:
            found.append((start, stop))
        if spans[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def _subtract(spans: _Spans, others: _Spans) -> _Spans:
    left: _Spans = []
    j = 0
    for start, stop in spans:
        position = start
        while j < len(others) and others[j][1] <= start:
            j += 1
        k = j
        while k < len(others) and others[k][0] < stop:
            if others[k][0] > position:
                left.append((position, others[k][0]))
            position = max(position, others[k][1])
            k += 1
        if position < stop:
            left.append((position, stop))
    return left
