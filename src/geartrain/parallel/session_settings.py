"""What a session's arguments mean: checked, and brought into the trainer's terms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.errors import ConfigError
from geartrain.parallel.model_calls import AUTOCAST_DTYPES
from geartrain.telemetry import read_document

if TYPE_CHECKING:
    import torch

    from geartrain.parallel.ranks import LocalDevice
    from geartrain.parallel.worker_spec import WorkerSpec
    from geartrain.planner import Plan


def find_autocast_dtype(precision: str, device: LocalDevice) -> torch.dtype | None:
    """The dtype that forward passes compute in; None where it is the parameters' own.

    Args:
        precision: A key of ``AUTOCAST_DTYPES``.
        device: Must support it.

    Raises:
        ConfigError: If the name is unknown, or the device does not support the dtype.
    """
    if precision not in AUTOCAST_DTYPES:
        msg = f"precision={precision!r} must be one of {', '.join(AUTOCAST_DTYPES)}"
        raise ConfigError(msg)
    dtype = AUTOCAST_DTYPES[precision]
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    supported = device.adapter.supported_dtypes(device.local_id)
    if name not in supported:
        msg = (
            f"precision={precision!r} needs {name}, which {device.profile.device_id} does "
            f"not support (it has {', '.join(supported)}); choose another precision"
        )
        raise ConfigError(msg)
    return dtype


def find_pinned_plan(plan: Plan | None, spec: WorkerSpec | None) -> Plan | None:
    """The plan that is carried out as it stands: the script's, else the launcher's.

    Raises:
        ConfigError: If the launcher's can't be read.
    """
    from geartrain.planner import Plan as PlanDocument  # noqa: PLC0415

    if plan is None and spec is not None and spec.plan_path:
        return read_document(Path(spec.plan_path), PlanDocument)
    return plan


def check_global_batch_size(global_batch_size: int, num_devices: int) -> None:
    """Check that every device can be given a sample.

    Raises:
        ConfigError: If not.
    """
    if global_batch_size < num_devices:
        msg = (
            f"global_batch_size={global_batch_size} is smaller than the number of "
            f"devices, {num_devices}; give a larger one or use fewer devices"
        )
        raise ConfigError(msg)


def tail_samples(fraction: float, plan: Plan | None) -> int:
    """Samples of a step that are left to whoever is free.

    Args:
        fraction: Part of the global batch, 0 to 1, 1 left out.
        plan: In force; None before the first batch.

    Raises:
        ConfigError: If the fraction is out of range, or there is no plan yet.
    """
    if not 0 <= fraction < 1:
        msg = f"fraction={fraction} must lie in 0..1, 1 left out"
        raise ConfigError(msg)
    if plan is None:
        msg = "share_tail() came before the first batch; take a batch from a loader"
        raise ConfigError(msg)
    return round(plan.global_batch_size * fraction)
