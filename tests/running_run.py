"""A run that changes its devices when it is asked to, as the launcher does; no workers."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from geartrain.devices.profile import DeviceProfile
from geartrain.launch.control_messages import (
    DeviceState,
    DeviceStatus,
    FleetChange,
    RunView,
)
from geartrain.launch.control_socket import ControlSocket
from geartrain.telemetry import RunManifest, write_document


def device(
    name: str,
    state: DeviceState = "training",
    *,
    node_id: str = "here",
    core_fraction: float | None = None,
    rank: int | None = None,
    reason: str = "",
) -> DeviceStatus:
    kind = name.partition(":")[0]
    if kind == "emulated" and core_fraction is None:
        core_fraction = 0.25
    profile = DeviceProfile(
        device_id=name,
        node_id=node_id,
        vendor="test",
        kind=kind,
        name="test device",
        memory_bytes=2**30,
        core_fraction=core_fraction,
    )
    return DeviceStatus(profile=profile, state=state, rank=rank, reason=reason)


def view_of(*devices: DeviceStatus, cores: float = 2.0, **options: object) -> RunView:
    return RunView(run_id="run-1", devices=devices, cores=cores, **options)  # type: ignore[arg-type]  # its fields


class RunningRun:
    """Polls its control socket on a thread and carries out what is asked.

    Args:
        folder: Becomes the run directory.
        view: The run at its start.
        decide: What it answers to a change: a message, and whether it does it.
        is_slow: It agrees, and doesn't get there.
    """

    def __init__(
        self,
        folder: Path,
        view: RunView,
        decide: Callable[[FleetChange], tuple[str, bool]] | None = None,
        *,
        is_slow: bool = False,
    ) -> None:
        self.run_dir = folder
        self.view = view
        self.changes: list[FleetChange] = []
        self._decide = decide or (lambda _: ("at the next step boundary", True))
        self._is_slow = is_slow
        self._ends = threading.Event()
        write_document(
            folder / "run.json",
            RunManifest(
                run_id=view.run_id,
                started_at_s=time.time(),
                script="train.py",
                arguments=(),
                fleet_spec="",
                labels=(),
                versions={},
            ),
        )
        self.socket = ControlSocket(folder, view)
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.set()
        self._thread.join()
        self.socket.close()

    def _serve(self) -> None:
        while not self._ends.is_set():
            for change in self.socket.poll():
                self.changes.append(change)
                message, does_it = self._decide(change)
                if does_it and not self._is_slow:
                    self._do(change)
                self.socket.answer(change, message, None if does_it else "DeviceError")
            select.select([], [], [], 0.002)

    def _do(self, change: FleetChange) -> None:
        devices = {d.device_id: d for d in self.view.devices}
        for name in change.remove:
            devices[name] = replace(devices[name], state="out", reason="drained")
        for profile in change.add:
            devices[profile.device_id] = DeviceStatus(profile=profile, state="training")
        self.view = replace(self.view, devices=tuple(devices.values()))
        self.socket.update(self.view)
