"""What a module may need to know about the micro-batch that is being computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from geartrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleContext:
    """The micro-batch under way: which samples of which step.

    A *ghost* is a micro-batch of real samples that a rank runs only so that collectives
    inside the model match those of its peers; it contributes nothing.
    """

    seed: int
    step: int
    sample_indices: torch.Tensor
    """Global indices of the samples, int64, shape (num_samples,)."""
    is_ghost: bool = False

    def __post_init__(self) -> None:
        indices = self.sample_indices
        if indices.dtype != torch.int64 or indices.ndim != 1:
            msg = (
                f"sample_indices is {indices.dtype} of shape {tuple(indices.shape)}; "
                "expected int64 of shape (num_samples,)"
            )
            raise ConfigError(msg)


class _Activation:
    """One forward pass within a context, with its count of calls a layer."""

    def __init__(self, context: SampleContext) -> None:
        self.context = context
        self.num_calls: dict[str, int] = {}


# A context variable is seen by the thread of the forward pass only. Backward runs in
# threads of its own on accelerators: what it needs has to be captured in forward.
_active: ContextVar[_Activation | None] = ContextVar("geartrain_sample", default=None)


@contextmanager
def use_sample_context(context: SampleContext) -> Iterator[None]:
    """Make this the current micro-batch, for one forward pass (and its backward)."""
    token = _active.set(_Activation(context))
    try:
        yield
    finally:
        _active.reset(token)


def current_sample_context() -> SampleContext | None:
    """The micro-batch under way, or None outside a step."""
    activation = _active.get()
    return None if activation is None else activation.context


def next_call_index(layer_id: str) -> int:
    """How often this layer was called before in this forward pass; counts the call.

    Raises:
        ConfigError: Outside a sample context.
    """
    activation = _active.get()
    if activation is None:
        msg = (
            f"layer {layer_id!r} was called in training mode outside a step; call "
            "session.step, or model.eval() first"
        )
        raise ConfigError(msg)
    index = activation.num_calls.get(layer_id, 0)
    activation.num_calls[layer_id] = index + 1
    return index
