"""Adding up what several members hold, in one order on all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def fold_in_order(
    own: torch.Tensor, others: Sequence[torch.Tensor], own_index: int
) -> None:
    """Replace ``own`` by the sum of all parts, added from the first member to the last.

    Floating-point sums depend on their order: whoever adds the same parts in the same
    order gets the same bits, whatever arrived first.

    Args:
        own: This member's part, shape (num_elements,).
        others: All other members' parts in member order, same shape; overwritten.
        own_index: How many of ``others`` come before ``own``.

    >>> own = torch.tensor([1.0])
    >>> fold_in_order(own, [torch.tensor([2.0]), torch.tensor([4.0])], 1)
    >>> own
    tensor([7.])
    """
    if own_index > 0:
        before = others[0]
        for part in others[1:own_index]:
            before += part
        torch.add(before, own, out=own)
    for part in others[own_index:]:
        own += part
