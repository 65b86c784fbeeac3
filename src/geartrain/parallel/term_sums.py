"""Loss terms of one step on one rank: their sums and counts so far, and their divisors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from geartrain.parallel.loss_terms import LossTerm
from geartrain.parallel.step_checks import known_count


@dataclass(slots=True)
class TermSums:
    """What a step's micro-batches add up to, term by term.

    Args:
        nominal: What sums are divided by until the true counts are known.
        known_counts: Fleet-wide counts by term; None where they are not known yet.
    """

    nominal: float = 1.0
    known_counts: dict[str, float] | None = None
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """By term, in the form of the buckets; only where each has a backward of its own."""
    _loss_sums: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _counts: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Terms seen so far."""
        return tuple(self._loss_sums)

    def are_weighed_late(self, names: Collection[str]) -> bool:
        """Whether terms need a backward each: their weights are not known before it."""
        return len(names) > 1 and self.known_counts is None

    def add(self, terms: Mapping[str, LossTerm], *, ghost: bool) -> None:
        """Take in a micro-batch.

        Args:
            terms: Its loss terms.
            ghost: It contributes nothing.
        """
        for name, term in terms.items():
            loss_sums = self._loss_sums.setdefault(name, [])
            counts = self._counts.setdefault(name, [])
            if not ghost:  # not 0 times its values, which may be infinite
                loss_sums.append(term.loss_sum.detach())
                counts.append(term.count)

    def accumulate_apart(
        self,
        flats: list[torch.Tensor],
        terms: Mapping[str, LossTerm],
        backward: Callable[[torch.Tensor, bool], None],
        *,
        ghost: bool,
    ) -> None:
        """One backward a term: their weights are known only after all forwards.

        Args:
            flats: The buckets, which backward fills; zero afterwards.
            terms: Of a micro-batch.
            backward: Called with a loss, and whether its graph is used again.
            ghost: It contributes nothing.
        """
        for index, (name, term) in enumerate(terms.items()):
            sums = self.gradients.setdefault(name, [torch.zeros_like(f) for f in flats])
            if not term.loss_sum.requires_grad and not term.count > 0:
                continue  # a term that is absent from this micro-batch
            torch._foreach_zero_(flats)
            loss = term.loss_sum / self.nominal
            backward(loss * 0.0 if ghost else loss, index < len(terms) - 1)
            torch._foreach_add_(sums, flats)
        torch._foreach_zero_(flats)

    def factor_for(self, counts: Mapping[str, float]) -> float:
        """By what gradients are still to be multiplied once the true counts are known.

        Args:
            counts: Fleet-wide, by term.
        """
        count = next(iter(counts.values()))
        is_single = len(counts) == 1 and self.known_counts is None
        return self.nominal / count if is_single and count else 1.0

    def divisor(self, name: str) -> float:
        """What a term's sum is divided by before its backward.

        Raises:
            ConfigError: If ``count_fn`` did not count the term.
        """
        if self.known_counts is None:
            return self.nominal
        count = known_count(name, self.known_counts)
        return max(count, 1e-30)  # no counted element anywhere: the sum is 0 as well

    def sums_counts(self, names: Sequence[str]) -> torch.Tensor:
        """Sums of the terms named, then their counts; float64, on the CPU."""
        return torch.tensor(
            [_total(self._loss_sums.get(name, [])) for name in names]
            + [_total(self._counts.get(name, [])) for name in names],
            dtype=torch.float64,
        )

    def counts(self, names: Sequence[str]) -> torch.Tensor:
        """Counts of the terms named; float64, on the CPU."""
        return self.sums_counts(names)[len(names) :]

    def combine_into(self, flats: list[torch.Tensor], counts: Mapping[str, float]) -> None:
        """Add up the terms' gradients, each weighted by nominal / its true count.

        Args:
            flats: The buckets; what they hold is added to.
            counts: True counts by term.
        """
        for name, count in counts.items():
            if name in self.gradients and count:
                torch._foreach_add_(flats, self.gradients[name], alpha=self.nominal / count)


def _total(values: list[torch.Tensor]) -> float:
    """Sum micro-batch values in float64, with one device synchronisation."""
    if not values:
        return 0.0
    return float(torch.stack([v.to(torch.float64).reshape(()) for v in values]).sum())
