"""Watches the links while training: a link that changed is measured again.

Every rank runs the same pure watch on the same numbers, which travel in each step's
trailer; so all agree, without a message, on when to measure and what.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from geartrain.collectives.exchange.scheduled_collective import ScheduledCollective
from geartrain.collectives.job_network import probe_again
from geartrain.topology.watch import (
    LinkWatch,
    Observation,
    StageTime,
    WatchSettings,
    observe,
    remeasured,
)
from geartrain.units import format_rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from geartrain.collectives.exchange_hub import ExchangeHub
    from geartrain.collectives.protocol import Collective
    from geartrain.parallel.plan_director import PlanDirector
    from geartrain.parallel.process_group import RankGroups
    from geartrain.parallel.run_recorder import RunRecorder
    from geartrain.parallel.trailer import RankFigures
    from geartrain.topology.profile import Tier, Topology

_CHANGED_FRACTION = 0.15
"""Rates that read differently by less are as good as they were measured."""
_MOST_TOLERANCE = 0.5
"""A link at half its rate is noticed on any machine."""
_CALIBRATING_STEPS = 5
"""From these it is learnt how far predictions are off while links are as measured:
buckets overlap, and processors are shared with compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFigures:
    """What the exchanges of one step took here."""

    exchange_s: float = 0.0
    predicted_s: float = 0.0
    rack_s: float = 0.0
    """Of the stage inside racks; 0 where this rank has no part in it."""
    slow_hop_s: float = 0.0


def take_figures(collective: Collective | None) -> ExchangeFigures:
    """What this rank's exchanges of gradients took since it was last asked."""
    if not isinstance(collective, ScheduledCollective):
        return ExchangeFigures()
    seen = [o for o in collective.observations() if o.key is not None]
    return ExchangeFigures(
        exchange_s=sum(o.observed_s for o in seen),
        predicted_s=sum(o.predicted_s for o in seen),
        rack_s=sum(o.stage_s.get("rack sum", 0.0) for o in seen),
        slow_hop_s=sum(o.stage_s.get("slow hop", 0.0) for o in seen),
    )


@dataclass(slots=True)
class StepWatch:
    """The watch over a job's links, fed once a step.

    Args:
        topology: What the predictions rest on.
        placement: Host id of each rank; without it any link may be in use.
    """

    topology: Topology
    placement: tuple[str, ...] = ()
    _members: tuple[int, ...] = ()
    """Ranks that exchanged in the last step."""
    _state: LinkWatch = field(default_factory=LinkWatch)
    _ratios: list[float] = field(default_factory=list)
    """Observed / predicted of the calibrating steps."""
    _slower_by: float = 1.0

    def observe(self, figures: Sequence[RankFigures]) -> tuple[tuple[str, ...], str]:
        """Take in a step.

        Args:
            figures: Of all ranks, of the exchange of the step before.

        Returns:
            Tiers to measure again, none mostly, and why.
        """
        members = tuple(
            rank
            for rank, f in enumerate(figures)
            if f.exchange_predicted_s > 0 and f.exchange_s > 0
        )
        if not members:
            return (), ""
        seen = [figures[rank] for rank in members]
        if members != self._members:  # another exchange, with other errors of its own
            self._members = members
            self._ratios.clear()
        observed_s = statistics.median(f.exchange_s for f in seen)
        predicted_s = statistics.median(f.exchange_predicted_s for f in seen)
        if len(self._ratios) < _CALIBRATING_STEPS:
            self._ratios.append(observed_s / predicted_s)
            self._state = LinkWatch(settings=_settings_for(self._ratios))
            return (), ""
        predicted_s *= statistics.median(self._ratios)
        stage = StageTime(
            stage="exchange",
            tier_ids=self._suspects(seen),
            predicted_s=predicted_s,
            observed_s=observed_s,
        )
        self._state, decision = observe(
            self._state,
            Observation(predicted_s=predicted_s, observed_s=observed_s, stages=(stage,)),
        )
        self._slower_by = decision.slower_by
        return decision.suspect_ids, decision.reason

    def measured(self, topology: Topology) -> bool:
        """Take in what measuring again found; says whether anything has changed.

        Only a change in the direction that was observed counts: a measurement may have
        been disturbed, and the exchanges were not.
        """
        changed = has_changed(self.topology, topology, is_slower=self._slower_by > 1)
        self._state = remeasured(self._state, changed=changed)
        if changed:
            self.topology = topology
        return changed

    def _suspects(self, seen: Sequence[RankFigures]) -> tuple[str, ...]:
        """Uplinks of racks where the slow hop takes longest, NICs of hosts else."""
        used = {self.placement[rank] for rank in self._members if self.placement}
        hosts = tuple(
            host.tier_id for host in self.topology.hosts if not used or host.tier_id in used
        )
        uplinks = tuple(
            rack.tier_id
            for rack in self.topology.racks
            if any(host_id in hosts for host_id in rack.member_ids)
        )
        if len(uplinks) == 1:
            return hosts
        rack_s = max(f.exchange_rack_s for f in seen)
        slow_hop_s = max(f.exchange_slow_hop_s for f in seen)
        return uplinks if slow_hop_s >= rack_s else (*hosts, *uplinks)


