"""The whole training state: on disk, and to a device that comes back."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from geartrain.checkpoint.optimizer_state import load_optimizer_state
from geartrain.checkpoint.snapshot import load_snapshot, read_manifest, save_snapshot
from geartrain.checkpoint.tree_file import tree_from_bytes, tree_to_bytes
from geartrain.errors import CheckpointError
from geartrain.parallel.settings_drift import name_changed_settings
from geartrain.parallel.state_sync import broadcast_bytes
from geartrain.parallel.tracked_objects import TrackedObjects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from geartrain.parallel.low_communication import ModelAverager
    from geartrain.parallel.process_group import RankGroups
    from geartrain.parallel.residual_state import SavedResiduals

_REQUIRED = ("model", "optimizer", "training")
_RESIDUALS = "residuals"
_AVERAGES = "averages"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """What makes up the state of a training."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any  # torch's schedulers share no public base
    scaler: torch.amp.GradScaler | None
    step_index: int
    seed: int
    averager: ModelAverager | None = None
    """Where models are averaged now and then: since when, and the outer momentum."""
    lineage: str = ""
    """Of the steps that led here, hexadecimal; empty where they are not named."""
    tracked: TrackedObjects = field(default_factory=TrackedObjects)
    """What the script keeps beside its model."""

    def components(self) -> dict[str, Any]:  # Any: trees of the checkpoint room
        """State dicts by name."""
        parts: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "training": {
                "step_index": self.step_index,
                "seed": self.seed,
                "lineage": self.lineage,
            },
        }
        if self.lr_scheduler is not None:
            parts["lr_scheduler"] = self.lr_scheduler.state_dict()
        if self.scaler is not None:
            parts["loss_scaler"] = self.scaler.state_dict()
        if self.averager is not None:
            parts[_AVERAGES] = self.averager.state_dict()
        return parts | self.tracked.state_dicts()

    def restore(self, parts: dict[str, Any]) -> None:  # Any: see components
        """Take on a state.

        Raises:
            CheckpointError: If it belongs to another model or optimizer.
        """
        try:
            self.model.load_state_dict(parts["model"])
            load_optimizer_state(self.optimizer, parts["optimizer"])
            if self.lr_scheduler is not None and "lr_scheduler" in parts:
                self.lr_scheduler.load_state_dict(parts["lr_scheduler"])
            if self.scaler is not None and "loss_scaler" in parts:
                self.scaler.load_state_dict(parts["loss_scaler"])
            if self.averager is not None:
                self.averager.load_state_dict(parts.get(_AVERAGES))
        except (RuntimeError, ValueError, KeyError) as error:
            msg = (
                f"the saved state does not fit this model and optimizer: {error}; build "
                "them as they were when it was saved"
            )
            raise CheckpointError(msg) from error
        self.tracked.restore(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState:
    """What a snapshot holds besides what was restored."""

    positions: list[dict[str, int | bool]]
    """Of the loaders."""
    step_index: int
    """How many steps had been made."""
    residuals: SavedResiduals | None
    """What compression owed; None without any."""
    lineage: str = ""
    """Of those steps."""
    changed_settings: tuple[str, ...] = ()
    """What the script sets otherwise, by name. Of the optimizer what was saved is in force,
    the seed is the script's."""


def save_state(
    path: Path,
    state: TrainState,
    positions: Sequence[dict[str, int | bool]],
    residuals: SavedResiduals | None = None,
) -> None:
    """Write the state, the loaders' positions, and what compression owes.

    Raises:
        CheckpointError: If it can't be written; an older snapshot there is kept.
    """
    components = whole_state(state, positions, residuals)
    save_snapshot(path, components, metadata={"step": state.step_index})


def whole_state(
    state: TrainState,
    positions: Sequence[dict[str, int | bool]],
    residuals: SavedResiduals | None = None,
) -> dict[str, Any]:  # Any: trees of the checkpoint room
    """All that is saved, as state dicts by name; tensors are not copied."""
    components = state.components()
    components["training"]["loaders"] = [dict(position) for position in positions]
    if residuals is not None:
        components[_RESIDUALS] = residuals
    return components


def copy_tree(tree: Any) -> Any:  # Any: what checkpoint.tree keeps
    """A copy on the host that nobody changes any more."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, dict):
        copied = copy.copy(tree)  # of its own kind, which may know its defaults
        for key, value in tree.items():
            copied[key] = copy_tree(value)
        return copied
    if isinstance(tree, list):
        return [copy_tree(value) for value in tree]
    if type(tree) is tuple:
        return tuple(copy_tree(value) for value in tree)
    return tree


def load_state(path: Path, state: TrainState) -> LoadedState:
    """Read a state into the model and its companions.

    Raises:
        CheckpointError: If it is damaged, incomplete, or of another model.
    """
    read_manifest(path)
    return adopt_state(load_snapshot(path), state, str(path))


def adopt_state(
    parts: dict[str, Any],  # Any: state dicts by name
    state: TrainState,
    source: str,
) -> LoadedState:
    """Take on what was saved, whatever it was read from.

    Args:
        parts: What ``whole_state`` had made.
        state: Of this rank.
        source: Of the parts, for errors.

    Raises:
        CheckpointError: If it is incomplete or of another model.
    """
    missing = [name for name in _REQUIRED if name not in parts]
    if missing:
        msg = f"{source} lacks {', '.join(missing)}; give what a training has saved"
        raise CheckpointError(msg)
    changed = name_changed_settings(parts, state)
    state.restore(parts)
    training: Any = parts["training"]  # written by whole_state
    return LoadedState(
        positions=list(training.get("loaders", [])),
        step_index=int(training["step_index"]),
        residuals=parts.get(_RESIDUALS),
        lineage=str(training.get("lineage", "")),  # absent before steps were named
        changed_settings=changed,
    )


def send_state(
    groups: RankGroups, members: tuple[int, ...], state: TrainState, source: int
) -> None:
    """Give a rank's state to others that do not hold it; all ranks must call it.

    Args:
        groups: All ranks.
        members: The one that gives it, and those that receive.
        state: This rank's state: read on the source, written on the others.
        source: The rank whose state it is.
    """
    members = tuple(sorted(members))
    group = groups.process_group(members)
    if groups.rank not in members or group is None:
        return
    is_source = groups.rank == source
    data = tree_to_bytes(state.components()) if is_source else None
    received = broadcast_bytes(
        data, group, members.index(source), groups.rendezvous.interruption
    )
    if not is_source:
        parts: Any = tree_from_bytes(received)  # a tree that components() made
        state.restore(parts)
