"""Copy a shard while the next step's forward and backward run.

Parameters and moments change only when the optimizer steps. So the copy of a committed
state may go on until the next step is about to be applied; training waits for what is
left by then, which is nothing where computing takes longer than copying.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from geartrain.checkpoint.agent.shard_layout import ShardLayout
from geartrain.checkpoint.chunks import cut_elements
from geartrain.errors import CheckpointError

_LIMIT_S = 60.0
"""For the one piece, of 4 MiB at most, that the thread has in hand at the end."""

Array = np.ndarray[Any, np.dtype[Any]]  # Any: of bytes


class ShadowCopy:
    """One copy on its way; made after a commit, finished before the next step is applied.

    Args:
        layout: Of these tensors.
        tensors: Whole tensors by name. Those that are not in host memory are copied at
            once: another thread's stream would not wait for what computes them.
        buffer: At least ``layout.num_bytes`` long.
        changing: Names of tensors that forward changes, such as running statistics; they
            are copied at once, too.
    """

    def __init__(
        self,
        layout: ShardLayout,
        tensors: Mapping[str, torch.Tensor],
        buffer: memoryview,
        *,
        changing: Collection[str] = (),
    ) -> None:
        whole = np.frombuffer(buffer, np.uint8)
        self._left: deque[tuple[Array, Array]] = deque()
        self._problem: BaseException | None = None
        self.busy_s = 0.0
        """How long the thread took; where the trainer computes on the same cores, they are
        missing there."""
        for part, offset in layout.places:
            tensor = tensors[part.name].detach()
            size = tensor.element_size()
            flat = tensor.view(-1)
            is_urgent = part.name in changing or tensor.device.type != "cpu"
            for start, stop in cut_elements(part.start, part.stop, size):
                begin = offset + (start - part.start) * size
                target = whole[begin : begin + (stop - start) * size]
                source = flat[start:stop].view(torch.uint8)
                if is_urgent:
                    torch.from_numpy(target).copy_(source)
                else:
                    self._left.append((target, source.numpy()))
        self._thread = threading.Thread(
            target=self._copy_beside, name="geartrain-shadow-copy", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait until all is copied; the caller takes a share of what is left.

        Raises:
            CheckpointError: If the thread failed, or hangs.
        """
        self._copy()
        self._thread.join(_LIMIT_S)
        if self._thread.is_alive() or self._problem is not None:
            cause = self._problem or f"a piece took longer than {_LIMIT_S:g} s"
            msg = f"the state was not copied ({cause}); don't seal it, and try again later"
            raise CheckpointError(msg)

    def _copy_beside(self) -> None:
        began_s = time.perf_counter()
        self._copy()
        self.busy_s = time.perf_counter() - began_s

    def _copy(self) -> None:
        """Copy pieces until none is left; in two threads at once at the end."""
        try:
            while True:
                target, source = self._left.popleft()
                # Not torch: its copy would start a pool of threads beside the trainer's.
                np.copyto(target, source)
        except IndexError:  # none left
            return
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for it
            self._problem = error
