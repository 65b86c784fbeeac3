"""Runs a training, makes the faults of a schedule when they are due, and ends it."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from geartrain.bench.chaos.deeds import NotPossibleError, Scene, Undo, is_running, perform
from geartrain.bench.chaos.evidence import Deed
from geartrain.bench.chaos.kinds import KINDS
from geartrain.bench.chaos.run_process import RunProcess
from geartrain.bench.chaos.schedule import Fault
from geartrain.bench.chaos.witness_log import WitnessFolder
from geartrain.errors import DeviceError, GeartrainError

logger = logging.getLogger(__name__)

Say = Callable[[str], None]

CALM_STEPS = 8
"""Before the first fault: what a step takes undisturbed, and the first of them apart."""
_TICK_S = 0.005
_LOOK_S = 0.05
"""Between two looks at what the witnesses wrote."""
_MOMENT_S = 10.0
"""So long a fault waits for its moment, and is then left out."""
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
    _num_hellos: int = 0

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
                if self.run.has_ended:
                    self._skip(fault, "the run had ended")
                else:
                    self._make(fault)
            self._wait_until(self.settings.duration_s)
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
        statements = self.witnesses.statements()
        self._num_hellos = len(statements)
        for statement in statements:
            device_id, process_id = statement.device_id, statement.hello.pid
            if self.scene.worker_ids.get(device_id) != process_id:
                self.scene.worker_ids[device_id] = process_id
                self._taken.discard(device_id)

    def _wait_until(self, at_s: float) -> None:
        due_at_s = self.began_at_s + at_s
        while time.time() < due_at_s and not self.run.has_ended:
            self._tick()

    def _tick(self) -> None:
        time.sleep(_TICK_S)
        self._undo_due(time.time())
        self._look()

    # -- faults -------------------------------------------------------------------

    def _make(self, fault: Fault) -> None:
        kind = KINDS[fault.kind]
        reason = self._reason_against(fault)
        if not reason and not self._await_moment(fault):
            reason = f"the moment ({kind.moment}) did not come"
        if reason:
            self._skip(fault, reason)
            return
        began_at_s = time.time()
        try:
            undo = perform(self.scene, fault)
        except (NotPossibleError, GeartrainError) as error:
            self._skip(fault, str(error))
            return
        ended_at_s = None
        if undo is not None:
            ended_at_s = began_at_s + fault.duration_s
            self._undos.append((ended_at_s, len(self.deeds), undo))
        if kind.loses_device:
            self._taken.add(fault.device_id)
        self.deeds.append(
            Deed(fault=fault, outcome="done", began_at_s=began_at_s, ended_at_s=ended_at_s)
        )
        lasting = f" for {fault.duration_s:.2f} s" if undo is not None else ""
        self.say(f"{fault.at_s:7.2f} s  {fault.kind} {fault.device_id}{lasting}")

    def _reason_against(self, fault: Fault) -> str:
        if not KINDS[fault.kind].loses_device:
            return ""
        if fault.device_id in self.settings.protected:
            return f"the run can't go on without {fault.device_id} in this version"
        left = [d for d in self._living() if d != fault.device_id]
        if len(left) < self.settings.min_left:
            return f"it would leave {len(left)} devices"
        return ""

    def _living(self) -> list[str]:
        return [
            device_id
            for device_id, process_id in self.scene.worker_ids.items()
            if device_id not in self._taken and is_running(process_id)
        ]

    def _await_moment(self, fault: Fault) -> bool:
        moment = KINDS[fault.kind].moment
        if moment in {"now", "rebuild"}:  # a rebuild is met by coming soon after a kill
            return True
        hellos = self._num_hellos
        deadline_s = time.monotonic() + _MOMENT_S
        while time.monotonic() < deadline_s and not self.run.has_ended:
            if moment == "save" and self._is_saving():
                return True
            if moment == "heal" and self._num_hellos > hellos:
                return True
            self._tick()
        return False

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
