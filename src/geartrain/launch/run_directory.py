"""The run directory: what a run was started with, for people and for the workers."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from geartrain.checkpoint.retention import RetentionPolicy
from geartrain.devices.emulation.network import NetworkHost
from geartrain.devices.profile import DeviceProfile, Fleet
from geartrain.errors import ConfigError
from geartrain.launch.settings import LaunchSettings
from geartrain.parallel.save_spec import CHECKPOINTS_NAME, PeerMemorySpec, SaveSpec
from geartrain.parallel.worker_spec import (
    CoordinatorSpec,
    GoingOn,
    WorkerFailure,
    WorkerLoss,
    WorkerSpec,
)
from geartrain.telemetry import RunManifest, read_document, write_document

RUNS_DIR = Path("runs")
FLEET_NAME = "fleet.json"
MANIFEST_NAME = "run.json"
CHECKPOINT_NAME = "checkpoint"
"""Where the session saves the state when it is asked to stop."""

_ACCELERATORS_FIRST = ("cuda", "rocm", "npu", "xpu", "xla", "mps")


def create_run_directory(script: Path, wanted: Path | None = None) -> Path:
    """Make an empty run directory.

    Args:
        script: Names the directory where none is wanted: ``runs/<time>-<script>``.
        wanted: The user's choice; it may exist, but not hold a run.

    Raises:
        ConfigError: If it holds a run already or can't be made.
    """
    if wanted is not None and (wanted / MANIFEST_NAME).exists():
        msg = f"{wanted} holds a run already; choose another --run-dir or remove it"
        raise ConfigError(msg)
    try:
        if wanted is not None:
            wanted.mkdir(parents=True, exist_ok=True)
            return wanted.resolve()
        return _make_unused(time.strftime("%Y%m%d-%H%M%S") + f"-{script.stem}")
    except OSError as error:
        place = wanted or RUNS_DIR.resolve()
        msg = f"cannot make a run directory at {place}: {error.strerror}; use --run-dir"
        raise ConfigError(msg) from error


def order_fleet(fleet: Fleet) -> Fleet:
    """Put the fastest device first; the others keep their order.

    Rank 0 is never left out of a plan, so it should be a device that no plan would
    leave out.
    """
    fastest = max(fleet.devices, key=_speed)  # the first of several equal ones
    others = tuple(device for device in fleet.devices if device is not fastest)
    return dataclasses.replace(fleet, devices=(fastest, *others))  # links stay with it


def write_run_files(settings: LaunchSettings) -> None:
    """Write ``fleet.json`` and ``run.json``."""
    write_document(settings.run_dir / FLEET_NAME, settings.fleet)
    write_document(settings.run_dir / MANIFEST_NAME, describe_run(settings))


def forget_workers(run_dir: Path) -> None:
    """Remove what earlier workers of the run have left for the launcher."""
    for pattern in ("lost-*.json", "failure-*.json", GoingOn.FILE_NAME):
        for path in run_dir.glob(pattern):
            path.unlink(missing_ok=True)


def describe_run(settings: LaunchSettings) -> RunManifest:
    """What a run is started with."""
    return RunManifest(
        run_id=settings.run_dir.name,
        started_at_s=time.time(),
        script=str(settings.script),
        arguments=settings.arguments,
        fleet_spec=settings.fleet.spec,
        labels=settings.fleet.labels
        if settings.links is None
        else (*settings.fleet.labels, f"links {settings.links}"),
        versions=collect_versions(),
    )


def config_of(manifest: RunManifest) -> dict[str, Any]:  # Any: JSON
    """What another run is compared with, by name."""
    return {
        "script": manifest.script,
        "arguments": list(manifest.arguments),
        "fleet": manifest.fleet_spec,
        "labels": list(manifest.labels),
        "versions": dict(manifest.versions),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Contacts:
    """Whom the workers of a run turn to."""

    store_port: int
    """Where the rendezvous store listens."""
    store_host: str = "127.0.0.1"
    coordinator: CoordinatorSpec | None = None
    """None: there is none."""
    memory: Callable[[str], PeerMemorySpec | None] = lambda _node_id: None
    """What the workers of a node are told of its agent."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One process of one rank."""

    rank: int
    num_starts: int = 0
    """How many processes the rank has had before."""
    joins: bool = False
    """Whether the training is under way when it comes."""

    @property
    def incarnation(self) -> str:
        """``RANK.N``: the Nth process of the rank, from 0."""
        return f"{self.rank}.{self.num_starts}"


