"""The trailer: the small float64 vector that follows the gradients of a step.

One sum over all ranks carries what everybody must know before the update: loss sums
and counts, which parameters got a gradient, who asks to stop, and each rank's own
figures in a slot of its own (the others add zeros, so a sum is a gather).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

SLOT_FIELDS = (
    "compute_s",
    "previous_wait_s",
    "data_s",
    "peak_memory_bytes",
    "num_samples",
    "expected_s",
    "probe_s",
    "plan_code",
    "save_due",
    "snapshot_wish",
    "exchange_s",
    "exchange_predicted_s",
    "exchange_rack_s",
    "exchange_slow_hop_s",
    "gradient_code",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank's figures of a step."""

    compute_s: float = 0.0
    """Forward and backward of this step, and the optimizer of the one before."""
    previous_wait_s: float = 0.0
    """How long the exchange of the step before took here, waiting included."""
    data_s: float = 0.0
    peak_memory_bytes: float = 0.0
    num_samples: float = 0.0
    expected_s: float = 0.0
    """What the profile says that compute (or the probe) takes here; 0 for no work."""
    probe_s: float = 0.0
    """Left-out devices now and then: time of one micro-batch."""
    plan_code: float = 0.0
    """crc32 of the plan's fingerprint: all ranks must carry out the same plan."""
    save_due: float = 0.0
    """On the lead: 1 where the state after this step is to be saved."""
    snapshot_wish: float = 0.0
    """Whether this rank can and would copy its part of the state; see ``snapshot_rule``."""
    exchange_s: float = 0.0
    """How long the links were busy with the gradients of the step before."""
    exchange_predicted_s: float = 0.0
    """What the schedules in force predicted for that."""
    exchange_rack_s: float = 0.0
    """Of it, the stage inside racks; 0 where this rank has no part in it."""
    exchange_slow_hop_s: float = 0.0
    """Of it, the stage between racks."""
    gradient_code: float = 0.0
    """Of the gradients that were applied in the step before; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """What all ranks know after a step's exchange."""

    loss_sums: dict[str, float]
    counts: dict[str, float]
    touched: list[bool]
    stop_requested: bool
    ranks: list[RankFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrailerLayout:
    """Where things lie in the vector."""

    term_names: tuple[str, ...]
    num_parameters: int
    world_size: int

    @property
    def length(self) -> int:
        """Elements of the vector."""
        terms = 2 * len(self.term_names)
        return 1 + terms + self.world_size * len(SLOT_FIELDS) + self.num_parameters

    def of_length(self, length: int) -> TrailerLayout:
        """The same for as many ranks as make a vector this long: a fleet may grow."""
        slots = length - self.length + self.world_size * len(SLOT_FIELDS)
        return replace(self, world_size=slots // len(SLOT_FIELDS))

    def pack(
        self,
        rank: int,
        figures: RankFigures,
        sums_counts: torch.Tensor,
        touched: list[bool],
        *,
        stop: bool,
    ) -> torch.Tensor:
        """Lay out one rank's contribution.

        Args:
            rank: Whose.
            figures: Its figures.
            sums_counts: Loss sums, then counts, of the terms, float64, shape (2 * terms,).
            touched: Parameters with a gradient, shape (num_parameters,).
            stop: Whether this rank asks to stop.

        Returns:
            float64 on the CPU, shape (length,).
        """
        vector = torch.zeros(self.length, dtype=torch.float64)
        vector[0] = float(stop)
        terms = 2 * len(self.term_names)
        vector[1 : 1 + terms] = sums_counts
        slot = 1 + terms + rank * len(SLOT_FIELDS)
        values = [getattr(figures, name) for name in SLOT_FIELDS]
        vector[slot : slot + len(SLOT_FIELDS)] = torch.tensor(values, dtype=torch.float64)
        vector[self.length - self.num_parameters :] = torch.tensor(
            touched, dtype=torch.float64
        )
        return vector

    def unpack(self, vector: torch.Tensor) -> Trailer:
        """Read the sum over all ranks."""
        values = vector.tolist()
        num_terms = len(self.term_names)
        sums = values[1 : 1 + num_terms]
        counts = values[1 + num_terms : 1 + 2 * num_terms]
        start = 1 + 2 * num_terms
        width = len(SLOT_FIELDS)
        slots = [
            values[start + r * width : start + (r + 1) * width]
            for r in range(self.world_size)
        ]
        return Trailer(
            loss_sums=dict(zip(self.term_names, sums, strict=True)),
            counts=dict(zip(self.term_names, counts, strict=True)),
            touched=[v > 0 for v in values[self.length - self.num_parameters :]],
            stop_requested=values[0] > 0,
            ranks=[RankFigures(**dict(zip(SLOT_FIELDS, s, strict=True))) for s in slots],
        )
