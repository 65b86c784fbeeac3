"""Which samples a step owns, who takes them, and how they reach the device."""

from __future__ import annotations

from geartrain.data.sample_rng import sample_generator

__all__ = ["sample_generator"]
