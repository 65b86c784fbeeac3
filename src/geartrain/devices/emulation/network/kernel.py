"""Asking the kernel for namespaces, links and queues, by iproute2."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from geartrain.errors import DeviceError

logger = logging.getLogger(__name__)

_DEADLINE_S = 30.0
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""To make links, and to make and enter namespaces; numbers from linux/capability.h."""
_STATUS = Path("/proc/self/status")
_PROGRAMS = ("ip", "tc", "nsenter")
_SYSTEM_PATHS = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
"""Where they lie, also where a login's PATH has no sbin."""


def missing_for_networks() -> str | None:
    """What keeps this process from emulating networks, in words; None where nothing does.

    That the kernel can shape and bridge is seen only when a network is made.
    """
    if sys.platform != "linux":
        return f"Linux (this is {sys.platform})"
    if os.geteuid() != 0:
        return f"root (this process has user id {os.geteuid()})"
    withheld = [name for name, bit in _CAPABILITIES.items() if not _has(bit)]
    if withheld:
        return f"the capabilities {', '.join(withheld)}, which this container withholds"
    absent = [name for name in _PROGRAMS if _find(name) is None]
    if absent:
        return f"the programs {', '.join(absent)} (packages iproute2 and util-linux)"
    return None


def check_networks_usable() -> None:
    """Refuse where networks can't be emulated.

    Raises:
        DeviceError: If something is missing; says what.
    """
    missing = missing_for_networks()
    if missing is not None:
        msg = (
            f"emulated links need {missing}; provide it, or leave the links as they are "
            "(no --links)"
        )
        raise DeviceError(msg)


def program(name: str) -> str:
    """The path of one of the system's programs.

    Raises:
        DeviceError: If it is not installed.
    """
    path = _find(name)
    if path is None:
        msg = f"{name} is not installed; install iproute2 and util-linux"
        raise DeviceError(msg)
    return path


def run_batch(
    name: str, lines: Sequence[str], *, namespace: str | None = None, force: bool = False
) -> str | None:
    """Have ``ip`` or ``tc`` carry out lines, all in one process.

    Args:
        name: ``ip`` or ``tc``.
        lines: What follows the program's name on a command line.
        namespace: Where; None: the network namespace of this process.
        force: Carry on after a line that fails.

    Returns:
        What failed, in the program's words, where ``force`` is set; None if nothing did.

    Raises:
        DeviceError: If a line fails and ``force`` is not set; quotes the line.
    """
    if not lines:
        return None
    where = [] if namespace is None else ["-n", namespace]
    argv = [program(name), *(["-force"] if force else []), *where, "-batch", "-"]
    try:
        done = subprocess.run(
            argv,
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
            start_new_session=True,  # Ctrl-C must not stop a clean-up half-way
        )
    except subprocess.TimeoutExpired as error:
        msg = f"{name} did not end within {_DEADLINE_S:.0f} s in {namespace or 'the host'}"
        raise DeviceError(msg) from error
    if done.returncode == 0:
        return None
    failure = " ".join(done.stderr.split())
    if force:
        return failure
    line = _failed_line(done.stderr, lines)
    msg = (
        f"the kernel refused `{name} {line}`"
        f"{f' in {namespace}' if namespace else ''}: {failure}; emulated links need "
        "network namespaces, veth, bridge and the tbf queue in the kernel"
    )
    raise DeviceError(msg)


def _failed_line(stderr: str, lines: Sequence[str]) -> str:
    number = stderr.rpartition("Command failed -:")[2].strip()
    if number.isdigit() and 0 < int(number) <= len(lines):
        return lines[int(number) - 1]
    return lines[0]


def _has(capability: int) -> bool:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return True  # the kernel will say


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=":".join(_SYSTEM_PATHS))
