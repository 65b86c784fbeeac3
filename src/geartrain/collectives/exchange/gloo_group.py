"""One Gloo group on a device of its own, whose connections can be cut."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from geartrain.collectives.exchange.sockets import (
    Endpoint,
    cut,
    open_listening,
    share_links,
)
from geartrain.errors import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Two all-reduces at once, as Gloo's own default; messages don't use these threads.
_NUM_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """How the groups of an epoch are made and how long they wait."""

    address: str = "127.0.0.1"
    """Of this host, on the interface to use; Gloo listens and connects there only."""
    build_timeout_s: float = 20.0
    """Deadline of making one stage."""
    timeout_s: float = 300.0
    """Outer limit of one message or collective, whatever a watch says before."""
    full_mesh_up_to: int = 64
    """Stages with more members connect a pair only when it first talks."""

    def __post_init__(self) -> None:
        if not (self.build_timeout_s > 0 and self.timeout_s > 0):
            msg = (
                f"transport: build_timeout_s={self.build_timeout_s:g} and "
                f"timeout_s={self.timeout_s:g} must be > 0"
            )
            raise ConfigError(msg)


@dataclass(slots=True)
class GlooGroup:
    """A ProcessGroupGloo and the ports that name its connections."""

    group: Any  # a ProcessGroupGloo or None; torch's stubs lack most of its methods
    store: Store  # Gloo calls its Python methods as long as pairs connect
    own: Endpoint
    peers: tuple[Endpoint, ...]
    is_lazy: bool = False
    """Whether a pair connects only when it first talks."""

    def send(self, data: torch.Tensor, to_index: int, tag: int) -> dist.Work:
        """Start sending."""
        work: dist.Work = self._live.send([data], to_index, tag)
        return work

    def receive(self, data: torch.Tensor, from_index: int, tag: int) -> dist.Work:
        """Start receiving."""
        work: dist.Work = self._live.recv([data], from_index, tag)
        return work

    def all_reduce(self, tensor: torch.Tensor, timeout_s: float) -> dist.Work:
        """Start the ring."""
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=timeout_s)
        work: dist.Work = self._live.allreduce([tensor], options)
        return work

    def cut(self) -> None:
        """Shut its connections down, which wakes those that wait on them, here and there.

        Save for a message that was half way, see ``sockets``.
        """
        cut(self.own, self.peers)

    def share_links(self) -> None:
        """Suit its connections to links that several of them fill at once."""
        share_links(self.own, self.peers)

    def release(self) -> None:
        """Let Gloo's threads and sockets go; may block until its last wait ends."""
        self.group = None

    @property
    def _live(self) -> Any:  # as above
        group = self.group
        if group is None:
            msg = "the group was dropped"
            raise RuntimeError(msg)
        return group


def build_group(
    store: Store, index: int, size: int, settings: TransportSettings
) -> GlooGroup:
    """Connect the group; blocks until all members have come, or the time is up.

    Args:
        store: Under a prefix that only this group uses, for this thread alone.
        index: This process in the group's order.
        size: Members.
        settings: Address to bind and announce, deadline.

    Raises:
        RuntimeError: If a member did not come or could not be reached (from Gloo).
    """
    deadline_at_s = time.monotonic() + settings.build_timeout_s
    lazy = size > settings.full_mesh_up_to
    device, own = open_listening(lambda: _make_device(settings, lazy))
    store.set(f"listens/{index}", f"{own[1]} {own[0]}")
    gloo: Any = dist.ProcessGroupGloo  # its options are missing in torch's stubs
    options = gloo._Options()  # noqa: SLF001 - no public way, 2.11-2.14
    options._devices = [device]  # noqa: SLF001 - as above
    options._timeout = timedelta(seconds=settings.build_timeout_s)  # noqa: SLF001 - as above
    options._threads = _NUM_THREADS  # noqa: SLF001 - as above
    group = dist.ProcessGroupGloo(store, index, size, options)
    peers = []
    for other in range(size):
        if other != index:
            left_s = max(deadline_at_s - time.monotonic(), 0.001)
            store.wait([f"listens/{other}"], timedelta(seconds=left_s))
            port, host = store.get(f"listens/{other}").decode().split(" ")
            peers.append((host, int(port)))
    return GlooGroup(group, store, own, tuple(peers), lazy)


def _make_device(settings: TransportSettings, lazy: bool) -> dist.ProcessGroupGloo.Device:
    return dist.ProcessGroupGloo.create_device(hostname=settings.address, lazy_init=lazy)
