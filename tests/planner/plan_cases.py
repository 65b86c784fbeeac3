"""Small profiles that the planner's tests share."""

from __future__ import annotations

from geartrain.planner import ComputeCurve, ExchangeProfile, ModelProfile, fit_curve


def make_profile(
    curves: list[ComputeCurve],
    exchange_s: float = 0.0,
    with_device_s: tuple[float, ...] = (),
    optimizer_s: tuple[float, ...] = (),
) -> ModelProfile:
    ids = tuple(curve.device_id for curve in curves)
    exchange = ExchangeProfile(
        num_bytes=1,
        all_devices_s=exchange_s,
        device_ids=ids[: len(with_device_s)],
        with_device_s=with_device_s,
    )
    return ModelProfile(
        name="toy",
        num_parameters=1,
        gradient_bytes=4,
        curves=tuple(curves),
        exchange=exchange,
        optimizer_s=optimizer_s,
    )


def linear(
    device_id: str, alpha_s: float, beta_s: float, largest: int = 64
) -> ComputeCurve:
    sizes = [1, 2, 8]
    return fit_curve(device_id, sizes, [alpha_s + beta_s * b for b in sizes], largest)
