"""Which checkpoints stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.checkpoint.retention import (
    KeptCandidate,
    RetentionPolicy,
    choose_kept,
    unneeded_objects,
)
from geartrain.errors import CheckpointError, ConfigError

CANDIDATES = st.lists(
    st.builds(
        KeptCandidate,
        name=st.uuids().map(str),
        step=st.integers(0, 50),
        kind=st.sampled_from(["full", "weights"]),
        created_at_s=st.floats(0, 100),
        is_whole=st.booleans(),
        is_pinned=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda one: one.name,
)
POLICIES = st.builds(
    RetentionPolicy,
    keep_last=st.integers(1, 4),
    keep_every_steps=st.none() | st.integers(1, 10),
)


def candidate(name: str, step: int, **facts: object) -> KeptCandidate:
    given_facts = {"kind": "full", "created_at_s": float(step)} | facts
    return KeptCandidate(name=name, step=step, **given_facts)  # type: ignore[arg-type]


def test_the_last_ones_and_those_at_round_steps_stay() -> None:
    candidates = [candidate(str(step), step) for step in range(100, 1000, 100)]

    found = choose_kept(candidates, RetentionPolicy(keep_last=2, keep_every_steps=300))

    assert found.kept == ("900", "800", "600", "300")
    assert found.dropped == ("700", "500", "400", "200", "100")
    assert found.reasons["600"] == "its step is a multiple of 300"


def test_a_run_that_went_back_keeps_what_it_saved_last_and_not_the_highest_steps() -> None:
    abandoned = candidate("old branch", 5000, created_at_s=1.0)
    current = candidate("new branch", 3000, created_at_s=2.0)

    found = choose_kept([abandoned, current], RetentionPolicy(keep_last=1))

    assert found.kept == ("new branch",)


def test_a_damaged_version_does_not_take_the_place_of_a_whole_one() -> None:
    candidates = [candidate("new", 2, is_whole=False), candidate("old", 1)]

    found = choose_kept(candidates, RetentionPolicy(keep_last=1))

    assert found.kept == ("old",)
    assert found.dropped == ("new",)


def test_weights_do_not_take_the_place_of_what_training_resumes_from() -> None:
    weights = [candidate(f"w{step}", step, kind="weights") for step in range(2, 9)]

    found = choose_kept([candidate("full", 1), *weights], RetentionPolicy(keep_last=2))

    assert found.kept == ("w8", "w7", "full")


@given(candidates=CANDIDATES, policy=POLICIES)
def test_every_version_is_either_kept_or_dropped_and_the_newest_whole_ones_stay(
    candidates: list[KeptCandidate], policy: RetentionPolicy
) -> None:
    found = choose_kept(candidates, policy)

    assert sorted(found.kept + found.dropped) == sorted(one.name for one in candidates)
    assert set(found.reasons) == set(found.kept)
    for kind in ("full", "weights"):
        whole = [one for one in candidates if one.kind == kind and one.is_whole]
        whole.sort(key=lambda one: (one.created_at_s, one.step, one.name))
        assert {one.name for one in whole[-policy.keep_last :]} <= set(found.kept)
    assert {one.name for one in candidates if one.is_pinned} <= set(found.kept)
    if any(one.kind == "full" for one in candidates):
        assert any(one.kind == "full" and one.name in found.kept for one in candidates)


@given(
    needs=st.dictionaries(st.text(max_size=3), st.lists(st.text(max_size=2)), min_size=1),
    present=st.sets(st.text(max_size=2)),
    data=st.data(),
)
def test_what_a_kept_version_needs_is_never_given_up(
    needs: dict[str, list[str]], present: set[str], data: st.DataObject
) -> None:
    kept = data.draw(st.sets(st.sampled_from(sorted(needs))))

    spare = unneeded_objects(present, needs, kept)

    needed = {name for version in kept for name in needs[version]}
    assert set(spare) == present - needed


def test_nothing_is_given_up_while_the_needs_of_a_kept_version_are_unknown() -> None:
    with pytest.raises(CheckpointError, match="nothing is deleted"):
        unneeded_objects(["a"], {"1": ["a"]}, kept=["1", "2"])


def test_a_policy_that_would_keep_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep_last=0 must be >= 1"):
        RetentionPolicy(keep_last=0)
