from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.data.order import GlobalOrder
from geartrain.data.sampler import ShareView, locate_batch, slice_by_shares
from geartrain.data.split import apportion
from geartrain.errors import ConfigError

weights = st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any)


@given(st.integers(0, 5000), weights)
def test_parts_add_up_and_lie_within_one_of_their_quota(
    count: int, weights: list[int]
) -> None:
    parts = apportion(count, weights)

    total = sum(weights)
    assert sum(parts) == count
    assert all(
        abs(p * total - count * w) < total for p, w in zip(parts, weights, strict=True)
    )


@given(weights)
def test_a_full_batch_is_split_as_planned(weights: list[int]) -> None:
    assert apportion(sum(weights), weights) == tuple(weights)


def test_nothing_is_split_when_every_weight_is_zero() -> None:
    assert apportion(0, [0, 0]) == (0, 0)
    with pytest.raises(ConfigError, match=r"cannot split 3 samples by \(0, 0\)"):
        apportion(3, [0, 0])


@st.composite
def epochs(draw: st.DrawFn) -> tuple[GlobalOrder, list[tuple[int, ...]]]:
    """An order, and shares with a tail that differ from step to step."""
    batch = draw(st.integers(1, 24))
    order = GlobalOrder(
        num_samples=draw(st.integers(batch, 100)),
        global_batch_size=batch,
        seed=draw(st.integers(0, 2**40)),
        drop_last=draw(st.booleans()),
    )
    num_ranks = draw(st.integers(1, 5))
    part = st.lists(st.integers(0, 20), min_size=num_ranks + 1, max_size=num_ranks + 1)
    one = part.filter(any).map(lambda weights: apportion(batch, weights))
    shares = draw(st.lists(one, min_size=order.num_steps, max_size=order.num_steps))
    return order, shares


@given(epochs(), st.integers(0, 3))
def test_every_sample_is_owned_exactly_once_whatever_the_shares_do(
    case: tuple[GlobalOrder, list[tuple[int, ...]]], epoch: int
) -> None:
    order, shares_of_step = case
    permutation = order.permutation(epoch).tolist()
    seen: Counter[int] = Counter()

    for step, (*shares, tail) in enumerate(shares_of_step):
        begin, end = order.batch_bounds(step)
        indices = tuple(permutation[begin:end])
        batches = [
            locate_batch(
                epoch,
                step,
                indices,
                ShareView(shares=tuple(shares), tail_samples=tail, rank=r),
            )
            for r in range(len(shares))
        ]
        for batch in batches:
            seen.update(batch.sample_indices[batch.start : batch.stop])
        seen.update(indices[batches[0].tail_start : batches[0].tail_stop])

    covered = order.num_samples
    if order.drop_last:
        covered -= order.num_samples % order.global_batch_size
    assert seen == Counter(permutation[:covered])


@given(st.integers(0, 200), weights.filter(lambda w: len(w) > 1))
def test_slices_are_contiguous_and_the_tail_is_last(count: int, parts: list[int]) -> None:
    *shares, tail = parts

    slices = slice_by_shares(count, tuple(shares), tail)

    edges = [*slices.own, slices.tail]
    assert edges[0][0] == 0
    assert edges[-1][1] == count
    assert all(a[1] == b[0] for a, b in pairwise(edges))


def test_a_view_without_any_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must not all be 0"):
        ShareView(shares=(0, 0), rank=0)


def test_a_rank_without_a_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank=2 has no share"):
        ShareView(shares=(1, 1), rank=2)
