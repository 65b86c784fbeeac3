"""The loop of the launcher: what it finds, ``decide`` judges; what that says, it does."""

from __future__ import annotations

import time
from dataclasses import dataclass

from geartrain.errors import DeviceError, GeartrainError
from geartrain.launch.comebacks import Comebacks
from geartrain.launch.coordinator_process import JOURNAL_NAME, CoordinatorProcess
from geartrain.launch.device_changes import DeviceChanges
from geartrain.launch.emulated_devices import EmulatedDevices
from geartrain.launch.epoch_follower import EpochFollower
from geartrain.launch.node_agents import NodeAgents
from geartrain.launch.processes import StoreProcess
from geartrain.launch.run_directory import CHECKPOINT_NAME, Contacts, goes_on, log_path
from geartrain.launch.settings import LaunchObserver, LaunchSettings
from geartrain.launch.situation import (
    Situation,
    WorkerState,
    excluded_workers,
    has_left,
    leader,
    loss_reason,
    lost_workers,
)
from geartrain.launch.spare_pool import SparePool
from geartrain.launch.stop_requests import StopRequests
from geartrain.launch.supervision import Verdict, decide
from geartrain.launch.workers import Worker, WorkerGroup, tail_of_log

_TICK_S = 0.05
_TOLD_S = 1.0
"""How long the others usually take at most to say that they go on without somebody."""
_FAST_TICK_S = 0.005
"""While somebody starts again: each tick delays it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    devices: EmulatedDevices
    store: StoreProcess
    group: WorkerGroup
    coordinator: CoordinatorProcess | None
    comebacks: Comebacks
    spares: SparePool
    agents: NodeAgents

    def contacts(self) -> Contacts:
        """Whom workers turn to, once the store serves."""
        port = self.store.poll_port()
        assert port is not None, "no worker is let go before the store serves"
        return Contacts(
            store_host=self.store.address,
            store_port=port,
            coordinator=None if self.coordinator is None else self.coordinator.spec,
            memory=self.agents.spec_for,
        )


class RunLoop:
    """Starts the workers, watches them, and starts those again that come back."""

    def __init__(
        self,
        settings: LaunchSettings,
        observer: LaunchObserver,
        requests: StopRequests,
        parts: Parts,
    ) -> None:
        self._settings = settings
        self._observer = observer
        self._requests = requests
        self._devices = parts.devices
        self._store = parts.store
        self._group = parts.group
        self._coordinator = parts.coordinator
        self._comebacks = parts.comebacks
        self._spares = parts.spares
        self._agents = parts.agents
        self._contacts = parts.contacts
        self._changes: DeviceChanges | None = None
        self._epochs = EpochFollower(settings.run_dir / JOURNAL_NAME)
        self._asked = False
        self._told: set[str] = set()  # incarnations whose loss the user knows of
        self._shown = self._group.workers[0]
        self._started_at_s = time.time()
        self._shown.show_output(0.0)

    def start(self) -> bool:
        """Let the workers go once all are ready; False when asked to stop before."""
        deadline_s = time.monotonic() + self._settings.start_timeout_s
        while not self._are_ready():
            if self._requests.count:
                return False
            if time.monotonic() > deadline_s:
                raise DeviceError(self._late_message())
            time.sleep(_TICK_S)
        self._group.write_specs(self._contacts())
        for worker in self._group.workers:
            self._devices.attach(worker.device.device_id, worker.process_id)
        self._devices.restart_clock()
        for worker in self._group.workers:
            worker.let_go()
        return True

    def watch(self, changes: DeviceChanges | None) -> Verdict:
        """Watch until the run is to end.

        Args:
            changes: Where others ask for other devices; None: nobody can.
        """
        self._changes = changes
        while True:
            self._note_members()
            self._note_departures(self._situation())
            situation = self._situation()
            verdict = decide(situation)
            if verdict.action != "watch":
                self._show_leader(situation, within_s=0.0)
                return verdict
            self._give_up_lost(situation)
            self._show_leader(situation, within_s=_TOLD_S)
            self._pass_on_stop_request()
            self._keep_coordinator()
            for notice in self._agents.poll():
                self._observer.on_notice(notice)
            if changes is not None:
                changes.poll(is_training=situation.goes_on)
            is_busy = self._bring_back(situation)
            self._devices.poll()
            self._observer.on_tick()
            time.sleep(_FAST_TICK_S if is_busy else _TICK_S)

    @property
    def has_saved(self) -> bool:
        """Whether the state was saved since the run began."""
        manifest = self._settings.run_dir / CHECKPOINT_NAME
        return manifest.is_dir() and manifest.stat().st_mtime >= self._started_at_s - 1

    # -- the start ----------------------------------------------------------------------

    def _are_ready(self) -> bool:
        ready = [worker.poll_ready() for worker in self._group.workers]
        ended = [state for state in self._states() if state.exit_code is not None]
        if ended:
            raise DeviceError(self._early_message(ended[0]))
        return self._store.poll_port() is not None and all(ready)

    def _early_message(self, state: WorkerState) -> str:
        path = log_path(self._settings.run_dir, state.rank)
        text = (
            f"{state.name} ended with exit code {state.exit_code} before the script "
            f"began; its log is {path}"
        )
        self._group.workers[state.rank].finish_output()
        if state.rank == 0:  # what it printed has been shown
            return text
        return f"{text} and ends with:\n{tail_of_log(self._settings.run_dir, state.rank)}"

    def _late_message(self) -> str:
        late = [
            state.name
            for state, worker in zip(self._states(), self._group.workers, strict=True)
            if not worker.poll_ready()
        ]
        if self._store.poll_port() is None:
            late.append("the rendezvous store")
        timeout_s = self._settings.start_timeout_s
        return (
            f"{', '.join(late)} did not start within {timeout_s:.0f} s; "
            "check the machine's load, or raise the start timeout"
        )

    # -- what is the case ---------------------------------------------------------------

    def _situation(self) -> Situation:
        return Situation(
            workers=self._states(),
            now_s=time.time(),
            stop_requested_at_s=self._requests.first_at_s,
            kill_requested=self._requests.count > 1,
            stop_timeout_s=self._settings.stop_timeout_s,
            goes_on=goes_on(self._settings.run_dir),
            min_devices=self._settings.min_devices,
            has_coordinator=self._coordinator is not None,
            broken=self._coordinator.failure if self._coordinator else None,
        )

    def _states(self) -> tuple[WorkerState, ...]:
        return tuple(self._state(worker) for worker in self._group.workers)

    def _state(self, worker: Worker) -> WorkerState:
        device_id = worker.device.device_id
        return worker.state(
            self._devices.out_of_memory_kills(device_id),
            returns=worker.is_away and self._comebacks.returns(device_id),
        )

    # -- who comes and goes -------------------------------------------------------------

    def _note_members(self) -> None:
        """Take note of who has come to take part."""
        if self._coordinator is None or not self._epochs.poll():
            return
        for worker in self._group.workers:
            name = worker.device.device_id
            is_member = self._epochs.members.get(name) == worker.seat.incarnation
            if is_member and not worker.has_entered:
                worker.has_entered = True
                self._observer.on_notice(f"{name} joined")

    def _note_departures(self, situation: Situation) -> None:
        """Take note of who is lost or has left, and when it comes back."""
        for state in lost_workers(situation):
            worker = self._group.workers[state.rank]
            if worker.is_away:
                continue
            worker.is_away = True
            if has_left(state):
                reason = loss_reason(state)
                self._comebacks.note_left(state.device_id, reason)
                self._observer.on_notice(f"{state.name} left: {reason}; the others go on")
                continue
            notice = self._comebacks.note_lost(state.device_id, loss_reason(state))
            self._tell_loss(state)
            if notice is not None:
                self._observer.on_notice(notice)

    def _give_up_lost(self, situation: Situation) -> None:
        """Kill workers that the others go on without, and say so."""
        for state in excluded_workers(situation):
            self._group.workers[state.rank].kill()
        for state in lost_workers(situation):
            self._tell_loss(state)

    def _tell_loss(self, state: WorkerState) -> None:
        incarnation = self._group.workers[state.rank].seat.incarnation
        if state.loss is None or not state.loss.is_failure or incarnation in self._told:
            return
        self._told.add(incarnation)
        text = f"lost {state.name}: {state.loss.reason}; the others go on"
        self._observer.on_notice(text)

    def _bring_back(self, situation: Situation) -> bool:
        """Start who is due, and let go who is ready; whether somebody is on the way."""
        if situation.goes_on and self._comebacks.are_possible:
            self._spares.begin()
        self._spares.poll()
        for worker in list(self._group.workers):
            name = worker.device.device_id
            is_due = name in self._comebacks.due and not self._spares.is_warming_up
            if is_due and worker.is_away:
                self._start_again(worker)
        starting = [w for w in self._group.workers if not w.was_let_go and w.is_running]
        for worker in starting:
            self._let_join(worker)
        return bool(starting)

    def _start_again(self, before: Worker) -> None:
        if before.process.peek_exit_code() is None:
            before.kill()  # the next tick goes on
            return
        name = before.device.device_id
        self._comebacks.note_started(name)
        try:
            self._group.start_again(before.rank, self._contacts())
        except (GeartrainError, OSError) as error:  # such as a full disk
            notice = self._comebacks.note_lost(name, f"it could not be started: {error}")
            self._observer.on_notice(f"{name} could not be started: {error}")
            if notice is not None:
                self._observer.on_notice(notice)

    def _let_join(self, worker: Worker) -> None:
        limit_s = self._settings.start_timeout_s
        if worker.poll_ready():
            try:
                self._devices.attach(worker.device.device_id, worker.process_id)
            except DeviceError:  # it ended just now
                return
            worker.let_go()
        elif time.monotonic() > worker.started_at_s + limit_s:
            name = worker.device.device_id
            self._observer.on_notice(f"{name} was not ready within {limit_s:.0f} s")
            worker.kill()

    # -- what else is to be done --------------------------------------------------------

    def _keep_coordinator(self) -> None:
        if self._coordinator is None:
            return
        notice = self._coordinator.poll()
        if notice is not None:
            self._observer.on_notice(notice)

    def _show_leader(self, situation: Situation, within_s: float) -> None:
        """Show what the next one prints where the one that led was lost.

        Args:
            situation: Now.
            within_s: How long the others may take to say since when the next one leads.
        """
        rank = self._shown.rank
        is_same = self._group.workers[rank] is self._shown
        worker = self._group.workers[leader(situation, rank if is_same else None).rank]
        if worker is self._shown:
            return
        before = situation.workers[rank]
        since_s = before.ended_at_s or time.time()
        if before.loss is not None:
            since_s = before.loss.at_s
        elif situation.now_s < since_s + within_s:
            return
        self._shown.hide_output()
        worker.show_output(since_s)
        self._shown = worker

    def _pass_on_stop_request(self) -> None:
        if not self._requests.count or self._asked:
            return
        self._asked = True
        self._comebacks.end()
        if self._changes is not None:
            self._changes.end("is stopping")
        waiting = [state.name for state in self._states() if state.exit_code is None]
        self._observer.on_notice(
            f"stopping: {', '.join(waiting)} save at the next step boundary, within "
            f"{self._settings.stop_timeout_s:.0f} s; "
            "press Ctrl-C again to kill without saving"
        )
        for worker in self._group.workers:
            worker.ask_to_stop()
