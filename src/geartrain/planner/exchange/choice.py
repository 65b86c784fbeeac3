"""Choose how an all-reduce is carried out, from what every way is predicted to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.errors import ConfigError
from geartrain.planner.exchange.request import AUTO, ExchangeRequest
from geartrain.planner.exchange.schedule import EXACT, CommSchedule
from geartrain.planner.exchange.ways import LEADERS, Candidate, Ways
from geartrain.units import format_bytes, format_seconds

DIRECT_OVER_RING = 0.8
"""In one rack the direct exchange must beat the ring by this: the ring is Gloo's own, in
C++, and takes less processor time than our threads. On eight equal hosts, read with 9 % of
error, 0.9 once let the direct exchange through, which then took 1.09 of the ring."""
SCARCE_OVER_RING = 0.65
"""The same where a host has less than a core, which computes as well: on a fifth of a core
the threads of a staged exchange took 0.4 s of a step of 2 s, the ring none to speak of."""
SMALL_BYTES = 64 * 1024
LEADERS_OVER_STAGED = 1.4
"""Small tensors go through rack leaders up to this much over the best prediction: they
cost an eighth of the messages, and messages cost more processor time than is foreseen.
Measured at 2 racks of 4 on two busy cores, staged and leaders over Gloo's ring: 8 KB 0.95
and 0.50, 32 KB 0.69-0.86 and 0.50, 64 KB 0.81-1.08 and 0.65-0.80."""
CODEC_OVER_EXACT = 0.95
"""What policy auto wants of a codec before it gives up exactness."""
SMALLEST_CODED_BYTES = 128 * 1024
"""Below, policy auto stays exact: latency decides, so a code would save next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoGain:
    """What policy ``auto`` would change."""

    codec: str
    """``none`` where it would stay exact."""
    exact_s: float
    auto_s: float
    text: str


def choose(request: ExchangeRequest) -> CommSchedule:
    """The fastest way that the policy allows.

    Raises:
        ConfigError: If a member's host is not in the topology, or a link has no rate.
    """
    return choose_among(Ways(request), request.policy, request.num_bytes)


def candidates(request: ExchangeRequest) -> tuple[Candidate, ...]:
    """All ways, the one that is taken first, refused ones with their reason last."""
    return rank(Ways(request), request.policy, request.num_bytes)


def what_auto_would_gain(request: ExchangeRequest) -> AutoGain:
    """Compare policy ``auto`` with exact, whatever the request's policy is."""
    exact = choose(dataclasses.replace(request, policy=None))
    auto = choose(dataclasses.replace(request, policy=AUTO))
    if auto.codec == EXACT:
        why = (
            "there is no slow hop"
            if exact.algorithm == "local"
            else "no codec that it may use saves 5 % of the time"
        )
        text = f"compression=auto would stay exact: {why}"
        if not request.codecs:
            text = "compression=auto would stay exact: no codec was measured here"
    else:
        text = (
            f"compression=auto would use {auto.codec} and take "
            f"{format_seconds(auto.predicted_s)} instead of "
            f"{format_seconds(exact.predicted_s)} "
            f"({auto.predicted_s / exact.predicted_s:.2f})"
        )
    return AutoGain(
        codec=auto.codec, exact_s=exact.predicted_s, auto_s=auto.predicted_s, text=text
    )


def choose_among(ways: Ways, policy: str | None, num_bytes: int) -> CommSchedule:
    """The fastest allowed way for one size, with its reason."""
    ranked = rank(ways, policy, num_bytes)
    return dataclasses.replace(ranked[0].schedule, reason=_reason(ranked[0], ranked))


def rank(ways: Ways, policy: str | None, num_bytes: int) -> tuple[Candidate, ...]:
    """All ways of one size: the one to take, other allowed ones, then refused ones."""
    found = _apply_policy(ways.candidates(num_bytes), policy, num_bytes)
    margin = None
    if ways.num_racks == 1:
        margin = SCARCE_OVER_RING if ways.core_fraction < 1 else DIRECT_OVER_RING
    taken = _pick([c for c in found if not c.refused], over_ring=margin)
    others = [c for c in found if c is not taken]
    others.sort(key=lambda c: (bool(c.refused), c.predicted_s))
    return (taken, *others)


def _apply_policy(
    found: Sequence[Candidate], policy: str | None, num_bytes: int
) -> list[Candidate]:
    if policy is None or found[0].schedule.algorithm == "local":
        return list(found)
    if policy == AUTO:
        return _refuse_codecs_without_gain(found, num_bytes)
    forced = f"compression={policy!r} is asked for, and this sends whole values"
    # Where latency decides there is nothing to compress: leaders stay allowed.
    return [
        dataclasses.replace(c, refused=c.refused or forced)
        if c.schedule.codec == EXACT and c.schedule.algorithm != "leader"
        else c
        for c in found
    ]


def _refuse_codecs_without_gain(
    found: Sequence[Candidate], num_bytes: int
) -> list[Candidate]:
    exact = [c for c in found if c.schedule.codec == EXACT and not c.refused]
    exact_s = min(c.predicted_s for c in exact)
    return [
        dataclasses.replace(c, refused=_why_no_codec(c, exact_s, num_bytes))
        if c.schedule.codec != EXACT
        else c
        for c in found
    ]


def _why_no_codec(candidate: Candidate, exact_s: float, num_bytes: int) -> str:
    if num_bytes < SMALLEST_CODED_BYTES:
        return f"auto stays exact below {format_bytes(SMALLEST_CODED_BYTES)}"
    if candidate.predicted_s > CODEC_OVER_EXACT * exact_s:
        saved = 1 - candidate.predicted_s / exact_s
        return f"saves {saved:.0%} of the time, and auto wants {1 - CODEC_OVER_EXACT:.0%}"
    return ""


def _pick(allowed: Sequence[Candidate], *, over_ring: float | None) -> Candidate:
    """The fastest; the ring unless a direct exchange beats it by ``over_ring``.

    Among several racks, where that is None, leaders are preferred for small tensors.
    """
    if not allowed:
        msg = (
            "no way to exchange is allowed; take compression=None or probe the links again"
        )
        raise ConfigError(msg)
    best = min(allowed, key=lambda c: c.predicted_s)
    ring = next((c for c in allowed if c.schedule.algorithm == "ring"), None)
    if over_ring is None and best.schedule.num_bytes <= SMALL_BYTES:
        leaders = next((c for c in allowed if c.name == LEADERS), best)
        most_s = min(
            LEADERS_OVER_STAGED * best.predicted_s,
            ring.predicted_s if ring else best.predicted_s,
        )
        return leaders if leaders.predicted_s <= most_s else best
    algorithm, num_bytes = best.schedule.algorithm, best.schedule.num_bytes
    is_direct = algorithm == "hierarchical" and best.schedule.codec == EXACT
    if over_ring == SCARCE_OVER_RING and num_bytes >= SMALLEST_CODED_BYTES:
        is_direct |= algorithm == "leader"  # carried out by the same threads
    if ring and is_direct and over_ring is not None:
        return ring if best.predicted_s > over_ring * ring.predicted_s else best
    return best


def _reason(best: Candidate, ranked: Sequence[Candidate]) -> str:
    schedule = best.schedule
    text = best.name
    if schedule.algorithm == "hierarchical":
        text += f" in {schedule.num_chunks} chunks"
    text += f": {format_seconds(schedule.predicted_s)}, {schedule.reason}"
    rest = [c for c in ranked if c is not best and not c.refused]
    if rest:
        other = rest[0]
        text += f"; next best {other.name} with {format_seconds(other.predicted_s)}"
    return text
