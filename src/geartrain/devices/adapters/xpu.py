"""Intel GPUs: torch builds with XPU."""

from __future__ import annotations

from geartrain.devices.accelerator import AcceleratorAdapter


class XpuAdapter(AcceleratorAdapter):
    """``xpu:0`` and so on."""

    kind = "xpu"
    vendor = "intel"
    namespace = "xpu"

    def collective_backends(self) -> tuple[str, ...]:
        """XCCL where torch was built with it."""
        available = getattr(self._torch.distributed, "is_xccl_available", None)
        return ("xccl", "gloo") if available is not None and available() else ("gloo",)

    def _driver(self) -> str:
        properties = self._space.get_device_properties(0)
        return str(getattr(properties, "driver_version", ""))
