"""A model's buffers as they were when a step began, in case the step is done again."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.modules.batchnorm import _NormBase


@dataclass(frozen=True, slots=True)
class _Kept:
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor


@dataclass(slots=True)
class BufferKeeper:
    """Copies buffers (running statistics) at the start of a step.

    Those that did not change since the copy before, such as masks, are not copied again.
    """

    model: torch.nn.Module
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _is_open: bool = False

    @torch.no_grad()
    def keep(self) -> None:
        """Take copies; the step begins."""
        for path, module in self.model.named_modules():
            # Torch's batch norm writes its statistics without counting a version.
            always = isinstance(module, _NormBase)
            for name, buffer in module.named_buffers(path, recurse=False):
                self._keep(name, buffer, always=always)
        self._is_open = True

    def applied(self) -> None:
        """The step is done: what it did to buffers stays."""
        self._is_open = False

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what an unfinished step did to buffers."""
        if not self._is_open:
            return
        self._is_open = False
        buffers = dict(self.model.named_buffers())
        for name, kept in self._kept.items():
            if name in buffers:
                buffers[name].copy_(kept.copy)

    def _keep(self, name: str, buffer: torch.Tensor, *, always: bool) -> None:
        version = -1 if buffer.is_inference() else buffer._version  # noqa: SLF001 - torch's
        kept = self._kept.get(name)
        is_same = kept is not None and kept.buffer is buffer and kept.version == version
        if is_same and not always and version >= 0:
            return
        if kept is not None and kept.copy.shape == buffer.shape:
            copy = kept.copy.to(buffer.dtype).copy_(buffer)
        else:
            copy = buffer.detach().clone()
        self._kept[name] = _Kept(buffer, version, copy)
