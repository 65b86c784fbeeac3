"""Collectives over torch.distributed, with host staging where the backend needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from geartrain.collectives.protocol import Pending


class LocalCollective:
    """The group of one: every sum is the tensor itself."""

    num_members = 1

    def all_reduce(
        self,
        tensor: torch.Tensor,
        weight: float = 1.0,
        *,
        key: str | None = None,  # noqa: ARG002 - protocol
    ) -> Pending:
        """Leave the tensor as it is, but for its weight."""
        apply_weight_(tensor, weight)
        return _Done()

    def predict_s(self, num_bytes: int) -> float:  # noqa: ARG002 - protocol
        """Nothing is sent."""
        return 0.0


class TorchCollective:
    """All-reduce over a torch.distributed process group.

    Tensors that the group's backend cannot take (an accelerator's over Gloo) travel
    through host memory, pinned for CUDA.

    Args:
        group: The process group; all members use the same one.
        member_ids: What to call the members in an error, in rank order.
        timeout_s: How long the group waits, for the error message.
        measured_bytes_per_s: Of an earlier measurement, for ``predict_s``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        member_ids: tuple[str, ...],
        timeout_s: float,
        measured_bytes_per_s: float | None = None,
    ) -> None:
        self._group = group
        self._member_ids = member_ids
        self._timeout_s = timeout_s
        self.measured_bytes_per_s = measured_bytes_per_s
        self.find_missing: Callable[[], list[str]] | None = None

    @property
    def num_members(self) -> int:
        """Ranks that take part."""
        return len(self._member_ids)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch.distributed group underneath."""
        return self._group

    def all_reduce(
        self,
        tensor: torch.Tensor,
        weight: float = 1.0,
        *,
        key: str | None = None,  # noqa: ARG002 - nothing is coded here
    ) -> Pending:
        """Start replacing the tensor by its weighted sum over all members."""
        apply_weight_(tensor, weight)
        staged = self._stage(tensor)
        try:
            work = dist.all_reduce(staged, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._explain(error) from error
        assert work is not None
        return _Running(work, tensor, staged, self._explain)

    def predict_s(self, num_bytes: int) -> float:
        """From the last measured rate; 0 where nothing was measured yet."""
        rate = self.measured_bytes_per_s
        return num_bytes / rate if rate else 0.0

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" or _backend_takes(self._group, tensor.device):
            return tensor
        host = torch.empty(
            tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
        )
        return host.copy_(tensor)

    def _explain(self, error: RuntimeError) -> CommunicationError:
        missing = self.find_missing() if self.find_missing else []
        waited_for = ", ".join(missing) if missing else ", ".join(self._member_ids)
        reason = str(error).strip().splitlines()[0]
        msg = (
            f"gradient exchange failed: {reason}; waiting for {waited_for} "
            f"(deadline {self._timeout_s:g} s). The step was not applied; look at "
            "those workers' logs"
        )
        return CommunicationError(msg)


def apply_weight_(tensor: torch.Tensor, weight: float) -> None:
    """Multiply this member's part in place; weight 0 writes zeros without reading it.

    0 times NaN would be NaN, and a part that doesn't count must not spoil the sum.
    """
    if weight == 0.0:
        tensor.detach().zero_()
    elif weight != 1.0:
        tensor.detach().mul_(weight)


def _backend_takes(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        backend = group._get_backend(device)  # noqa: SLF001 - no public way, 2.11-2.14
    except RuntimeError:
        return False
    return "gloo" not in type(backend).__name__.lower()


@dataclass(slots=True)
class _Done:
    def wait(self) -> None:
        pass


@dataclass(slots=True)
class _Running:
    work: dist.Work
    tensor: torch.Tensor
    staged: torch.Tensor
    explain: Callable[[RuntimeError], CommunicationError]

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.explain(error) from error
        if self.staged is not self.tensor:
            self.tensor.copy_(self.staged)
