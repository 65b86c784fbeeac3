"""Who is left: agreed through a store, by threads that stand for processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from geartrain.collectives.faults.pulse import neighbours
from geartrain.collectives.faults.roll_call import roll_call


def test_all_expected_close_the_list_without_waiting_for_the_deadline() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        lists = list(
            pool.map(lambda r: roll_call(store, 1, r, 60.0, expected=(0, 2, 5)), (0, 2, 5))
        )

    assert lists == [(0, 2, 5)] * 3


def test_after_the_deadline_it_closes_without_who_is_missing() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        lists = list(
            pool.map(lambda r: roll_call(store, 1, r, 0.3, expected=(0, 1, 2)), (0, 2))
        )

    assert lists == [(0, 2)] * 2


def test_who_comes_late_learns_that_it_is_out() -> None:
    store = HashStore()
    assert roll_call(store, 1, 0, 1.0, expected=(0,)) == (0,)

    assert roll_call(store, 1, 7, 60.0) == (0,)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True))
def test_all_get_the_same_list_whoever_closes_it(ranks: list[int]) -> None:
    store = HashStore()
    with ThreadPoolExecutor(len(ranks)) as pool:
        lists = list(
            pool.map(
                lambda r: roll_call(store, 3, r, 0.0 if r % 2 else 0.02, expected=ranks),
                ranks,
            )
        )

    assert len(set(lists)) == 1
    assert set(lists[0]) <= set(ranks)
    assert lists[0] == tuple(sorted(lists[0]))


@pytest.mark.parametrize("num_members", [1, 2, 16, 17, 64, 100, 1000])
def test_news_reaches_all_members_in_few_hops_over_links_that_both_keep(
    num_members: int,
) -> None:
    reached, hops = {0}, 0
    while len(reached) < num_members:
        reached |= {n for member in reached for n in neighbours(num_members, member)}
        hops += 1

    assert hops <= max(1, num_members.bit_length())
    for member in range(num_members):
        linked = neighbours(num_members, member)
        assert all(member in neighbours(num_members, other) for other in linked)
        assert len(linked) <= max(15, 2 * num_members.bit_length())
