"""The choice is the fastest allowed way, and sane for all topologies."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.errors import ConfigError
from geartrain.planner.exchange import (
    EXACT,
    ExchangeRequest,
    candidates,
    choose,
    what_auto_would_gain,
)
from geartrain.planner.exchange.choice import DIRECT_OVER_RING, LEADERS_OVER_STAGED
from geartrain.topology.profile import Topology
from planner.exchange.exchange_cases import (
    FP16,
    INT4,
    INT8,
    make_topology,
    placement_of,
)

MB = 1_000_000
TWO_RACKS = make_topology([[500] * 4] * 2, [50, 50])
FLAT = make_topology([[500] * 8])
SLOW_HOST = make_topology([[100] * 7 + [25]])
CODECS = (FP16, INT8, INT4)


def ask(
    topology: Topology, num_bytes: float = 25 * MB, policy: str | None = None
) -> ExchangeRequest:
    return ExchangeRequest(
        topology=topology,
        placement=placement_of(topology),
        num_bytes=int(num_bytes),
        codecs=CODECS,
        policy=policy,
    )


def least_s(request: ExchangeRequest) -> float:
    """Of the ways that are allowed, whichever is preferred."""
    return min(way.predicted_s for way in candidates(request) if not way.refused)


@st.composite
def rates_of_racks(draw: st.DrawFn) -> tuple[list[list[float]], list[float]]:
    rate = st.floats(5, 10_000)
    nics = draw(st.lists(st.lists(rate, min_size=1, max_size=4), min_size=1, max_size=4))
    if sum(len(rack) for rack in nics) == 1:
        nics = [[*nics[0], draw(rate)]]
    uplinks = draw(st.lists(rate, min_size=len(nics), max_size=len(nics)))
    return nics, uplinks if len(nics) > 1 else []


sizes = st.sampled_from([1024, 64 * 1024, MB, 25 * MB, 400 * MB])
policies = st.sampled_from([None, "auto", "int4"])


@settings(max_examples=80, deadline=None)
@given(rates_of_racks(), sizes, policies)
def test_the_choice_is_no_slower_than_the_ring_and_no_faster_than_physics(
    rates: tuple[list[list[float]], list[float]], num_bytes: int, policy: str | None
) -> None:
    request = ask(make_topology(*rates), num_bytes, policy)
    ring = next(c for c in candidates(request) if c.name == "ring")

    chosen = choose(request)

    if policy != "int4":
        assert chosen.predicted_s <= 1.05 * ring.predicted_s
    if chosen.codec == EXACT:
        assert chosen.predicted_s >= (1 - 1e-9) * chosen.bound_s


@settings(max_examples=150, deadline=None)
@given(
    rates_of_racks(),
    sizes,
    st.integers(0, 99),
    st.floats(1, 10),
    st.sampled_from([None, "auto"]),
)
def test_a_faster_link_never_makes_the_fastest_way_slower(
    rates: tuple[list[list[float]], list[float]],
    num_bytes: int,
    which: int,
    factor: float,
    policy: str | None,
) -> None:
    nics, uplinks = rates
    before_s = least_s(ask(make_topology(nics, uplinks), num_bytes, policy))
    faster = [list(rack) for rack in nics]
    up = list(uplinks)
    rack = which % len(nics)
    if up and which % 2:
        up[rack] *= factor
    else:
        faster[rack][which % len(faster[rack])] *= factor

    after_s = least_s(ask(make_topology(faster, up), num_bytes, policy))

    # Filling the pipeline and rounding the number of chunks may cost a little.
    assert after_s <= 1.06 * before_s


@settings(max_examples=80, deadline=None)
@given(rates_of_racks(), sizes, st.sampled_from([None, "auto"]))
def test_what_is_preferred_costs_no_more_than_its_margin_over_the_fastest_way(
    rates: tuple[list[list[float]], list[float]], num_bytes: int, policy: str | None
) -> None:
    request = ask(make_topology(*rates), num_bytes, policy)
    one_rack = len(rates[0]) == 1
    margin = 1 / DIRECT_OVER_RING if one_rack else LEADERS_OVER_STAGED

    assert choose(request).predicted_s <= margin * least_s(request) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(rates_of_racks(), sizes, policies)
def test_equal_questions_have_equal_answers(
    rates: tuple[list[list[float]], list[float]], num_bytes: int, policy: str | None
) -> None:
    first = choose(ask(make_topology(*rates), num_bytes, policy))
    second = choose(ask(make_topology(*rates), num_bytes, policy))

    assert first == second
    assert first.fingerprint == second.fingerprint


def test_processes_of_one_host_stay_on_it() -> None:
    request = dataclasses.replace(ask(FLAT, policy="int8"), placement=("h0",) * 4)

    chosen = choose(request)

    assert (chosen.algorithm, chosen.codec) == ("local", EXACT)
    assert chosen.racks[0].hosts == ((0, 1, 2, 3),)


def test_a_flat_rack_of_equal_hosts_takes_the_ring() -> None:
    chosen = choose(ask(FLAT))

    assert chosen.algorithm == "ring"
    assert sorted(chosen.ring_order) == list(range(8))


def test_a_slow_host_makes_the_exchange_direct_and_owns_nothing() -> None:
    chosen = choose(ask(SLOW_HOST))

    assert chosen.algorithm == "hierarchical"
    assert chosen.racks[0].host_shares[7] == 0
    ring = next(c for c in candidates(ask(SLOW_HOST)) if c.name == "ring")
    assert chosen.predicted_s <= 0.6 * ring.predicted_s


def test_two_racks_are_staged_in_many_chunks_near_the_bound() -> None:
    chosen = choose(ask(TWO_RACKS))

    assert chosen.algorithm == "hierarchical"
    assert chosen.num_chunks >= 16
    assert chosen.bound_s / chosen.predicted_s >= 0.95


def test_tiny_messages_on_a_long_way_go_through_leaders() -> None:
    topology = make_topology([[1000] * 4] * 2, [500, 500], latency_s=2e-3)

    assert choose(ask(topology, 1024)).algorithm == "leader"
    assert choose(ask(topology, 25 * MB)).algorithm == "hierarchical"


def test_leaders_are_refused_whole_tensors_of_many_megabytes() -> None:
    leader = next(c for c in candidates(ask(TWO_RACKS)) if c.name == "rack leaders")

    assert "MiB of whole tensors" in leader.refused


def test_a_rack_is_led_by_a_host_that_is_not_slow() -> None:
    topology = make_topology([[25, 100, 100], [100, 100]], [50, 50], latency_s=5e-3)

    chosen = choose(ask(topology, 1024))

    assert chosen.algorithm == "leader"
    assert chosen.racks[0].leaders[0] == 1


def test_exact_is_the_default_and_auto_compresses_where_the_uplink_limits() -> None:
    assert choose(ask(TWO_RACKS)).codec == EXACT

    auto = choose(ask(TWO_RACKS, policy="auto"))

    assert auto.codec == "int8"
    assert auto.predicted_s <= 0.267 * choose(ask(TWO_RACKS)).predicted_s


def test_auto_stays_exact_where_hosts_or_the_processor_limit() -> None:
    slow_host = make_topology([[200] * 4, [200, 25, 200, 200]], [50, 50])
    assert choose(ask(slow_host, policy="auto")).codec == EXACT

    busy = dataclasses.replace(
        ask(make_topology([[40_000] * 4] * 2, [40_000] * 2), policy="auto"),
        core_fraction=0.2,
    )
    assert choose(busy).codec == EXACT


def test_auto_takes_no_codec_that_may_cost_quality() -> None:
    request = dataclasses.replace(ask(TWO_RACKS, policy="auto"), codecs=(INT4,))

    assert choose(request).codec == EXACT


def test_auto_leaves_small_messages_exact() -> None:
    assert choose(ask(TWO_RACKS, 32 * 1024, "auto")).codec == EXACT


def test_auto_codes_only_the_slow_racks_where_that_is_as_fast() -> None:
    topology = make_topology([[500] * 2] * 4, [400, 400, 12, 400])

    chosen = choose(ask(topology, policy="auto"))

    assert [rack.codec for rack in chosen.racks] == [EXACT, EXACT, "int8", EXACT]


def test_a_codec_by_name_is_used_on_every_slow_hop() -> None:
    chosen = choose(ask(TWO_RACKS, policy="int4"))

    assert [rack.codec for rack in chosen.racks] == ["int4", "int4"]


def test_a_codec_by_name_makes_the_links_of_a_lone_rack_the_slow_hop() -> None:
    chosen = choose(ask(make_topology([[100, 100]]), policy="int8"))

    assert [rack.hosts for rack in chosen.racks] == [((0,),), ((1,),)]
    assert chosen.codec == "int8"


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'zip'.*fp16"):
        ask(FLAT, policy="zip")


def test_the_gain_of_auto_is_said_under_any_policy() -> None:
    gain = what_auto_would_gain(ask(TWO_RACKS, policy="int4"))

    assert gain.codec == "int8"
    assert gain.auto_s < 0.3 * gain.exact_s
    assert "int8" in gain.text
    assert "stay exact" in what_auto_would_gain(ask(FLAT, 1024)).text


def test_the_candidate_that_is_taken_comes_first_and_refused_ones_say_why() -> None:
    found = candidates(ask(TWO_RACKS, policy="int8"))

    assert found[0].schedule.algorithm == choose(ask(TWO_RACKS, policy="int8")).algorithm
    assert not found[0].refused
    assert {c.name: bool(c.refused) for c in found} == {
        "staged, int8": False,
        "rack leaders": True,
        "ring": True,
        "staged": True,
    }


def test_the_reason_names_the_limit_and_the_next_best_way() -> None:
    reason = choose(ask(TWO_RACKS)).reason

    assert "uplink of rack" in reason
    assert "ring" in reason


def test_no_bytes_have_a_schedule_too() -> None:
    assert choose(ask(TWO_RACKS, 0)).num_chunks == 1


@pytest.mark.parametrize(("num_racks", "limit_s"), [(40, 2.0), (400, 20.0)])
def test_large_fleets_are_planned_quickly(num_racks: int, limit_s: float) -> None:
    """1,000 hosts within a second and 10,000 within ten, doubled for busy machines."""
    topology = make_topology([[10_000] * 25] * num_racks, [20_000] * num_racks)

    start = time.process_time()
    choose(ask(topology, policy="auto"))

    assert time.process_time() - start < limit_s


def test_small_tensors_take_leaders_though_staging_promises_a_little_more() -> None:
    small = ask(TWO_RACKS, 64 * 1024)
    by_name = {c.name: c.predicted_s for c in candidates(small)}

    assert by_name["staged"] < by_name["rack leaders"] <= 1.4 * by_name["staged"]
    assert choose(small).algorithm == "leader"
    assert choose(ask(TWO_RACKS, 256 * 1024)).algorithm == "hierarchical"
