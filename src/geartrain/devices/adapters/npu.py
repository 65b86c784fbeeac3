"""Huawei Ascend NPUs: torch with the extension torch_npu."""

from __future__ import annotations

import importlib.util

from geartrain.devices.accelerator import AcceleratorAdapter


class NpuAdapter(AcceleratorAdapter):
    """``npu:0`` and so on; importing torch_npu gives torch its ``npu`` namespace."""

    kind = "npu"
    vendor = "huawei"
    namespace = "npu"
    backends = ("hccl", "gloo")

    def _is_this_vendor(self) -> bool:
        if hasattr(self._torch, "npu"):
            return True
        if importlib.util.find_spec("torch_npu") is None:
            return False
        importlib.import_module("torch_npu")
        return hasattr(self._torch, "npu")

    def _memory_bytes(self, index: int) -> int:
        # Older extensions lack get_device_properties; the memory query is in all.
        return int(self._space.mem_get_info(index)[1])

    def _driver(self) -> str:
        return str(getattr(self._torch.version, "cann", ""))
