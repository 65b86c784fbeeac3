"""Facts exchanged through the store: in rank order, by a deadline, naming who is late."""

from __future__ import annotations

import threading

import pytest
from torch._C._distributed_c10d import HashStore

from geartrain.collectives.lost_peers import lost_peers
from geartrain.collectives.rendezvous import Rendezvous
from geartrain.errors import CommunicationError, ConfigError


def rendezvous_of(store: HashStore, rank: int, timeout_s: float = 10.0) -> Rendezvous:
    return Rendezvous(store, rank, 2, timeout_s, ("cpu#0", "cpu#1"))


def test_documents_come_in_rank_order_round_after_round() -> None:
    store = HashStore()
    found: dict[int, list[list[int]]] = {}

    def run(rank: int) -> None:
        rendezvous = rendezvous_of(store, rank)
        found[rank] = [
            rendezvous.gather("number", 10 * rank + turn, int) for turn in range(3)
        ]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found[0] == found[1] == [[0, 10], [1, 11], [2, 12]]


def test_one_rank_gathers_its_own() -> None:
    assert Rendezvous(None, 0, 1, 1.0, ("cpu",)).gather("number", 3, int) == [3]


def test_who_does_not_answer_is_named() -> None:
    with pytest.raises(CommunicationError, match=r"the plan of cpu#1 \(rank 1\), which"):
        rendezvous_of(HashStore(), 0, timeout_s=0.1).gather("plan", "a", str)


def test_an_answer_of_another_kind_is_refused() -> None:
    store = HashStore()
    store.set("gather/1/number/1", '"three"')

    with pytest.raises(ConfigError, match="rank 1 is not a valid int"):
        rendezvous_of(store, 0).gather("number", 3, int)


def test_who_does_not_report_a_failure_is_missing() -> None:
    store = HashStore()
    store.set("missing/1/0", "1")

    assert rendezvous_of(store, 0).find_missing("1") == ["cpu#1"]


def test_nobody_is_missing_where_all_report() -> None:
    store = HashStore()
    store.set("missing/1/1", "1")

    assert rendezvous_of(store, 0).find_missing("1") == []


def fail_with(error: Exception) -> None:
    with lost_peers("counting"):
        raise error


def test_a_failed_call_says_what_failed_and_where_to_look() -> None:
    with pytest.raises(CommunicationError, match="counting failed: no route; a peer was"):
        fail_with(RuntimeError("no route\nstack..."))


def test_an_error_of_another_kind_stays_what_it_is() -> None:
    with pytest.raises(KeyError):
        fail_with(KeyError("x"))


def test_rank_0_hands_its_document_to_all() -> None:
    store = HashStore()
    assert rendezvous_of(store, 0).broadcast("seed", 7, int) == 7
    assert rendezvous_of(store, 1).broadcast("seed", 8, int) == 7


def test_a_missing_rank_0_is_named() -> None:
    with pytest.raises(CommunicationError, match=r"the seed of cpu#0 \(rank 0\), which"):
        rendezvous_of(HashStore(), 1, timeout_s=0.1).broadcast("seed", 8, int)
