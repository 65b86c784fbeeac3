"""Keeps this rank's part of the state in its node's memory, while the training goes on.

After a step in which all have said that they are ready, each rank copies its part of the
state into its agent's memory, while the next step is computed; the agent sends it to peers.
Steps between two snapshots are logged where that is cheap. So where all that train are lost
at once, what they had is still there. Agents that fail, or have no room, cost nothing but
that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from geartrain.checkpoint.agent.interval import (
    IntervalLimits,
    IntervalTuner,
    SnapshotCost,
)
from geartrain.checkpoint.agent.messages import SnapshotFacts
from geartrain.checkpoint.agent.shadow_copy import ShadowCopy
from geartrain.checkpoint.agent.shard_layout import SnapshotLabel, make_facts
from geartrain.parallel.agent_connection import AgentConnection
from geartrain.parallel.memory_log import LogBudget, log_step
from geartrain.parallel.memory_shares import (
    Division,
    gradient_parts,
    num_bytes_of,
    share_of,
)
from geartrain.parallel.saved_state import whole_state
from geartrain.parallel.snapshot_rule import Wish, agree

if TYPE_CHECKING:
    from geartrain.checkpoint.agent.link import AgentLink, LinkState
    from geartrain.parallel.commit import ReducedStep
    from geartrain.parallel.save_spec import PeerMemorySettings
    from geartrain.parallel.step_update import StepOutcome
    from geartrain.parallel.trainer import Trainer

_KEPT_STEPS = 32
_COPY_LIMIT_S = 10.0
"""A peer that takes longer to get its copy is not waited for before the next snapshot."""
_SLACK = 1.25
"""What compression owes is not known ahead; and buffers are few."""


@dataclass(slots=True)
class _Taking:
    """A snapshot on its way."""

    copy: ShadowCopy
    facts: SnapshotFacts
    stall_s: float


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A snapshot that the agent has, but maybe its peers not yet."""

    step: int
    stall_s: float
    at_s: float


