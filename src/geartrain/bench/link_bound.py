"""What no exchange of gradients can beat on known links. Pure, torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from geartrain.devices.emulation.network import NetworkSpec

_MAX_SEARCHED = 12
"""Up to so many devices every choice of some is looked at; above, the fastest k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """What no step over known links can beat."""

    compute_s: float
    exchange_s: float
    num_devices: int
    """How many devices of the fleet take part."""

    @property
    def step_s(self) -> float:
        """Computing and exchanging may overlap, so the longer one counts."""
        return max(self.compute_s, self.exchange_s)


def step_bound(
    global_batch_size: int,
    samples_per_s: Sequence[float],
    gradient_bytes: float,
    links: NetworkSpec,
) -> StepBound:
    """The bound of a step: the least over all choices of devices that take part.

    A device behind a slow link may be worth less than what it costs to ask it.

    Args:
        global_batch_size: Samples of a step.
        samples_per_s: Each device's own speed, in host order.
        gradient_bytes: What is exchanged in a step.
        links: A host a device.

    >>> from geartrain.devices.emulation.network import parse_links
    >>> links = parse_links("8Mbit", 2)
    >>> step_bound(100, [80.0, 20.0], 0.5e6, links)
    StepBound(compute_s=1.0, exchange_s=0.5, num_devices=2)
    >>> step_bound(100, [80.0, 20.0], 4e6, links)
    StepBound(compute_s=1.25, exchange_s=0.0, num_devices=1)
    """
    return min(
        (
            StepBound(
                compute_s=global_batch_size / sum(samples_per_s[i] for i in chosen),
                exchange_s=exchange_bound_s(gradient_bytes, _only(links, chosen)),
                num_devices=len(chosen),
            )
            for chosen in _choices(samples_per_s)
        ),
        key=lambda bound: (bound.step_s, -bound.num_devices),
    )


def exchange_bound_s(num_bytes: float, links: NetworkSpec) -> float:
    """The least time to add up a tensor over all hosts and hand the sum to each.

    With the tensor's size S, n hosts of rate b and R racks of uplink u,

        T >= max(S / min b, S / min u, 2 (n - 1) S / sum b, 2 (R - 1) S / sum u)

    for each direction: every host must receive S, whatever sums it is given; every rack
    must send its part and receive the rest; and n - 1 hosts (R - 1 racks) must be added
    up at some place and told the sum, which makes 2 (n - 1) S in all. Headers are left
    out: TCP itself reaches 95.4 % of a link's rate.

    Args:
        num_bytes: S.
        links: The hosts and racks. A rack whose uplink is not shaped bounds nothing.

    Returns:
        Seconds; 0 for one host.

    >>> from geartrain.devices.emulation.network import parse_links
    >>> exchange_bound_s(1e6, parse_links("8Mbit", 4))
    1.5
    >>> exchange_bound_s(1e6, parse_links("2x2:80Mbit:8Mbit"))
    1.0
    """
    hosts = links.hosts
    if len(hosts) < 2:  # noqa: PLR2004 - it takes two to exchange
        return 0.0
    bounds = []
    for direction in ("send_bytes_per_s", "receive_bytes_per_s"):
        bounds.append(_bound_s(num_bytes, [getattr(host, direction) for host in hosts]))
        shaped = [uplink for uplink in links.uplinks if uplink is not None]
        rates = [getattr(uplink, direction) for uplink in shaped]
        if len(links.racks) > 1 and rates:
            bounds.append(num_bytes / min(rates))
        if len(links.racks) > 1 and len(rates) == len(links.racks):
            bounds.append(_bound_s(num_bytes, rates))
    return max(bounds)


def _bound_s(num_bytes: float, rates: list[float]) -> float:
    through_all_s = 2 * (len(rates) - 1) * num_bytes / sum(rates)
    return max(num_bytes / min(rates), through_all_s)


def _choices(samples_per_s: Sequence[float]) -> Iterator[tuple[int, ...]]:
    count = len(samples_per_s)
    fastest_first = sorted(range(count), key=lambda i: -samples_per_s[i])
    for size in range(1, count + 1):
        if count > _MAX_SEARCHED:
            yield tuple(fastest_first[:size])
        else:
            yield from itertools.combinations(range(count), size)


def _only(links: NetworkSpec, hosts: Collection[int]) -> NetworkSpec:
    """The network without the other hosts, and without racks that are then empty."""
    racks, uplinks = [], []
    indices = itertools.count()
    for rack_index, rack in enumerate(links.racks):
        kept = tuple(link for link in rack if next(indices) in hosts)
        if kept:
            racks.append(kept)
            uplinks.append(links.uplink(rack_index))
    return replace(links, racks=tuple(racks), uplinks=tuple(uplinks))
