"""How long the user's model takes on this rank's device."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from geartrain.parallel.model_measurement import (
    DeviceMemory,
    MeasurementSettings,
    measure_curve,
)
from geartrain.parallel.sample_context import SampleContext, use_sample_context
from geartrain.planner import ComputeCurve, ModelProfile

if TYPE_CHECKING:
    from geartrain.data.loader import ShareLoader
    from geartrain.parallel.model_calls import ModelCalls
    from geartrain.parallel.ranks import RankPlace
    from geartrain.parallel.run_recorder import RunRecorder
    from geartrain.parallel.step_engine import StepEngine
    from geartrain.parallel.trainer_settings import TrainerSettings
    from geartrain.parallel.worker_spec import WorkerSpec

_OPTIMIZER_COPIES = 2
"""Adam's two moments; what an optimizer really keeps is not known before a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningRequest:
    """What planning needs to know and use."""

    place: RankPlace
    loader: ShareLoader
    calls: ModelCalls
    engine: StepEngine
    settings: TrainerSettings
    spec: WorkerSpec | None
    recorder: RunRecorder
    profile: ModelProfile | None
    """Of an earlier loader with the same model."""

    @property
    def is_measurable(self) -> bool:
        """Whether the model can and may be measured."""
        may = not self.settings.deterministic and self.settings.pinned_plan is None
        return may and self.calls.loss_fn is not None and self.place.world_size > 1


def measure_model(request: PlanningRequest, hiding_s: float) -> ComputeCurve:
    """Measure without leaving a trace in buffers, gradients or generators.

    Args:
        request: What to measure, and where.
        hiding_s: Micro-batches that take up to so long are of use; 0: the fastest ones.
    """
    model = request.calls.model
    buffers = copy.deepcopy(dict(model.named_buffers()))
    batches: dict[int, Any] = {}  # the user's batches, read before the clock runs

    def run(size: int) -> None:
        if size not in batches:
            batches.clear()
            batches[size] = request.loader.fetch_profile_batch(size)
        _run_micro_batch(request, batches[size], size)

    largest = request.settings.micro_batch_size or request.loader.config.global_batch_size
    with torch.random.fork_rng(devices=[]):
        settings = MeasurementSettings(
            extrapolates=request.settings.sync_batchnorm, hiding_s=hiding_s
        )
        curve = measure_curve(run, _device_memory(request), largest, settings)
        if hiding_s:
            size = curve.micro_batch_sizes[-1]
            if size not in batches:  # the last size tried did not fit
                batches[size] = request.loader.fetch_profile_batch(size)
            part = _backward_fraction(request, batches[size], size)
            curve = replace(curve, backward_fraction=part)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    _drop_gradients(request)
    return curve


def _run_micro_batch(
    request: PlanningRequest,
    batch: Any,
    size: int,
    between: Callable[[], None] | None = None,
) -> None:
    """Forward and backward; ``between`` is called after forward."""
    context = SampleContext(
        seed=0, step=0, sample_indices=torch.zeros(size, dtype=torch.int64)
    )
    with use_sample_context(context):
        terms = request.calls.loss_terms(batch)
        loss = sum(term.loss_sum for term in terms.values()) / size
        assert isinstance(loss, torch.Tensor)
        if between is not None:
            between()
        loss.backward()  # type: ignore[no-untyped-call]
    request.place.device.synchronize()


def _backward_fraction(request: PlanningRequest, batch: Any, size: int) -> float:
    """Backward's part of a micro-batch's time, from a run of its own.

    Waiting for the device between the two would slow down what is timed as a whole.
    """
    at_s: list[float] = []

    def between() -> None:
        request.place.device.synchronize()
        at_s.append(time.perf_counter())

    started_at_s = time.perf_counter()
    _run_micro_batch(request, batch, size, between)
    ended_at_s = time.perf_counter()
    return (ended_at_s - at_s[0]) / (ended_at_s - started_at_s)


def time_micro_batch(request: PlanningRequest, size: int) -> float:
    """Time one micro-batch on a device that is left out, to see whether it recovered.

    Returns:
        Seconds; 0 with an own forward, which can't be run from here.
    """
    if request.calls.loss_fn is None:
        return 0.0
    batch = request.loader.fetch_profile_batch(size)
    started_at_s = time.perf_counter()
    _run_micro_batch(request, batch, size)
    seconds = time.perf_counter() - started_at_s
    _drop_gradients(request)
    return seconds


def _drop_gradients(request: PlanningRequest) -> None:
    if request.engine.buckets is not None:
        request.engine.buckets.begin_step()
    else:
        for parameter in request.calls.model.parameters():
            parameter.grad = None


def _device_memory(request: PlanningRequest) -> DeviceMemory:
    device = request.place.device
    parameter_bytes = sum(
        p.numel() * p.element_size() for p in request.calls.model.parameters()
    )
    kept = parameter_bytes + (1 + _OPTIMIZER_COPIES) * request.engine.gradient_bytes
    counts_tensors = device.adapter.memory_stats(device.local_id).counts == "tensors"
    return DeviceMemory(
        device_id=device.profile.device_id,
        limit_bytes=device.profile.memory_limit_bytes or device.profile.memory_bytes,
        fixed_bytes=kept,
        reset_peak=(lambda: device.adapter.reset_peak(device.local_id))
        if counts_tensors
        else None,
        peak_bytes=(lambda: device.adapter.memory_stats(device.local_id).peak_bytes)
        if counts_tensors
        else None,
    )