@dataclass(slots=True)
class PeerMemory:
    """What one rank does about it.

    Args:
        trainer: Of this rank.
        connection: To its agent.
        settings: What it may cost.
        tell: Told what there is to know; on the lead it reaches the run log.
    """

    trainer: Trainer
    connection: AgentConnection
    settings: PeerMemorySettings
    tell: Callable[[str], None]
    wants_soon: bool = False
    """A save waits for a snapshot."""
    on_sealed: Callable[[AgentLink, SnapshotFacts], None] = lambda _link, _facts: None
    """Called when a part was handed to the agent."""
    _tuner: IntervalTuner = field(init=False)
    _log: LogBudget = field(init=False)
    _owners: tuple[int, ...] = ()
    """By the last step."""
    _is_hasty: bool = False
    _division: Division | None = None
    """Of the last snapshot, and of the log since then; None before there is one."""
    _is_logging: bool = False
    _taking: _Taking | None = None
    _sealed: _Sealed | None = None
    """Until its copies are at its peers: a next one would leave them half of this one."""
    _num_since: int = 0
    _num_seen: int = 0
    _ended_at_s: float = 0.0
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    _log_copy_s: float = 0.0
    _has_told: bool = False

    def __post_init__(self) -> None:
        limits = IntervalLimits(max_cost_fraction=self.settings.max_cost_fraction)
        self._tuner = IntervalTuner(limits=limits)
        self._log = LogBudget(self.settings.max_log_cost_fraction)

    # -- a step -------------------------------------------------------------------------

    def wish(self) -> Wish:
        """What this rank says in the figures of the open step."""
        if not self._takes_part or not self.connection.has_agent():
            return Wish.NONE
        self._take_notices()
        wants_soon = self.wants_soon or self._log_is_filling
        later = Wish.SOON if wants_soon else Wish.LATER
        if not self._is_due or self._taking is not None or self._sealed is not None:
            return later
        if not self._has_buffer():
            return later if self.connection.has_agent() else Wish.NONE
        return Wish.READY_SOON if wants_soon else Wish.READY

    def before_update(self, step: ReducedStep) -> None:
        """A committed step is about to be applied: what it changes is copied by now."""
        self.settle()
        division, link = self._division, self.connection.link
        if division is None or link is None or not self._is_logging:
            return
        if division.owners != self._owners or not self._log.is_on:
            self._is_logging = False  # a log with a gap is none
            return
        with self.connection.guarded():
            taken_s = log_step(link, step, self._parts(division), self._about())
            self._is_logging = taken_s is not None
            self._log_copy_s = taken_s or 0.0
            self._log.note(self._log_copy_s + link.state.log_code_s, self._step_s)

    def after_step(self, outcome: StepOutcome) -> bool:
        """A step was applied; says whether the state after it is being copied."""
        self._note_time()
        figures, members = outcome.trailer.ranks, self.trainer.place.groups.members
        agreed = agree({r: figures[r].snapshot_wish for r in members}, self._owners)
        self._owners, self._is_hasty = agreed.owners, agreed.is_hasty
        self._num_since += 1
        self._num_seen += 1
        if not self._log.is_on:
            self._log.skip()
        residuals = None
        if agreed.is_taken and self.trainer.residuals.are_coded:
            residuals = self.trainer.together(self.trainer.residuals.collect)
        if not agreed.is_taken or self.trainer.place.rank not in agreed.owners:
            return False
        with self.connection.guarded():
            self._take(agreed.owners, residuals)
        return self._taking is not None

    @property
    def has_kept(self) -> bool:
        """Whether the agent holds a part of this run's state now."""
        return self._has_told and self.connection.link is not None

    def settle(self) -> None:
        """Finish what is being copied: the state is about to change."""
        taking, self._taking = self._taking, None
        link = self.connection.link
        if taking is None or link is None:
            return
        began_s = time.perf_counter()
        with self.connection.guarded():
            taking.copy.finish()
            link.seal(taking.facts)
            stall_s = taking.stall_s + time.perf_counter() - began_s
            if self.trainer.place.device.torch_device.type == "cpu":
                stall_s += taking.copy.busy_s  # the step was computed on the same cores
            self._sealed = _Sealed(taking.facts.step, stall_s, time.perf_counter())
            self.on_sealed(link, taking.facts)

    def close(self) -> None:
        """The training ends."""
        self.settle()
        self.connection.close()

    # -- inside -------------------------------------------------------------------------

    @property
    def _takes_part(self) -> bool:
        engine = self.trainer.engine
        return engine.gradient_group is not None and engine.buckets is not None

    @property
    def _log_is_filling(self) -> bool:
        link = self.connection.link
        if link is None or not self._is_logging or not link.state.wants_snapshot:
            return False
        costs = [one.copy_s + one.send_s for one in self._tuner.costs]
        limit_s = 2 * self.settings.max_cost_fraction * self._step_s * self._num_since
        return max(costs, default=0.0) <= limit_s

    @property
    def _is_due(self) -> bool:
        if self._num_seen == 0 or self._owners == ():
            return False  # the optimizer may have no state yet
        if self.wants_soon or self._is_hasty or self._log_is_filling:
            return True
        is_of_others = self._division is None or self._division.owners != self._owners
        return is_of_others or self._tuner.is_due(self._num_since)

    @property
    def _step_s(self) -> float:
        steps_s = sorted(self._steps_s)
        return steps_s[len(steps_s) // 2] if steps_s else 0.0

    def _has_buffer(self) -> bool:
        """Ask for a buffer for what is to be copied, ahead of time."""
        if self.trainer.place.rank not in self._owners:
            return False
        link = self.connection.link
        division = Division(owners=self._owners, rank=self.trainer.place.rank)
        is_laid_out = self._division == division and link is not None
        if is_laid_out and link is not None:
            has = link.reservation
            return self.connection.offer(has.snapshot_bytes, has.slot_bytes)
        size = 0
        with self.connection.guarded():
            share = share_of(self._components(None), self.trainer.model, division)
            size = int(_SLACK * share.layout.num_bytes)
        return size > 0 and self.connection.offer(size, self._slot_bytes(division))

    def _slot_bytes(self, division: Division) -> int:
        if self.trainer.residuals.are_coded:
            return 0  # what compression owes can't be made again from gradients
        return num_bytes_of(self._parts(division))

    def _parts(self, division: Division) -> list[Any]:  # Any: see gradient_parts
        buckets = self.trainer.engine.buckets
        assert buckets is not None, "who takes part has them"
        return gradient_parts(buckets.views, self.trainer.model, division)

    def _about(self) -> dict[str, Any]:  # Any: JSON
        positions = [dict(one) for one in self.trainer.positions()]
        lineage = self.trainer.engine.name.lineage
        return {"previous_lineage": lineage, "positions": positions}

    def _components(self, residuals: Any) -> dict[str, Any]:  # Any: see whole_state
        return whole_state(self.trainer.state(), self.trainer.positions(), residuals)

    def _take(
        self, owners: tuple[int, ...], residuals: Any
    ) -> None:  # Any: saved residuals
        link = self.connection.link
        buffer = link.begin() if link is not None else None
        if link is None or buffer is None:
            return
        began_s = time.perf_counter()
        trainer = self.trainer
        division = Division(owners=owners, rank=trainer.place.rank)
        share = share_of(self._components(residuals), trainer.model, division)
        if share.layout.num_bytes > link.reservation.snapshot_bytes:
            self._division = None  # it has grown: lay it out anew
            return
        label = SnapshotLabel(
            member_id=self.connection.member_id,
            incarnation=self.connection.incarnation,
            step=trainer.step_index,
            lineage=trainer.engine.name.lineage,
            extras=share.extras(division, self._place()),
        )
        facts = make_facts(share.layout, label, share.facts)
        copy = ShadowCopy(share.layout, share.tensors, buffer, changing=share.changing)
        self._taking = _Taking(copy, facts, time.perf_counter() - began_s)
        self._division, self._num_since, self.wants_soon = division, 0, False
        self._is_logging = self._log.is_on and link.reservation.num_slots > 0

    def _place(self) -> dict[str, Any]:  # Any: JSON
        engine = self.trainer.engine
        return {
            "term_names": list(engine.term_names),
            "bucket_bytes": engine.settings.bucket_bytes,
            "last_loss": self.trainer.last_loss,
        }

    def _note_time(self) -> None:
        now_s = time.perf_counter()
        if self._ended_at_s:
            self._steps_s.append(now_s - self._ended_at_s)
            if self._taking is None and self._num_since > 0:
                self._tuner = self._tuner.with_step(now_s - self._ended_at_s)
        self._ended_at_s = now_s

    def _take_notices(self) -> None:
        """What the agent has said: a snapshot is kept, and what it has cost."""
        link, sealed = self.connection.link, self._sealed
        if link is None or sealed is None:
            self._sealed = None
            return
        with self.connection.guarded():
            state = link.poll()
            if not self._is_settled(sealed, state):
                if state.kept_step >= sealed.step:
                    link.request_status()
                return
            self._sealed = None
            if state.kept_step < sealed.step:
                return
            cost = SnapshotCost(copy_s=sealed.stall_s, send_s=state.seal_s + state.send_s)
            self._tuner = self._tuner.with_cost(cost)
            self._tell_once(sealed.step)

    def _is_settled(self, sealed: _Sealed, state: LinkState) -> bool:
        if state.problem or time.perf_counter() - sealed.at_s > _COPY_LIMIT_S:
            return True
        wanted = state.copied_step if self.connection.num_copies else state.kept_step
        return min(wanted, state.kept_step) >= sealed.step

    def _tell_once(self, step: int) -> None:
        if self._has_told:
            return
        self._has_told = True
        num_copies = self.connection.num_copies
        copies = f" and {num_copies} more on other hosts" if num_copies else ""
        interval = self._tuner.interval
        often = f", and again every {interval.num_steps} steps" if interval else ""
        self.tell(
            f"the state after step {step} is kept in memory: {len(self._owners)} parts of "
            f"it on their own nodes{copies}{often}"
        )
