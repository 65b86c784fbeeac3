"""A process that does nothing but use the CPU, and asks to die with its parent."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from geartrain.devices.emulation.cgroups import CgroupV1, usable_cgroups
from geartrain.devices.emulation.duty_cycle import process_cpu_s
from geartrain.devices.emulation.owner import current_owner

_CODE = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
print("busy", flush=True)
while True:
    for _ in range(100000):
        pass
"""


@contextlib.contextmanager
def busy_process() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the kernel's autogroup, which favour() then favours
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def favour(task_id: int) -> None:
    """Let a process or thread have the CPU when it asks, however busy the host is.

    What is tested is what a throttle takes away, not what others leave. Without
    privileges the test needs a quiet host.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, task_id, -20)
        if os.getsid(task_id) == task_id:  # niceness counts only within a session
            with contextlib.suppress(FileNotFoundError):
                Path(f"/proc/{task_id}/autogroup").write_text("-20")


def favour_cgroups() -> None:
    """Do the same for all groups that this process made."""
    cgroups = usable_cgroups()
    if cgroups is None:
        return
    version_1 = isinstance(cgroups, CgroupV1)
    name, most = ("cpu.shares", "262144") if version_1 else ("cpu.weight", "10000")
    cgroups.files.write(cgroups.roots[0] / current_owner().name / name, most)


def cpu_share(pid: int, length_s: float) -> float:
    """CPU time over wall time of a process, both by their clocks."""
    started_at_s, before_s = time.monotonic(), process_cpu_s(pid)
    assert before_s is not None
    threading.Event().wait(length_s)  # the length of the measurement
    after_s = process_cpu_s(pid)
    assert after_s is not None
    return (after_s - before_s) / (time.monotonic() - started_at_s)
