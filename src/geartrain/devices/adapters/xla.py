"""TPUs and other XLA devices: torch with the extension torch_xla."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from geartrain.devices.accelerator import AcceleratorAdapter
from geartrain.devices.adapter import MemoryStats
from geartrain.devices.fingerprint import fingerprint
from geartrain.devices.host import node_id
from geartrain.devices.probes.timing import TimingBudget
from geartrain.devices.profile import DeviceProfile

if TYPE_CHECKING:
    import torch as torch_types

_KIB = 1024


class XlaAdapter(AcceleratorAdapter):
    """``xla:0`` and so on.

    Operations are recorded and run when asked for, so a timing waits after each.

    Args:
        torch_module: The torch module; None imports it when first needed.
        xla_module: The torch_xla module; None imports it when first needed.
    """

    kind = "xla"
    vendor = "google"
    namespace = "xla"
    backends = ("xla", "gloo")
    budget = TimingBudget(max_batch=1)

    def __init__(
        self,
        torch_module: Any | None = None,  # Any: a module, or a facade with its names
        xla_module: Any | None = None,  # Any: the same
    ) -> None:
        super().__init__(torch_module)
        self._xla_module = xla_module
        self._peak_bytes: dict[str, int] = {}

    def is_available(self) -> bool:
        """Whether torch_xla is installed and finds a device."""
        if self._xla_module is None and importlib.util.find_spec("torch_xla") is None:
            return False
        try:
            return self._num_devices() > 0
        except (ImportError, AttributeError, RuntimeError, OSError):
            return False

    def torch_device(self, device_id: str) -> torch_types.device:
        """Return torch_xla's name of the device."""
        device: torch_types.device = self._xla.device(self._index(device_id))
        return device

    def memory_stats(self, device_id: str) -> MemoryStats:
        """Bytes in use; the peak is the runtime's own where it keeps one."""
        info = self._memory_info(device_id)
        in_use_bytes = _in_use_bytes(info)
        peak_bytes = max(self._peak_bytes.get(device_id, 0), in_use_bytes)
        self._peak_bytes[device_id] = peak_bytes
        return MemoryStats(
            in_use_bytes=in_use_bytes,
            peak_bytes=max(peak_bytes, int(info.get("peak_bytes_used", 0))),
            limit_bytes=_limit_bytes(info),
            counts="tensors",
        )

    def reset_peak(self, device_id: str) -> None:
        """Forget the largest use seen here; the runtime's own peak can't be reset."""
        self._peak_bytes[device_id] = _in_use_bytes(self._memory_info(device_id))

    def synchronize(self, device_id: str) -> None:
        """Run what was recorded and wait for it."""
        self._index(device_id)
        self._xla.sync()
        self._model.wait_device_ops()

    def manual_seed(self, device_id: str, seed: int) -> None:
        """Seed the device's generator."""
        self._model.set_rng_state(seed, device=str(self.torch_device(device_id)))

    def rng_state(self, device_id: str) -> torch_types.Tensor:
        """Return the generator's state, one integer, as a tensor."""
        state = self._model.get_rng_state(device=str(self.torch_device(device_id)))
        tensor: torch_types.Tensor = self._torch.tensor([state], dtype=self._torch.int64)
        return tensor

    def set_rng_state(self, device_id: str, state: torch_types.Tensor) -> None:
        """Restore the device's generator."""
        self.manual_seed(device_id, int(state.item()))

    @property
    def _xla(self) -> Any:  # Any: torch_xla is not installed where this is checked
        if self._xla_module is None:
            self._xla_module = importlib.import_module("torch_xla")
            importlib.import_module("torch_xla.core.xla_model")
            importlib.import_module("torch_xla.runtime")
        return self._xla_module

    @property
    def _model(self) -> Any:  # Any: see _xla
        return self._xla.core.xla_model

    def _num_devices(self) -> int:
        return int(self._xla.runtime.addressable_device_count())

    def _memory_info(self, device_id: str) -> dict[str, int]:
        info: dict[str, int] = self._model.get_memory_info(self.torch_device(device_id))
        return info

    def _describe(self, index: int) -> DeviceProfile:
        name = str(self._xla.runtime.device_type())
        device_id = f"{self.kind}:{index}"
        info = self._model.get_memory_info(self._xla.device(index))
        return DeviceProfile(
            device_id=device_id,
            node_id=node_id(),
            vendor=self.vendor,
            kind=self.kind,
            name=name,
            memory_bytes=_limit_bytes(info),
            collective_backends=self.backends,
            fingerprint=fingerprint(
                self.kind, name, _limit_bytes(info), getattr(self._xla, "__version__", "")
            ),
        )


def _in_use_bytes(info: dict[str, int]) -> int:
    if "bytes_used" in info:
        return int(info["bytes_used"])
    # The runtime before PJRT told KiB.
    return (int(info["kb_total"]) - int(info["kb_free"])) * _KIB


def _limit_bytes(info: dict[str, int]) -> int:
    if "bytes_limit" in info:
        return int(info["bytes_limit"])
    return int(info["kb_total"]) * _KIB