def grow_fleet(run_dir: Path, device: DeviceProfile) -> None:
    """Put one more device at the end of ``fleet.json``, before its worker is started.

    Raises:
        ConfigError: If the file can't be read or written.
    """
    path = run_dir / FLEET_NAME
    try:
        # As it stands: a richer document may say more than a fleet knows.
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} can't be read: {error}; no device can join this run"
        raise ConfigError(msg) from error
    document["devices"] = [*document["devices"], msgspec.to_builtins(device)]
    write_document(path, document)


def write_worker_spec(
    settings: LaunchSettings,
    seat: Seat,
    contacts: Contacts,
    *,
    host: NetworkHost | None = None,
) -> Path:
    """Write ``worker-RANK.json`` and return its path.

    Args:
        settings: Of the run.
        seat: Whose spec.
        contacts: Whom it turns to.
        host: The emulated host that the worker is on; None without emulated links.
    """
    plan_path, rank = settings.plan_path, seat.rank
    spec = WorkerSpec(
        rank=rank,
        world_size=len(settings.fleet.devices),
        fleet_path=str(settings.run_dir / FLEET_NAME),
        run_dir=str(settings.run_dir),
        store_host=contacts.store_host,
        store_port=contacts.store_port,
        interface=None if host is None else host.interface,
        address=None if host is None else host.address,
        mode=settings.mode,
        plan_path=None if plan_path is None else str(plan_path.resolve()),
        deterministic=settings.deterministic,
        timeout_s=settings.peer_timeout_s,
        replan_threshold=settings.replan_threshold,
        tail_fraction=settings.tail_fraction,
        on_loss=settings.on_loss,
        min_devices=settings.min_devices,
        saves=_saves_of(settings),
        resume=settings.resume,
        memory=contacts.memory(settings.fleet.devices[rank].node_id),
        coordinator=contacts.coordinator,
        incarnation=seat.incarnation,
        joins=seat.joins,
        torch_threads=threads_of(settings.fleet.devices[rank]),
    )
    path = spec_path(settings.run_dir, rank)
    write_document(path, spec)
    return path


def _saves_of(settings: LaunchSettings) -> SaveSpec | None:
    if settings.cadence is None:
        return None
    return SaveSpec(
        directory=str(settings.run_dir / CHECKPOINTS_NAME),
        durable_url=settings.durable_url,
        cadence=settings.cadence,
        retention=RetentionPolicy(keep_last=settings.keep_last),
        config=config_of(describe_run(settings)),
    )


def threads_of(device: DeviceProfile) -> int | None:
    """Intra-op threads: an emulated device is one thread, a real one decides itself."""
    return 1 if device.kind == "emulated" else None


def spec_path(run_dir: Path, rank: int) -> Path:
    """Where the worker's spec lies."""
    return run_dir / f"worker-{rank}.json"


def log_path(run_dir: Path, rank: int) -> Path:
    """Where the worker's output is kept."""
    return run_dir / f"worker-{rank}.log"


def failure_path(run_dir: Path, rank: int) -> Path:
    """Where a failing worker says why."""
    return run_dir / f"failure-{rank}.json"


def read_failure(run_dir: Path, rank: int) -> WorkerFailure | None:
    """The worker's failure, if it has written one."""
    path = failure_path(run_dir, rank)
    return read_document(path, WorkerFailure) if path.exists() else None


def read_loss(run_dir: Path, incarnation: str) -> WorkerLoss | None:
    """That the others go on without a worker's process, if they have said so."""
    path = run_dir / WorkerLoss.file_name(incarnation)
    return read_document(path, WorkerLoss) if path.exists() else None


def goes_on(run_dir: Path) -> bool:
    """Whether the workers can go on by now where one of them is lost."""
    return (run_dir / GoingOn.FILE_NAME).exists()


def collect_versions() -> dict[str, str]:
    """Versions that a result depends on, found without importing anything big."""
    versions = {
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in ("geartrain", "torch", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _make_unused(name: str) -> Path:
    RUNS_DIR.mkdir(exist_ok=True)
    attempt = 1
    while True:
        path = RUNS_DIR / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:  # two runs started within a second
            attempt += 1
        else:
            return path.resolve()


def _speed(device: DeviceProfile) -> tuple[int, float, float]:
    accelerated = int(device.kind in _ACCELERATORS_FIRST)
    rate = device.flop_per_s.get("float32")
    return (accelerated, device.core_fraction or 0.0, rate.per_s if rate else 0.0)