@dataclass(slots=True)
class LinkWatcher:
    """Measures links again that are off, and has plans made anew where they changed.

    Args:
        groups: Of this rank.
        hub: Carries exchanges out along the links.
        director: Told when links have changed.
        recorder: Told what was measured.
    """

    groups: RankGroups
    hub: ExchangeHub
    director: PlanDirector
    recorder: RunRecorder
    _watch: StepWatch = field(init=False)

    def __post_init__(self) -> None:
        topology = self.hub.network.topology
        self.recorder.add_event(0, "linked", describe_links(topology))
        self._watch = StepWatch(topology, self.hub.network.placement)

    def after_step(self, step_index: int, figures: Sequence[RankFigures]) -> None:
        """Take in a step; all ranks measure again after the same one.

        Args:
            step_index: Steps applied so far.
            figures: Of all ranks.

        Raises:
            CommunicationError: If a peer was lost meanwhile.
        """
        suspects, reason = self._watch.observe(figures)
        if not suspects:
            return
        before = self.hub.network
        network = probe_again(self.groups.rendezvous, before, suspects)
        message = f"{reason}; measured {', '.join(suspects)} again: "
        if self._watch.measured(network.topology):
            self.groups.relink(network)
            self.director.relink(step_index)
        message += describe_change(before.topology, network.topology)
        self.recorder.add_event(step_index, "relinked", message)


def make_watcher(
    groups: RankGroups, director: PlanDirector, recorder: RunRecorder
) -> LinkWatcher | None:
    """Links are watched where there are any and plans may follow them.

    Args:
        groups: Of this rank, with the hub in place.
        director: Whose plans follow the links.
        recorder: Told of the links.
    """
    hub, settings = groups.hub, director.settings
    is_fixed = settings.deterministic or settings.pinned_plan is not None
    is_fixed = is_fixed or director.engine.averager is not None  # seldom used links
    if hub is None or hub.network.is_one_host or is_fixed or groups.joins:
        return None
    return LinkWatcher(groups, hub, director, recorder)


def _settings_for(ratios: Sequence[float]) -> WatchSettings:
    """Tolerate 15 %, or what steps differ by on a busy machine while links do not."""
    usual = WatchSettings()
    typical = statistics.median(ratios)
    noise = max(abs(ratio / typical - 1) for ratio in ratios)
    tolerance = min(max(usual.tolerance_fraction, noise), _MOST_TOLERANCE)
    return replace(usual, tolerance_fraction=tolerance)


def has_changed(before: Topology, after: Topology, *, is_slower: bool) -> bool:
    """Whether an uplink reads slower (or faster) by more than a measurement's error."""
    known = {(tier.kind, tier.tier_id): tier for tier in before.tiers}
    factors = [
        factor
        for tier in after.tiers
        if (old := known.get((tier.kind, tier.tier_id))) is not None
        for factor in _factors(old, tier)
    ]
    if is_slower:
        return any(factor < 1 - _CHANGED_FRACTION for factor in factors)
    return any(factor > 1 + _CHANGED_FRACTION for factor in factors)


def describe_links(topology: Topology) -> str:
    """Hosts, racks and uplinks in a line, for people."""
    racks = [
        f"{rack.tier_id} ({len(rack.member_ids)} hosts, uplink {_rate(rack)})"
        if len(topology.racks) > 1
        else f"{rack.tier_id} ({len(rack.member_ids)} hosts)"
        for rack in topology.racks
    ]
    noun = "rack" if len(racks) == 1 else "racks"
    found = f"{len(topology.hosts)} hosts in {len(racks)} {noun}: {', '.join(racks)}"
    if topology.source != "measured":
        return f"{found}; {topology.source}"
    return f"{found}; measured in {topology.probe_s:.1f} s"


def describe_change(before: Topology, after: Topology) -> str:
    """Which uplinks changed, from what to what, for people."""
    known = {(tier.kind, tier.tier_id): tier for tier in before.tiers}
    parts = []
    for tier in after.tiers:
        old = known.get((tier.kind, tier.tier_id))
        if old is None or all(
            abs(factor - 1) <= _CHANGED_FRACTION for factor in _factors(old, tier)
        ):
            continue
        parts.append(f"{tier.kind} {tier.tier_id} {_rate(old)} -> {_rate(tier)}")
    return "; ".join(parts) or "no link has changed"


def _factors(old: Tier, new: Tier) -> list[float]:
    """New / old rate of an uplink, of each direction that is known."""
    pairs = (
        (old.uplink_send_bytes_per_s, new.uplink_send_bytes_per_s),
        (old.uplink_receive_bytes_per_s, new.uplink_receive_bytes_per_s),
    )
    return [b / a for a, b in pairs if a is not None and b is not None]


def _rate(tier: Tier) -> str:
    rates = (tier.uplink_send_bytes_per_s, tier.uplink_receive_bytes_per_s)
    known = [rate for rate in rates if rate is not None]
    return format_rate(8 * min(known), "bit/s") if known else "?"
