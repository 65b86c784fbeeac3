"""Talking to probe processes. Never reaches torch."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from geartrain.devices.adapter import Progress
from geartrain.devices.emulation.start import open_throttle
from geartrain.devices.probe_process import ProbeReply, ProbeRequest
from geartrain.devices.profile import DeviceProfile
from geartrain.errors import DeviceError


class ProbeClient:
    """One probe process.

    Args:
        on_progress: Told what the process is measuring.
    """

    def __init__(self, on_progress: Progress | None = None) -> None:
        self._tell = on_progress or (lambda _: None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "geartrain.devices.probe_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the caller, who then ends this process.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, request: ProbeRequest) -> tuple[DeviceProfile, ...]:
        """Send a request and wait for its answer.

        Raises:
            DeviceError: If the probe failed, or its process ended.
        """
        assert self._process.stdin is not None, "made with a pipe"
        assert self._process.stdout is not None, "made with a pipe"
        with contextlib.suppress(BrokenPipeError):  # told by the missing answer
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            reply = msgspec.json.decode(line, type=ProbeReply)
            if reply.kind == "done":
                return reply.profiles
            if reply.kind == "failed":
                raise DeviceError(reply.message)
            self._tell(reply.message)
        status = self._process.wait()
        msg = (
            f"the probe process ended with status {status} instead of answering "
            f"{request.action}; its error is above, and often the device's driver"
        )
        raise DeviceError(msg)

    def close(self) -> None:
        """End the process, which has nothing to save."""
        self._process.kill()  # torch's own way out takes seconds at a tenth of a core
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextlib.contextmanager
def probe_client(on_progress: Progress | None = None) -> Iterator[ProbeClient]:
    """Run a probe process for the length of a block."""
    client = ProbeClient(on_progress)
    try:
        yield client
    finally:
        client.close()


def probe_emulated(
    devices: Sequence[DeviceProfile], on_progress: Progress | None = None
) -> tuple[DeviceProfile, ...]:
    """Measure emulated devices by throttled processes, all at the same time.

    They run together because they will train together: what they take from each
    other (caches, memory bandwidth) is then part of the measurement.

    Raises:
        DeviceError: If a probe failed.
    """
    with contextlib.ExitStack() as stack:
        throttle = open_throttle(devices)
        stack.callback(throttle.close)
        # The pool first, so that on Ctrl-C the processes end before their readers.
        pool = stack.enter_context(ThreadPoolExecutor(len(devices)))
        clients = [stack.enter_context(probe_client(on_progress)) for _ in devices]
        list(pool.map(lambda c: c.ask(ProbeRequest(action="prepare")), clients))
        for device, client in zip(devices, clients, strict=True):
            throttle.attach(device.device_id, client.pid)
        requests = [
            ProbeRequest(action="probe", device_ids=(d.device_id,), emulated=d)
            for d in devices
        ]
        answers = list(pool.map(lambda c, r: c.ask(r), clients, requests))
    return tuple(profile for answer in answers for profile in answer)
