"""What one member concludes from what the coordinator says, in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.elastic.messages import (
    Commit,
    CoordinatorMessage,
    Dismiss,
    Halt,
    Heal,
    Hold,
    MemberPlace,
    NewEpoch,
    Welcome,
)
from geartrain.elastic.view import HeldState, MemberView, Voted

A, B, C = "aa" * 8, "bb" * 8, "cc" * 8


def _view(epoch: int = 1) -> MemberView:
    view = MemberView(held=HeldState(step=4, lineage=A))
    view.take(_new_epoch(epoch, 4, A))
    view.taken_epoch = epoch
    return view


def _new_epoch(epoch: int, step: int, lineage: str) -> NewEpoch:
    place = MemberPlace(member_id="a", incarnation="a-1", host_id="h")
    return NewEpoch(
        epoch=epoch,
        step=step,
        lineage=lineage,
        members=(place,),
        reason="test",
        build_s=1.0,
    )


def _hold(epoch: int, step: int, lineage: str) -> Hold:
    return Hold(epoch=epoch, step=step, lineage=lineage, lost=(), reason="x is lost")


def _welcome(step: int, lineage: str) -> Welcome:
    return Welcome(
        epoch=1, step=step, lineage=lineage, beat_interval_s=1, build_s=1, min_members=1
    )


@pytest.mark.parametrize(
    "message",
    [
        Commit(epoch=1, step=5, lineage=B),
        _hold(1, 5, B),
        _new_epoch(2, 5, B),
        _welcome(5, B),
    ],
    ids=lambda m: type(m).__name__,
)
def test_whoever_names_the_state_voted_for_tells_the_commit(
    message: CoordinatorMessage,
) -> None:
    view = _view()
    view.vote(Voted(epoch=1, step=5, lineage=B))
    view.take(message)
    assert view.committed == Voted(epoch=1, step=5, lineage=B)
    assert view.held == HeldState(step=5, lineage=B)
    assert view.recent == (A,)


def test_an_epoch_that_ends_without_the_step_drops_the_vote() -> None:
    view = _view()
    view.vote(Voted(epoch=1, step=5, lineage=B))
    assert view.take(_hold(1, 4, A)) == "x is lost"
    assert view.take(_new_epoch(2, 4, A)) is None  # told once
    view.take(Commit(epoch=1, step=5, lineage=B))
    assert view.committed is None
    assert view.held.step == 4


def test_a_commit_of_other_bits_is_never_applied() -> None:
    view = _view()
    view.vote(Voted(epoch=1, step=5, lineage=B))
    view.take(Commit(epoch=1, step=5, lineage=C))
    assert view.held.lineage == A
    assert view.ending is not None
    assert view.ending.kind == "diverged"
    cause = view.ending
    view.take(_new_epoch(2, 5, C))
    assert view.ending == cause  # no new epoch cures that


def test_a_vote_in_an_epoch_that_is_over_does_not_go_out() -> None:
    view = _view()
    view.take(_hold(1, 4, A))
    assert not view.vote(Voted(epoch=1, step=5, lineage=B))
    assert view.pending is None


def test_a_halted_run_can_go_on_with_a_new_epoch() -> None:
    view = _view()
    halt = Halt(epoch=1, step=4, lineage=A, kind="no_state", reason="all gone")
    assert view.take(halt) == "all gone"
    view.take(_new_epoch(2, 3, C))
    assert view.ending is None
    assert view.epoch_in_force(1) is not None


def test_who_comes_back_to_a_later_epoch_hears_that_its_own_is_over() -> None:
    view = _view(epoch=2)
    view.vote(Voted(epoch=2, step=5, lineage=B))
    assert view.take(_welcome(4, A)) is None  # of the epoch in which it is
    later = Heal(epoch=3, step=6, lineage=C, transfers=())
    assert view.take(later) is not None
    assert view.pending is None
    assert view.epoch_in_force(0) is None
    view.take(_new_epoch(4, 7, C))
    assert view.epoch_in_force(2) is not None


def test_a_dismissal_with_a_way_back_does_not_end_the_membership() -> None:
    view = _view()
    dismissal = Dismiss(epoch=1, step=4, lineage=A, reason="silent", may_return_after_s=0.5)
    assert view.take(dismissal) == "silent"
    assert view.ending is None
    assert view.return_after_s == 0.5


_MESSAGES = st.one_of(
    st.builds(
        Commit,
        epoch=st.integers(0, 4),
        step=st.integers(3, 7),
        lineage=st.sampled_from([A, B, C]),
    ),
    st.builds(_hold, st.integers(0, 4), st.integers(3, 7), st.sampled_from([A, B, C])),
    st.builds(_new_epoch, st.integers(0, 4), st.integers(3, 7), st.sampled_from([A, B, C])),
    st.builds(_welcome, st.integers(3, 7), st.sampled_from([A, B, C])),
    st.builds(
        Voted, epoch=st.integers(0, 4), step=st.just(5), lineage=st.sampled_from([B, C])
    ),
)


@given(st.lists(_MESSAGES, max_size=12))
def test_a_state_changes_only_to_one_voted_for_and_named_by_the_coordinator(
    events: list[CoordinatorMessage | Voted],
) -> None:
    view, named, voted = _view(), set(), set()
    for event in events:
        before, epoch = view.held, view.over_epoch
        if isinstance(event, Voted):
            if view.vote(event):
                voted.add((event.step, event.lineage))
        else:
            view.take(event)
            if isinstance(event, Commit | Hold | NewEpoch | Welcome):
                named.add((event.step, event.lineage))
        assert view.over_epoch >= epoch
        if view.held != before:
            assert (view.held.step, view.held.lineage) in named & voted
