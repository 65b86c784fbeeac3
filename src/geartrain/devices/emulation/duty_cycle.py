"""Throttling without privileges: stop and continue a process by its CPU time.

Each device has an account. It is credited with its share of the wall time and
charged with the CPU time the process really used, so that an overshoot is paid back
in the next cycle and the share comes out exact. What an idle process did not use is
kept for one period only, as the kernel's own quota does it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from geartrain.devices.emulation.throttle import check_core_fraction, unknown_device
from geartrain.devices.profile import DeviceProfile
from geartrain.errors import DeviceError

logger = logging.getLogger(__name__)

_PERIOD_S = 0.02
_LONG_PERIOD_S = 0.05
_MIN_RUN_S = 0.001
_MIN_WAIT_S = 0.0005
_IDLE_WAIT_S = 1.0
_CPU_CLOCK = 2
"""CPUCLOCK_SCHED of the kernel's per-process clocks, nanosecond exact."""


@dataclass(slots=True)
class Account:
    """A device's credit of CPU time. ``advance`` decides, others signal."""

    core_fraction: float
    credit_s: float = 0.0
    is_stopped: bool = False

    @property
    def period_s(self) -> float:
        """Credit is kept for this long."""
        short = self.core_fraction * _PERIOD_S >= _MIN_RUN_S
        return _PERIOD_S if short else _LONG_PERIOD_S

    def change(self, core_fraction: float) -> None:
        """Take another share; what was saved under the old one is not carried over."""
        self.core_fraction = core_fraction
        self.credit_s = min(self.credit_s, core_fraction * self.period_s)

    def advance(self, wall_s: float, used_s: float) -> float:
        """Book what has passed and decide whether the process may run.

        Args:
            wall_s: Time since the last call.
            used_s: CPU time the process used in it.

        Returns:
            Seconds until the account should be looked at again.
        """
        quota_s = self.core_fraction * self.period_s
        before_s = self.credit_s
        self.credit_s += self.core_fraction * wall_s - used_s
        if not self.is_stopped and self.credit_s > quota_s:
            # It was free to run and did not. What it earned while it was stopped
            # stays, as a busy host may let this controller wake late.
            self.credit_s = max(quota_s, min(before_s, self.credit_s))
        if self.core_fraction >= 1:
            self.is_stopped = False
            return _IDLE_WAIT_S
        if self.is_stopped:
            self.is_stopped = self.credit_s < quota_s / 2
        else:
            self.is_stopped = self.credit_s <= 0
        if self.is_stopped:
            return max((quota_s / 2 - self.credit_s) / self.core_fraction, _MIN_WAIT_S)
        # It can't burn its credit sooner; with several threads the debt is paid back.
        return max(self.credit_s / (1 - self.core_fraction), _MIN_WAIT_S)


class DutyCycleThrottle:
    """A thread of this process stops and continues one process a device.

    Only the attached process is held, not its children: memory has no limit of the
    kernel here, and if this process is killed a stopped one stays stopped unless it
    asked for a parent-death signal, as geartrain's workers do.
    """

    def __init__(self, devices: Sequence[DeviceProfile]) -> None:
        self.name = "duty-cycle"
        self._accounts: dict[str, Account] = {}
        self._pids: dict[str, int] = {}
        self._used_s: dict[str, float] = {}
        self._lock = threading.Lock()
        for device in devices:
            self.add(device)
        self._wake = threading.Event()
        self._closed = False
        self._booked_at_s = time.monotonic()
        self._thread = threading.Thread(
            target=self._control, name="geartrain-duty-cycle", daemon=True
        )
        self._thread.start()

    def add(self, device: DeviceProfile) -> None:
        """Keep an account of one more device; one that is there stays as it is.

        Raises:
            ConfigError: If its share is impossible.
        """
        fraction = device.core_fraction or 1.0
        check_core_fraction(fraction, device.device_id)
        with self._lock:
            self._accounts.setdefault(device.device_id, Account(fraction))

    def attach(self, device_id: str, pid: int) -> None:
        """Put a process under the device's share.

        Raises:
            ConfigError: If the device is unknown.
            DeviceError: If there is no such process.
        """
        with self._lock:
            self._account(device_id)
            used_s = process_cpu_s(pid)
            if used_s is None:
                msg = f"{device_id}: process {pid} does not run; was it started?"
                raise DeviceError(msg)
            self._pids[device_id], self._used_s[device_id] = pid, used_s
        self._wake.set()

    def set_core_fraction(self, device_id: str, core_fraction: float) -> None:
        """Change a device's share at once.

        Raises:
            ConfigError: If the device is unknown or the share impossible.
        """
        check_core_fraction(core_fraction, device_id)
        with self._lock:
            self._account(device_id).change(core_fraction)
        self._wake.set()

    def core_fraction(self, device_id: str) -> float:
        """Return the share in force."""
        return self._account(device_id).core_fraction

    def out_of_memory_kills(self, device_id: str) -> int:
        """Return 0: without a cgroup the kernel tells no kills apart."""
        self._account(device_id)
        return 0

    def close(self) -> None:
        """Let all processes run on."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        for device_id, pid in self._pids.items():
            if self._accounts[device_id].is_stopped:
                _signal(pid, signal.SIGCONT)
        self._pids.clear()

    def _account(self, device_id: str) -> Account:
        if device_id not in self._accounts:
            raise unknown_device(device_id, sorted(self._accounts))
        return self._accounts[device_id]

    def _control(self) -> None:
        while not self._closed:
            with self._lock:
                wait_s = self._book()
            self._wake.wait(wait_s)
            self._wake.clear()

    def _book(self) -> float:
        now_s = time.monotonic()
        wall_s, self._booked_at_s = now_s - self._booked_at_s, now_s
        waits = [_IDLE_WAIT_S]
        for device_id, pid in list(self._pids.items()):
            used_s = process_cpu_s(pid)
            if used_s is None:
                del self._pids[device_id]
                continue
            account = self._accounts[device_id]
            was_stopped = account.is_stopped
            waits.append(account.advance(wall_s, used_s - self._used_s[device_id]))
            self._used_s[device_id] = used_s
            if account.is_stopped != was_stopped:
                _signal(pid, signal.SIGSTOP if account.is_stopped else signal.SIGCONT)
        return min(waits)


def process_cpu_s(pid: int) -> float | None:
    """CPU time of a process and all its threads; None once it has ended."""
    return _read_cpu_s(pid)


def _linux_cpu_s(pid: int) -> float | None:
    # The clock of another process: clock_getcpuclockid(3), which Python doesn't offer.
    try:
        return time.clock_gettime((~pid << 3) | _CPU_CLOCK)
    except OSError:
        return None


def _portable_cpu_s(pid: int) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


_read_cpu_s: Callable[[int], float | None] = (
    _linux_cpu_s if sys.platform == "linux" else _portable_cpu_s
)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.debug("process %d ended before %s", pid, number.name)
