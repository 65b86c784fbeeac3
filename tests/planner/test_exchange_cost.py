"""With known links the plan's exchange is that of the schedule."""

from __future__ import annotations

import dataclasses

import pytest

from geartrain.errors import ConfigError
from geartrain.planner import ExchangeNetwork, ModelProfile, Workload, solve
from geartrain.planner.exchange import choose
from geartrain.planner.exchange_cost import device_costs_s, exchange_request, exchange_s
from geartrain.planner.explanation import explain, render_text
from geartrain.telemetry.documents import decode_document, encode_document
from planner.exchange.exchange_cases import INT8, make_topology
from planner.plan_cases import linear, make_profile

DEVICES = ("d0", "d1", "d2", "d3", "d4")


def linked_profile(policy: str | None = None, beta_s: float = 0.1) -> ModelProfile:
    """Five devices: two on h0, one beside it in the rack, two behind a slow uplink."""
    profile = make_profile([linear(i, 0.0, beta_s) for i in DEVICES], exchange_s=99.0)
    network = ExchangeNetwork(
        topology=make_topology([[1000, 1000], [1000, 1000]], [50, 50]),
        device_ids=DEVICES,
        host_ids=("h0", "h0", "h1", "h2", "h3"),
        codecs=(INT8,),
        policy=policy,
    )
    return dataclasses.replace(profile, gradient_bytes=25_000_000, network=network)


def test_an_exchange_costs_what_its_schedule_is_predicted_to_take() -> None:
    profile = linked_profile()
    request = exchange_request(profile, DEVICES)
    assert request is not None

    assert exchange_s(profile, DEVICES) == choose(request).predicted_s
    assert exchange_s(profile, DEVICES[:1]) == 0


def test_devices_cost_more_the_worse_their_hosts_are_linked() -> None:
    costs_s = device_costs_s(linked_profile())

    assert costs_s["d0"] == 0
    assert costs_s["d1"] < 0.2 * costs_s["d2"]
    assert costs_s["d2"] < 0.2 * costs_s["d3"]
    assert costs_s["d3"] == costs_s["d4"] == exchange_s(linked_profile(), DEVICES)


def test_a_compression_policy_makes_the_exchange_cheaper() -> None:
    exact_s = exchange_s(linked_profile(), DEVICES)

    assert exchange_s(linked_profile("auto"), DEVICES) < 0.3 * exact_s


def test_devices_that_cost_more_exchange_than_they_give_are_left_out() -> None:
    profile = linked_profile(beta_s=0.02)

    plan = solve(profile, Workload(global_batch_size=60))

    assert [replica.device_id for replica in plan.replicas] == ["d0", "d1", "d2"]
    assert plan.predicted_whole_exchange_s == exchange_s(profile, DEVICES[:3])


def test_the_explanation_shows_algorithm_shares_bound_refusals_and_gain() -> None:
    profile = linked_profile(beta_s=10.0)
    plan = solve(profile, Workload(global_batch_size=60))

    text = render_text(explain(plan, profile))

    assert "exchanged in stages" in text
    assert "Rack rack1 adds up 50%; its sum is held by h2 50%, h3 50%." in text
    assert "No exact exchange could take less than" in text
    assert "Not ring" in text
    assert "compression=auto would use int8" in text


def test_without_links_nothing_is_said_of_the_exchange() -> None:
    profile = make_profile([linear(i, 0.0, 0.1) for i in DEVICES])
    plan = solve(profile, Workload(global_batch_size=60))

    assert explain(plan, profile).exchange is None


def test_a_profile_with_links_reads_back_equal_and_one_without_is_readable() -> None:
    profile = linked_profile("auto")
    old = encode_document(make_profile([linear("d0", 0.0, 0.1)]))

    assert decode_document(encode_document(profile), ModelProfile) == profile
    assert b"network" in old
    without = old.replace(b',\n  "network": null', b"")
    assert b"network" not in without
    assert decode_document(without, ModelProfile).network is None


def test_a_device_whose_links_are_unknown_is_named() -> None:
    with pytest.raises(ConfigError, match="d9"):
        exchange_request(linked_profile(), ("d0", "d9"))
