"""Torch on a machine with an accelerator, replayed on the CPU from recorded facts.

Tensors live on the CPU; what the device namespace answers, and in which dtypes a
product is refused, comes from a file in ``recorded/``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class RecordedDevice:
    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class RecordedSpace:
    """The functions that torch.cuda, torch.xpu and torch.npu have in common."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._devices = facts["devices"]
        self._current = 0
        self._in_use = [2**20 for _ in self._devices]
        self._peak = [2**22 for _ in self._devices]
        self._generators = [torch.Generator() for _ in self._devices]
        self.num_waits = 0

    def is_available(self) -> bool:
        return bool(self._devices)

    def device_count(self) -> int:
        return len(self._devices)

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self._current = self._current, index
        yield
        self._current = before

    def get_device_name(self, index: int) -> str:
        return str(self._devices[index]["name"])

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(total_memory=self._devices[index]["total_memory"])

    def get_device_capability(self, index: int) -> Any:
        capability = self._devices[index]["capability"]
        return tuple(capability) if isinstance(capability, list) else capability

    def mem_get_info(self, index: int) -> tuple[int, int]:
        total = self._devices[index]["total_memory"]
        return total - self._in_use[index], total

    def memory_allocated(self, index: int) -> int:
        return self._in_use[index]

    def max_memory_allocated(self, index: int) -> int:
        return self._peak[index]

    def reset_peak_memory_stats(self, index: int) -> None:
        self._peak[index] = self._in_use[index]

    def synchronize(self, index: int) -> None:
        assert index < len(self._devices)
        self.num_waits += 1

    def manual_seed(self, seed: int) -> None:
        self._generators[self._current].manual_seed(seed)

    def get_rng_state(self, index: int) -> torch.Tensor:
        return self._generators[index].get_state()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self._generators[index].set_state(state)


class RecordedMps:
    """What torch.mps has; it knows no device index."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._total = facts["devices"][0]["total_memory"]
        self._generator = torch.Generator()
        self.allocated = 2**22
        self.num_waits = 0

    def is_available(self) -> bool:
        return True

    def current_allocated_memory(self) -> int:
        self.allocated -= 2**10  # tensors die meanwhile
        return self.allocated

    def recommended_max_memory(self) -> int:
        return int(self._total)

    def synchronize(self) -> None:
        self.num_waits += 1

    def manual_seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        return self._generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)


class RecordedXla:
    """The part of torch_xla that the adapter uses; an older runtime tells KiB."""

    __version__ = "2.9.0"

    def __init__(self, facts: dict[str, Any], *, in_kib: bool = False) -> None:
        self._devices = facts["devices"]
        self._in_kib = in_kib
        self._seeds = [0 for _ in self._devices]
        self._used = 2**22
        self.num_waits = 0
        self.runtime = SimpleNamespace(
            addressable_device_count=lambda: len(self._devices),
            device_type=lambda: self._devices[0]["name"],
        )
        self.core = SimpleNamespace(
            xla_model=SimpleNamespace(
                get_memory_info=self._memory_info,
                wait_device_ops=self._wait,
                set_rng_state=self._set_seed,
                get_rng_state=lambda device: self._seeds[_index(device)],
            )
        )

    def device(self, index: int) -> RecordedDevice:
        return RecordedDevice("xla", index)

    def sync(self) -> None:
        self.num_waits += 1

    def _wait(self) -> None:
        self.num_waits += 1

    def _set_seed(self, seed: int, device: str) -> None:
        self._seeds[_index(device)] = seed

    def _memory_info(self, device: RecordedDevice) -> dict[str, int]:
        self._used -= 2**10
        total = self._devices[device.index or 0]["total_memory"]
        if self._in_kib:
            return {"kb_total": total // 1024, "kb_free": (total - self._used) // 1024}
        return {"bytes_limit": total, "bytes_used": self._used}


class RecordedTorch:
    """The torch module, with one device namespace put in its place."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._refused = {getattr(torch, name) for name in facts["unsupported_dtypes"]}
        self.version = SimpleNamespace(**facts["version"])
        space = RecordedMps(facts) if facts["kind"] == "mps" else RecordedSpace(facts)
        setattr(self, facts["namespace"], space)
        self.space = space

    def __getattr__(self, name: str) -> Any:
        if name in {"npu", "xla"}:  # namespaces that extensions bring
            raise AttributeError(name)
        return getattr(torch, name)

    def device(self, kind: str, index: int | None = None) -> RecordedDevice:
        return RecordedDevice(kind, index)

    def randn(self, *size: int, device: RecordedDevice) -> torch.Tensor:
        return torch.randn(*size)

    def ones(self, *size: Any, device: RecordedDevice | None = None) -> torch.Tensor:
        return torch.ones(*size)

    def zeros(self, *size: Any, device: RecordedDevice | None = None) -> torch.Tensor:
        return torch.zeros(*size)

    def matmul(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        self._refuse(left.dtype)
        return torch.matmul(left, right)

    def _scaled_mm(self, left: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._refuse(left.dtype)
        return torch._scaled_mm(left, *args, **kwargs)

    def _refuse(self, dtype: torch.dtype) -> None:
        if dtype in self._refused:
            msg = f'"addmm_impl" not implemented for {dtype}'
            raise RuntimeError(msg)


def read_facts(kind: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((RECORDED / f"{kind}.json").read_text())
    return facts


def _index(device: str) -> int:
    return int(device.partition(":")[2])
