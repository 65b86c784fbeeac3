"""torch.distributed's default group of all ranks, and which library carries it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store


def join(backend: str, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Initialise torch.distributed's default group.

    Raises:
        CommunicationError: If not all ranks came in time.
    """
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("geartrain/default", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ConnectionError) as error:
        reason = str(error).strip().splitlines()[0]
        msg = (
            f"rank {rank} of {world_size} could not join the others within "
            f"{timeout_s:g} s: {reason}; look at the other workers' logs"
        )
        raise CommunicationError(msg) from error


def choose_backend(backends_by_rank: Sequence[tuple[str, ...]]) -> str:
    """Pick one backend for gradients that every rank's device supports.

    Args:
        backends_by_rank: What each rank's device supports, preferred first.

    Returns:
        A torch.distributed backend string. A vendor's library is chosen only where
        all ranks have it; Gloo always carries what lies in host memory.

    >>> choose_backend([("nccl", "gloo"), ("nccl", "gloo")])
    'cpu:gloo,cuda:nccl'
    >>> choose_backend([("nccl", "gloo"), ("gloo",)])
    'gloo'
    """
    device_types = {"nccl": "cuda", "hccl": "npu", "xccl": "xpu"}
    for backend in backends_by_rank[0]:
        shared = all(backend in backends for backends in backends_by_rank)
        if shared and backend in device_types:
            return f"cpu:gloo,{device_types[backend]}:{backend}"
    return "gloo"
