"""What each case has to reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A limit on one figure of a case."""

    figure: str
    at_most: float | None = None
    at_least: float | None = None
    needs_default_seed: bool = False
    """Whether it holds for one order of the ranks only."""

    def is_met(self, value: float | None) -> bool:
        """Whether the figure keeps the limit; a figure that was not measured doesn't."""
        if value is None:
            return False
        if self.at_most is not None and value > self.at_most:
            return False
        return self.at_least is None or value >= self.at_least

    def __str__(self) -> str:
        limit = f"<= {self.at_most:g}" if self.at_most is not None else ""
        limit += f">= {self.at_least:g}" if self.at_least is not None else ""
        return f"{self.figure} {limit}"


TARGETS: dict[str, tuple[Target, ...]] = {
    "racks2": (
        Target(figure="ratio_to_best_ring", at_most=0.58),
        Target(figure="ratio_to_given_ring", at_most=0.31, needs_default_seed=True),
        Target(figure="bound_fraction", at_least=0.88),
    ),
    "racks4": (
        Target(figure="ratio_to_best_ring", at_most=0.85),
        Target(figure="bound_fraction", at_least=0.85),
    ),
    "racks2_int8": (
        Target(figure="ratio_to_own_exact", at_most=0.267),
        Target(figure="ratio_to_best_ring", at_most=0.16),
    ),
    "racks2_int4": (Target(figure="ratio_to_own_exact", at_most=0.17),),
    "slow_host": (Target(figure="ratio_to_best_ring", at_most=0.65),),
    "slow_uplink": (Target(figure="ratio_to_best_ring", at_most=0.65),),
    "flat": (Target(figure="ratio_to_best_ring", at_most=1.05),),
    "small_64k": (Target(figure="ratio_to_best_ring", at_most=0.65),),
    "same_host": (Target(figure="ratio_to_best_ring", at_most=0.45),),
    "overlap": (Target(figure="overlap_fraction", at_least=0.65),),
    "link_drop": (
        Target(figure="steps_to_new_optimum", at_most=20),
        Target(figure="steps_back", at_most=20),
    ),
}
