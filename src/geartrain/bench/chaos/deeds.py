"""What is done to a run for each kind of fault, and how it is undone."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from geartrain.bench.chaos.capabilities import COORDINATOR_MODULE
from geartrain.bench.chaos.flipped_bits import flip_in_copy
from geartrain.bench.chaos.lab_links import find_link
from geartrain.bench.chaos.leftovers import marked_processes
from geartrain.bench.chaos.schedule import Fault
from geartrain.bench.chaos.victims import NotPossibleError
from geartrain.devices.emulation.control import CONTROL_NAME
from geartrain.devices.emulation.network import LinkRate, NetworkSpec
from geartrain.telemetry import read_document, write_document

Undo = Callable[[], None]

_SLOWED_TO = 5.0
_SHAPED_TO = 8.0
_LEAST_FRACTION = 0.1
"""A slow device, not a starved host: its process also makes connections and plans."""
_FILLER_NAME = ".chaos-filler"
_FILL_BYTES = 2**20


@dataclass(slots=True, kw_only=True)
class Scene:
    """What deeds act on."""

    launcher_id: int
    mark: str
    """Of all processes of the run."""
    run_dir: Path
    """As this process reaches it."""
    folder: Path
    """Of the chaos run, for copies."""
    core_fractions: Mapping[str, float]
    """Of the emulated devices."""
    links: NetworkSpec | None = None
    saved: Path | None = None
    """Where the script saves its state, relative to the run directory or absolute."""
    seed: int = 0
    worker_ids: dict[str, int] = field(default_factory=dict)
    """Process id of each device's worker, the newest one."""
    num_flips: int = 0

    def worker_of(self, device_id: str) -> int:
        """The process id of a device's worker that still runs.

        Raises:
            NotPossibleError: If there is none.
        """
        process_id = self.worker_ids.get(device_id)
        if process_id is None or not is_running(process_id):
            msg = f"{device_id} has no worker that runs"
            raise NotPossibleError(msg)
        return process_id

    @property
    def saved_path(self) -> Path | None:
        """Where the state is saved, as this process reaches it."""
        return None if self.saved is None else self.run_dir / self.saved


def is_running(process_id: int) -> bool:
    """Whether a process is there and has not ended; a stopped one is there."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def perform(scene: Scene, fault: Fault) -> Undo | None:
    """Make a fault.

    Returns:
        What undoes it; None where it has no end.

    Raises:
        NotPossibleError: If it finds nothing to act on.
        GeartrainError: If the machine refuses.
    """
    return _DEEDS[fault.kind](scene, fault)


def _kill(scene: Scene, fault: Fault) -> None:
    _signal(scene.worker_of(fault.device_id), signal.SIGKILL)


def _kill_all(scene: Scene, fault: Fault) -> None:
    del fault  # it is nobody's device
    process_ids = [p for p in scene.worker_ids.values() if is_running(p)]
    for process_id in process_ids:
        with contextlib.suppress(NotPossibleError):  # it ended by itself just now
            _signal(process_id, signal.SIGKILL)
    if not process_ids:
        msg = "no worker runs just now"
        raise NotPossibleError(msg)


def _stop(scene: Scene, fault: Fault) -> Undo:
    process_id = scene.worker_of(fault.device_id)
    _signal(process_id, signal.SIGSTOP)

    def proceed() -> None:
        with contextlib.suppress(NotPossibleError):  # given up and killed meanwhile
            _signal(process_id, signal.SIGCONT)

    return proceed


def _freeze(scene: Scene, fault: Fault) -> None:
    _signal(scene.worker_of(fault.device_id), signal.SIGSTOP)


def _slow(scene: Scene, fault: Fault) -> Undo:
    scene.worker_of(fault.device_id)
    device_id = fault.device_id
    fraction = scene.core_fractions[device_id]
    slow = max(fraction / _SLOWED_TO, min(_LEAST_FRACTION, fraction / 2))
    _set_core_fraction(scene, device_id, slow)

    def hurry() -> None:
        _set_core_fraction(scene, device_id, fraction)

    return hurry


def _link_slow(scene: Scene, fault: Fault) -> Undo:
    link = find_link(scene.launcher_id, scene.worker_of(fault.device_id))
    assert scene.links is not None
    rate = scene.links.hosts[link.host_index]
    link.set_rate(
        LinkRate(
            send_bytes_per_s=rate.send_bytes_per_s / _SHAPED_TO,
            receive_bytes_per_s=rate.receive_bytes_per_s / _SHAPED_TO,
        )
    )
    return lambda: link.set_rate(rate)


def _link_cut(scene: Scene, fault: Fault) -> Undo:
    link = find_link(scene.launcher_id, scene.worker_of(fault.device_id))
    link.cut()
    return link.restore


def _disk_full(scene: Scene, fault: Fault) -> Undo:
    del fault  # the disk is the run's, not a device's
    filler = scene.run_dir / _FILLER_NAME
    _fill(filler)

    def empty() -> None:
        filler.unlink(missing_ok=True)

    return empty


def _bit_flip(scene: Scene, fault: Fault) -> None:
    saved = scene.saved_path
    if saved is None or not saved.is_dir():
        msg = "nothing has been saved yet"
        raise NotPossibleError(msg)
    copy = scene.folder / "flips" / str(scene.num_flips)
    dice = random.Random(f"{scene.seed}/{fault.at_s}")  # noqa: S311 - repeatable
    try:
        flip_in_copy(saved, copy, dice)
    except OSError as error:  # a newer save has taken its place meanwhile
        shutil.rmtree(copy, ignore_errors=True)
        raise NotPossibleError(str(error)) from error
    scene.num_flips += 1


def _kill_coordinator(scene: Scene, fault: Fault) -> None:
    del fault  # it is nobody's device
    process_id = next(
        (p for p in marked_processes(scene.mark) if _runs(p, COORDINATOR_MODULE)), None
    )
    if process_id is None:
        msg = f"the run has no process {COORDINATOR_MODULE} just now"
        raise NotPossibleError(msg)
    _signal(process_id, signal.SIGKILL)


def _runs(process_id: int, module: str) -> bool:
    """Whether a process is ``python -m module``."""
    try:
        words = Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile
        return False
    return module.encode() in words


_DEEDS: Mapping[str, Callable[[Scene, Fault], Undo | None]] = {
    "kill": _kill,
    "stop": _stop,
    "freeze": _freeze,
    "slow": _slow,
    "link_slow": _link_slow,
    "link_cut": _link_cut,
    "disk_full": _disk_full,
    "bit_flip": _bit_flip,
    "kill_in_rebuild": _kill,
    "kill_in_save": _kill,
    "kill_in_heal": _kill,
    "coordinator_kill": _kill_coordinator,
    "kill_all": _kill_all,
}


def _signal(process_id: int, number: signal.Signals) -> None:
    try:
        os.kill(process_id, number)
    except ProcessLookupError as error:
        msg = f"process {process_id} has ended"
        raise NotPossibleError(msg) from error


def _set_core_fraction(scene: Scene, device_id: str, fraction: float) -> None:
    """As ``geartrain emulate set`` does, but also where the run has a disk of its own."""
    path = scene.run_dir / CONTROL_NAME
    fractions = read_document(path, dict[str, float])
    write_document(path, fractions | {device_id: fraction})


def _fill(path: Path) -> None:
    """Write until nothing more fits; first in large pieces, then in small ones."""
    with path.open("wb", buffering=0) as stream:
        for num_bytes in (_FILL_BYTES, 4096, 1):
            piece = bytes(num_bytes)
            try:
                while stream.write(piece) == num_bytes:
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
