"""Which host a process is on: equal for two processes only if they share all of it.

A host is a running kernel *and* a network namespace. The boot id alone would put two
containers, which have addresses of their own, on one host; the namespace alone is a
number that every machine gives out anew.
"""

from __future__ import annotations

import hashlib
import platform
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

_DIGITS = 8
"""Of the hash: a chance of 1e-4 that any two of 1,000 hosts of one name are confused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIdentity:
    """A host, for machines and for people."""

    host_id: str
    """``NAME-HASH``: the hash tells hosts apart, the name tells people which it is."""
    name: str
    boot_id: str
    network_namespace: str


def make_host_identity(name: str, boot_id: str, network_namespace: str) -> HostIdentity:
    """Name a host by its kernel's boot and its network namespace; both must agree.

    >>> one = make_host_identity("node3.cluster", "5f2a", "net:[4026531833]")
    >>> two = make_host_identity("node3.cluster", "5f2a", "net:[4026532201]")
    >>> one.host_id.startswith("node3-"), one.host_id == two.host_id
    (True, False)
    """
    key = f"{boot_id}\n{network_namespace}".encode()
    short = re.sub(r"[^A-Za-z0-9_-]", "-", name.partition(".")[0]) or "host"
    return HostIdentity(
        host_id=f"{short}-{hashlib.sha256(key).hexdigest()[:_DIGITS]}",
        name=name,
        boot_id=boot_id,
        network_namespace=network_namespace,
    )


def name_in(host_id: str) -> str:
    """The name that a host id begins with; ids of another form are names as they are.

    >>> name_in("node3-5f2a9c01"), name_in("node3-west")
    ('node3', 'node3-west')
    """
    match = re.fullmatch(rf"(.+)-[0-9a-f]{{{_DIGITS}}}", host_id)
    return match[1] if match else host_id


def read_host_identity(proc_root: Path = Path("/proc")) -> HostIdentity:
    """Read which host the calling thread is on.

    Args:
        proc_root: Where ``/proc`` is mounted.

    Returns:
        The identity. Where there is no ``/proc`` the network card's number and the time
        of boot stand in for the boot id; such systems have one network namespace.
    """
    try:
        boot_id = (proc_root / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = f"{uuid.getnode():x}-{round(psutil.boot_time())}"
    try:
        # Of the thread: a thread may have entered another namespace than its process.
        namespace = str((proc_root / "thread-self/ns/net").readlink())
    except OSError:
        namespace = "only"
    return make_host_identity(platform.node() or "localhost", boot_id, namespace)
