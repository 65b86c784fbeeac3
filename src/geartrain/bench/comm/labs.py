"""Measures one lab: every scheme in turn, round by round, counters read around each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from geartrain.bench.comm.crew import Crew
from geartrain.bench.comm.judge import LabMeasurement, SchemeRound
from geartrain.bench.comm.messages import BEST_RING, CODEC_OF, OURS, Order, Report
from geartrain.bench.comm.rank_order import crossing_edges, shuffled_hosts
from geartrain.bench.comm.settings import SMALL_BYTES, LabSetup, whole_values
from geartrain.devices.emulation.network import LinkBytes, NetworkLab, NetworkSpec
from geartrain.planner.exchange import CommSchedule
from geartrain.units import format_bytes, format_seconds

Say = Callable[[str], None]

_JOIN_S = 180.0
_MEASURE_S = 300.0
_WARMUP_BYTES = 64 * 1024
_SMALL_REPEATS = 30
_RINGS_IN_WORDS = 2


def measure_lab(setup: LabSetup, seed: int, say: Say) -> LabMeasurement:
    """Build the lab, let geartrain find its way in it, measure, and remove the lab.

    Raises:
        DeviceError: If the lab can't be made or a worker fails.
    """
    hosts = shuffled_hosts(setup.spec.num_hosts, seed)
    say(f"{setup.name}: {setup.links}, {describe_order(setup.spec, hosts, seed)}")
    with NetworkLab(setup.spec) as lab, Crew(hosts, lab) as crew:
        schemes = tuple(dict.fromkeys((*setup.schemes, OURS)))
        schemes = tuple(scheme for scheme in schemes if scheme in CODEC_OF)
        found = crew.ask(Order(verb="join", schemes=schemes), _JOIN_S)[0]
        say(f"{setup.name}: {describe_found(found)}")
        _warm_up(crew, setup)
        rounds: list[SchemeRound] = []
        schedules: dict[str, CommSchedule] = {}
        predicted_s: dict[str, float] = {}
        for index in range(setup.rounds):
            for scheme in setup.schemes_of(index):
                done, reports = _measure(crew, lab, scheme, setup.num_bytes)
                rounds.append(done)
                schedules |= reports[0].schedules
                predicted_s |= reports[0].predicted_s
                say(f"{setup.name}, round {index + 1}: {describe_round(done)}")
        small: tuple[SchemeRound, ...] = ()
        small_schedule = None
        if setup.measures_small:
            small, small_schedule = _measure_small(crew, setup, say)
    return LabMeasurement(
        setup=setup,
        seed=seed,
        host_of_rank=hosts,
        rounds=tuple(rounds),
        small=small,
        schedules=schedules,
        predicted_s=predicted_s,
        small_schedule=small_schedule,
        found=found,
    )


def describe_order(spec: NetworkSpec, hosts: Sequence[int], seed: int) -> str:
    """The order of the ranks, and how often their ring crosses racks, in words."""
    edges = crossing_edges([spec.rack_of(host) for host in hosts], len(spec.racks))
    order = ",".join(map(str, hosts))
    text = f"seed {seed}, ranks on hosts {order}: {sum(edges)} of {len(hosts)} edges of"
    text += " their ring cross racks"
    if len(edges) == _RINGS_IN_WORDS:
        text += f", {edges[0]} in each direction"
    return text


def describe_found(found: Report) -> str:
    """What geartrain's probe found, in words."""
    racks = " | ".join(",".join(map(str, rack)) for rack in found.found_racks)
    return (
        f"found {found.num_hosts} hosts, racks of ranks {racks}, in "
        f"{format_seconds(found.probe_s)} with {format_bytes(found.probe_bytes)}"
    )


def describe_round(done: SchemeRound) -> str:
    """One measurement, in words."""
    text = f"{done.scheme} {format_seconds(max(done.seconds))}"
    uplinks = [
        f"{link} {max(carried.send_bytes, carried.receive_bytes) / 1e6:.2f} MB"
        for link, carried in done.links.items()
        if link.startswith("rack")
    ]
    return f"{text} ({', '.join(uplinks)})" if len(uplinks) > 1 else text


def gather_round(
    scheme: str, reports: Sequence[Report], links: dict[str, LinkBytes] | None = None
) -> SchemeRound:
    """All ranks' timings of one scheme as one: the slowest counts."""
    by_rank = [[t for t in report.timings if t.scheme == scheme] for report in reports]
    repeats = list(zip(*by_rank, strict=True))
    errors = [t.relative_error for t in by_rank[0] if t.relative_error is not None]
    stages = sorted({name for ts in by_rank for t in ts for name in t.stage_s})
    return SchemeRound(
        scheme=scheme,
        seconds=tuple(max(t.seconds for t in ranks) for ranks in repeats),
        links=links or {},
        relative_error=max(errors, default=0.0),
        same_bits=all(len({t.checksum for t in ranks}) == 1 for ranks in repeats),
        cpu_s=sum(t.cpu_s for ranks in repeats for t in ranks),
        stage_s={
            name: max(t.stage_s.get(name, 0.0) for ts in by_rank for t in ts)
            for name in stages
        },
    )


def _warm_up(crew: Crew, setup: LabSetup) -> None:
    """Connect all groups; Gloo and kernels grow their buffers."""
    num_bytes = whole_values(_WARMUP_BYTES, setup.spec.num_hosts)
    schemes = dict.fromkeys((*setup.schemes, *setup.once, BEST_RING, OURS))
    crew.ask(Order(verb="measure", schemes=tuple(schemes), num_bytes=num_bytes), _JOIN_S)


def _measure(
    crew: Crew, lab: NetworkLab, scheme: str, num_bytes: int
) -> tuple[SchemeRound, list[Report]]:
    before = lab.bytes()
    order = Order(verb="measure", schemes=(scheme,), num_bytes=num_bytes)
    reports = crew.ask(order, _MEASURE_S)
    after = lab.bytes()
    links = {link: after[link] - before[link] for link in after}
    return gather_round(scheme, reports, links), reports


def _measure_small(
    crew: Crew, setup: LabSetup, say: Say
) -> tuple[tuple[SchemeRound, ...], CommSchedule]:
    schemes = (BEST_RING, OURS)
    reports = crew.ask(
        Order(
            verb="measure", schemes=schemes, num_bytes=SMALL_BYTES, repeats=_SMALL_REPEATS
        ),
        _MEASURE_S,
    )
    say(f"{setup.name}: {_SMALL_REPEATS} times {format_bytes(SMALL_BYTES)} in turn")
    done = tuple(gather_round(scheme, reports) for scheme in schemes)
    return done, reports[0].schedules[OURS]
