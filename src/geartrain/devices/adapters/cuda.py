"""NVIDIA GPUs: torch builds with CUDA."""

from __future__ import annotations

from geartrain.devices.accelerator import AcceleratorAdapter
from geartrain.devices.fingerprint import driver_version

_MIG_CAPABILITIES = {(8, 0), (9, 0), (10, 0)}
"""A100/A30, H100/H200 and B200 can be cut into hardware slices."""


class CudaAdapter(AcceleratorAdapter):
    """``cuda:0`` and so on."""

    kind = "cuda"
    vendor = "nvidia"
    namespace = "cuda"
    backends = ("nccl", "gloo")

    def slices_supported(self, device_id: str) -> tuple[str, ...]:
        """MPS percentages everywhere; MIG on data-centre generations."""
        capability = self._space.get_device_capability(self._index(device_id))
        mig = ("mig",) if tuple(capability) in _MIG_CAPABILITIES else ()
        return (*mig, "mps")

    def _is_this_vendor(self) -> bool:
        # A HIP build of torch answers to torch.cuda as well.
        return self._torch.version.cuda is not None and self._torch.version.hip is None

    def _driver(self) -> str:
        return f"{self._torch.version.cuda} {driver_version('/proc/driver/nvidia/version')}"
