"""Goes on where all workers of a run were lost at once, with the newest state there is.

That is what the nodes' agents hold in memory, or else the last save.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from geartrain.devices.profile import DeviceProfile, Fleet
from geartrain.errors import ConfigError, GeartrainError
from geartrain.launch.run_directory import FLEET_NAME, forget_workers
from geartrain.parallel.save_spec import MemorySource, ResumeSpec
from geartrain.telemetry import read_document

if TYPE_CHECKING:
    from geartrain.checkpoint.agent.listing import AgentAccess
    from geartrain.launch.comebacks import Comebacks
    from geartrain.launch.emulated_network import EmulatedNetwork
    from geartrain.launch.node_agents import NodeAgents
    from geartrain.launch.settings import LaunchSettings
    from geartrain.launch.stop_requests import StopRequests
    from geartrain.parallel.resume import Resumable

logger = logging.getLogger(__name__)

_TICK_S = 0.05
_SETTLED_S = 0.2
_SETTLE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """How a run goes on."""

    settings: LaunchSettings
    notice: str
    """For the user: steps are made again."""


def find_in_memory(agents: NodeAgents, network: EmulatedNetwork) -> MemorySource | None:
    """Ask a run's agents for the newest state that they hold whole.

    Returns:
        None where there is none.
    """
    access = agents.access
    if access is None:
        return None
    agents.poll()  # of those that have died since nothing is asked
    end_s = time.monotonic() + _SETTLE_S
    found: MemorySource | None = None
    while True:
        # Agents let the workers go first: what these left behind may still be looked at.
        before, found = found, _ask(access, network)
        if (found is not None and found == before) or time.monotonic() > end_s:
            return found
        time.sleep(_SETTLED_S)


def _ask(access: AgentAccess, network: EmulatedNetwork) -> MemorySource | None:
    try:
        with network.coordinator_side():
            recovery = access.open_recovery()
            try:
                return MemorySource(access=access, source=recovery.find_whole())
            finally:
                recovery.close()
    except GeartrainError as error:
        logger.debug("%s", error)
        return None


def restore(
    settings: LaunchSettings,
    comebacks: Comebacks,
    requests: StopRequests,
    memory: MemorySource | None = None,
) -> Restored | None:
    """Find what the run can go on from, and wait as long as its devices must.

    Args:
        settings: Of the run.
        comebacks: Which devices may start again, and when.
        requests: To stop, which end the wait.
        memory: What agents hold.

    Returns:
        None where there is neither that nor a save, or too few devices are left that have
        neither failed too often nor been let go, or the run can't do without one of them,
        or a stop was asked for.
    """
    if not comebacks.are_possible:
        return None
    left = tuple(d for d in _devices(settings) if d.device_id not in comebacks.left_out)
    if len(left) < max(settings.min_devices, 1):
        return None
    spec = choose(memory, _find(settings))
    if spec is None:
        return None
    fleet = replace(settings.fleet, devices=left)
    try:
        settings = replace(settings, fleet=fleet, resume=spec)
    except ConfigError:  # emulated links, a plan or a schedule are for all devices
        return None
    if not _wait(comebacks, requests):
        return None
    forget_workers(settings.run_dir)
    if spec.memory is not None:
        place = "what the nodes hold in memory"
    else:
        place = spec.snapshot or spec.stores[0]
    notice = (
        "all workers were lost at once: the run goes on after step "
        f"{spec.step}, from {place}; later steps are made again"
    )
    return Restored(settings=settings, notice=notice)


def choose(memory: MemorySource | None, saved: Resumable | None) -> ResumeSpec | None:
    """The newer of what there is in memory and on disk; the latter serves for both."""
    on_disk = None if saved is None else saved.spec
    if memory is None or (on_disk is not None and on_disk.step > memory.source.step):
        return on_disk
    return replace(on_disk or ResumeSpec(), memory=memory, step=memory.source.step)


def _devices(settings: LaunchSettings) -> tuple[DeviceProfile, ...]:
    """Those that the run began with, in the order of its emulated hosts, and later ones."""
    first = settings.fleet.devices
    known = {device.device_id for device in first}
    fleet = read_document(settings.run_dir / FLEET_NAME, Fleet)  # in rank order
    return (*first, *(d for d in fleet.devices if d.device_id not in known))


def _find(settings: LaunchSettings) -> Resumable | None:
    from geartrain.parallel.resume import find_resumable  # noqa: PLC0415 - imports torch

    others = () if settings.durable_url is None else (settings.durable_url,)
    for place in (str(settings.run_dir), *others):
        try:
            return find_resumable(place, others if place not in others else ())
        except GeartrainError:
            continue
    return None


def _wait(comebacks: Comebacks, requests: StopRequests) -> bool:
    """Wait until all devices may start again; False where a stop is asked for."""
    names = {name for name in comebacks.state.records if comebacks.returns(name)}
    while not names <= set(comebacks.due):
        if requests.count:
            return False
        time.sleep(_TICK_S)
    for name in names:
        comebacks.note_started(name)
    return True
