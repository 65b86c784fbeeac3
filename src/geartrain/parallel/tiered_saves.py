"""Saves while the training goes on: due now and then, frozen, written by other threads.

The lead decides when a save is due and says so in its figures of a step, so that all ranks
know after the same step: what compression owes lies with its owners and is collected from
them. Training waits for a copy of the state, and for nothing of what is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from geartrain.checkpoint.background_writer import BackgroundWriter
from geartrain.checkpoint.cadence import Moment, Save, due_saves
from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.durable_tier import open_store
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.pieces import (
    HeldPiece,
    StateFacts,
    assemble_manifest,
    store_pieces,
)
from geartrain.checkpoint.prune import prune_store
from geartrain.checkpoint.save_attempt import SaveAttempt, TierStatus, TierTarget
from geartrain.checkpoint.state_tensors import held_pieces, take_apart
from geartrain.checkpoint.versions import publish_version
from geartrain.errors import CheckpointError
from geartrain.telemetry import EventKind
from geartrain.units import format_seconds

if TYPE_CHECKING:
    from geartrain.checkpoint.chunks import ObjectStore
    from geartrain.checkpoint.retention import RetentionPolicy
    from geartrain.parallel.agent_saves import AgentSaves
    from geartrain.parallel.save_spec import SaveSpec

logger = logging.getLogger(__name__)

LOCAL, DURABLE = "local", "durable"
SAVED: EventKind = "saved"
UNSAVED: EventKind = "unsaved"
_LAST_SAVES_S = 30.0
"""How long the end of a run waits for saves that are being written."""
_POLL_S = 0.1

Tell = Callable[[EventKind, str], None]
"""Told the kind of an event, and its text."""
Components = Mapping[str, Any]  # Any: state dicts


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenState:
    """A copy of the state that nobody changes any more."""

    facts: StateFacts
    tensors: dict[str, torch.Tensor]
    """On the host."""


def freeze(
    components: Components,
    *,
    step: int,
    kind: str,
    config: Mapping[str, Any],
    lineage: str = "",
) -> FrozenState:
    """Copy a state.

    Args:
        components: State dicts by name.
        step: How many steps it has made.
        kind: ``full``, or ``weights`` for the model alone.
        config: What the run was started with.
        lineage: Of the steps that led to it.

    Raises:
        CheckpointError: If something in a component can't be kept.
    """
    is_full = kind == "full"
    taken = components if is_full else {"model": components["model"]}
    named = take_apart(taken)
    return FrozenState(
        facts=StateFacts(
            step=step,
            lineage=lineage,
            created_at_s=time.time(),
            tensors=named.facts,
            kind="full" if is_full else "weights",
            structure=named.structure,
            config=dict(config),
        ),
        tensors={name: _host_copy(tensor) for name, tensor in named.tensors.items()},
    )


class TieredSaves:
    """Saves of one rank; only the lead's are due, and written.

    Args:
        spec: Where to, and how often.
        tell: Told of saves that were made or failed; failures are logged, too.
        step: How many steps have been made.
    """

    agent: AgentSaves | None = None
    """Writes whole states to the local disk, where an agent keeps them in memory."""

    def __init__(self, spec: SaveSpec, tell: Tell, step: int = 0) -> None:
        self._spec = spec
        self.tell = tell
        self._begun = Moment(step=step, clock_s=time.monotonic())
        self._made: list[Save] = []
        self._writer: BackgroundWriter[FrozenState] | None = None
        self._told: dict[str, TierStatus] = {}
        self._left: Save | None = None  # to the agent, last
        self._agent_failed = False  # so that the next save is made here

    def resume_at(self, step: int) -> None:
        """Count from here: the state was loaded."""
        self._begun = Moment(step=step, clock_s=time.monotonic())

    def is_due(self, step: int) -> bool:
        """Whether the state after so many steps is to be saved; asked of the lead.

        What an agent will write need not be: it is asked to.
        """
        return bool([save for save in self._due(step) if not self._leave(save)])

    def save(self, components: Components, step: int, lineage: str = "") -> None:
        """Copy the state and have it written; on the lead, where a save is due.

        A state that can't be kept, or a store that can't be opened, stops no training: it
        is told, and nothing is saved.

        Args:
            components: State dicts by name.
            step: How many steps have been made.
            lineage: Of those steps.
        """
        by_kind: dict[str, list[Save]] = {}
        for save in self._due(step):
            by_kind.setdefault(save.kind, []).append(save)
        for kind, saves in by_kind.items():
            self._made = [m for m in self._made if not _is_same_kind(m, saves)] + saves
            tiers = [s.tier for s in saves]
            try:
                began_s = time.perf_counter()
                frozen = freeze(
                    components,
                    step=step,
                    kind=kind,
                    config=self._spec.config,
                    lineage=lineage,
                )
                copied_s = time.perf_counter() - began_s
                self._open().offer(frozen, step=step, tiers=tiers)
                self._agent_failed = False
            except CheckpointError as error:
                logger.warning("step %d was not saved: %s", step, error)
                self.tell(UNSAVED, f"step {step} was not saved: {error}")
                continue
            logger.debug("step %d was copied in %s", step, format_seconds(copied_s))

    def report(self) -> None:
        """Tell what has become of earlier saves."""
        if self.agent is not None and self.agent.poll() == "failed":
            self._agent_failed = True  # and the save is due again
            self._made = [made for made in self._made if made is not self._left]
        for status in self._writer.status() if self._writer is not None else ():
            before = self._told.get(status.tier) or TierStatus(
                tier=status.tier, place=status.place
            )
            if status.num_saved > before.num_saved:
                took = format_seconds(status.save_s or 0.0)
                text = f"step {status.saved_step} is in {status.place} ({took})"
                self.tell(SAVED, text)
            if status.is_failing and not before.is_failing:
                text = f"{status.place}: {status.last_error}; training goes on"
                self.tell(UNSAVED, text)
            self._told[status.tier] = status

    def close(self) -> None:
        """Wait for saves that are being written, but not for ever."""
        if self.agent is not None:
            self.agent.wait(_LAST_SAVES_S)
        if self._writer is None:
            return
        end_s = time.monotonic() + _LAST_SAVES_S
        while not self._writer.wait(_POLL_S) and not self._only_failing():
            if time.monotonic() > end_s:
                logger.warning(
                    "A save was not written within %g s of the run's end and is given up.",
                    _LAST_SAVES_S,
                )
                break
        self.report()
        self._writer.close()
        self._writer = None

    def _only_failing(self) -> bool:
        """Whether all that is still written goes to stores that refuse it."""
        assert self._writer is not None
        busy = [s for s in self._writer.status() if s.writing_step is not None]
        return bool(busy) and all(status.is_failing for status in busy)

    def _leave(self, save: Save) -> bool:
        """Leave a save to the agent, if it is of those and the agent is able to.

        Where saves are counted in steps the state is to be that after these very steps,
        and an agent's snapshot comes a little later.
        """
        wanted = self._spec.cadence.local.full
        is_timed = wanted is not None and wanted.every_steps is None
        if self.agent is None or self._agent_failed or not self.agent.is_able:
            return False
        if save.tier != LOCAL or save.kind != "full" or not is_timed:
            return False
        if not self.agent.is_busy:  # else it is due until the one before is written
            self._made = [m for m in self._made if not _is_same_kind(m, [save])] + [save]
            self._left = save
            self.agent.begin()
        return True

    def _due(self, step: int) -> tuple[Save, ...]:
        now = Moment(step=step, clock_s=time.monotonic())
        found = due_saves(self._spec.cadence, self._made, begun=self._begun, now=now)
        has_durable = self._spec.durable_url is not None
        return tuple(save for save in found if has_durable or save.tier == LOCAL)

    def _open(self) -> BackgroundWriter[FrozenState]:
        if self._writer is None:
            spec = self._spec
            targets = [
                TierTarget(
                    tier=LOCAL,
                    place=spec.directory,
                    write=_writes_to(FileStore(spec.directory), spec.retention),
                )
            ]
            if spec.durable_url is not None:
                store = open_store(spec.durable_url)
                targets.append(
                    TierTarget(tier=DURABLE, place=store.label, write=_writes_to(store))
                )
            self._writer = BackgroundWriter(targets)
        return self._writer


def _is_same_kind(made: Save, saves: Sequence[Save]) -> bool:
    return any(made.tier == save.tier and made.kind == save.kind for save in saves)


def _writes_to(
    store: ObjectStore, retention: RetentionPolicy | None = None
) -> Callable[[FrozenState, SaveAttempt], None]:
    """Return what writes a state to a store, and then removes what need not stay."""

    def write(state: FrozenState, attempt: SaveAttempt) -> None:
        pieces = _checked(held_pieces(state.tensors), attempt)
        if isinstance(store, FileStore):
            LocalTier(store.label).save(state.facts, pieces)
        else:
            part = store_pieces(store, state.facts.tensors, pieces)
            publish_version(store, assemble_manifest(state.facts, (part,)))
        if retention is not None:
            prune_store(store, retention)

    return write


def _checked(pieces: Iterator[HeldPiece], attempt: SaveAttempt) -> Iterator[HeldPiece]:
    for piece in pieces:
        attempt.check()
        yield piece


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach().resolve_conj().resolve_neg()
    return detached.to("cpu", copy=True, memory_format=torch.contiguous_format)
