"""Runs a script on a fleet: starts the workers, watches them, ends them together."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from geartrain.errors import ConfigError
from geartrain.launch.comebacks import Comebacks
from geartrain.launch.coordinator_process import (
    CoordinatorProcess,
    Place,
    needs_coordinator,
)
from geartrain.launch.device_changes import Changeable, DeviceChanges
from geartrain.launch.emulated_devices import EmulatedDevices
from geartrain.launch.emulated_network import EmulatedNetwork
from geartrain.launch.node_agents import NodeAgents
from geartrain.launch.output import SteadyObserver
from geartrain.launch.processes import StoreProcess
from geartrain.launch.restoring import find_in_memory, restore
from geartrain.launch.results import interrupted_early, result_of
from geartrain.launch.run_directory import order_fleet, write_run_files
from geartrain.launch.run_loop import Parts, RunLoop
from geartrain.launch.settings import LaunchObserver, LaunchResult, LaunchSettings
from geartrain.launch.spare_pool import SparePool
from geartrain.launch.stop_requests import StopRequests
from geartrain.launch.supervision import INTERRUPTED_EARLY, Verdict
from geartrain.launch.workers import Surroundings, WorkerGroup


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
    comebacks = Comebacks(settings.respawn if needs_coordinator(settings) else None)
    with ExitStack() as stack:
        requests = stack.enter_context(StopRequests())
        network = stack.enter_context(closing(EmulatedNetwork(settings)))
        # They and what they hold outlive the workers.
        agents = stack.enter_context(closing(NodeAgents(settings, network)))
        lasting = _Lasting(observer, requests, comebacks, network, agents)
        while True:
            verdict, result = _attempt(settings, lasting)
            if verdict.action != "restore":
                return result
            memory = find_in_memory(agents, network)
            restored = restore(settings, comebacks, requests, memory)
            if restored is None:
                return result
            observer.on_notice(restored.notice)
            settings = restored.settings
            if settings.resume is None or settings.resume.memory is None:
                agents.forget()


@dataclass(frozen=True, slots=True)
class _Lasting:
    """What stays when a run goes on with other workers."""

    observer: LaunchObserver
    requests: StopRequests
    comebacks: Comebacks
    network: EmulatedNetwork
    agents: NodeAgents


def _attempt(settings: LaunchSettings, lasting: _Lasting) -> tuple[Verdict, LaunchResult]:
    """Run until all have ended, or nobody holds the state any more."""
    observer, network, requests = lasting.observer, lasting.network, lasting.requests
    comebacks = lasting.comebacks
    with ExitStack() as stack:
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
        spares = stack.enter_context(closing(SparePool(settings)))
        around = Surroundings(settings, observer, network, spares)
        group = stack.enter_context(closing(WorkerGroup(around)))
        parts = Parts(devices, store, group, coordinator, comebacks, spares, lasting.agents)
        run = RunLoop(settings, observer, requests, parts)
        if not run.start():
            return INTERRUPTED_EARLY, interrupted_early(settings)
        changes = _open_changes(settings, observer, network, parts)
        if changes is not None:
            stack.enter_context(closing(changes))
        verdict = run.watch(changes)
        saved = run.has_saved
    observer.on_tick()  # the last records are on disk now
    return verdict, result_of(settings, verdict, saved=saved)


def _open_coordinator(
    settings: LaunchSettings, network: EmulatedNetwork
) -> CoordinatorProcess | None:
    if not needs_coordinator(settings):
        return None
    place = Place(network.store_address, network.store_command)
    return CoordinatorProcess(settings, place)


def _open_changes(
    settings: LaunchSettings,
    observer: LaunchObserver,
    network: EmulatedNetwork,
    parts: Parts,
) -> DeviceChanges | None:
    """Let others ask for other devices; None where nobody could come or go."""
    if parts.coordinator is None:
        return None
    changeable = Changeable(
        devices=parts.devices,
        network=network,
        group=parts.group,
        comebacks=parts.comebacks,
        coordinator=parts.coordinator.spec,
        contacts=parts.contacts,
    )
    try:
        return DeviceChanges(settings, observer, changeable)
    except ConfigError as error:  # some file systems have no sockets
        observer.on_notice(f"devices can't be changed while this runs: {error}")
        return None
