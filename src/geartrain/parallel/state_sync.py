"""Give ranks the same state: at the start, and when a left-out device returns."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from geartrain.collectives.lost_peers import lost_peers
from geartrain.errors import ConfigError
from geartrain.parallel.process_group import RankGroups

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_same_model(groups: RankGroups, model: torch.nn.Module) -> None:
    """Compare names, shapes and dtypes of the model over all ranks.

    Raises:
        ConfigError: If a rank has another model.
    """
    text = "\n".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in _named_tensors(model)
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    digests = groups.rendezvous.gather("model layout", digest, str)
    different = [groups.device_ids[r] for r, d in enumerate(digests) if d != digests[0]]
    if different:
        msg = (
            f"{', '.join(different)} built another model than {groups.device_ids[0]} "
            "(names, shapes or dtypes differ); build the same model on every rank"
        )
        raise ConfigError(msg)


def broadcast_model(groups: RankGroups, model: torch.nn.Module) -> None:
    """Give all ranks rank 0's parameters and buffers."""
    group = groups.process_group()
    if group is not None:
        broadcast_tensors([tensor for _, tensor in _named_tensors(model)], group)


def broadcast_buffers(groups: RankGroups, model: torch.nn.Module) -> None:
    """Give all ranks rank 0's buffers (BatchNorm's running statistics)."""
    group = groups.process_group()
    if group is not None:
        broadcast_tensors(list(model.buffers()), group)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace tensors by those of rank 0, through host memory where needed."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            _broadcast(tensor, group)
            continue
        host = tensor.detach().cpu().contiguous()
        _broadcast(host, group)
        tensor.copy_(host)


def broadcast_bytes(
    data: torch.Tensor | None, group: dist.ProcessGroup, source: int = 0
) -> torch.Tensor:
    """Send a uint8 tensor of a size that only its sender knows.

    Args:
        data: On the sender the bytes, shape (num_bytes,); elsewhere None.
        group: Of the sender and those that receive.
        source: The sender's position in the group.

    Returns:
        The bytes, on every member.
    """
    size = torch.tensor([0 if data is None else data.numel()], dtype=torch.int64)
    _broadcast(size, group, source)
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8)
    _broadcast(data, group, source)
    return data


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, source: int = 0) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = source  # a position: rank 0 is the first of every group
    with lost_peers("sending the training state"):
        # The group's own call, since one of survivors is not known to torch.distributed.
        group.broadcast([tensor], options).wait()


def _named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = [(name, p.data) for name, p in model.named_parameters()]
    return parameters + list(model.named_buffers())
