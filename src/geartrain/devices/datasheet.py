"""Makers' numbers, used only where a device is there but nothing can be measured.

Dense peaks at the usual board power, which no training step reaches; a profile made
from them says ``source="datasheet"``.
"""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.devices.profile import MeasuredRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """One product's published rates."""

    flop_per_s: dict[str, float]
    memory_bytes_per_s: float
    power_watts: float

    def rates(self) -> tuple[dict[str, MeasuredRate], MeasuredRate]:
        """Return FLOP/s by dtype and bytes/s, from no repeats at all."""
        flop = {name: _published(value) for name, value in self.flop_per_s.items()}
        return flop, _published(self.memory_bytes_per_s)


_PRODUCTS = {
    "H200": Datasheet(
        flop_per_s={"float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
        memory_bytes_per_s=4.8e12,
        power_watts=700,
    ),
    "H100": Datasheet(
        flop_per_s={"float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
        memory_bytes_per_s=3.35e12,
        power_watts=700,
    ),
    "A100": Datasheet(
        flop_per_s={"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
        memory_bytes_per_s=2.039e12,
        power_watts=400,
    ),
    "MI300X": Datasheet(
        flop_per_s={"float32": 163.4e12, "bfloat16": 1307e12, "float16": 1307e12},
        memory_bytes_per_s=5.3e12,
        power_watts=750,
    ),
}


def find_datasheet(name: str) -> Datasheet | None:
    """Find a product by the name its driver reports.

    >>> find_datasheet("NVIDIA H100 80GB HBM3").power_watts
    700
    """
    for product, sheet in _PRODUCTS.items():
        if product in name:
            return sheet
    return None


def _published(per_s: float) -> MeasuredRate:
    return MeasuredRate(per_s=per_s, spread_fraction=0.0, num_repeats=0)
