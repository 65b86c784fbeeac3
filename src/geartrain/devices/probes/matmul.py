"""Matrix multiplication in each dtype that a device really supports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from geartrain.devices.probes.timing import TimingBudget, measure_rate, time_once
from geartrain.devices.profile import MeasuredRate

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn")

_SMALLEST = 64
_WORTHWHILE = 1.5
"""A doubling that raises the rate by less is the last."""

_FP8_MULTIPLE = 16
"""Scaled fp8 products want dimensions that 16 divides."""


def supported_dtypes(
    torch: Any,  # Any: the torch module, or the facade of a recorded device
    device: Any,  # Any: a torch.device
    synchronize: Callable[[], None],
) -> tuple[str, ...]:
    """Dtypes in which a small product runs and comes out finite.

    Trying is the only answer that holds: a backend may list a dtype that one of its
    kernels lacks.
    """
    return tuple(
        name for name in DTYPES if _product(torch, device, name, synchronize) is not None
    )


def measure_matmul(  # noqa: PLR0913, PLR0917 - a measurement's whole setting
    torch: Any,  # Any: see supported_dtypes
    device: Any,  # Any: see supported_dtypes
    dtype_name: str,
    synchronize: Callable[[], None],
    budget: TimingBudget,
    max_size: int,
) -> MeasuredRate | None:
    """Measure the FLOP/s of square products.

    The size doubles as long as that raises the rate, so that a dtype which is hundreds
    of times slower (fp16 on many CPUs) costs no more time than the others, while a
    fixed cost of each product (a launch, a thread barrier on a busy host) does not
    end the search early.

    Returns:
        The rate; None where the dtype does not work on the device.
    """
    if _product(torch, device, dtype_name, synchronize) is None:
        return None
    size = _SMALLEST
    run = _multiplier(torch, device, dtype_name, size)
    once_s = time_once(run, synchronize)
    while size < max_size and once_s < budget.window_s / 4:
        before = size**3 / once_s
        size *= 2
        run = _multiplier(torch, device, dtype_name, size)
        once_s = time_once(run, synchronize)
        if once_s > budget.window_s / 64 and size**3 / once_s < _WORTHWHILE * before:
            break
    return measure_rate(run, synchronize, 2.0 * size**3, budget)


def _product(
    torch: Any, device: Any, dtype_name: str, synchronize: Callable[[], None]
) -> object | None:
    if not hasattr(torch, dtype_name):
        return None
    try:
        product = _multiplier(torch, device, dtype_name, _FP8_MULTIPLE)()
        synchronize()
        if not bool(torch.isfinite(product.float()).all().item()):
            return None
    except Exception as error:  # noqa: BLE001 - each backend refuses in its own way
        logger.debug("%s has no matmul in %s: %s", device, dtype_name, error)
        return None
    return product  # type: ignore[no-any-return]  # a tensor of an untyped module


def _multiplier(torch: Any, device: Any, dtype_name: str, size: int) -> Callable[[], Any]:
    dtype = getattr(torch, dtype_name)
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    if not dtype_name.startswith("float8"):
        return lambda: torch.matmul(left, right)
    # A plain product of fp8 tensors runs on CPUs, element by element; training uses
    # the scaled one, whose second matrix lies column by column.
    one = torch.ones((), device=device)
    columns = right.t().contiguous().t()
    return lambda: torch._scaled_mm(  # noqa: SLF001 - no public name in torch 2.11
        left, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
    )
