"""Runs a script on a fleet: starts the workers, watches them, ends them together."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from geartrain.errors import DeviceError
from geartrain.launch.coordinator_process import (
    CoordinatorProcess,
    Place,
    needs_coordinator,
)
from geartrain.launch.emulated_devices import EmulatedDevices
from geartrain.launch.emulated_network import EmulatedNetwork
from geartrain.launch.output import SteadyObserver
from geartrain.launch.processes import StoreProcess
from geartrain.launch.run_directory import (
    CHECKPOINT_NAME,
    Contacts,
    goes_on,
    log_path,
    order_fleet,
    write_run_files,
)
from geartrain.launch.script_failure import is_deliberate, message_of
from geartrain.launch.settings import LaunchObserver, LaunchResult, LaunchSettings
from geartrain.launch.stop_requests import StopRequests
from geartrain.launch.supervision import (
    INTERRUPTED_EXIT_CODE,
    Situation,
    Verdict,
    WorkerState,
    decide,
    excluded_workers,
    leader,
    lost_workers,
)
from geartrain.launch.workers import WorkerGroup, tail_of_log

_TICK_S = 0.05


def launch(settings: LaunchSettings, observer: LaunchObserver) -> LaunchResult:
    """Run a script on a fleet, a worker process a device, until all have ended.

    Call it from the main thread, so that Ctrl-C stops the run in order: the workers
    save their state and end; a second one kills them.

    Args:
        settings: What to run, where; the fastest device becomes rank 0.
        observer: Is told what is printed and what happens.

    Returns:
        How it ended. Nothing that was started still runs.

    Raises:
        ConfigError: If a file of the run can't be written or read.
        DeviceError: If an emulated device can't be set up or a worker does not start.
    """
    observer = SteadyObserver(observer)
    with ExitStack() as stack:
        requests = stack.enter_context(StopRequests())
        network = stack.enter_context(closing(EmulatedNetwork(settings)))
        fleet = order_fleet(network.name_nodes(settings.fleet))
        settings = replace(settings, fleet=fleet)
        write_run_files(settings)
        devices = stack.enter_context(closing(EmulatedDevices(settings)))
        store = stack.enter_context(
            closing(StoreProcess(network.store_address, network.store_command))
        )
        coordinator = _open_coordinator(settings, network)
        if coordinator is not None:
            stack.enter_context(closing(coordinator))
        group = stack.enter_context(closing(WorkerGroup(settings, observer, network)))
        run = _Run(settings, observer, requests, _Parts(devices, group, coordinator))
        if not run.start(store):
            return _interrupted_early(settings)
        verdict = run.watch()
        saved = run.has_saved
    observer.on_tick()  # the last records are on disk now
    return _result(settings, verdict, saved=saved)


def _open_coordinator(
    settings: LaunchSettings, network: EmulatedNetwork
) -> CoordinatorProcess | None:
    if not needs_coordinator(settings):
        return None
    place = Place(network.store_address, network.store_command)
    return CoordinatorProcess(settings, place)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a run is made of, besides its store."""

    devices: EmulatedDevices
    group: WorkerGroup
    coordinator: CoordinatorProcess | None


