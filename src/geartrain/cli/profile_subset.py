"""A measured model on another fleet: the devices of it that were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from geartrain.errors import ConfigError
from geartrain.planner import ExchangeProfile, ModelProfile
from geartrain.planner.exchange_cost import device_costs_s


def select_devices(profile: ModelProfile, device_ids: Sequence[str]) -> ModelProfile:
    """Keep these devices of a profile, in this order.

    What an exchange costs among them follows from the planner's own rule: as much as
    its most expensive member makes it cost.

    Raises:
        ConfigError: If the model was not measured on one of them.
    """
    curves = {curve.device_id: curve for curve in profile.curves}
    missing = [device_id for device_id in device_ids if device_id not in curves]
    if missing:
        msg = (
            f"the model was not measured on {', '.join(missing)}, only on "
            f"{', '.join(curves)}; run geartrain plan SCRIPT on that fleet"
        )
        raise ConfigError(msg)
    costs_s = device_costs_s(profile)
    known = [i for i in device_ids if i in profile.exchange.device_ids]
    optimizer_s = dict(zip(curves, profile.optimizer_s, strict=False))
    return dataclasses.replace(
        profile,
        curves=tuple(curves[device_id] for device_id in device_ids),
        exchange=ExchangeProfile(
            num_bytes=profile.exchange.num_bytes,
            all_devices_s=max(costs_s[device_id] for device_id in device_ids),
            device_ids=tuple(known),
            with_device_s=tuple(costs_s[device_id] for device_id in known),
        ),
        optimizer_s=tuple(optimizer_s[i] for i in device_ids if i in optimizer_s),
    )
