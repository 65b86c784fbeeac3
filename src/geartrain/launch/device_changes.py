"""Carries out what is asked of a running run: devices that are to come, or to leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from geartrain.devices.host import cores_present
from geartrain.devices.profile import DeviceProfile
from geartrain.errors import GeartrainError
from geartrain.launch.comebacks import Comebacks
from geartrain.launch.control_messages import (
    DeviceState,
    DeviceStatus,
    FleetChange,
    RunView,
)
from geartrain.launch.control_socket import ControlSocket
from geartrain.launch.coordinator_question import CoordinatorQuestion, ask_to_drain
from geartrain.launch.emulated_devices import EmulatedDevices
from geartrain.launch.emulated_network import EmulatedNetwork
from geartrain.launch.run_directory import Contacts
from geartrain.launch.settings import LaunchObserver, LaunchSettings
from geartrain.launch.workers import Worker, WorkerGroup
from geartrain.parallel.worker_spec import CoordinatorSpec

_LEAVE_S = 60.0
"""How long a device that was asked to leave gets, before the user is told that it stays."""
_DRAINED = "it was drained"


@dataclass(frozen=True, slots=True)
class Changeable:
    """What changes of devices act on."""

    devices: EmulatedDevices
    network: EmulatedNetwork
    group: WorkerGroup
    comebacks: Comebacks
    coordinator: CoordinatorSpec
    contacts: Callable[[], Contacts]
    """Whom new workers turn to."""


class DeviceChanges:
    """Answers ``geartrain scale`` and ``geartrain nodes``.

    Args:
        settings: Of the run, as it began.
        observer: Hears of devices that do not leave.
        parts: What the changes act on.

    Raises:
        ConfigError: If the socket can't be made in the run directory.
    """

    def __init__(
        self, settings: LaunchSettings, observer: LaunchObserver, parts: Changeable
    ) -> None:
        self._settings = settings
        self._observer = observer
        self._parts = parts
        self._leave_until_s: dict[str, float] = {}  # by device that was asked to leave
        self._questions: list[tuple[FleetChange, CoordinatorQuestion]] = []
        self._is_training = False
        self._ending = ""
        self._socket = ControlSocket(settings.run_dir, self._view())

    def poll(self, *, is_training: bool) -> None:
        """Serve who asks, without waiting for anybody.

        Args:
            is_training: Whether workers take part by now.
        """
        self._is_training = is_training
        self._note_left()
        self._take_answers()
        self._socket.update(self._view())
        for change in self._socket.poll():
            try:
                self._carry_out(change)
            except (GeartrainError, OSError) as error:
                self._socket.answer(change, str(error), "DeviceError")
            self._socket.update(self._view())

    def end(self, reason: str) -> None:
        """Refuse all changes from now on.

        Args:
            reason: What the run does, such as ``is stopping``.
        """
        self._ending = reason

    def close(self) -> None:
        """Remove the socket; who waits for an answer is told that the run is over."""
        self._socket.close()

    # -- what is asked for --------------------------------------------------------------

    def _carry_out(self, change: FleetChange) -> None:
        for profile in change.add:
            self._add(profile)
        members = self._drop_absent(change.remove)
        if not members:
            self._socket.answer(change, _describe(change))
            return
        question = ask_to_drain(self._parts.coordinator, members, self._parts.network)
        self._questions.append((change, question))

    def _add(self, profile: DeviceProfile) -> None:
        name, group = profile.device_id, self._parts.group
        if all(worker.device.device_id != name for worker in group.workers):
            self._parts.devices.add(profile)
            group.add(profile, self._parts.contacts())
            return
        self._parts.comebacks.readmit(name)

    def _drop_absent(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Let those go that take no part; the others have to be asked."""
        members = []
        for worker in self._parts.group.workers:
            name = worker.device.device_id
            if name not in names:
                continue
            if not worker.is_away and worker.has_entered:
                members.append(name)
                continue
            worker.is_away = True
            worker.kill()
            self._parts.comebacks.note_left(name, _DRAINED)
        return tuple(members)

    def _take_answers(self) -> None:
        for change, question in list(self._questions):
            if question.is_open:
                continue
            self._questions.remove((change, question))
            if question.refusal is not None:
                self._socket.answer(change, question.refusal, "CommunicationError")
                continue
            until_s = time.monotonic() + _LEAVE_S
            self._leave_until_s |= dict.fromkeys(question.member_ids, until_s)
            self._socket.answer(change, _describe(change))

    def _note_left(self) -> None:
        for worker in self._parts.group.workers:
            name = worker.device.device_id
            until_s = self._leave_until_s.get(name)
            if until_s is None:
                continue
            if worker.is_away:
                del self._leave_until_s[name]
                # Also where it was lost meanwhile: it was to go.
                self._parts.comebacks.note_left(name, _DRAINED)
            elif time.monotonic() > until_s:
                del self._leave_until_s[name]
                self._observer.on_notice(
                    f"{name} was asked to leave and has not within {_LEAVE_S:.0f} s; it "
                    "still takes part"
                )

    # -- what is the case ---------------------------------------------------------------

    def _view(self) -> RunView:
        settings, fleet = self._settings, self._parts.group.fleet
        return RunView(
            run_id=settings.run_dir.name,
            devices=tuple(self._status(w) for w in self._parts.group.workers),
            min_devices=settings.min_devices,
            cores=cores_present(),
            oversubscribed=fleet.oversubscribed,
            ending=self._ending,
            fixed=_why_fixed(settings),
        )

    def _status(self, worker: Worker) -> DeviceStatus:
        name = worker.device.device_id
        record = self._parts.comebacks.state.records.get(name)
        runs = worker.is_running
        state = self._state(worker, runs=runs)
        reason = ""
        if state in {"waiting", "out"} and record is not None:
            reason = record.left_out or record.reason
        return DeviceStatus(
            profile=worker.device,
            state=state,
            rank=worker.rank,
            process_id=worker.process_id if runs else None,
            num_failures=record.num_failures if record is not None else 0,
            reason=reason,
        )

    def _state(self, worker: Worker, *, runs: bool) -> DeviceState:
        name = worker.device.device_id
        if worker.is_away:
            if self._parts.comebacks.returns(name):
                return "waiting"
            return "draining" if runs else "out"
        if name in self._leave_until_s:
            return "draining"
        if not runs:
            return "out"
        return "training" if worker.has_entered and self._is_training else "starting"


def _describe(change: FleetChange) -> str:
    texts = []
    if change.add:
        names = ", ".join(profile.device_id for profile in change.add)
        texts.append(f"{names}: joins at a step boundary once its worker is ready")
    if change.remove:
        names = ", ".join(change.remove)
        texts.append(f"{names}: leaves at the next step boundary")
    return "; ".join(texts)


def _why_fixed(settings: LaunchSettings) -> str:
    if settings.links is not None:
        return "each device of this run is a host with links that were made for it"
    if settings.plan_path is not None:
        return f"the run carries out {settings.plan_path} as it stands"
    return ""
