"""The links of a running network lab, handled from outside of the launcher that made it."""

from __future__ import annotations

import contextlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from geartrain.devices.emulation.network import LinkRate, wiring
from geartrain.devices.emulation.network.kernel import program
from geartrain.errors import DeviceError

_HOST = re.compile(r"(?P<prefix>geartrain-.*\.)h(?P<index>\d+)$")
_DEADLINE_S = 10.0
_NAMESPACES = "run/netns"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLink:
    """The link of the emulated host that a worker is on."""

    launcher_id: int
    """Names of namespaces mean something where the launcher sees them only."""
    prefix: str
    """Of the lab's namespaces."""
    host_index: int

    def cut(self) -> None:
        """Pull the cable: nothing passes, nobody is told."""
        self._run("ip", self._fabric, f"link set {self._port} down")

    def restore(self) -> None:
        """Plug it in again."""
        self._run("ip", self._fabric, f"link set {self._port} up")

    def set_rate(self, rate: LinkRate) -> None:
        """Shape both directions."""
        name = f"host{self.host_index}"
        up = wiring.shape_line(wiring.sender(name), rate.send_bytes_per_s)
        down = wiring.shape_line(wiring.port(name), rate.receive_bytes_per_s)
        self._run("tc", f"{self.prefix}h{self.host_index}", up)
        self._run("tc", self._fabric, down)

    @property
    def _fabric(self) -> str:
        return f"{self.prefix}fabric"

    @property
    def _port(self) -> str:
        return wiring.port(f"host{self.host_index}")

    def _run(self, name: str, namespace: str, line: str) -> None:
        inside = [program("nsenter"), f"--mount=/proc/{self.launcher_id}/ns/mnt", "--"]
        try:
            done = subprocess.run(
                [*inside, program(name), "-n", namespace, *line.split()],
                capture_output=True,
                text=True,
                timeout=_DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            msg = f"`{name} {line}` did not end within {_DEADLINE_S:.0f} s"
            raise DeviceError(msg) from error
        if done.returncode:
            msg = f"`{name} {line}` in {namespace} was refused: {done.stderr.strip()}"
            raise DeviceError(msg)


def find_link(launcher_id: int, worker_id: int) -> WorkerLink:
    """The link of a worker's emulated host.

    Args:
        launcher_id: Process id of the run's launcher.
        worker_id: Process id of the worker.

    Raises:
        DeviceError: If the worker is on no emulated host.
    """
    own = Path(f"/proc/{worker_id}/ns/net").stat()
    for path in Path(f"/proc/{launcher_id}/root/{_NAMESPACES}").iterdir():
        match = _HOST.match(path.name)
        if match is None:
            continue
        with contextlib.suppress(OSError):
            status = path.stat()
            if (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino):
                return WorkerLink(
                    launcher_id=launcher_id,
                    prefix=match["prefix"],
                    host_index=int(match["index"]),
                )
    msg = f"worker {worker_id} is on no emulated host; start the run with --links"
    raise DeviceError(msg)
