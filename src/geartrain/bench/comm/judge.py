"""From the rounds of a lab to the figures of its cases. Pure, torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from geartrain.bench.comm.messages import (
    BEST_RING,
    CODEC_OF,
    GIVEN_RING,
    OURS,
    OURS_INT4,
    OURS_INT8,
    STOCK,
    Report,
)
from geartrain.bench.comm.minimum_bytes import (
    least_ring_bytes,
    least_schedule_bytes,
    least_stock_bytes,
    short_links,
)
from geartrain.bench.comm.rank_order import DEFAULT_SEED, crossing_edges
from geartrain.bench.comm.result import CaseResult, Value
from geartrain.bench.comm.settings import SMALL_BYTES, LabSetup
from geartrain.bench.comm.targets import TARGETS, Target
from geartrain.bench.link_bound import exchange_bound_s
from geartrain.devices.emulation.network import LinkBytes
from geartrain.planner.exchange import CommSchedule

MAX_RELATIVE_ERROR = {None: 1e-6, "int8": 0.02, "int4": 0.25}
"""Norm of the error / norm of the exact sum, by compression. A code's error is that of
one step and what the step before had left over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRound:
    """One scheme, measured once (or, for small tensors, many times in a row)."""

    scheme: str
    seconds: tuple[float, ...]
    """Of the slowest rank, each repeat."""
    links: dict[str, LinkBytes] = field(default_factory=dict)
    """What every link carried meanwhile."""
    relative_error: float = 0.0
    """The largest."""
    same_bits: bool = True
    """Whether all ranks had the same result, each time."""
    cpu_s: float = 0.0
    """Of all ranks, all repeats."""
    stage_s: dict[str, float] = field(default_factory=dict)
    """Of the rank that each stage took longest on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabMeasurement:
    """What one lab gave."""

    setup: LabSetup
    seed: int
    host_of_rank: tuple[int, ...]
    rounds: tuple[SchemeRound, ...]
    small: tuple[SchemeRound, ...] = ()
    schedules: dict[str, CommSchedule] = field(default_factory=dict)
    predicted_s: dict[str, float] = field(default_factory=dict)
    """By scheme, what geartrain predicted."""
    small_schedule: CommSchedule | None = None
    found: Report = field(default_factory=Report)

    @property
    def true_racks(self) -> set[frozenset[int]]:
        """The lab's racks, as ranks."""
        spec = self.setup.spec
        racks: list[set[int]] = [set() for _ in spec.racks]
        for rank, host in enumerate(self.host_of_rank):
            racks[spec.rack_of(host)].add(rank)
        return {frozenset(rack) for rack in racks}

    def of(self, scheme: str) -> list[SchemeRound]:
        """A scheme's rounds."""
        return [r for r in self.rounds if r.scheme == scheme]

    def median_s(self, scheme: str) -> float | None:
        """A scheme's time; None where it was not measured."""
        rounds = self.of(scheme)
        return statistics.median(r.seconds[0] for r in rounds) if rounds else None


def judge_lab(measured: LabMeasurement, *, uses_targets: bool) -> list[CaseResult]:
    """The cases of a lab.

    Args:
        measured: What it gave.
        uses_targets: Whether the lab is one that the targets are for.
    """
    schemes = {f"{measured.setup.name}_int8": OURS_INT8}
    schemes |= {f"{measured.setup.name}_int4": OURS_INT4}
    results = []
    for case in measured.setup.cases:
        targets = _targets(case, measured.seed) if uses_targets else ()
        if case == "small_64k":
            results.append(_judge_small(measured, targets))
        else:
            scheme = schemes.get(case, OURS)
            results.append(_judge_large(measured, case, scheme, targets))
    return results


def _targets(case: str, seed: int) -> tuple[Target, ...]:
    return tuple(
        target
        for target in TARGETS.get(case, ())
        if seed == DEFAULT_SEED or not target.needs_default_seed
    )


def _judge_large(
    measured: LabMeasurement, case: str, scheme: str, targets: tuple[Target, ...]
) -> CaseResult:
    seconds = measured.median_s(scheme)
    assert seconds is not None
    bound_s = exchange_bound_s(measured.setup.num_bytes, measured.setup.spec)
    exact = scheme == OURS
    baselines = [GIVEN_RING, BEST_RING, STOCK] if exact else [BEST_RING]
    failures = [f for s in (scheme, *baselines) for f in _failures(measured, s)]
    return CaseResult(
        case=case,
        seconds=seconds,
        ratio_to_best_ring=_ratio(seconds, measured.median_s(BEST_RING)),
        ratio_to_given_ring=_ratio(seconds, measured.median_s(GIVEN_RING)),
        bound_fraction=bound_s / seconds if exact else None,
        uplink_bytes=_uplink_bytes(measured, scheme),
        figures=_lab_figures(measured)
        | _scheme_figures(measured, scheme)
        | {
            "bound_s": bound_s if exact else None,
            "ratio_to_own_exact": (
                None if exact else _ratio(seconds, measured.median_s(OURS))
            ),
            "ratio_to_stock_hierarchy": (
                _ratio(seconds, measured.median_s(STOCK)) if exact else None
            ),
            "best_ring_s": measured.median_s(BEST_RING),
            "given_ring_s": measured.median_s(GIVEN_RING),
            "stock_hierarchy_s": measured.median_s(STOCK),
        },
        failures=tuple(failures),
        targets=targets,
    )


