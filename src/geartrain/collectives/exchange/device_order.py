"""Keeps a stage thread's work on a device behind what the caller had queued there."""

from __future__ import annotations

from collections.abc import Callable

import torch


def after_queued_work(tensor: torch.Tensor) -> Callable[[], None] | None:
    """Mark where the caller's stream is now.

    Args:
        tensor: What was computed on that stream.

    Returns:
        To be called in another thread before it uses the tensor: its current stream then
        waits for the mark. None for host memory, where all is done already. Devices
        without streams are waited for at once.
    """
    device = tensor.device
    if device.type in {"cpu", "meta"}:
        return None
    try:
        stream = torch.accelerator.current_stream(device)
        event = stream.record_event()
    except (RuntimeError, NotImplementedError, AttributeError):
        # No streams there (MPS, some plugins): the caller waits, which is always right.
        torch.accelerator.synchronize(device)
        return None

    def follow() -> None:
        torch.accelerator.current_stream(device).wait_event(event)

    return follow
