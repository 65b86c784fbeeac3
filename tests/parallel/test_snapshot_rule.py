"""When all ranks copy their parts of the state: what each says, and what follows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from geartrain.parallel.snapshot_rule import Wish, agree


def test_all_that_have_an_agent_must_be_ready() -> None:
    ready, later, none = Wish.READY, Wish.LATER, Wish.NONE

    assert agree({0: ready, 1: ready, 2: none}, (0, 1)).is_taken
    assert not agree({0: ready, 1: later, 2: none}, (0, 1)).is_taken
    assert not agree({0: none, 1: none}, ()).is_taken


def test_nothing_is_copied_while_the_owners_change() -> None:
    found = agree({0: Wish.READY, 1: Wish.READY}, (0, 1, 2))

    assert not found.is_taken
    assert found.owners == (0, 1)
    assert agree({0: Wish.READY, 1: Wish.READY}, found.owners).is_taken


def test_one_in_haste_makes_all_be_ready() -> None:
    assert agree({0: Wish.LATER, 1: Wish.SOON}, (0, 1)).is_hasty
    assert agree({0: Wish.READY_SOON, 1: Wish.READY}, (0, 1)).is_taken
    assert not agree({0: Wish.READY, 1: Wish.LATER}, (0, 1)).is_hasty


def test_wish_of_another_version_is_no_consent() -> None:
    found = agree({0: 3.0, 1: 99.0}, (0, 1))

    assert found.owners == (0, 1)
    assert not found.is_taken


@given(
    st.dictionaries(
        st.integers(0, 5), st.sampled_from([float(w) for w in Wish]), max_size=6
    ),
    st.sets(st.integers(0, 5)),
)
def test_what_is_taken_is_whole(wishes: dict[int, float], before: set[int]) -> None:
    found = agree(wishes, tuple(sorted(before)))

    with_agent = {rank for rank, wish in wishes.items() if wish != Wish.NONE}
    assert set(found.owners) == with_agent
    if found.is_taken:
        assert with_agent == before
        assert all(wishes[rank] >= Wish.READY for rank in with_agent)
