"""AMD GPUs: torch builds with HIP, which answer to the name torch.cuda."""

from __future__ import annotations

from geartrain.devices.accelerator import AcceleratorAdapter
from geartrain.devices.fingerprint import driver_version


class RocmAdapter(AcceleratorAdapter):
    """``rocm:0`` and so on; torch calls the same device ``cuda:0``."""

    kind = "rocm"
    vendor = "amd"
    namespace = "cuda"
    backends = ("nccl", "gloo")
    """RCCL is what the name nccl means in a HIP build."""

    def _is_this_vendor(self) -> bool:
        return self._torch.version.hip is not None

    def _driver(self) -> str:
        return f"{self._torch.version.hip} {driver_version('/sys/module/amdgpu/version')}"
