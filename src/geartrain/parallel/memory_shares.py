"""Which part of the state, and of each gradient, a rank keeps in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from geartrain.checkpoint.agent.recovery import STRUCTURE_EXTRA
from geartrain.checkpoint.agent.shard_layout import ShardLayout, lay_out
from geartrain.checkpoint.ranges import StateRange, split_ownership, whole_ranges
from geartrain.checkpoint.state_tensors import NamedTensors, take_apart

if TYPE_CHECKING:
    from geartrain.checkpoint.agent.messages import Json
    from geartrain.checkpoint.manifest import TensorFacts

GRADIENT_PREFIX = "gradient/"
BUFFER_PREFIX = "buffer/"
"""What parts of a logged step are called: by parameters' and buffers' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Ranks that keep the state, and which of them this one is."""

    owners: tuple[int, ...]
    rank: int

    @property
    def is_first(self) -> bool:
        """Whether it also keeps what all ranks have alike, or each its own of."""
        return self.owners[0] == self.rank

    def own_part(self, num_elements: Mapping[str, int]) -> tuple[StateRange, ...]:
        """This rank's share of tensors that all have alike."""
        weights = {str(owner): 1.0 for owner in self.owners}
        return split_ownership(num_elements, weights)[str(self.rank)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a state, laid out."""

    tensors: dict[str, torch.Tensor]
    layout: ShardLayout
    facts: dict[str, TensorFacts]
    """Of all tensors of the state."""
    changing: frozenset[str]
    """Those that change while a step is computed."""
    structure: dict[str, Json]
    """What the state holds beside tensors."""

    def extras(self, division: Division, place: Mapping[str, Json]) -> dict[str, Json]:
        """What goes with the tensors; one rank's says it for all."""
        if not division.is_first:
            return {}
        return {STRUCTURE_EXTRA: self.structure, "place": dict(place)}


def share_of(
    components: Mapping[str, Any],  # Any: state dicts
    model: torch.nn.Module,
    division: Division,
) -> Share:
    """Lay this rank's part of a state out.

    Parameters and what the optimizer keeps of them are the same on all ranks and shared
    out evenly. The rest (buffers, what a script tracks, what compression owes) is kept as
    the first owner has it.

    Args:
        components: Of the whole state.
        model: Whose parameters are among them.
        division: Who keeps what.

    Raises:
        CheckpointError: If a tensor can't be kept: its dtype is strange, or it is not
            contiguous.
    """
    named = take_apart(components)
    alike = _alike(named, model)
    rest = {n: t.numel() for n, t in named.tensors.items() if n not in alike}
    owned = list(division.own_part(alike))
    if division.is_first:
        owned += whole_ranges(rest)
    return Share(
        tensors=named.tensors,
        layout=lay_out(named.tensors, owned),
        facts=named.facts,
        changing=frozenset(rest),
        structure=named.structure,
    )


def gradient_parts(
    views: Mapping[str, torch.Tensor], model: torch.nn.Module, division: Division
) -> list[tuple[StateRange, torch.Tensor]]:
    """This rank's part of a step for the log.

    Args:
        views: Reduced gradients by parameter.
        model: Whose buffers the first owner adds: the step's forward has changed them.
        division: Who keeps what.
    """
    sizes = {name: view.numel() for name, view in views.items()}
    parts = []
    for part in division.own_part(sizes):
        named = StateRange(
            name=GRADIENT_PREFIX + part.name, start=part.start, stop=part.stop
        )
        parts.append((named, views[part.name].view(-1)[part.start : part.stop]))
    if division.is_first:
        parts += [
            (StateRange(name=BUFFER_PREFIX + name, start=0, stop=buffer.numel()), buffer)
            for name, buffer in model.named_buffers()
            if buffer.numel()
        ]
    return parts


def num_bytes_of(parts: Sequence[tuple[StateRange, torch.Tensor]]) -> int:
    """Room that parts take in a slot, each of them aligned."""
    return sum(v.numel() * v.element_size() + v.element_size() for _, v in parts)


def _alike(named: NamedTensors, model: torch.nn.Module) -> dict[str, int]:
    """Elements of each tensor that all ranks have alike."""
    places = {p.data_ptr() for p in model.parameters() if p.numel()}
    return {
        name: tensor.numel()
        for name, tensor in named.tensors.items()
        if name.startswith("optimizer/")
        or (name.startswith("model/") and tensor.data_ptr() in places)
    }
