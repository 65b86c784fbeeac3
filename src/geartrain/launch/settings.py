"""What is asked of the launcher, and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from geartrain.checkpoint.cadence import Cadence
from geartrain.checkpoint.retention import RetentionPolicy
from geartrain.devices.emulation.network import NetworkSpec
from geartrain.devices.emulation.network.kernel import check_networks_usable
from geartrain.devices.emulation.schedule import check_schedule, parse_schedule
from geartrain.devices.host import cores_present
from geartrain.devices.profile import Fleet
from geartrain.errors import ConfigError
from geartrain.launch.respawn import RespawnSettings
from geartrain.parallel.save_spec import PeerMemorySettings, ResumeSpec
from geartrain.parallel.worker_spec import OnLoss
from geartrain.planner import Plan
from geartrain.planner.pinned_plan import check_devices
from geartrain.telemetry import read_document

Outcome = Literal["finished", "failed", "stopped"]
StreamName = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """One script on one fleet."""

    script: Path
    fleet: Fleet
    run_dir: Path
    arguments: tuple[str, ...] = ()
    mode: Literal["train", "plan"] = "train"
    plan_path: Path | None = None
    deterministic: bool = False
    replan_threshold: float = 0.15
    tail_fraction: float = 0.0
    on_loss: OnLoss = "finish"
    """What the others do where a worker is lost while training."""
    min_devices: int = 1
    """With fewer left the run ends."""
    respawn: RespawnSettings | None = field(default_factory=RespawnSettings)
    """How often lost workers are started again; None: never."""
    warm_spares: bool = True
    """Keep a process ready from which they start at once."""
    cadence: Cadence | None = field(default_factory=Cadence)
    """How often the state is saved while training; None: never."""
    durable_url: str | None = None
    """A store that outlives this host, such as ``s3://bucket/run``; None: the state is
    saved in the run directory only."""
    keep_last: int = 3
    """Versions kept in the run directory."""
    peer_memory: PeerMemorySettings | None = field(default_factory=PeerMemorySettings)
    """Keep the state in the memory of the nodes, too; None: don't."""
    resume: ResumeSpec | None = None
    """What training goes on from; None: it begins."""
    schedule_path: Path | None = None
    """CSV of core fractions over time, for emulated devices."""
    links: NetworkSpec | None = None
    """Each device is a host of its own, emulated, with these links; in fleet order."""
    preload: tuple[str, ...] = ()
    """Modules that workers import at full speed, before an emulated device is throttled."""
    start_timeout_s: float = 180.0
    """Deadline for every worker to have imported what it preloads."""
    stop_timeout_s: float = 60.0
    """Deadline for the workers to save and end once asked to stop."""
    peer_timeout_s: float = 300.0
    """Deadline of a worker's wait for its peers outside a step."""

    def __post_init__(self) -> None:
        check_script(self.script)
        RetentionPolicy(keep_last=self.keep_last)  # checks it
        if self.durable_url is not None and self.cadence is None:
            msg = f"durable_url={self.durable_url!r} needs a cadence; nothing is saved else"
            raise ConfigError(msg)
        if not (self.replan_threshold > 0 and math.isfinite(self.replan_threshold)):
            msg = (
                f"replan_threshold={self.replan_threshold} must be > 0; "
                "0.15 re-plans on changes of 15 %"
            )
            raise ConfigError(msg)
        if not 0 <= self.tail_fraction < 1:
            msg = f"tail_fraction={self.tail_fraction} must lie in 0..1, 1 left out"
            raise ConfigError(msg)
        if not 1 <= self.min_devices <= len(self.fleet.devices):
            msg = (
                f"min_devices={self.min_devices} must lie in "
                f"1..{len(self.fleet.devices)}, the devices of the fleet"
            )
            raise ConfigError(msg)
        if self.plan_path is not None and not self.plan_path.is_file():
            msg = f"no plan at {self.plan_path}; write one with geartrain plan -o"
            raise ConfigError(msg)
        if self.plan_path is not None:
            device_ids = [device.device_id for device in self.fleet.devices]
            check_devices(read_document(self.plan_path, Plan), device_ids)
        if self.schedule_path is not None:
            _check_schedule(self.schedule_path, self.fleet)
        if self.links is not None:
            _check_links(self.links, self.fleet)


def _check_schedule(path: Path, fleet: Fleet) -> None:
    fractions = {
        device.device_id: device.core_fraction
        for device in fleet.devices
        if device.core_fraction is not None
    }
    if not fractions:
        msg = (
            f"{path} schedules core fractions, but the fleet {fleet.spec!r} has no "
            "emulated device; leave it out"
        )
        raise ConfigError(msg)
    check_schedule(
        parse_schedule(path),
        fractions,
        cores_present(),
        oversubscribe=fleet.oversubscribed,
    )


def _check_links(links: NetworkSpec, fleet: Fleet) -> None:
    real = [device.device_id for device in fleet.devices if device.kind != "emulated"]
    if real:
        msg = (
            f"links are emulated between emulated devices, but {', '.join(real)} of the "
            "fleet are real; leave --links out, or use a fleet such as emulated:0.5,0.5"
        )
        raise ConfigError(msg)
    if links.num_hosts != len(fleet.devices):
        msg = (
            f"links describe {links.num_hosts} hosts, but the fleet {fleet.spec!r} has "
            f"{len(fleet.devices)} devices; each device is a host of its own"
        )
        raise ConfigError(msg)
    check_networks_usable()


def check_script(script: Path) -> None:
    """Refuse a script that does not exist.

    Raises:
        ConfigError: If it is not a file.
    """
    if not script.is_file():
        msg = f"no script at {script}; name a Python file that exists"
        raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """How the run ended."""

    outcome: Outcome
    exit_code: int
    """What the launcher's own process should end with."""
    run_dir: Path
    message: str
    """One line for people: what happened and where to look."""
    details: str = ""
    """The traceback of the worker that failed, or the end of its log."""
    checkpoint_dir: Path | None = None
    """Where the state was saved when the run was stopped."""


class LaunchObserver(Protocol):
    """Is told what happens while the workers run."""

    def on_output(self, stream: StreamName, data: bytes) -> None:
        """Take what the leading worker's script printed. Called from other threads."""

    def on_notice(self, text: str) -> None:
        """Take a line of the launcher to the user."""

    def on_tick(self) -> None:
        """Refresh what is shown; called some 20 times a second."""


class SilentObserver:
    """Shows nothing; the logs in the run directory have it all."""

    def on_output(self, stream: StreamName, data: bytes) -> None:
        """Drop the output."""

    def on_notice(self, text: str) -> None:
        """Drop the notice."""

    def on_tick(self) -> None:
        """Show nothing."""