class _Run:
    """The thin loop around ``decide``."""

    def __init__(
        self,
        settings: LaunchSettings,
        observer: LaunchObserver,
        requests: StopRequests,
        parts: _Parts,
    ) -> None:
        self._settings = settings
        self._coordinator = parts.coordinator
        self._observer = observer
        self._requests = requests
        self._devices = parts.devices
        self._group = parts.group
        self._asked = False
        self._told: set[int] = set()  # ranks whose loss the user knows of
        self._started_at_s = time.time()
        self._group.workers[0].show_output(0.0)

    def start(self, store: StoreProcess) -> bool:
        """Let the workers go once all are ready; False when asked to stop before."""
        deadline_s = time.monotonic() + self._settings.start_timeout_s
        while not self._are_ready(store):
            if self._requests.count:
                return False
            if time.monotonic() > deadline_s:
                raise DeviceError(self._late_message(store))
            time.sleep(_TICK_S)
        port = store.poll_port()
        assert port is not None
        contacts = Contacts(
            store_host=store.address,
            store_port=port,
            coordinator=None if self._coordinator is None else self._coordinator.spec,
        )
        for rank, worker in enumerate(self._group.workers):
            worker.write_spec(contacts)
            device = self._settings.fleet.devices[rank]
            self._devices.attach(device.device_id, worker.process.pid)
        self._devices.restart_clock()
        for worker in self._group.workers:
            worker.let_go()
        return True

    def watch(self) -> Verdict:
        """Watch until the run is to end."""
        while True:
            situation = self._situation()
            verdict = decide(situation)
            if verdict.action == "end":
                self._show_leader(situation)
                return verdict
            self._give_up_lost(situation)
            self._show_leader(situation)
            self._pass_on_stop_request()
            self._keep_coordinator()
            self._devices.poll()
            self._observer.on_tick()
            time.sleep(_TICK_S)

    @property
    def has_saved(self) -> bool:
        """Whether the state was saved since the run began."""
        manifest = self._settings.run_dir / CHECKPOINT_NAME
        return manifest.is_dir() and manifest.stat().st_mtime >= self._started_at_s - 1

    def _are_ready(self, store: StoreProcess) -> bool:
        ready = [worker.poll_ready() for worker in self._group.workers]
        ended = [state for state in self._states() if state.exit_code is not None]
        if ended:
            raise DeviceError(self._early_message(ended[0]))
        return store.poll_port() is not None and all(ready)

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

    def _late_message(self, store: StoreProcess) -> str:
        late = [
            state.name
            for state, worker in zip(self._states(), self._group.workers, strict=True)
            if not worker.poll_ready()
        ]
        if store.poll_port() is None:
            late.append("the rendezvous store")
        timeout_s = self._settings.start_timeout_s
        return (
            f"{', '.join(late)} did not start within {timeout_s:.0f} s; "
            "check the machine's load, or raise the start timeout"
        )

    def _situation(self) -> Situation:
        return Situation(
            workers=self._states(),
            now_s=time.time(),
            stop_requested_at_s=self._requests.first_at_s,
            kill_requested=self._requests.count > 1,
            stop_timeout_s=self._settings.stop_timeout_s,
            goes_on=goes_on(self._settings.run_dir),
            min_devices=self._settings.min_devices,
            broken=self._coordinator.failure if self._coordinator else None,
        )

    def _keep_coordinator(self) -> None:
        if self._coordinator is None:
            return
        notice = self._coordinator.poll()
        if notice is not None:
            self._observer.on_notice(notice)

    def _give_up_lost(self, situation: Situation) -> None:
        """Kill workers that the others go on without, and say so."""
        for state in excluded_workers(situation):
            self._group.workers[state.rank].kill()
        for state in lost_workers(situation):
            if state.loss is None or state.rank in self._told:
                continue
            self._told.add(state.rank)
            self._observer.on_notice(
                f"lost {state.name}: {state.loss.reason}; the others go on"
            )

    def _show_leader(self, situation: Situation) -> None:
        """Show what the next one prints where the one that led was lost."""
        rank = leader(situation).rank
        losses = [w.loss for w in situation.workers[:rank] if w.loss is not None]
        if losses:
            self._group.workers[rank].show_output(max(loss.at_s for loss in losses))

    def _states(self) -> tuple[WorkerState, ...]:
        return tuple(
            worker.state(self._devices.out_of_memory_kills(device.device_id))
            for worker, device in zip(
                self._group.workers, self._settings.fleet.devices, strict=True
            )
        )

    def _pass_on_stop_request(self) -> None:
        if not self._requests.count or self._asked:
            return
        self._asked = True
        waiting = [state.name for state in self._states() if state.exit_code is None]
        self._observer.on_notice(
            f"stopping: {', '.join(waiting)} save at the next step boundary, within "
            f"{self._settings.stop_timeout_s:.0f} s; "
            "press Ctrl-C again to kill without saving"
        )
        for worker in self._group.workers:
            worker.ask_to_stop()


def _interrupted_early(settings: LaunchSettings) -> LaunchResult:
    return LaunchResult(
        outcome="stopped",
        exit_code=INTERRUPTED_EXIT_CODE,
        run_dir=settings.run_dir,
        message="stopped before the script began; nothing to save",
    )


def _result(settings: LaunchSettings, verdict: Verdict, *, saved: bool) -> LaunchResult:
    checkpoint = settings.run_dir / CHECKPOINT_NAME if saved else None
    if verdict.outcome == "failed":
        message = _failed_message(settings, verdict)
    elif verdict.outcome == "stopped":
        fate = "nothing was saved" if checkpoint is None else f"saved in {checkpoint}"
        message = f"{verdict.reason}; {fate}"
    else:
        message = f"finished; the run is in {settings.run_dir}"
    return LaunchResult(
        outcome=verdict.outcome,
        exit_code=verdict.exit_code,
        run_dir=settings.run_dir,
        message=message,
        details=_details(settings, verdict),
        checkpoint_dir=checkpoint,
    )


def _failed_message(settings: LaunchSettings, verdict: Verdict) -> str:
    cause = verdict.cause
    if cause is None:
        return f"{verdict.reason}; logs are in {settings.run_dir}"
    failure = cause.failure
    alike = [w for w in verdict.others if _error_of(w) == _error_of(cause) is not None]
    names = ", ".join(w.name for w in sorted([cause, *alike], key=lambda w: w.rank))
    if failure is not None and is_deliberate(failure) and not failure.secondary:
        text = f"{message_of(failure)}\n  raised by {names}"
    else:
        text = f"{names}: {verdict.reason}"
    if cause.out_of_memory_kills and failure is not None:
        text += "; the kernel killed a process of it for lack of memory"
    rest = [other.name for other in verdict.others if other not in alike]
    if rest:
        text += f"; {', '.join(rest)} failed in consequence"
    return f"{text}; logs are in {settings.run_dir}"


def _error_of(worker: WorkerState) -> str | None:
    return None if worker.failure is None else worker.failure.error


def _details(settings: LaunchSettings, verdict: Verdict) -> str:
    cause = verdict.cause
    if cause is None:
        return ""
    if cause.failure is None:
        return "" if cause.rank == 0 else tail_of_log(settings.run_dir, cause.rank)
    if is_deliberate(cause.failure) and not cause.failure.secondary:
        return ""
    return cause.failure.traceback
