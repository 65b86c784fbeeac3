"""What the exchange benchmark works out without a network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import msgspec
import pytest

from geartrain.bench.comm.judge import LabMeasurement, SchemeRound, judge_lab
from geartrain.bench.comm.labs import describe_order, gather_round
from geartrain.bench.comm.link_drop import steps_until
from geartrain.bench.comm.messages import (
    BEST_RING,
    GIVEN_RING,
    OURS,
    OURS_INT8,
    Report,
    Timing,
)
from geartrain.bench.comm.minimum_bytes import (
    least_ring_bytes,
    least_schedule_bytes,
    least_stock_bytes,
    short_links,
)
from geartrain.bench.comm.overlap import overlap_fraction
from geartrain.bench.comm.rank_order import DEFAULT_SEED, crossing_edges, shuffled_hosts
from geartrain.bench.comm.result import CaseResult, table_rows
from geartrain.bench.comm.settings import (
    CASES,
    FULL_BYTES,
    QUICK_BYTES,
    CommOptions,
    LabSetup,
    cases_of,
    labs_of,
    whole_values,
)
from geartrain.bench.comm.targets import TARGETS, Target
from geartrain.devices.emulation.network import LinkBytes, NetworkSpec, parse_links
from geartrain.errors import ConfigError
from geartrain.planner.exchange import CommSchedule
from geartrain.planner.exchange.schedule import RackPart

TWO_RACKS = parse_links("2x4:500Mbit:50Mbit")
FOUR_RACKS = parse_links("4x2:500Mbit:50Mbit")
SIZE = 1_000_000


def schedule(racks: Sequence[tuple[int, ...]], codec: str = "none") -> CommSchedule:
    """Equal shares among racks of single-member hosts."""
    parts = tuple(
        RackPart(
            rack_id=f"rack{index}",
            hosts=tuple((member,) for member in rack),
            share=1 / len(racks),
            host_shares=(1 / len(rack),) * len(rack),
            codec=codec,
        )
        for index, rack in enumerate(racks)
    )
    return CommSchedule(
        algorithm="hierarchical",
        num_members=sum(len(rack) for rack in racks),
        racks=parts,
    )


def hosts_in_order(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def test_default_seed_makes_four_edges_cross_in_each_direction() -> None:
    hosts = shuffled_hosts(8, DEFAULT_SEED)
    racks = [TWO_RACKS.rack_of(host) for host in hosts]

    assert sorted(hosts) == list(range(8))
    assert crossing_edges(racks, 2) == (4, 4)
    assert "4 in each direction" in describe_order(TWO_RACKS, hosts, DEFAULT_SEED)


def test_best_order_crosses_each_rack_once() -> None:
    racks = [FOUR_RACKS.rack_of(host) for host in range(8)]

    assert crossing_edges(racks, 4) == (1, 1, 1, 1)


def test_ring_needs_its_part_on_every_crossing_edge() -> None:
    best = least_ring_bytes(range(8), TWO_RACKS, SIZE)
    given = least_ring_bytes(shuffled_hosts(8, DEFAULT_SEED), TWO_RACKS, SIZE)

    assert best == {"rack0": 1.75 * SIZE, "rack1": 1.75 * SIZE}
    assert given == {"rack0": 7 * SIZE, "rack1": 7 * SIZE}


def test_ring_in_one_rack_is_counted_at_the_hosts() -> None:
    least = least_ring_bytes(range(4), parse_links("8Mbit", 4), SIZE)

    assert least == {f"host{i}": 1.5 * SIZE for i in range(4)}


@pytest.mark.parametrize(("spec", "least"), [(TWO_RACKS, 1.0), (FOUR_RACKS, 1.5)])
def test_staged_schedule_needs_what_the_bound_says(spec: NetworkSpec, least: float) -> None:
    per_rack = 8 // len(spec.racks)
    racks = [tuple(range(i, i + per_rack)) for i in range(0, 8, per_rack)]

    found = least_schedule_bytes(schedule(racks), hosts_in_order(8), spec, SIZE)

    assert found == {
        f"rack{i}": pytest.approx(least * SIZE) for i in range(len(spec.racks))
    }
    assert least_stock_bytes(spec, SIZE) == found


@pytest.mark.parametrize(
    ("codec", "part"), [("fp16", 0.5), ("int8", 0.25), ("int4", 0.125)]
)
def test_code_needs_its_bits_a_value(codec: str, part: float) -> None:
    racks = [(0, 1, 2, 3), (4, 5, 6, 7)]

    found = least_schedule_bytes(schedule(racks, codec), hosts_in_order(8), TWO_RACKS, SIZE)

    assert found["rack0"] == part * SIZE


def test_unknown_codec_is_refused_since_its_size_cannot_be_checked() -> None:
    racks = [(0, 1, 2, 3), (4, 5, 6, 7)]

    with pytest.raises(ConfigError, match="no known size"):
        least_schedule_bytes(schedule(racks, "morse"), hosts_in_order(8), TWO_RACKS, SIZE)


def test_rack_that_owns_nothing_needs_the_tensor_once() -> None:
    made = schedule([(0, 1), (2, 3), (4, 5), (6, 7)])
    shares = (1 / 3, 1 / 3, 0.0, 1 / 3)
    parts = tuple(
        dataclasses.replace(part, share=share)
        for part, share in zip(made.racks, shares, strict=True)
    )
    uneven = dataclasses.replace(made, racks=parts)

    found = least_schedule_bytes(uneven, hosts_in_order(8), FOUR_RACKS, SIZE)

    assert found["rack2"] == SIZE
    assert found["rack0"] == pytest.approx(SIZE * 5 / 3)


def test_schedule_with_other_racks_than_the_lab_needs_what_every_cut_must_pass() -> None:
    mistaken = schedule([(0, 1, 2, 3, 4), (5, 6, 7)])

    found = least_schedule_bytes(mistaken, hosts_in_order(8), TWO_RACKS, SIZE)

    assert found == {"rack0": SIZE, "rack1": SIZE}


def test_schedule_is_read_in_ranks_and_counted_on_hosts() -> None:
    hosts = shuffled_hosts(8, DEFAULT_SEED)
    racks = [
        tuple(r for r, host in enumerate(hosts) if TWO_RACKS.rack_of(host) == rack)
        for rack in (0, 1)
    ]

    found = least_schedule_bytes(schedule(racks), hosts, TWO_RACKS, SIZE)

    assert found == {"rack0": SIZE, "rack1": SIZE}


def test_one_rack_counts_what_each_host_owns() -> None:
    spec = parse_links("8Mbit", 4)

    found = least_schedule_bytes(schedule([(0, 1, 2, 3)]), (0, 1, 2, 3), spec, SIZE)

    assert found == {f"host{i}": 1.5 * SIZE for i in range(4)}


def test_link_that_carried_too_little_is_named_with_its_direction() -> None:
    short = short_links({"rack0": 100.0}, {"rack0": 99}, {"rack0": 100})

    assert len(short) == 1
    assert "rack0 sent 99 bytes" in short[0]


# -- judging ---------------------------------------------------------------------------


def setup_of(**fields: object) -> LabSetup:
    lab = LabSetup(
        name="racks2",
        spec=TWO_RACKS,
        links="2x4:500Mbit:50Mbit",
        cases=("racks2",),
        schemes=(BEST_RING, OURS),
        num_bytes=SIZE,
        rounds=1,
    )
    return dataclasses.replace(lab, **fields)  # type: ignore[arg-type]  # a field each


def carried(tensors: float) -> dict[str, LinkBytes]:
    count = int(tensors * SIZE)
    return {f"rack{i}": LinkBytes(send_bytes=count, receive_bytes=count) for i in (0, 1)}


def measured(**fields: object) -> LabMeasurement:
    """A lab where ours takes 0.2 s, the best ring 0.4 s and the given one 1.6 s."""
    lab = LabMeasurement(
        setup=setup_of(),
        seed=DEFAULT_SEED,
        host_of_rank=hosts_in_order(8),
        rounds=(
            SchemeRound(scheme=BEST_RING, seconds=(0.4,), links=carried(1.8)),
            SchemeRound(scheme=OURS, seconds=(0.2,), links=carried(1.05)),
            SchemeRound(scheme=GIVEN_RING, seconds=(1.6,), links=carried(7.2)),
        ),
        schedules={OURS: schedule([(0, 1, 2, 3), (4, 5, 6, 7)])},
        found=Report(found_racks=((0, 1, 2, 3), (4, 5, 6, 7)), num_hosts=8),
    )
    return dataclasses.replace(lab, **fields)  # type: ignore[arg-type]  # a field each


def judged(**fields: object) -> CaseResult:
    (result,) = judge_lab(measured(**fields), uses_targets=True)
    return result


def test_ratios_bound_and_counters_of_a_case() -> None:
    result = judged()

    assert result.ratio_to_best_ring == pytest.approx(0.5)
    assert result.ratio_to_given_ring == pytest.approx(0.125)
    assert result.bound_fraction == pytest.approx(0.16 / 0.2)
    assert result.uplink_bytes == {"rack0": 1_050_000, "rack1": 1_050_000}
    assert result.figures["racks_found"] is True
    assert result.failures == ()
    assert result.is_met is False  # 80 % of the bound, and 88 % are wanted


def test_case_fails_when_an_uplink_carried_less_than_the_scheme_needs() -> None:
    rounds = (
        SchemeRound(scheme=BEST_RING, seconds=(0.4,), links=carried(1.8)),
        SchemeRound(scheme=OURS, seconds=(0.17,), links=carried(0.99)),
    )

    result = judged(rounds=rounds)

    assert result.bound_fraction is not None
    assert result.bound_fraction > 0.88
    assert result.is_met is False
    assert "geartrain: rack0 sent 990000 bytes" in result.failures[0]


def test_coded_case_is_held_to_what_its_code_needs() -> None:
    racks = [(0, 1, 2, 3), (4, 5, 6, 7)]
    coded = SchemeRound(
        scheme=OURS_INT8, seconds=(0.05,), links=carried(0.24), relative_error=0.01
    )
    lab = measured(
        setup=setup_of(cases=("racks2_int8",), schemes=(BEST_RING, OURS, OURS_INT8)),
        rounds=(*measured().rounds, coded),
        schedules={OURS: schedule(racks), OURS_INT8: schedule(racks, "int8")},
    )

    (result,) = judge_lab(lab, uses_targets=True)

    assert result.value("ratio_to_own_exact") == pytest.approx(0.25)
    assert result.bound_fraction is None
    assert "needs 250000" in result.failures[0]


@pytest.mark.parametrize("error", [2e-6, math.nan])
def test_case_fails_when_the_sum_is_wrong(error: float) -> None:
    rounds = tuple(
        dataclasses.replace(r, relative_error=error) if r.scheme == OURS else r
        for r in measured().rounds
    )

    assert "the sum is off" in judged(rounds=rounds).failures[0]


def test_case_fails_when_ranks_hold_different_bits() -> None:
    rounds = tuple(
        dataclasses.replace(r, same_bits=r.scheme != OURS) for r in measured().rounds
    )

    assert judged(rounds=rounds).failures == ("geartrain: ranks hold different sums",)


def test_given_ring_is_a_target_at_the_default_seed_only() -> None:
    figures = {target.figure for target in judged().targets}
    others = {target.figure for target in judged(seed=3).targets}

    assert figures - others == {"ratio_to_given_ring"}


def test_slowest_rank_counts_and_different_checksums_are_seen() -> None:
    def report(seconds: float, checksum: int, error: float | None) -> Report:
        timing = Timing(
            scheme=OURS, seconds=seconds, checksum=checksum, relative_error=error
        )
        return Report(timings=(timing,))

    same = gather_round(OURS, [report(1.0, 7, 1e-8), report(2.0, 7, None)])
    different = gather_round(OURS, [report(1.0, 7, 1e-8), report(2.0, 8, None)])

    assert same.seconds == (2.0,)
    assert same.relative_error == 1e-8
    assert same.same_bits
    assert not different.same_bits


# -- what is asked ---------------------------------------------------------------------


def test_all_cases_have_targets_and_a_lab_or_workers_of_their_own() -> None:
    from_labs = {case for lab in labs_of(CommOptions()) for case in lab.cases}

    assert set(TARGETS) == set(CASES) == set(cases_of(CommOptions()))
    assert set(CASES) - from_labs == {"same_host", "overlap", "link_drop"}


def test_quick_run_is_two_racks_with_the_best_ring_and_ours() -> None:
    options = CommOptions(quick=True)
    (lab,) = labs_of(options)

    assert cases_of(options) == ("racks2",)
    assert set(lab.schemes_of(0)) == {BEST_RING, OURS}
    assert QUICK_BYTES * 0.99 < lab.num_bytes <= QUICK_BYTES
    assert not lab.measures_small


@pytest.mark.parametrize(
    ("racks", "sizes"),
    [("3+5", [3, 5]), ("1+1+1", [1, 1, 1]), ("4x2", [2] * 4), ("3", [3, 3, 2])],
)
def test_other_racks_make_one_lab_of_their_own(racks: str, sizes: list[int]) -> None:
    options = CommOptions(racks=racks, uplink="20Mbit", nic="200Mbit")
    (lab,) = labs_of(options)

    assert [len(rack) for rack in lab.spec.racks] == sizes
    assert str(lab.spec.uplink(0)) == "20Mbit"
    assert lab.cases[0] == f"racks{len(sizes)}"
    assert not options.is_default_lab


def test_only_one_case_measures_what_it_is_compared_with_and_no_more() -> None:
    (lab,) = labs_of(CommOptions(only=("racks2_int8",)))
    (small,) = labs_of(CommOptions(only=("small_64k",)))

    assert lab.schemes == (BEST_RING, OURS, OURS_INT8)
    assert small.rounds == 0
    assert small.measures_small


def test_unknown_case_and_too_many_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match="no case racks9"):
        cases_of(CommOptions(only=("racks9",)))
    with pytest.raises(ConfigError, match="40 hosts"):
        labs_of(CommOptions(racks="20x2"))
    with pytest.raises(ConfigError, match="too small"):
        CommOptions(num_bytes=1000)


def test_rounds_go_forth_and_back_and_the_longest_comes_once() -> None:
    lab = setup_of(once=(GIVEN_RING,))

    assert lab.schemes_of(0) == (BEST_RING, OURS, GIVEN_RING)
    assert lab.schemes_of(1) == (OURS, BEST_RING)


def test_sizes_can_be_cut_evenly_by_every_scheme() -> None:
    assert whole_values(FULL_BYTES, 8) % (8 * 256 * 4) == 0
    assert whole_values(1, 8) == 8 * 256 * 4


# -- reporting -------------------------------------------------------------------------


def test_case_prints_its_keys_flat_and_null_where_nothing_was_measured() -> None:
    skipped = CaseResult(case="racks2", skipped="needs root").as_json()
    found = judged().as_json()

    keys = {"seconds", "ratio_to_best_ring", "ratio_to_given_ring", "bound_fraction"}
    assert all(skipped[key] is None for key in (*keys, "uplink_bytes", "is_met"))
    assert skipped["skipped"] == "needs root"
    assert msgspec.json.decode(msgspec.json.encode(found)) == found
    assert found["targets"] == {
        "ratio_to_best_ring <= 0.58": True,
        "ratio_to_given_ring <= 0.31": True,
        "bound_fraction >= 0.88": False,
    }


def test_table_says_what_was_missed_and_what_was_skipped() -> None:
    missed, skipped = table_rows((judged(), CaseResult(case="flat", skipped="needs root")))

    assert missed[:2] == ("racks2", "MISSED")
    assert "bound_fraction is 0.800" in missed[-1]
    assert skipped == ("flat", "skipped", "", "", "", "", "", "needs root")


def test_target_that_was_not_measured_is_not_met() -> None:
    target = Target(figure="steps_back", at_most=20)

    assert target.is_met(20)
    assert not target.is_met(21)
    assert not target.is_met(None)


def test_steps_are_counted_until_three_are_near_the_optimum() -> None:
    assert steps_until([1.0, 1.0, 1.0], 1.0) == 0
    assert steps_until([3.0, 1.0, 3.0, 3.0, 1.05, 1.1, 1.0], 1.0) == 4
    assert steps_until([3.0, 1.2, 1.2, 1.2], 1.0) is None


def test_overlap_is_one_when_all_that_can_be_hidden_is() -> None:
    assert overlap_fraction(1.0, 0.7, 0.5, 1.0) == 1.0
    assert overlap_fraction(1.0, 0.7, 0.5, 1.5) == 0.0
    assert overlap_fraction(1.0, 0.5, 2.0, 2.5) == 1.0
