"""What a gradient exchange costs among a set of devices."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from geartrain.errors import ConfigError
from geartrain.planner.exchange.choice import choose, choose_among
from geartrain.planner.exchange.fabric import place
from geartrain.planner.exchange.request import ExchangeRequest
from geartrain.planner.exchange.ways import Ways
from geartrain.planner.model_profile import ExchangeNetwork, ModelProfile
from geartrain.planner.overlap import NO_EXCHANGE, Overlap

SMALLEST_BUCKET_BYTES = 256 * 2**10
"""Below, what an exchange takes is mostly its start."""
_RINGS_AT_ONCE = 2
"""Threads of a Gloo group that carry out rings."""
_RATES_PER_DECADE = 25
"""Hosts whose rates differ by less than a tenth are added to an exchange together."""


def device_costs_s(profile: ModelProfile) -> dict[str, float]:
    """What each device at least makes an exchange cost, by device id.

    With a network: the predicted time among all devices whose hosts are linked no worse.
    Without: the measured times with rank 0's device, scaled such that the largest is the
    time of an exchange among all. A device that was not measured counts as the slowest;
    rank 0's device is in every exchange and adds nothing.
    """
    if profile.network is not None:
        return _network_costs_s(profile, profile.network)
    exchange = profile.exchange
    first = profile.curves[0].device_id
    measured = dict(zip(exchange.device_ids, exchange.with_device_s, strict=True))
    others = [curve.device_id for curve in profile.curves[1:]]
    slowest_s = max((measured[i] for i in others if i in measured), default=0.0)
    costs_s = {first: 0.0}
    for device_id in others:
        part = measured.get(device_id, slowest_s) / slowest_s if slowest_s > 0 else 1.0
        costs_s[device_id] = exchange.all_devices_s * part
    return costs_s


def exchange_s(profile: ModelProfile, member_ids: Collection[str]) -> float:
    """Predicted time of one exchange among these devices; 0 for fewer than two."""
    if len(member_ids) < 2:  # noqa: PLR2004 - it takes two to exchange
        return 0.0
    request = exchange_request(profile, member_ids)
    if request is not None:
        return choose(request).predicted_s
    costs_s = device_costs_s(profile)
    return max(costs_s[device_id] for device_id in member_ids)


def exchange_overlap(profile: ModelProfile, member_ids: Collection[str]) -> Overlap:
    """One exchange among these devices, and how much of it may be hidden.

    Known links tell what a bucket takes. Without them nothing is said to be hidden: what
    was measured is then the whole exchange, within a host mostly.
    """
    if len(member_ids) < 2:  # noqa: PLR2004 - it takes two to exchange
        return NO_EXCHANGE
    request = exchange_request(profile, member_ids)
    if request is None or profile.network is None:
        whole_s = exchange_s(profile, member_ids)
        return Overlap(whole_s=whole_s, last_s=whole_s)
    ways = Ways(request)
    whole_s = choose_among(ways, request.policy, request.num_bytes).predicted_s
    last_bytes = largest_bucket_bytes(profile.network, request.num_bytes)
    last = choose_among(ways, request.policy, last_bytes)
    if last.algorithm == "ring":
        # Chunks of staged exchanges overlap; of rings, only so many are under way.
        num_buckets = request.num_bytes / last_bytes
        whole_s = max(whole_s, num_buckets * last.predicted_s / _RINGS_AT_ONCE)
    return Overlap(whole_s=whole_s, last_s=min(last.predicted_s, whole_s))


def largest_bucket_bytes(network: ExchangeNetwork, gradient_bytes: int) -> int:
    """In how large buckets gradients are planned to be exchanged."""
    even = math.ceil(gradient_bytes / network.num_buckets)
    return min(max(even, SMALLEST_BUCKET_BYTES), gradient_bytes)


def exchange_request(
    profile: ModelProfile, member_ids: Iterable[str]
) -> ExchangeRequest | None:
    """The exchange of this model's gradients among these devices; None without network.

    Raises:
        ConfigError: If the network does not know a device.
    """
    network = profile.network
    if network is None:
        return None
    host_of = dict(zip(network.device_ids, network.host_ids, strict=True))
    members = list(member_ids)
    if unknown := [device_id for device_id in members if device_id not in host_of]:
        msg = (
            f"the links of {', '.join(unknown)} were not probed, only those of "
            f"{', '.join(host_of)}; probe the links of this fleet again"
        )
        raise ConfigError(msg)
    return ExchangeRequest(
        topology=network.topology,
        placement=tuple(host_of[device_id] for device_id in members),
        num_bytes=profile.gradient_bytes,
        codecs=network.codecs,
        policy=network.policy,
        host_group=network.host_group,
        core_fraction=_least_cores(network, members),
    )


def _least_cores(network: ExchangeNetwork, members: Collection[str]) -> float:
    cores = dict(zip(network.device_ids, network.core_fractions, strict=False))
    return min((cores[i] for i in members if i in cores), default=network.core_fraction)


def _network_costs_s(profile: ModelProfile, network: ExchangeNetwork) -> dict[str, float]:
    """Add hosts to rank 0's from the best linked on; each costs what the set then costs."""
    first, *others = [curve.device_id for curve in profile.curves]
    costs_s = {first: 0.0}
    if not others:
        return costs_s
    request = exchange_request(profile, [first, *others])
    assert request is not None, "the profile has a network"
    reach = _reach(network, request)
    host_of = dict(zip([first, *others], request.placement, strict=True))
    members, cost_s = [first], 0.0
    for rate in sorted({reach[host_of[i]] for i in others}, reverse=True):
        added = [i for i in others if reach[host_of[i]] == rate]
        members += added
        # Costs must not fall as sets grow: the solver tries sets by their largest cost.
        cost_s = max(cost_s, exchange_s(profile, members))
        costs_s |= dict.fromkeys(added, cost_s)
    return costs_s


def _reach(network: ExchangeNetwork, request: ExchangeRequest) -> dict[str, int]:
    """How fast each host reaches rank 0's, in steps of a tenth; its own host fastest."""
    fabric = place(network.topology, request.placement)
    first = request.placement[0]
    rack_of = {host.host_id: rack for rack in fabric.racks for host in rack.hosts}
    reach = {}
    for host in fabric.hosts:
        rate = host.bytes_per_s
        if rack_of[host.host_id] is not rack_of[first]:
            uplinks = (rack_of[host.host_id].bytes_per_s, rack_of[first].bytes_per_s)
            rate = min(rate, *uplinks)
        reach[host.host_id] = round(_RATES_PER_DECADE * math.log10(rate))
    return reach | {first: max(reach.values()) + 1}
