"""Which checkpoints stay: decided from their names and steps alone.

What would be lost by a mistake here is lost for good, so each rule keeps when in
doubt: a damaged checkpoint never takes the place of a whole one, and weights alone
never take the place of what training resumes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from geartrain.checkpoint.cadence import SaveKind
from geartrain.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """How many checkpoints stay."""

    keep_last: int = 3
    """Of each kind, the newest whole ones."""
    keep_every_steps: int | None = None
    """In addition, those whose step is a multiple of this number."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            msg = f"keep_last={self.keep_last} must be >= 1; the newest one always stays"
            raise ConfigError(msg)
        if self.keep_every_steps is not None and self.keep_every_steps < 1:
            msg = (
                f"keep_every_steps={self.keep_every_steps} must be >= 1; leave it out to "
                "keep the last ones alone"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCandidate:
    """A checkpoint as retention sees it."""

    name: str
    step: int
    kind: SaveKind
    created_at_s: float
    is_whole: bool = True
    """Whether all that it needs is there."""
    is_pinned: bool = False
    """Whether somebody still reads or wants it, such as the pointer LATEST."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays and what may go, each newest first."""

    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    reasons: dict[str, str] = field(default_factory=dict)
    """Why each kept one stays."""


def choose_kept(candidates: Iterable[KeptCandidate], policy: RetentionPolicy) -> Retention:
    """Decide which checkpoints stay.

    Raises:
        CheckpointError: If two have one name.
    """
    newest_first = sorted(
        candidates, key=lambda one: (one.created_at_s, one.step, one.name), reverse=True
    )
    if len({one.name for one in newest_first}) != len(newest_first):
        msg = "two checkpoints have one name; list the store again"
        raise CheckpointError(msg)
    reasons: dict[str, str] = {}
    for kind in ("full", "weights"):
        of_kind = [one for one in newest_first if one.kind == kind]
        whole = [one for one in of_kind if one.is_whole]
        for one in whole[: policy.keep_last]:
            reasons[one.name] = f"among the last {policy.keep_last} of {kind}"
        if not whole and kind == "full":
            # Somebody may still mend it from another tier.
            for one in of_kind[: policy.keep_last]:
                reasons[one.name] = "damaged, but no whole one could take its place"
    every = policy.keep_every_steps
    for one in newest_first:
        if one.is_pinned:
            reasons.setdefault(one.name, "LATEST points at it")
        if every is not None and one.step % every == 0:
            reasons.setdefault(one.name, f"its step is a multiple of {every}")
    return Retention(
        kept=tuple(one.name for one in newest_first if one.name in reasons),
        dropped=tuple(one.name for one in newest_first if one.name not in reasons),
        reasons=reasons,
    )


def unneeded_objects(
    present: Iterable[str], needs: Mapping[str, Sequence[str]], kept: Iterable[str]
) -> tuple[str, ...]:
    """Return the objects that no kept checkpoint needs.

    Args:
        present: Names of the objects that are there.
        needs: Names of the objects that each checkpoint needs, by its name.
        kept: Names of the checkpoints that stay.

    Raises:
        CheckpointError: If it isn't known what a kept one needs: nothing may go then.

    >>> unneeded_objects(["a", "b", "c"], {"1": ["a"], "2": ["b"]}, kept=["2"])
    ('a', 'c')
    """
    needed: set[str] = set()
    for name in kept:
        if name not in needs:
            msg = (
                f"it is not known what the kept checkpoint {name} needs, so nothing is "
                "deleted; run geartrain checkpoint verify"
            )
            raise CheckpointError(msg)
        needed.update(needs[name])
    return tuple(sorted(set(present) - needed))
