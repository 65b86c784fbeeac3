"""Give ranks the same state: at the start, and when a left-out device returns."""

from __future__ import annotations

import hashlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from geartrain.collectives.lost_peers import lost_peers
from geartrain.errors import CommunicationError, ConfigError
from geartrain.parallel.process_group import RankGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_TIMEOUT_S = 300.0
"""Outer limit of one message, whatever is noticed before."""
_SHORT_S = 0.002
_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.005


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
    """Give all ranks the lead's parameters and buffers."""
    group = groups.process_group()
    if group is not None:
        tensors = [tensor for _, tensor in _named_tensors(model)]
        broadcast_tensors(tensors, group, groups.rendezvous.interruption)


def broadcast_buffers(groups: RankGroups, model: torch.nn.Module) -> None:
    """Give all ranks the lead's buffers (BatchNorm's running statistics)."""
    group = groups.process_group()
    if group is not None:
        interruption = groups.rendezvous.interruption
        broadcast_tensors(list(model.buffers()), group, interruption, groups.lead_index)


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor],
    group: dist.ProcessGroup,
    interruption: Callable[[], str | None] | None = None,
    source: int = 0,
) -> None:
    """Replace tensors by those of one member, through host memory where needed.

    Args:
        tensors: The same on all members.
        group: Of the members.
        interruption: As for ``wait_for``.
        source: That member's position in the group.
    """
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            _broadcast(tensor, group, source, interruption)
            continue
        host = tensor.detach().cpu().contiguous()
        _broadcast(host, group, source, interruption)
        tensor.copy_(host)


def broadcast_bytes(
    data: torch.Tensor | None,
    group: dist.ProcessGroup,
    source: int = 0,
    interruption: Callable[[], str | None] | None = None,
) -> torch.Tensor:
    """Send a uint8 tensor of a size that only its sender knows.

    Args:
        data: On the sender the bytes, shape (num_bytes,); elsewhere None.
        group: Of the sender and those that receive.
        source: The sender's position in the group.
        interruption: As for ``wait_for``.

    Returns:
        The bytes, on every member.
    """
    size = torch.tensor([0 if data is None else data.numel()], dtype=torch.int64)
    _broadcast(size, group, source, interruption)
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8)
    _broadcast(data, group, source, interruption)
    return data


def wait_for(work: dist.Work, interruption: Callable[[], str | None] | None) -> None:
    """Wait for an operation of a group, but not for one that can't end any more.

    Gloo does not wake who waits for a message that was half way when its sender died.

    Args:
        work: What was begun.
        interruption: Why it is in vain, since a member was lost; None while it is not.

    Raises:
        CommunicationError: As soon as it is in vain.
        RuntimeError: If it failed (from torch).
    """
    if interruption is None:
        work.wait()
        return
    began_at_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while not work.is_completed():
        reason = interruption()
        if reason is not None:
            msg = f"the training state will not come: {reason}"
            raise CommunicationError(msg)
        time.sleep(pause_s)
        if time.monotonic() > began_at_s + _SHORT_S:
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    work.wait()


def _broadcast(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    source: int,
    interruption: Callable[[], str | None] | None,
) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = source  # a position: the first of every group is 0
    options.timeout = timedelta(seconds=_TIMEOUT_S)
    with lost_peers("sending the training state"):
        # The group's own call, since torch.distributed does not know all of them.
        wait_for(group.broadcast([tensor], options), interruption)


def _named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = [(name, p.data) for name, p in model.named_parameters()]
    return parameters + list(model.named_buffers())
