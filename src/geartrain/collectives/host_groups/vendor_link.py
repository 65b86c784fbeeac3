"""A vendor's collectives between the accelerators of one host."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed.distributed_c10d import Backend

from geartrain.collectives.lost_peers import lost_peers
from geartrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch._C._distributed_c10d import Store


class VendorLink(Protocol):
    """Reduce-scatter and all-gather over one communicator; used by one thread."""

    def reduce_scatter(self, shard: torch.Tensor, parts: torch.Tensor) -> None:
        """Fill this member's shard with the sum of that shard of all members' parts.

        Args:
            shard: Shape (shard_elements,), overwritten.
            parts: Shape (num_members * shard_elements,).
        """

    def all_gather(self, parts: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill parts with all members' shards, in the members' order."""

    def abort(self) -> None:
        """Make what is under way fail."""


class BackendLink:
    """A backend of torch.distributed, made directly.

    It needs no default process group and no other rank's consent, so a rank whose torch
    lacks the vendor's library never hears of it, and a new epoch makes a new one.

    Args:
        backend: An object of one of torch's backend classes.
        what: What it connects, for errors.
    """

    def __init__(
        self,
        backend: Any,  # Any: plug-in backends have no type of their own
        what: str,
    ) -> None:
        self._backend = backend
        self._what = what

    def reduce_scatter(self, shard: torch.Tensor, parts: torch.Tensor) -> None:
        """Fill this member's shard with the sum of that shard of all members' parts.

        Raises:
            CommunicationError: If a member was lost or late.
        """
        with lost_peers(f"adding up gradients over {self._what}"):
            # Sum is the options' default operation.
            options = dist.ReduceScatterOptions()
            self._backend._reduce_scatter_base(shard, parts, options).wait()  # noqa: SLF001

    def all_gather(self, parts: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill parts with all members' shards, in the members' order.

        Raises:
            CommunicationError: If a member was lost or late.
        """
        with lost_peers(f"handing out gradients over {self._what}"):
            self._backend._allgather_base(parts, shard).wait()  # noqa: SLF001

    def abort(self) -> None:
        """Abort the communicator; a no-op in Gloo, whose waits have a deadline."""
        abort = getattr(self._backend, "abort", None)
        if abort is not None:
            with lost_peers(f"aborting {self._what}"):
                abort()


def make_link(
    backend_name: str, store: Store, index: int, num_members: int, timeout_s: float
) -> VendorLink:
    """Connect the accelerators of one vendor in one host.

    Args:
        backend_name: ``nccl`` (CUDA and ROCm), ``xccl``, ``gloo``, or one that a package
            has registered with torch, such as ``hccl``.
        store: Of these members only.
        index: This process's place among them.
        num_members: Processes.
        timeout_s: After which an operation fails.

    Raises:
        ConfigError: If this process's torch lacks the backend.
        CommunicationError: If the members could not be connected.
    """
    make = _MAKERS.get(backend_name, _make_plugin)
    with lost_peers(f"connecting {num_members} devices over {backend_name}"):
        timeout = dt.timedelta(seconds=timeout_s)
        backend = make(backend_name, store, index, num_members, timeout)
    return BackendLink(backend, backend_name)


_CLASSES = {
    "gloo": "ProcessGroupGloo",
    "nccl": "ProcessGroupNCCL",
    "xccl": "ProcessGroupXCCL",
}


def _class_of(backend_name: str) -> Any:  # Any: a class that this torch may lack
    found = getattr(dist, _CLASSES[backend_name], None)
    if found is None:
        raise ConfigError(_missing(backend_name))
    return found


def _make_gloo(
    name: str, store: Store, index: int, num_members: int, timeout: dt.timedelta
) -> object:
    backend: object = _class_of(name)(store, index, num_members, timeout=timeout)
    return backend


def _make_with_options(
    name: str, store: Store, index: int, num_members: int, timeout: dt.timedelta
) -> object:
    """NCCL and XCCL take their deadline in options."""
    backend_class = _class_of(name)
    options = backend_class.Options()
    options._timeout = timeout  # noqa: SLF001 - as torch's own new_group sets it
    backend: object = backend_class(store, index, num_members, options)
    return backend


def _make_plugin(
    name: str, store: Store, index: int, num_members: int, timeout: dt.timedelta
) -> object:
    """A backend that a package registered, as torch_npu does with hccl."""
    plugin = Backend._plugins.get(name.upper())  # noqa: SLF001 - no public way, 2.11-2.14
    if plugin is None:
        raise ConfigError(_missing(name))
    make: Callable[..., object] = plugin.creator_fn
    if not plugin.extended_api:
        return make(store, index, num_members, timeout)
    options = _DistributedBackendOptions()
    options.store = store
    options.group_rank = index
    options.group_size = num_members
    options.timeout = timeout
    options.group_id = f"geartrain-{name}"
    options.global_ranks_in_group = list(range(num_members))
    return make(options, None)


_MAKERS: dict[str, Callable[..., object]] = {
    "gloo": _make_gloo,
    "nccl": _make_with_options,
    "xccl": _make_with_options,
}


def _missing(backend_name: str) -> str:
    return (
        f"this torch has no {backend_name}; expected it for accelerators that offer it. "
        "Install the vendor's build of torch, or exchange through shared memory"
    )
