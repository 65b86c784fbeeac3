"""Runs a training, makes the faults of a schedule when they are due, and ends it."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from geartrain.bench.chaos.deeds import Scene, Undo, is_running, perform
from geartrain.bench.chaos.evidence import Deed
from geartrain.bench.chaos.kinds import KINDS, FaultKind
from geartrain.bench.chaos.run_process import RunProcess
from geartrain.bench.chaos.schedule import Fault
from geartrain.bench.chaos.victims import DeviceView, NotPossibleError, choose_victim
from geartrain.bench.chaos.witness_log import Hello, WitnessFolder
from geartrain.errors import DeviceError, GeartrainError

logger = logging.getLogger(__name__)

Say = Callable[[str], None]

CALM_STEPS = 8
"""Before the first fault: what a step takes undisturbed, and the first of them apart."""
_TICK_S = 0.005
_LOOK_S = 0.05
"""Between two looks at what the witnesses wrote."""
_SETTLE_STEPS = 2
_SETTLE_S = 30.0
"""After the last fault: the run shows that it goes on, before it is asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """How faults are made."""

    faults: tuple[Fault, ...]
    duration_s: float
    device_ids: tuple[str, ...]
    min_left: int
    protected: tuple[str, ...] = ()
    start_timeout_s: float = 300.0
    """For the workers to import torch, to measure, to plan, and to make some steps."""


