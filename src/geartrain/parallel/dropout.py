"""Dropout that does not depend on the plan: a sample's mask is its own.

The mask is a function of (seed, step, layer, call, sample, element), drawn by a
counter-based generator in int64 arithmetic, so it has the same bits on every kind of device
and whatever rank and micro-batch the sample falls to.

Source: SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014. Each sample of a call has a stream of its own, started at a mixed 64-bit key; one
64-bit output gives two elements their 32 bits. Chosen over Widynski's squares32 for cost:
12 passes over an int64 a 64-bit output instead of 19 for 32 bits.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from typing import Final

import torch
from torch import nn

from geartrain.errors import ConfigError
from geartrain.parallel.sample_context import current_sample_context, next_call_index

logger = logging.getLogger(__name__)

_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK_64: Final = 2**64 - 1
_ALPHA_PRIME: Final = 1.7580993408473766  # SELU's scale * alpha, Klambauer et al. 2017
_MAX_REMEMBERED_CALLS: Final = 256

# Number of dims of an input whose masks cover whole channels; torch's Dropout2d takes three
# for (N, C, L) too.
_CHANNEL_DIMS: Final[dict[type[nn.Module], tuple[int, ...]]] = {
    nn.Dropout1d: (3,),
    nn.Dropout2d: (3, 4),
    nn.Dropout3d: (5,),
}


class PlanInvariantDropout(nn.Module):
    """Dropout by element whose masks follow the samples.

    Its input's first dim must be the samples of the current SampleContext. Eval mode and
    p = 0 are the identity. Under activation recompute (torch.utils.checkpoint with
    preserve_rng_state, the default) the same mask is drawn again.
    """

    def __init__(self, p: float, layer_id: str, *, inplace: bool = False) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            msg = f"dropout p={p} of {layer_id!r} must lie in 0..1"
            raise ConfigError(msg)
        self.p = p
        self.layer_id = layer_id
        self.inplace = inplace
        self._layer_key = _hash_name(layer_id)
        self._calls: OrderedDict[int, torch.Tensor] = OrderedDict()

    def extra_repr(self) -> str:
        """Show the rate and the layer's name."""
        return f"p={self.p}, layer_id={self.layer_id!r}, inplace={self.inplace}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements; shape (N, ...) to the same shape.

        Raises:
            ConfigError: Outside a step, or where the first dim is not the samples.
        """
        if not self.training or self.p == 0.0:
            return x
        keep = self.draw_keep(x, self.mask_shape(x))
        return self.apply_keep(x, keep)

    def mask_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Shape of the mask; it broadcasts to that of the input."""
        return tuple(x.shape)

    def apply_keep(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Drop what is not kept and scale the rest, so that the expectation stays."""
        scale = 0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p)
        # The scale comes last: a bf16 mask could not hold it.
        kept = keep.to(x.dtype)
        return x.mul_(kept).mul_(scale) if self.inplace else x * kept * scale

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def draw_keep(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Which elements stay: bool of this shape, on the input's device."""
        bits = random_bits(self._keys(x), math.prod(shape[1:]))
        # int32 is signed: the threshold is shifted with it.
        threshold = round(self.p * 2**32) - 2**31
        if threshold == 2**31:
            return torch.zeros(shape, dtype=torch.bool, device=x.device)
        return (bits >= threshold).view(shape)

    def _keys(self, x: torch.Tensor) -> torch.Tensor:
        """Key of every sample's stream for this call, shape (N,).

        A recomputed forward is told apart by running within a backward; which call it
        repeats is told by a number drawn from torch's default generator, since recompute
        restores that one's state.
        """
        nonce = int(torch.randint(2**62, (), device="cpu"))
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - as torch.utils.checkpoint does
            return self._remembered(nonce).to(x.device)
        context = current_sample_context()
        call_index = next_call_index(self.layer_id)
        assert context is not None  # next_call_index has raised
        num_samples = len(context.sample_indices)
        if x.ndim == 0 or x.shape[0] != num_samples:
            msg = (
                f"dropout {self.layer_id!r} got an input of shape {tuple(x.shape)} in a "
                f"micro-batch of {num_samples} samples; its first dim must be the samples: "
                "make it so or set invariant_dropout=False"
            )
            raise ConfigError(msg)
        salt = stream_salt(context.seed, context.step, self._layer_key, call_index)
        keys = sample_keys(context.sample_indices.to(x.device), salt)
        self._calls[nonce] = keys
        if len(self._calls) > _MAX_REMEMBERED_CALLS:
            self._calls.popitem(last=False)
        return keys

    def _remembered(self, nonce: int) -> torch.Tensor:
        if nonce not in self._calls:
            msg = (
                f"dropout {self.layer_id!r} is recomputed in backward but its first call "
                "is not known; call torch.utils.checkpoint with preserve_rng_state=True"
            )
            raise ConfigError(msg)
        return self._calls[nonce]


class PlanInvariantChannelDropout(PlanInvariantDropout):
    """Drops whole channels, as ``nn.Dropout1d``, ``2d`` and ``3d`` do."""

    def __init__(
        self, p: float, layer_id: str, *, num_dims: tuple[int, ...], inplace: bool = False
    ) -> None:
        super().__init__(p, layer_id, inplace=inplace)
        self.num_dims = num_dims

    def mask_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return (N, C, 1, ...)."""
        if x.ndim not in self.num_dims:
            msg = (
                f"dropout {self.layer_id!r} got an input of shape {tuple(x.shape)}; "
                f"expected (samples, channels, ...) of {self.num_dims} dims: add the "
                "dim of the samples"
            )
            raise ConfigError(msg)
        return (*x.shape[:2], *(1,) * (x.ndim - 2))


class PlanInvariantAlphaDropout(PlanInvariantDropout):
    """Keeps mean and variance of SELU activations, as ``nn.AlphaDropout`` does."""

    def apply_keep(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Put SELU's lower limit where an element is dropped, then rescale."""
        p = self.p
        scale = 0.0 if p == 1.0 else 1.0 / math.sqrt((_ALPHA_PRIME**2 * p + 1) * (1 - p))
        kept = keep.to(x.dtype)
        shift = (kept - 1).mul_(_ALPHA_PRIME * scale).add_(_ALPHA_PRIME * scale * p)
        if self.inplace:
            return x.mul_(kept).mul_(scale).add_(shift)
        return x * kept * scale + shift


def convert_dropout(module: nn.Module) -> nn.Module:
    """Replace a model's dropout modules by plan-invariant ones, named by their place.

    What cannot be replaced is left as it is and named in one warning: other classes of
    dropout, the dropout within attention and recurrent modules, and functional calls.

    Args:
        module: The model, before it is cut into stages, so that names agree everywhere.

    Returns:
        The same module; a new one where the model itself is a dropout.
    """
    made: dict[int, PlanInvariantDropout] = {}
    left: list[str] = []
    for name, layer in list(module.named_modules()):
        new = _plan_invariant(name, layer)
        if new is not None:
            made[id(layer)] = new
        elif _hidden_dropout(layer):
            left.append(f"{name or 'the model'} ({type(layer).__name__})")
    for parent in list(module.modules()):
        for child_name, child in list(parent._modules.items()):  # noqa: SLF001 - named_children hides repeats
            if id(child) in made:
                setattr(parent, child_name, made[id(child)])
    if left:
        logger.warning(
            "dropout of %s is not plan-invariant: a re-plan changes its masks; use "
            "nn.Dropout modules, or set that dropout to 0",
            ", ".join(left),
        )
    return made.get(id(module), module)


def _plan_invariant(name: str, layer: nn.Module) -> PlanInvariantDropout | None:
    """The replacement of a layer, or None where there is none."""
    kind = type(layer)
    new: PlanInvariantDropout
    if not isinstance(layer, nn.modules.dropout._DropoutNd):  # noqa: SLF001 - their common class
        return None
    if kind is nn.Dropout:
        new = PlanInvariantDropout(layer.p, name, inplace=layer.inplace)
    elif kind is nn.AlphaDropout:
        new = PlanInvariantAlphaDropout(layer.p, name, inplace=layer.inplace)
    elif kind in _CHANNEL_DIMS:
        new = PlanInvariantChannelDropout(
            layer.p, name, num_dims=_CHANNEL_DIMS[kind], inplace=layer.inplace
        )
    else:
        return None
    return new.train(layer.training)


def _hidden_dropout(layer: nn.Module) -> bool:
    """Whether a layer drops by itself in a way that cannot be replaced."""
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
        return float(layer.dropout) > 0.0
    if isinstance(layer, PlanInvariantDropout):
        return False
    name = type(layer).__name__.lower()
    if any(layer.children()) or not any(
        word in name for word in ("dropout", "droppath", "stochasticdepth")
    ):
        return False
    rate = getattr(layer, "p", getattr(layer, "drop_prob", None))
    return rate != 0.0


def random_bits(keys: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Draw the first bits of every key's stream, int32, shape (N, num_elements)."""
    num_outputs = (num_elements + 1) // 2
    steps = torch.arange(1, num_outputs + 1, dtype=torch.int64, device=keys.device)
    mixed = _mix_(keys[:, None] + steps.mul_(_signed(_GAMMA)))
    return mixed.view(torch.int32)[:, :num_elements]


def sample_keys(sample_indices: torch.Tensor, salt: int) -> torch.Tensor:
    """Key of each sample's stream, int64, shape (N,)."""
    return _mix_(sample_indices * _signed(_GAMMA) + _signed(salt))


def stream_salt(seed: int, step: int, layer_key: int, call_index: int) -> int:
    """64 bits for one call of a layer in one step."""
    salt = 0
    for value in (seed, step, layer_key, call_index):
        salt = _mix_integer(salt ^ value)
    return salt


def _hash_name(layer_id: str) -> int:
    # Python's own hash differs from process to process.
    return int.from_bytes(
        hashlib.blake2b(layer_id.encode(), digest_size=8).digest(), "little"
    )


def _mix_integer(value: int) -> int:
    """One output of SplitMix64 started at this value."""
    mixed = (value + _GAMMA) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK_64
    return mixed ^ (mixed >> 31)


def _mix_(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function, in place; int64 products wrap around."""
    shifted = torch.empty_like(value)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        torch.bitwise_right_shift(value, shift, out=shifted)
        shifted &= 2 ** (64 - shift) - 1  # the shift of an int64 repeats its sign
        value ^= shifted
        if factor is not None:
            value *= _signed(factor)
    return value


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value
