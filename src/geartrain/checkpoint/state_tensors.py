"""Between a training's objects and the named tensors that versions consist of.

A component is a state dict: of a model, an optimizer, a schedule, or any object that has
``state_dict`` and ``load_state_dict``. Its tensors are named ``component/place``; the rest
of it is JSON in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from geartrain.checkpoint.manifest import Json, StateManifest, TensorFacts
from geartrain.checkpoint.optimizer_state import load_optimizer_state
from geartrain.checkpoint.pieces import HeldPiece
from geartrain.checkpoint.ranges import StateRange, merge_ranges, whole_ranges
from geartrain.checkpoint.tree import Tree, flatten, unflatten
from geartrain.errors import CheckpointError


class RangeReader(Protocol):
    """Reads ranges of one state, wherever it lies."""

    def read(self, targets: Iterable[tuple[StateRange, memoryview]]) -> None:
        """Fill buffers, each of the size of its range.

        Raises:
            CheckpointError: If a range can't be read undamaged.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensors:
    """Components taken apart; tensors are not copied."""

    tensors: dict[str, torch.Tensor]
    """Each once, wherever it lies."""
    structure: dict[str, Json]
    """What each component holds beside its tensors."""

    @property
    def facts(self) -> dict[str, TensorFacts]:
        """What a manifest says about the tensors."""
        return {name: describe_tensor(tensor) for name, tensor in self.tensors.items()}


def take_apart(components: Mapping[str, Any]) -> NamedTensors:  # Any: see below
    """Take state dicts, or objects that have one, apart into named tensors.

    Args:
        components: By name; a name must not hold ``/``.

    Raises:
        CheckpointError: If something in one can't be kept, naming its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure: dict[str, Json] = {}
    for component, holder in components.items():
        if not component or "/" in component:
            msg = f"component name {component!r} must not be empty or hold '/'; rename it"
            raise CheckpointError(msg)
        flat = flatten(_state_of(holder), component)
        structure[component] = flat.structure
        for name, tensor in flat.tensors.items():
            tensors[f"{component}/{name}"] = tensor
    return NamedTensors(tensors=tensors, structure=structure)


def describe_tensor(tensor: torch.Tensor) -> TensorFacts:
    """Return what a manifest says about a tensor.

    Raises:
        CheckpointError: If its dtype can't be kept.
    """
    return TensorFacts(
        dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape)
    )


def held_pieces(
    tensors: Mapping[str, torch.Tensor], ranges: Iterable[StateRange] | None = None
) -> Iterator[HeldPiece]:
    """Give out the bytes of ranges, one tensor after the other.

    Those on the host are not copied: leave them alone until the bytes are written.

    Args:
        tensors: Whole tensors by name.
        ranges: What to give out; everything where None.

    Raises:
        CheckpointError: If a range is not part of a tensor.
    """
    if ranges is None:
        ranges = whole_ranges({name: tensor.numel() for name, tensor in tensors.items()})
    flat_name, flat = "", torch.empty(0)
    for part in merge_ranges(ranges):
        if part.name != flat_name:
            if part.name not in tensors:
                msg = f"{part} is not held here; ask for what this member holds"
                raise CheckpointError(msg)
            flat_name, flat = part.name, _flat(tensors[part.name])
        if part.stop > len(flat):
            msg = f"{part} goes beyond the {len(flat)} elements held; correct the range"
            raise CheckpointError(msg)
        yield HeldPiece(range=part, data=host_bytes(flat[part.start : part.stop]))


def host_bytes(flat: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, of one dimension; copied where it lies on a device.

    Args:
        flat: Shape (num_elements,), contiguous, with at least one element.
    """
    host = flat.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    view: memoryview = host.view(torch.uint8).numpy().data
    return view


def empty_tensor(facts: TensorFacts) -> torch.Tensor:
    """Make a tensor on the host, to be filled.

    Raises:
        CheckpointError: If this torch has no such dtype.
    """
    dtype = getattr(torch, facts.dtype, None)
    if not isinstance(dtype, torch.dtype):
        msg = f"torch {torch.__version__} has no dtype {facts.dtype}; load it with another"
        raise CheckpointError(msg)
    return torch.empty(facts.shape, dtype=dtype)


def load_components(
    reader: RangeReader,
    manifest: StateManifest,
    components: Iterable[str] | None = None,
    *,
    map_location: str | torch.device | None = None,
) -> dict[str, Tree]:
    """Read components of a version, bit for bit.

    Args:
        reader: Of the version.
        manifest: Of the version.
        components: Which; all where None.
        map_location: Where to put the tensors; the host where None.

    Returns:
        State dicts by name. Tensors that were one when saved are one again.

    Raises:
        CheckpointError: If the version lacks a component, or is undamaged in no store.
    """
    wanted = tuple(manifest.structure if components is None else components)
    for component in wanted:
        if component not in manifest.structure:
            has = ", ".join(manifest.structure) or "none"
            msg = (
                f"the version of step {manifest.step} ({manifest.kind}) has no "
                f"{component!r}, only {has}; load a version that has it"
            )
            raise CheckpointError(msg)
    return {
        component: read_component(
            reader,
            manifest.tensors,
            (component, manifest.structure[component]),
            map_location,
        )
        for component in wanted
    }


def restore_objects(
    objects: Mapping[str, Any],  # Any: models, optimizers, and whatever has a state
    components: Mapping[str, Tree],
) -> None:
    """Give objects their states back, by name.

    Args:
        objects: Each with ``load_state_dict``.
        components: What ``load_components`` returned.

    Raises:
        CheckpointError: If one has no saved state, or one that doesn't fit.
    """
    for name, target in objects.items():
        if name not in components:
            msg = f"no state was saved for {name!r}, only {', '.join(components)}"
            raise CheckpointError(msg)
        try:
            if isinstance(target, torch.optim.Optimizer):
                load_optimizer_state(target, components[name])
            else:
                target.load_state_dict(components[name])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            msg = (
                f"the saved state of {name!r} does not fit: {error}; build it as it was "
                "when it was saved"
            )
            raise CheckpointError(msg) from error


def _state_of(holder: Any) -> Tree:  # Any: a tree, or an object that has one
    state_dict = getattr(holder, "state_dict", None)
    return state_dict() if callable(state_dict) else holder


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)


def read_component(
    reader: RangeReader,
    facts: Mapping[str, TensorFacts],
    component: tuple[str, Json],
    map_location: str | torch.device | None = None,
) -> Tree:
    """Read one component, bit for bit.

    Args:
        reader: Of the state.
        facts: Of all its tensors, or at least the component's.
        component: Its name and structure, as ``take_apart`` gave them.
        map_location: Where to put the tensors; the host where None.

    Raises:
        CheckpointError: If a part can't be read, or the structure is none.
    """
    name, structure = component
    prefix = f"{name}/"
    tensors = {
        full.removeprefix(prefix): empty_tensor(one)
        for full, one in facts.items()
        if full.startswith(prefix)
    }
    reader.read(
        (StateRange(name=prefix + place, start=0, stop=tensor.numel()), _buffer(tensor))
        for place, tensor in tensors.items()
        if tensor.numel()
    )
    if map_location is not None:
        tensors = {place: tensor.to(map_location) for place, tensor in tensors.items()}
    try:
        return unflatten(structure, tensors.__getitem__)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = (
            f"component {name!r} is not a state of geartrain ({error!r}); load another "
            "version"
        )
        raise CheckpointError(msg) from error


def _buffer(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view