@dataclass(slots=True)
class Driver:
    """One run under chaos.

    Args:
        settings: What to do.
        scene: What to do it to.
        run: The run, just started.
        witnesses: Of its members.
        say: Told what goes on.
    """

    settings: DriverSettings
    scene: Scene
    run: RunProcess
    witnesses: WitnessFolder
    say: Say
    deeds: list[Deed] = field(default_factory=list)
    began_at_s: float = 0.0
    ended_at_s: float = 0.0
    calm_step_s: float = 0.0
    _undos: list[tuple[float, int, Undo]] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)
    _looked_at_s: float = 0.0
    _newest: dict[str, tuple[Hello, int]] = field(default_factory=dict)
    _waiting: list[tuple[Fault, float]] = field(default_factory=list)
    """Faults whose time has come, and until when each may still be made."""

    def drive(self) -> None:
        """Wait for the training, make the faults, and undo what has not ended.

        Raises:
            DeviceError: If the training does not begin.
        """
        self._await_calm()
        self.began_at_s = time.time()
        try:
            for fault in self.settings.faults:
                self._wait_until(fault.at_s)
                patience_s = KINDS[fault.kind].patience_s
                self._waiting.append((fault, time.time() + patience_s))
                self._try_waiting(time.time())
            self._wait_until(self.settings.duration_s)
            self._try_waiting(now_s=float("inf"))
        finally:
            self._undo_due(now_s=float("inf"))
        if not self.run.has_ended:
            self._settle()
        self.ended_at_s = time.time()
        self._look(force=True)

    # -- the run ------------------------------------------------------------------

    def _await_calm(self) -> None:
        deadline_s = time.monotonic() + self.settings.start_timeout_s
        while self.witnesses.last_step() < CALM_STEPS:
            if self.run.has_ended:
                ending = self.run.stop(timeout_s=1.0)
                msg = f"the run ended before chaos began: {ending.message}"
                raise DeviceError(msg)
            if time.monotonic() > deadline_s:
                msg = (
                    f"the run made {self.witnesses.last_step()} steps in "
                    f"{self.settings.start_timeout_s:.0f} s, {CALM_STEPS} were awaited; "
                    "is the machine overloaded?"
                )
                raise DeviceError(msg)
            time.sleep(_LOOK_S)
            self._look()
        self.calm_step_s = calm_step_s(self.witnesses)

    def _settle(self) -> None:
        target = self.witnesses.last_step() + _SETTLE_STEPS
        deadline_s = time.monotonic() + _SETTLE_S
        while self.witnesses.last_step() < target and time.monotonic() < deadline_s:
            if self.run.has_ended:
                return
            time.sleep(_LOOK_S)
            self._look(force=True)

    def _look(self, *, force: bool = False) -> None:
        now_s = time.monotonic()
        if not force and now_s < self._looked_at_s + _LOOK_S:
            return
        self._looked_at_s = now_s
        self.witnesses.poll()
        self._newest = self.witnesses.newest()
        for device_id, (hello, _) in self._newest.items():
            if self.scene.worker_ids.get(device_id) != hello.pid:
                self.scene.worker_ids[device_id] = hello.pid
                self._taken.discard(device_id)

    def _wait_until(self, at_s: float) -> None:
        due_at_s = self.began_at_s + at_s
        while time.time() < due_at_s and not self.run.has_ended:
            self._tick()

    def _tick(self) -> None:
        time.sleep(_TICK_S)
        self._undo_due(time.time())
        self._look()
        self._try_waiting(time.time())

    # -- faults -------------------------------------------------------------------

    def _try_waiting(self, now_s: float) -> None:
        """Make what is possible now, in the order of the schedule."""
        still = []
        for fault, until_s in self._waiting:
            if self.run.has_ended:
                self._skip(fault, "the run had ended")
                continue
            try:
                self._make(fault)
            except GeartrainError as error:
                if now_s < until_s:
                    still.append((fault, until_s))
                else:
                    self._skip(fault, str(error))
        self._waiting = still

    def _make(self, fault: Fault) -> None:
        kind = KINDS[fault.kind]
        self._check_moment(kind)
        device_id = choose_victim(
            kind,
            fault.device_id,
            self._views(),
            min_left=self.settings.min_left,
            protected=self.settings.protected,
        )
        asked, fault = fault, replace(fault, device_id=device_id)
        began_at_s = time.time()
        undo = perform(self.scene, fault)
        ended_at_s = None
        if undo is not None:
            ended_at_s = began_at_s + fault.duration_s
            self._undos.append((ended_at_s, len(self.deeds), undo))
        if kind.loses_device:
            self._taken.add(device_id)
        is_other = device_id != asked.device_id
        self.deeds.append(
            Deed(
                fault=fault,
                outcome="done",
                began_at_s=began_at_s,
                ended_at_s=ended_at_s,
                note=f"{asked.device_id} was away" if is_other else "",
            )
        )
        lasting = f" for {fault.duration_s:.2f} s" if undo is not None else ""
        at_s = began_at_s - self.began_at_s
        self.say(f"{at_s:7.2f} s  {fault.kind} {device_id}{lasting}")

    def _views(self) -> list[DeviceView]:
        """Everybody as they are now, by what was last read."""
        running = {d: is_running(hello.pid) for d, (hello, _) in self._newest.items()}
        # Of those that run: after a restore steps come again.
        last_step = max(
            (step for d, (_, step) in self._newest.items() if running[d]), default=0
        )
        lasting: dict[str, set[str]] = {}
        for _, index, _ in self._undos:
            fault = self.deeds[index].fault
            lasting.setdefault(fault.device_id, set()).add(fault.kind)
        views = []
        for device_id in self.settings.device_ids:
            kinds = frozenset(lasting.get(device_id, ()))
            _, step = self._newest.get(device_id, (None, 0))
            views.append(
                DeviceView(
                    device_id=device_id,
                    is_running=running.get(device_id, False),
                    holds=0 < last_step <= step + 1,
                    is_silenced=device_id in self._taken
                    or any(KINDS[kind].silences for kind in kinds),
                    lasting=kinds,
                )
            )
        return views

    def _check_moment(self, kind: FaultKind) -> None:
        """See whether the engine is in the middle of what the kind disturbs.

        Raises:
            NotPossibleError: If it is not. A rebuild is met by coming soon after a kill.
        """
        is_there = True
        if kind.moment == "save":
            is_there = self._is_saving()
        elif kind.moment == "heal":
            joining = [hello for hello, step in self._newest.values() if not step]
            is_there = any(is_running(hello.pid) for hello in joining)
        if not is_there:
            msg = f"the moment ({kind.moment}) did not come"
            raise NotPossibleError(msg)

    def _is_saving(self) -> bool:
        saved = self.scene.saved_path
        if saved is None:
            return False
        return any(saved.parent.glob(f".{saved.name}.saving-*"))

    def _skip(self, fault: Fault, note: str) -> None:
        self.deeds.append(
            Deed(fault=fault, outcome="skipped", began_at_s=time.time(), note=note)
        )
        self.say(f"{fault.at_s:7.2f} s  {fault.kind} {fault.device_id} left out: {note}")

    def _undo_due(self, now_s: float) -> None:
        due = [entry for entry in self._undos if entry[0] <= now_s]
        self._undos = [entry for entry in self._undos if entry[0] > now_s]
        for _, index, undo in due:
            try:
                undo()
            except (GeartrainError, OSError) as error:  # its worker or the run has gone
                logger.debug("not undone: %s", error)
            deed = self.deeds[index]
            self.deeds[index] = Deed(
                fault=deed.fault,
                outcome=deed.outcome,
                began_at_s=deed.began_at_s,
                ended_at_s=time.time(),
            )


def calm_step_s(witnesses: WitnessFolder) -> float:
    """Median time between commits so far, the first ones left out."""
    times: dict[int, float] = {}
    for statement in witnesses.statements():
        for commit in statement.commits:
            times[commit.step] = min(commit.at_s, times.get(commit.step, commit.at_s))
    return median_gap_s([times[step] for step in sorted(times)][2:])


def median_gap_s(times_s: Sequence[float]) -> float:
    """Median difference of neighbours; 0 where there are none.

    >>> median_gap_s([1.0, 2.0, 4.0, 5.0])
    1.0
    """
    gaps = [after - before for before, after in pairwise(times_s)]
    return statistics.median(gaps) if gaps else 0.0
