"""Fleets for launches: unthrottled CPU processes, and emulated devices."""

from __future__ import annotations

from geartrain.devices.profile import DeviceProfile, Fleet


def cpu_fleet(num_devices: int) -> Fleet:
    """Devices that nothing holds back, so that tests need no root."""
    return Fleet(devices=tuple(_device(f"cpu:{i}", "cpu") for i in range(num_devices)))


def emulated_fleet(*core_fractions: float, memory_limit_bytes: int | None = None) -> Fleet:
    """Emulated devices, oversubscribed if need be."""
    return Fleet(
        devices=tuple(
            _device(f"emulated:{index}", "emulated", fraction, memory_limit_bytes)
            for index, fraction in enumerate(core_fractions)
        ),
        spec="emulated:" + ",".join(map(str, core_fractions)),
    )


def _device(
    device_id: str,
    kind: str,
    fraction: float | None = None,
    memory_limit_bytes: int | None = None,
) -> DeviceProfile:
    return DeviceProfile(
        device_id=device_id,
        node_id="here",
        vendor="test",
        kind=kind,
        name="test device",
        memory_bytes=2**30,
        core_fraction=fraction,
        memory_limit_bytes=memory_limit_bytes,
        source="emulated" if fraction else "measured",
    )
