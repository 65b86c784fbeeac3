"""What a gradient exchange costs among a set of devices."""

from __future__ import annotations

from collections.abc import Collection

from geartrain.planner.model_profile import ModelProfile


def device_costs_s(profile: ModelProfile) -> dict[str, float]:
    """What each device at least makes an exchange cost, by device id.

    The measured times with rank 0's device, scaled such that the largest is the time
    of an exchange among all. A device that was not measured counts as the slowest;
    rank 0's device is in every exchange and adds nothing.
    """
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
    costs_s = device_costs_s(profile)
    return max(costs_s[device_id] for device_id in member_ids)
