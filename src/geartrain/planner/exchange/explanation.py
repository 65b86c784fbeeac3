"""Say how gradients are exchanged, why so, and what else was considered."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.planner.exchange.choice import candidates, choose, what_auto_would_gain
from geartrain.planner.exchange.request import ExchangeRequest
from geartrain.planner.exchange.schedule import EXACT, CommSchedule
from geartrain.units import format_bytes, format_seconds

_NAMES = {
    "local": "on one host",
    "ring": "by Gloo's ring",
    "leader": "through leaders",
    "hierarchical": "in stages",
}
_MOST_HOSTS_TO_LIST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A way that was not taken."""

    name: str
    predicted_s: float
    refused: str = ""
    """Why it is not allowed; empty where it is only slower, or not faster by enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeExplanation:
    """One exchange in numbers and words."""

    schedule: CommSchedule
    host_ids: tuple[str, ...]
    """Of each member."""
    alternatives: tuple[Alternative, ...]
    auto: str
    """What ``compression="auto"`` would change."""


def explain_exchange(request: ExchangeRequest) -> ExchangeExplanation:
    """Explain what ``choose`` says to a request."""
    others = candidates(request)[1:]
    return ExchangeExplanation(
        schedule=choose(request),
        host_ids=request.placement,
        alternatives=tuple(
            Alternative(name=c.name, predicted_s=c.predicted_s, refused=c.refused)
            for c in others
        ),
        auto=what_auto_would_gain(request).text,
    )


def exchange_sentences(explanation: ExchangeExplanation) -> list[str]:
    """The explanation as lines for people."""
    schedule = explanation.schedule
    way = _NAMES[schedule.algorithm]
    if schedule.algorithm == "hierarchical":
        way += f" in {schedule.num_chunks} chunks"
    codec = "exact" if schedule.codec == EXACT else f"{schedule.codec} on the slow hop"
    lines = [
        (
            f"Gradients of {format_bytes(schedule.num_bytes)} are exchanged {way}, "
            f"{codec}: predicted {format_seconds(schedule.predicted_s)}."
        )
    ]
    if schedule.bound_s > 0:
        lines.append(
            f"No exact exchange could take less than {format_seconds(schedule.bound_s)} "
            f"on these links: {schedule.bound_s / schedule.predicted_s:.0%} of the "
            "prediction."
        )
    lines.append(f"Chosen: {schedule.reason}.")
    if schedule.algorithm == "hierarchical":
        lines += _shares(explanation)
    for other in explanation.alternatives:
        why = other.refused or _compare(other.predicted_s, schedule.predicted_s)
        lines.append(f"Not {other.name} ({format_seconds(other.predicted_s)}): {why}.")
    return [*lines, f"{explanation.auto}."]


def _compare(other_s: float, taken_s: float) -> str:
    if other_s < taken_s:
        return "faster by less than its processor time is worth"
    return f"{other_s / taken_s:.2f} times as long"


def _shares(explanation: ExchangeExplanation) -> list[str]:
    lines = []
    for rack in explanation.schedule.racks:
        hosts = [
            f"{explanation.host_ids[leader]} {share:.0%}"
            for leader, share in zip(rack.leaders, rack.host_shares, strict=True)
        ]
        if len(hosts) > _MOST_HOSTS_TO_LIST:
            low, high = min(rack.host_shares), max(rack.host_shares)
            hosts = [f"{len(hosts)} hosts, {low:.1%} to {high:.1%} each"]
        codec = "" if rack.codec == EXACT else f", {rack.codec} over its uplink"
        lines.append(
            f"Rack {rack.rack_id} adds up {rack.share:.0%}{codec}; its sum is held by "
            f"{', '.join(hosts)}."
        )
    return lines
