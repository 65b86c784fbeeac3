"""Which settings differ between two runs, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Json = Any  # what JSON can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One setting that differs."""

    name: str
    """Its path, such as ``optimizer.lr``."""
    kind: Literal["changed", "added", "removed"]
    before: Json = None
    after: Json = None

    def __str__(self) -> str:
        if self.kind == "added":
            return f"{self.name}: added as {self.after!r}"
        if self.kind == "removed":
            return f"{self.name}: removed, was {self.before!r}"
        return f"{self.name}: {self.before!r} -> {self.after!r}"


def find_drift(before: Mapping[str, Json], after: Mapping[str, Json]) -> tuple[Drift, ...]:
    """Compare two trees of settings, by path.

    >>> found = find_drift({"optimizer": {"lr": 0.1}}, {"optimizer": {"lr": 0.2}})
    >>> print(*found)
    optimizer.lr: 0.1 -> 0.2
    """
    return tuple(_compare(before, after, ""))


def _compare(before: Json, after: Json, name: str) -> Iterator[Drift]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        keys = [*before, *(key for key in after if key not in before)]
        for key in keys:
            path = f"{name}.{key}" if name else str(key)
            if key not in after:
                yield Drift(name=path, kind="removed", before=before[key])
            elif key not in before:
                yield Drift(name=path, kind="added", after=after[key])
            else:
                yield from _compare(before[key], after[key], path)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _compare(one, other, f"{name}[{index}]")
    elif type(before) is not type(after) or before != after:
        yield Drift(name=name, kind="changed", before=before, after=after)
