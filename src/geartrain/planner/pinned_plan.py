"""Check that a plan made elsewhere fits this fleet, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from geartrain.errors import ConfigError
from geartrain.planner.curve_fit import largest_micro_batch_size
from geartrain.planner.model_profile import ComputeCurve
from geartrain.planner.plan import Plan, Replica
from geartrain.units import format_bytes


def check_plan(
    plan: Plan,
    device_ids: Sequence[str],
    curves: Sequence[ComputeCurve] | None = None,
    *,
    global_batch_size: int | None = None,
) -> None:
    """Check a loaded plan against the fleet, and the model where it was measured.

    Args:
        plan: The plan, as read from its file.
        device_ids: The fleet's devices in rank order.
        curves: Measured curves; None skips the check of memory.
        global_batch_size: What the script asks for; None skips that check.

    Raises:
        ConfigError: If the plan does not fit; the message says what to change.
    """
    _check_form(plan)
    check_devices(plan, device_ids)
    if device_ids[0] in plan.left_out:
        msg = (
            f"the plan leaves out {device_ids[0]}, the device of rank 0, which must take "
            "part; give it a replica with share 0, or list another device first"
        )
        raise ConfigError(msg)
    if global_batch_size is not None and plan.global_batch_size != global_batch_size:
        msg = (
            f"the plan is for a global batch of {plan.global_batch_size} but the script "
            f"asks for {global_batch_size}; plan again, or change the script"
        )
        raise ConfigError(msg)
    for curve in curves or ():
        replica = plan.replica_of(curve.device_id)
        if replica is not None and replica.share:
            _check_memory(replica, curve)


def without_tail(plan: Plan) -> Plan:
    """The same plan with its tail handed out in advance, in proportion to the shares.

    A given plan is carried out alike each time, so nobody takes samples on the fly.
    """
    shares = [replica.share for replica in plan.replicas]
    if not plan.tail_samples or not any(shares):
        return plan
    grown = list(shares)
    for _ in range(plan.tail_samples):
        behind = min(
            (i for i, share in enumerate(shares) if share),
            key=lambda i: (grown[i] + 1) / shares[i],
        )
        grown[behind] += 1
    replicas = tuple(
        replace(
            replica, share=share, num_micro_batches=-(-share // replica.micro_batch_size)
        )
        for replica, share in zip(plan.replicas, grown, strict=True)
    )
    return replace(
        plan, stages=(replace(plan.stages[0], replicas=replicas),), tail_samples=0
    )


def _check_form(plan: Plan) -> None:
    if len(plan.stages) != 1:
        msg = (
            f"the plan has {len(plan.stages)} stages; only plans of one stage can be "
            "carried out, so plan again"
        )
        raise ConfigError(msg)
    counts = sorted({replica.num_micro_batches for replica in plan.replicas})
    if plan.uniform_micro_batches and len(counts) > 1:
        msg = (
            f"the plan says uniform_micro_batches but counts {counts} of micro-batches; "
            "give every replica the same num_micro_batches"
        )
        raise ConfigError(msg)


def check_devices(plan: Plan, device_ids: Sequence[str]) -> None:
    """Check that a plan speaks of the fleet's devices, all of them and no others.

    Raises:
        ConfigError: If not.
    """
    named = [replica.device_id for replica in plan.replicas] + list(plan.left_out)
    fleet = ", ".join(device_ids)
    if unknown := [device_id for device_id in named if device_id not in device_ids]:
        msg = (
            f"the plan names {', '.join(unknown)}, which the fleet of {fleet} lacks; "
            "plan again on this fleet, or choose another with --fleet"
        )
        raise ConfigError(msg)
    if absent := [device_id for device_id in device_ids if device_id not in named]:
        msg = (
            f"the plan says nothing of {', '.join(absent)}; add it to left_out, or give "
            "it a replica"
        )
        raise ConfigError(msg)


def _check_memory(replica: Replica, curve: ComputeCurve) -> None:
    size, largest = replica.micro_batch_size, largest_micro_batch_size(curve)
    if size <= largest:
        return
    need = ""
    if curve.memory is not None:
        need = (
            f" ({format_bytes(curve.memory.bytes_for(size))} of "
            f"{format_bytes(curve.memory.limit_bytes)})"
        )
    msg = (
        f"{replica.device_id}: micro-batches of {size} samples do not fit in its "
        f"memory{need}; at most {largest} do, so lower micro_batch_size or plan again"
    )
    raise ConfigError(msg)
