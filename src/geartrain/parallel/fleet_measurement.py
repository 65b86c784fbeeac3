"""Measure the user's model on all ranks at once, and the exchange among them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from geartrain.collectives.lost_peers import lost_peers
from geartrain.parallel.alike_devices import pool_alike
from geartrain.parallel.state_sync import wait_for
from geartrain.planner import ComputeCurve, ExchangeProfile, ModelProfile
from geartrain.telemetry import decode_document, encode_document

if TYPE_CHECKING:
    from collections.abc import Callable

    from geartrain.collectives.protocol import Collective
    from geartrain.parallel.process_group import RankGroups
    from geartrain.parallel.ranks import RankPlace

_MOST_PAIRS = 16
"""Beyond so many ranks no pairs are timed; every device then counts as the slowest."""
_REPEATS = 3
_NOMINAL_SAMPLES_PER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of the model without measuring."""

    name: str
    num_parameters: int
    gradient_bytes: int


def gather_profile(
    place: RankPlace, facts: ModelFacts, measure: Callable[[], ComputeCurve]
) -> ModelProfile:
    """Measure on every rank at the same time and share the results.

    All ranks measure together, as they will compute: they share caches, memory
    bandwidth and power.

    Raises:
        DeviceError: If the model does not fit on this rank's device.
        CommunicationError: If a rank does not answer in time.
    """
    own = encode_document(measure()).decode()
    texts = place.groups.rendezvous.gather("compute curve", own, str)
    curves = tuple(
        decode_document(text, ComputeCurve, f"curve of rank {rank}")
        for rank, text in zip(place.groups.members, texts, strict=True)
    )
    return ModelProfile(
        name=facts.name,
        num_parameters=facts.num_parameters,
        gradient_bytes=facts.gradient_bytes,
        curves=pool_alike(curves, place.devices),
        exchange=measure_exchange(place.groups, facts.gradient_bytes),
    )


def declared_profile(
    place: RankPlace, facts: ModelFacts, micro_batch_size: int
) -> ModelProfile:
    """Stand in for a measurement with what the fleet file says of its devices.

    Used where two runs must be alike to the bit, or where there is no loss function
    to measure with. Speeds are the emulated core fractions, else the probed float32
    rates, else equal.
    """
    rates = declared_rates(place)
    curves = tuple(
        ComputeCurve(
            device_id=device.device_id,
            micro_batch_sizes=(micro_batch_size,),
            seconds=(micro_batch_size / rate,),
            max_micro_batch_size=micro_batch_size,
            beta_s=1 / rate,
        )
        for device, rate in zip(place.devices, rates, strict=True)
    )
    return ModelProfile(
        name=facts.name,
        num_parameters=facts.num_parameters,
        gradient_bytes=facts.gradient_bytes,
        curves=curves,
        exchange=ExchangeProfile(num_bytes=facts.gradient_bytes, all_devices_s=0.0),
    )


def declared_rates(place: RankPlace) -> list[float]:
    """Relative speeds of the devices left, from the fleet file, shape (num_devices,)."""
    devices = place.devices
    if all(device.core_fraction is not None for device in devices):
        return [float(device.core_fraction or 1.0) for device in devices]
    if all("float32" in device.flop_per_s for device in devices):
        fastest = max(device.flop_per_s["float32"].per_s for device in devices)
        return [device.flop_per_s["float32"].per_s / fastest for device in devices]
    return [_NOMINAL_SAMPLES_PER_S] * len(devices)


def measure_exchange(groups: RankGroups, num_bytes: int) -> ExchangeProfile:
    """Time an all-reduce of the gradient's size: among all, and in pairs with the lead."""
    ranks = groups.members
    if len(ranks) == 1:
        return ExchangeProfile(num_bytes=num_bytes, all_devices_s=0.0)
    everyone = groups.collective()
    buffer = torch.zeros(max(num_bytes // 4, 1), dtype=torch.float32)
    all_s = _slowest(groups, _time_all_reduce(everyone, buffer))
    predicts = groups.hub is not None and not groups.hub.network.is_one_host
    few_or_many = len(ranks) > _MOST_PAIRS or len(ranks) == 2  # noqa: PLR2004 - a pair
    if few_or_many or predicts:  # from links the planner predicts any set of devices
        return ExchangeProfile(num_bytes=num_bytes, all_devices_s=all_s)
    pairs_s = []
    for other in ranks[1:]:
        pair = groups.collective((groups.lead, other))
        takes_part = groups.rank in (groups.lead, other)
        own_s = _time_all_reduce(pair, buffer) if takes_part else 0.0
        pairs_s.append(_slowest(groups, own_s))
        groups.drop_collective((groups.lead, other))
    return ExchangeProfile(
        num_bytes=num_bytes,
        all_devices_s=all_s,
        device_ids=tuple(groups.device_ids[rank] for rank in ranks[1:]),
        with_device_s=tuple(pairs_s),
    )


def _time_all_reduce(collective: Collective, buffer: torch.Tensor) -> float:
    collective.all_reduce(buffer).wait()  # connects, and lets all begin together
    times = []
    for _ in range(_REPEATS):
        started_at_s = time.perf_counter()
        collective.all_reduce(buffer).wait()
        times.append(time.perf_counter() - started_at_s)
    return statistics.median(times)


def _slowest(groups: RankGroups, seconds: float) -> float:
    """The largest of all ranks' times, equal to the bit on all of them."""
    value = torch.tensor([seconds], dtype=torch.float64)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]  # torch's stub errs
    options.timeout = timedelta(seconds=groups.timeout_s)
    with lost_peers("comparing exchange times"):
        group = groups.process_group()
        assert group is not None
        # The group's own call, since torch.distributed does not know all of them.
        wait_for(group.allreduce([value], options), groups.rendezvous.interruption)
    return float(value)
