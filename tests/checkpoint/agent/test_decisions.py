"""Whom to give copies, how often, and what memory allows: pure."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.checkpoint.agent.interval import (
    IntervalLimits,
    IntervalTuner,
    SnapshotCost,
    choose_interval,
)
from geartrain.checkpoint.agent.log_chain import LogChain
from geartrain.checkpoint.agent.memory_budget import MemoryBudget
from geartrain.checkpoint.agent.messages import LogEntry
from geartrain.checkpoint.agent.peer_choice import PeerFacts, choose_peers
from geartrain.errors import CheckpointError, ConfigError


def _peer(name: str, host: str = "", rack: str = "", free: int = 100) -> PeerFacts:
    return PeerFacts(node_id=name, host_id=host or name, rack_id=rack, free_bytes=free)


_peers = st.lists(
    st.builds(
        _peer,
        st.sampled_from("abcdefgh"),
        st.sampled_from("uvwxyz"),
        st.sampled_from(["", "r1", "r2", "r3"]),
        st.integers(0, 100),
    ),
    max_size=8,
    unique_by=lambda peer: peer.node_id,
)


@given(
    peers=_peers,
    copies=st.integers(0, 3),
    needed=st.integers(0, 100),
    seed=st.randoms(use_true_random=False),
)
def test_copies_lie_on_other_hosts_with_room(
    peers: list[PeerFacts], copies: int, needed: int, seed: random.Random
) -> None:
    own = _peer("own", "u", "r1")
    shuffled = list(peers)
    seed.shuffle(shuffled)

    choice = choose_peers(own, peers, num_copies=copies, needed_bytes=needed)

    by_id = {peer.node_id: peer for peer in peers}
    hosts = [by_id[node_id].host_id for node_id in choice.node_ids]
    assert "u" not in hosts
    assert len(set(hosts)) == len(hosts) <= copies
    assert all(by_id[node_id].free_bytes >= needed for node_id in choice.node_ids)
    assert (choice.warning == "") == (len(hosts) == copies)
    assert choice == choose_peers(own, shuffled, num_copies=copies, needed_bytes=needed)


def test_other_racks_come_first_and_who_has_a_copy_keeps_it() -> None:
    own = _peer("own", rack="r1")
    near = [_peer(name, rack="r1") for name in "abcd"]
    far = [_peer(name, rack="r2") for name in "efg"]

    chosen = choose_peers(own, near + far, num_copies=1, needed_bytes=1).node_ids
    kept = choose_peers(own, near + far, num_copies=1, needed_bytes=1000, present=["g"])

    assert set(chosen) <= set("efg")
    assert kept.node_ids == ("g",)
    third = _peer("z", rack="r3", free=1)
    two = choose_peers(own, [*near, *far, third], num_copies=2, needed_bytes=1)
    assert two.num_racks == 2


def test_too_few_hosts_are_said() -> None:
    choice = choose_peers(_peer("a"), [_peer("b", free=1)], num_copies=2, needed_bytes=5)

    assert choice.node_ids == ()
    assert "a: 0 of 2 copies can be kept" in choice.warning
    with pytest.raises(ConfigError, match="num_copies=-1"):
        choose_peers(_peer("a"), [], num_copies=-1, needed_bytes=0)


@given(
    step_s=st.floats(1e-3, 10),
    copy_s=st.floats(0, 10),
    send_s=st.floats(0, 100),
    limit=st.floats(0.001, 0.5),
)
def test_an_interval_costs_less_than_its_limit(
    step_s: float, copy_s: float, send_s: float, limit: float
) -> None:
    limits = IntervalLimits(max_cost_fraction=limit, max_steps=10**9)

    chosen = choose_interval(step_s, SnapshotCost(copy_s=copy_s, send_s=send_s), limits)

    assert chosen.is_within_limit
    assert chosen.cost_fraction <= limit * (1 + 1e-9)
    if chosen.num_steps > 1:
        shorter = (copy_s + send_s) / ((chosen.num_steps - 1) * step_s)
        assert shorter >= limit * (1 - 1e-9)


def test_a_long_interval_is_cut_and_said() -> None:
    limits = IntervalLimits(max_steps=10)

    chosen = choose_interval(0.01, SnapshotCost(copy_s=1.0, send_s=1.0), limits)

    assert (chosen.num_steps, chosen.is_within_limit) == (10, False)
    with pytest.raises(ConfigError, match=r"step_s=0\.0"):
        choose_interval(0.0, SnapshotCost(copy_s=1.0, send_s=1.0), limits)


def test_a_tuner_follows_the_dearest_of_late_without_flutter() -> None:
    tuner = IntervalTuner()
    assert tuner.is_due(0)
    for _ in range(9):
        tuner = tuner.with_step(0.1)
    tuner = tuner.with_cost(SnapshotCost(copy_s=0.05, send_s=0.05))
    first = tuner.interval
    assert first is not None
    assert not tuner.is_due(first.num_steps - 1)
    assert tuner.is_due(first.num_steps)

    dearer = tuner.with_cost(SnapshotCost(copy_s=0.5, send_s=0.05)).interval
    assert dearer is not None
    assert dearer.num_steps > first.num_steps

    calm = tuner
    for _ in range(5):
        calm = calm.with_cost(SnapshotCost(copy_s=0.045, send_s=0.05))
    assert calm.interval is not None
    assert calm.interval.num_steps == first.num_steps


def test_a_budget_refuses_and_says_who_has_the_memory() -> None:
    budget = MemoryBudget(limit_bytes=100).reserve("guest a", 60).reserve("guest b", 30)

    with pytest.raises(CheckpointError, match=r"guest c needs 20.*10.*100.*guest a 60"):
        budget.reserve("guest c", 20)

    assert budget.release("guest a").reserve("guest c", 70).free_bytes == 0
    assert budget.reserve("guest b", 40).used_bytes == 100  # instead of what it had


def _entry(step: int, num_bytes: int = 10, before: str = "", after: str = "") -> LogEntry:
    return LogEntry(
        member_id="m",
        incarnation="i",
        step=step,
        previous_lineage=before or str(step - 1),
        lineage=after or str(step),
        num_bytes=num_bytes,
        crc32=0,
    )


def test_a_log_starts_at_a_snapshot_and_has_no_gap() -> None:
    chain = LogChain(limit_bytes=100)
    assert chain.with_entry(_entry(5), anchors=["9"], newest_step=9).is_broken

    chain = chain.with_entry(_entry(5), anchors=["4"], newest_step=4)
    chain = chain.with_entry(_entry(6), anchors=["4"], newest_step=4)
    broken = chain.with_entry(_entry(8), anchors=["4"], newest_step=4)

    assert [e.step for e in chain.path(4, "4")] == [5, 6]
    assert chain.path(4, "another") == ()
    assert broken.is_broken
    assert broken.wants_snapshot(4)
    # It does not heal by itself, but at the next snapshot, from which it starts anew.
    assert broken.with_entry(_entry(7), anchors=["4"], newest_step=4).is_broken
    healed = broken.with_entry(_entry(9), anchors=["4", "8"], newest_step=8)
    assert [e.step for e in healed.entries] == [9]
    assert not healed.is_broken


def test_a_full_log_asks_for_a_snapshot_and_never_grows() -> None:
    chain = LogChain(limit_bytes=50)
    wanted = []
    for step in range(5, 12):
        chain = chain.with_entry(_entry(step), anchors=["4"], newest_step=4)
        wanted.append(chain.wants_snapshot(4))
        assert chain.num_bytes <= 50

    assert wanted == [False, False, True, True, True, True, True]
    assert chain.is_broken
    assert [e.step for e in chain.entries] == [5, 6, 7, 8, 9]
    # What a newer snapshot holds gives way first.
    full = LogChain(limit_bytes=50, entries=chain.entries)
    going_on = full.with_entry(_entry(10), anchors=["4", "7"], newest_step=7)
    assert [e.step for e in going_on.entries] == [8, 9, 10]
