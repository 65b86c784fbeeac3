"""Which kind of group the processes of a host form."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from geartrain.collectives.host_groups.lone import LoneGroup
from geartrain.collectives.host_groups.meeting import Meeting
from geartrain.collectives.host_groups.shared_memory import SharedMemoryGroup
from geartrain.collectives.host_groups.vendor import VendorGroup, VendorLinks
from geartrain.collectives.host_groups.vendor_link import VendorLink, make_link
from geartrain.devices.host import cores_present
from geartrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store

    from geartrain.collectives.host_groups.protocol import HostGroup

_VENDOR_BACKENDS = ("nccl", "hccl", "xccl")
_SPIN_S = 30e-6
"""About what it takes the kernel to wake a process on another core."""
_BETWEEN_HOSTS = ("gloo",)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMember:
    """One process of a host, as all processes of the host know it."""

    name: str
    """What to call it in errors."""
    kind: str = "cpu"
    """Of its device: cpu, cuda, rocm, npu, xpu..."""
    backends: tuple[str, ...] = _BETWEEN_HOSTS
    """Of torch.distributed that its device offers."""
    cores: float | None = None
    """CPU cores that it may use, for a fair part of the adding; None if not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroupSettings:
    """How long the processes of a host wait for each other."""

    setup_timeout_s: float = 30.0
    timeout_s: float = 300.0
    """Outer limit of each wait: a device that computes longer is no fault."""
    ended: threading.Event | None = None
    """When set, setting up gives up at once."""


def make_host_group(  # noqa: PLR0913 - what a host is, and three choices
    members: Sequence[HostMember],
    index: int,
    store: Store | None,
    *,
    only_host: bool = False,
    device: torch.device | None = None,
    settings: HostGroupSettings | None = None,
) -> HostGroup:
    """Make one member of the processes of this host; all of them call it at once.

    One process stands for itself. Accelerators of one vendor use that vendor's library,
    if all of them offer it; all others meet in shared memory.

    Args:
        members: The processes, the leader first; the same list on each.
        index: This process's place among them.
        store: Reached by these processes, under keys of this epoch and host alone (a
            PrefixStore); None for a single process.
        only_host: Whether there is no other host.
        device: This process's, for a vendor's library.
        settings: Deadlines.

    Raises:
        ConfigError: If there is no store to meet through, or this process's torch lacks
            the library that its device is said to offer.
        CommunicationError: If the others did not come in time.
    """
    settings = settings or HostGroupSettings()
    if len(members) == 1:
        return LoneGroup()
    if store is None:
        msg = f"{len(members)} processes on this host need a store to meet; got None"
        raise ConfigError(msg)
    meeting = Meeting(
        store=dist.PrefixStore("memory", store),  # type: ignore[attr-defined]  # torch
        # doesn't re-export it
        names=tuple(member.name for member in members),
        index=index,
        setup_timeout_s=settings.setup_timeout_s,
        timeout_s=settings.timeout_s,
        ended=settings.ended,
        spin_s=_SPIN_S if len(members) <= cores_present() else 0.0,
    )
    backend = common_backend(members)
    if backend is None or device is None or device.type == "cpu":
        return SharedMemoryGroup(
            meeting, only_host=only_host, slice_shares=slice_shares(members)
        )
    links = VendorLinks(
        reduce=_link(backend, "reduce", store, index, members, settings),
        publish=_link(backend, "publish", store, index, members, settings),
    )
    return VendorGroup(meeting, links, device)


def common_backend(members: Sequence[HostMember]) -> str | None:
    """The vendor's library that all these devices share, if they are of one kind.

    >>> one = HostMember(name="a", kind="cuda", backends=("nccl", "gloo"))
    >>> common_backend([one, one])
    'nccl'
    >>> common_backend([one, HostMember(name="b", kind="npu", backends=("hccl",))])
    """
    if len({member.kind for member in members}) > 1:
        return None
    for backend in _VENDOR_BACKENDS:
        if all(backend in member.backends for member in members):
            return backend
    return None


def slice_shares(members: Sequence[HostMember]) -> tuple[float, ...] | None:
    """What part of the adding each does: as its cores, up to one core each.

    One thread adds, so a second core is of no use to it. None where it is not known.

    >>> slow = HostMember(name="a", cores=0.25)
    >>> slice_shares([slow, HostMember(name="b", cores=8)])
    (0.25, 1.0)
    """
    cores = [member.cores for member in members]
    if any(share is None for share in cores):
        return None
    return tuple(min(share, 1.0) for share in cores if share is not None)


def _link(  # noqa: PLR0913, PLR0917 - private, called twice
    backend: str,
    purpose: str,
    store: Store,
    index: int,
    members: Sequence[HostMember],
    settings: HostGroupSettings,
) -> VendorLink:
    return make_link(
        backend,
        dist.PrefixStore(purpose, store),  # type: ignore[attr-defined]  # as above
        index,
        len(members),
        settings.timeout_s,
    )