def _judge_small(measured: LabMeasurement, targets: tuple[Target, ...]) -> CaseResult:
    by_scheme = {r.scheme: r for r in measured.small}
    ours, ring = by_scheme[OURS], by_scheme[BEST_RING]
    seconds = statistics.median(ours.seconds)
    schedule = measured.small_schedule
    return CaseResult(
        case="small_64k",
        seconds=seconds,
        ratio_to_best_ring=seconds / statistics.median(ring.seconds),
        figures=_lab_figures(measured)
        | {
            "num_bytes": SMALL_BYTES,
            "num_repeats": len(ours.seconds),
            "best_ring_s": statistics.median(ring.seconds),
            "spread_fraction": _spread(ours.seconds),
            "algorithm": schedule.algorithm if schedule else None,
        },
        failures=tuple(wrong_results(ours) + wrong_results(ring)),
        targets=targets,
    )


def _lab_figures(measured: LabMeasurement) -> dict[str, Value]:
    found = {frozenset(rack) for rack in measured.found.found_racks}
    racks = [measured.setup.spec.rack_of(host) for host in measured.host_of_rank]
    edges = crossing_edges(racks, len(measured.setup.spec.racks))
    return {
        "links": measured.setup.links,
        "seed": measured.seed,
        "given_ring_crossings": sum(edges),
        "probe_s": measured.found.probe_s,
        "probe_bytes": measured.found.probe_bytes,
        "racks_found": found == measured.true_racks,
    }


def _scheme_figures(measured: LabMeasurement, scheme: str) -> dict[str, Value]:
    rounds = measured.of(scheme)
    schedule = measured.schedules.get(scheme)
    slowest = max(rounds, key=lambda r: r.seconds[0])
    figures: dict[str, Value] = {
        "num_bytes": measured.setup.num_bytes,
        "num_repeats": len(rounds),
        "spread_fraction": _spread([r.seconds[0] for r in rounds]),
        "relative_error": max(r.relative_error for r in rounds),
        "cpu_s": statistics.median(r.cpu_s for r in rounds),
    }
    figures |= {
        f"stage_{name.replace(' ', '_')}_s": value
        for name, value in slowest.stage_s.items()
    }
    if schedule is not None:
        figures |= {
            "algorithm": schedule.algorithm,
            "num_chunks": schedule.num_chunks,
            "predicted_s": measured.predicted_s.get(scheme),
        }
    return figures


def _failures(measured: LabMeasurement, scheme: str) -> list[str]:
    failures = []
    for done in measured.of(scheme):
        failures += wrong_results(done)
        short = short_links(
            _least_bytes(measured, scheme),
            {link: carried.send_bytes for link, carried in done.links.items()},
            {link: carried.receive_bytes for link, carried in done.links.items()},
        )
        failures += [f"{scheme}: {text}" for text in short]
    return failures


def wrong_results(done: SchemeRound) -> list[str]:
    """What is wrong with a scheme's sums, in words."""
    failures = []
    if not done.same_bits:
        failures.append(f"{done.scheme}: ranks hold different sums")
    most = MAX_RELATIVE_ERROR[CODEC_OF.get(done.scheme)]
    if not done.relative_error <= most:  # also where it is NaN
        failures.append(
            f"{done.scheme}: the sum is off by {done.relative_error:.2e} of its norm; "
            f"expected {most:g} at most"
        )
    return failures


def _least_bytes(measured: LabMeasurement, scheme: str) -> dict[str, float]:
    setup = measured.setup
    if scheme == GIVEN_RING:
        return least_ring_bytes(measured.host_of_rank, setup.spec, setup.num_bytes)
    if scheme == BEST_RING:
        hosts = range(setup.spec.num_hosts)
        return least_ring_bytes(hosts, setup.spec, setup.num_bytes)
    if scheme == STOCK:
        return least_stock_bytes(setup.spec, setup.num_bytes)
    return least_schedule_bytes(
        measured.schedules[scheme], measured.host_of_rank, setup.spec, setup.num_bytes
    )


def _uplink_bytes(measured: LabMeasurement, scheme: str) -> dict[str, int] | None:
    """Of the middle round."""
    if len(measured.setup.spec.racks) == 1:
        return None
    rounds = sorted(measured.of(scheme), key=lambda r: r.seconds[0])
    middle = rounds[(len(rounds) - 1) // 2]
    return {
        link: max(carried.send_bytes, carried.receive_bytes)
        for link, carried in middle.links.items()
        if link.startswith("rack")
    }


def _ratio(seconds: float, baseline_s: float | None) -> float | None:
    return None if baseline_s is None else seconds / baseline_s


def _spread(seconds: Sequence[float]) -> float:
    return (max(seconds) - min(seconds)) / statistics.median(seconds)
