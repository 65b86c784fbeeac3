"""From readings to a topology. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.topology.agent_protocol import Description
from geartrain.topology.arrivals import RateReading
from geartrain.topology.capacities import Capacity
from geartrain.topology.clustering import Racks
from geartrain.topology.instrument import Survey
from geartrain.topology.profile import LinkProfile, Tier, Topology
from geartrain.topology.readings import LONG_ENOUGH_S
from geartrain.units import format_bit_rate, format_bytes

_FABRIC_ID = "fabric"
_FAST_BYTES_PER_S = 1.25e9
"""10 Gbit/s. From here on, what one process sends is as likely the limit as the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a survey found."""

    racks: Racks
    """Positions of each rack's hosts."""
    rack_names: Sequence[str]
    nics: Sequence[Capacity]
    """One a host."""
    uplinks: Sequence[Capacity]
    """One a rack."""
    memory_bytes_per_s: Sequence[float | None]
    """One a host."""


def assemble(survey: Survey, hosts: Sequence[Description], found: Findings) -> Topology:
    """Put everything that was measured into a topology.

    Args:
        survey: Its readings and notes.
        hosts: As the agents describe them.
        found: What was found.
    """
    tiers = [
        _host_tier(survey, position, hosts[position], found.nics[position], memory)
        for position, memory in enumerate(found.memory_bytes_per_s)
    ]
    tiers += [
        Tier(
            kind="rack",
            tier_id=name,
            member_ids=tuple(hosts[host].host_id for host in rack),
            uplink_send_bytes_per_s=_rate(uplink.send),
            uplink_receive_bytes_per_s=_rate(uplink.receive),
        )
        for rack, name, uplink in zip(
            found.racks, found.rack_names, found.uplinks, strict=True
        )
    ]
    tiers.append(
        Tier(kind="fabric", tier_id=_FABRIC_ID, member_ids=tuple(found.rack_names))
    )
    _note_uncertain(survey, found.nics, hosts)
    return Topology(
        tiers=tuple(tiers),
        links=_links(survey, hosts, found.racks, found.uplinks),
        source="measured",
        measured_at_s=time.time(),
        probe_s=survey.elapsed_s,
        probe_bytes=survey.instrument.sent_bytes,
        notes=tuple(dict.fromkeys(survey.notes)),
    )


def _host_tier(
    survey: Survey, position: int, host: Description, nic: Capacity, memory: float | None
) -> Tier:
    # A host alone in its rack, or one that was cut short: its best pair is what is known.
    send = _rate(nic.send) or survey.readings.best_sends()[position] or None
    receive = _rate(nic.receive) or survey.readings.best_receives()[position] or None
    survey.notes += [f"{host.host_id}: {note}" for note in host.notes]
    return Tier(
        kind="host",
        tier_id=host.host_id,
        member_ids=host.device_ids,
        uplink_send_bytes_per_s=send,
        uplink_receive_bytes_per_s=receive,
        inner_bytes_per_s=memory,
        address=host.address,
        interface=host.interface or None,
    )


def _links(
    survey: Survey, hosts: Sequence[Description], racks: Racks, uplinks: Sequence[Capacity]
) -> tuple[LinkProfile, ...]:
    rack_of = {host: index for index, rack in enumerate(racks) for host in rack}
    sends, receives = survey.readings.best_sends(), survey.readings.best_receives()
    links = []
    for (source, target), reading in sorted(survey.readings.rates.items()):
        rate = reading.bytes_per_s
        one, two = rack_of[source], rack_of[target]
        if one != two:
            # Pairs were measured while others shared the uplinks; alone it is faster.
            limits = (_rate(uplinks[one].send), _rate(uplinks[two].receive))
            alone = min(
                [sends[source], receives[target], *(u for u in limits if u is not None)]
            )
            rate = max(rate, alone) if None not in limits else rate
        links.append(
            LinkProfile(
                source_id=hosts[source].host_id,
                target_id=hosts[target].host_id,
                bytes_per_s=rate,
                latency_s=survey.readings.latencies_s[source, target],
            )
        )
    return tuple(links)


def _note_uncertain(
    survey: Survey, nics: Sequence[Capacity], hosts: Sequence[Description]
) -> None:
    short = [
        host.host_id
        for host, nic in zip(hosts, nics, strict=True)
        if any(
            r is not None and r.window_s < LONG_ENOUGH_S for r in (nic.send, nic.receive)
        )
    ]
    if short:
        survey.notes.append(
            f"NIC of {', '.join(short)}: read over less than {LONG_ENOUGH_S * 1e3:.0f} ms "
            f"within the budget of {format_bytes(survey.instrument.sent_bytes)}; take the "
            "rate as a lower bound"
        )
    fast = max((r.bytes_per_s for n in nics for r in (n.send, n.receive) if r), default=0.0)
    if fast > _FAST_BYTES_PER_S:
        survey.notes.append(
            f"rates above {format_bit_rate(_FAST_BYTES_PER_S)} are lower bounds: "
            "one process a host measured them"
        )
    if survey.is_cut_short:
        survey.notes.append(
            "the budget of bytes was used up before all was measured; raise max_bytes"
        )


def _rate(reading: RateReading | None) -> float | None:
    return None if reading is None else reading.bytes_per_s
