"""The cost model agrees with a simulation of the flows."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.planner.exchange.fabric import Fabric, place
from geartrain.planner.exchange.schedule import EXACT, CodecProfile, CommSchedule, RackPart
from geartrain.planner.exchange.shares import fill_shares
from geartrain.planner.exchange.staged_cost import (
    SMALLEST_CHUNK_BYTES,
    choose_num_chunks,
    predict_staged,
    slow_hop_loads,
    staged_loads,
)
from geartrain.topology.profile import Topology
from planner.exchange.exchange_cases import INT8, MBIT, make_topology, placement_of
from planner.exchange.fluid_network import simulate_s

SIZE = 25_000_000


def staged(
    topology: Topology, codec: CodecProfile | None = None
) -> tuple[Fabric, tuple[RackPart, ...]]:
    """A fabric and its parts, all racks with that codec."""
    fabric = place(topology, placement_of(topology))
    fraction = codec.bytes_fraction if codec else 1.0
    shares = fill_shares(fabric, [fraction] * len(fabric.racks))
    parts = tuple(
        RackPart(
            rack_id=rack.rack_id,
            hosts=tuple(host.members for host in rack.hosts),
            share=share,
            host_shares=held,
            codec=codec.name if codec else EXACT,
        )
        for rack, share, held in zip(fabric.racks, shares.racks, shares.hosts, strict=True)
    )
    return fabric, parts


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    rate = st.sampled_from([25, 60, 100, 200, 500])
    nics = draw(st.lists(st.lists(rate, min_size=1, max_size=4), min_size=1, max_size=3))
    if sum(len(rack) for rack in nics) == 1:
        nics = [[*nics[0], draw(rate)]]
    uplinks = draw(
        st.lists(st.sampled_from([12, 50, 200]), min_size=len(nics), max_size=len(nics))
    )
    return make_topology(nics, uplinks if len(nics) > 1 else ())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(topologies(), st.sampled_from([8, 16]))
def test_prediction_is_within_20_percent_of_simulated_flows(
    topology: Topology, num_chunks: int
) -> None:
    fabric, parts = staged(topology)
    schedule = CommSchedule(
        algorithm="hierarchical",
        num_members=fabric.num_members,
        racks=parts,
        num_chunks=num_chunks,
    )
    prediction = predict_staged(staged_loads(fabric, parts, None), SIZE, num_chunks)

    simulated_s = simulate_s(fabric, schedule, SIZE)

    predicted_s = prediction.seconds - prediction.stages.latency_s
    assert predicted_s == pytest.approx(simulated_s, rel=0.2)


def test_measured_exchanges_are_predicted_within_15_percent() -> None:
    """25 MB and 20 MB over shaped links: what the prototype of this exchange took."""
    cases = [
        ([[500] * 4] * 2, [50, 50], 25e6, 32, 4.36),
        ([[500] * 4] * 2, [50, 50], 25e6, 8, 4.45),
        ([[500] * 2] * 4, [50] * 4, 25e6, 8, 6.90),
        ([[500] * 4] * 2, [50, 50], 25e6, 4, 4.75),
    ]
    for nics, uplinks, num_bytes, num_chunks, measured_s in cases:
        fabric, parts = staged(make_topology(nics, uplinks, source="labels"))
        loads = staged_loads(fabric, parts, None)

        predicted_s = predict_staged(loads, int(num_bytes), num_chunks).seconds

        assert predicted_s == pytest.approx(measured_s, rel=0.15)


def test_what_goes_to_or_comes_from_a_coded_rack_is_coded() -> None:
    _, parts = staged(make_topology([[500]] * 4, [50] * 4))
    mixed = [dataclasses.replace(parts[0], codec="int8"), *parts[1:]]

    coded, plain, *_ = slow_hop_loads(mixed, 0.25)

    # The coded rack sends 3/4 of its sum and 3 copies of its quarter, all in a quarter.
    assert coded.each_way == pytest.approx(0.25 * (0.75 + 0.75))
    # Another sends 1/4 to the coded owner coded and 2/4 plain; of its totals 1 in 3 coded.
    assert plain.each_way == pytest.approx(0.25 * 0.25 + 0.5 + 0.25 * (0.25 + 2))


def test_uplinks_carry_the_known_bytes() -> None:
    for num_racks, each_way in ((2, 1.0), (3, 4 / 3), (4, 1.5)):
        _, parts = staged(make_topology([[500]] * num_racks, [50] * num_racks))

        loads = slow_hop_loads(parts, 1.0)

        assert [hop.each_way for hop in loads] == pytest.approx([each_way] * num_racks)


def test_a_slow_codec_makes_the_processor_the_limit() -> None:
    slow = dataclasses.replace(INT8, encode_bytes_per_s=5e6, decode_bytes_per_s=5e6)
    fabric, parts = staged(make_topology([[500] * 2] * 2, [50, 50]), slow)

    prediction = predict_staged(staged_loads(fabric, parts, slow), SIZE, 8)

    assert prediction.limit == "the processor"
    assert prediction.seconds > SIZE / (50 * MBIT)


def test_fewer_cores_make_codecs_and_messages_slower() -> None:
    fabric, parts = staged(make_topology([[500] * 2] * 2, [500, 500]), INT8)

    whole = predict_staged(staged_loads(fabric, parts, INT8, 1.0), SIZE, 16)
    tenth = predict_staged(staged_loads(fabric, parts, INT8, 0.1), SIZE, 16)

    assert tenth.seconds > whole.seconds
    assert tenth.stages.codec_s == pytest.approx(10 * whole.stages.codec_s)


@given(st.integers(0, 2**31), topologies())
def test_chunks_stay_within_their_limits(num_bytes: int, topology: Topology) -> None:
    fabric, parts = staged(topology)

    chunks = choose_num_chunks(staged_loads(fabric, parts, None), num_bytes)

    assert 1 <= chunks <= 32
    assert chunks == 1 or num_bytes / chunks >= SMALLEST_CHUNK_BYTES


def test_many_racks_take_one_chunk_rather_than_many_messages() -> None:
    fabric, parts = staged(make_topology([[10_000]] * 300, [10_000] * 300))

    assert choose_num_chunks(staged_loads(fabric, parts, None), SIZE) == 1


def test_long_latency_asks_for_fewer_chunks() -> None:
    near, far = (
        staged_loads(*staged(make_topology([[500] * 4] * 2, [50] * 2, latency_s=s)), None)
        for s in (1e-4, 2e-2)
    )

    assert choose_num_chunks(far, SIZE) < choose_num_chunks(near, SIZE)


def test_hosts_with_less_than_a_core_send_fewer_messages() -> None:
    fabric, parts = staged(make_topology([[50] * 4]))
    whole = staged_loads(fabric, parts, None)
    tenth = staged_loads(fabric, parts, None, core_fraction=0.1)

    assert choose_num_chunks(tenth, 768 * 1024) < choose_num_chunks(whole, 768 * 1024)
    assert choose_num_chunks(whole, SIZE) == choose_num_chunks(
        staged_loads(fabric, parts, None, core_fraction=2.0), SIZE
    )


def test_devices_and_processes_of_a_host_are_stages_of_their_own() -> None:
    topology = make_topology([[500, 500]], memory_bytes_per_s=1e9)
    alone = place(topology, ("h0", "h1"))
    several = place(topology, ("h0", "h0", "h1", "h1"))
    shares = fill_shares(alone)

    def predicted(fabric: Fabric) -> float:
        part = RackPart(
            rack_id="rack0",
            hosts=tuple(host.members for host in fabric.hosts),
            share=1.0,
            host_shares=shares.hosts[0],
        )
        loads = staged_loads(fabric, (part,), None)
        return predict_staged(loads, SIZE, 8).stages.device_group_s

    assert predicted(alone) == 0
    assert predicted(several) == pytest.approx(3 * SIZE / 1e9)
