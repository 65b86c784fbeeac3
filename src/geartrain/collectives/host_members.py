"""The processes of each host, as an exchange and its plan see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from geartrain.collectives.host_groups.choose import HostMember, common_backend
from geartrain.errors import ConfigError
from geartrain.planner.exchange import ScheduleBook
from geartrain.planner.exchange.request import HostGroupKind

if TYPE_CHECKING:
    from geartrain.collectives.job_network import RankFacts


def check_placement(book: ScheduleBook, placement: Sequence[str]) -> None:
    """Check that a book puts the processes of each host into one device group.

    Args:
        book: For as many members as there are hosts ids given.
        placement: Host id of each member.

    Raises:
        ConfigError: If it was made for another placement.
    """
    here = {
        tuple(m for m, host in enumerate(placement) if host == host_id)
        for host_id in set(placement)
    }
    for schedule in book.schedules:
        there = {tuple(sorted(h)) for rack in schedule.racks for h in rack.hosts}
        if there != here:
            msg = (
                f"the plan's exchange has the members {sorted(there)} on one host each, "
                f"but here {sorted(here)} share one; take the exchange out of the plan to "
                "have it planned anew"
            )
            raise ConfigError(msg)


def host_member(name: str, facts: RankFacts) -> HostMember:
    """One process of a host.

    Args:
        name: Of its device.
        facts: Where it runs.
    """
    return HostMember(
        name=name,
        kind=facts.device_kind,
        backends=facts.collective_backends,
        cores=facts.core_fraction,
    )


def host_group_kind(ranks: Sequence[RankFacts]) -> HostGroupKind:
    """The kind on the hosts that have several ranks; ``lone`` where none has."""
    by_host: dict[str, list[HostMember]] = {}
    for facts in ranks:
        by_host.setdefault(facts.host_id, []).append(host_member("", facts))
    several = [members for members in by_host.values() if len(members) > 1]
    if not several:
        return "lone"
    return "vendor" if all(map(common_backend, several)) else "shared_memory"
