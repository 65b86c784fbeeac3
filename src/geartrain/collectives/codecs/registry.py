"""Codecs by the names that users and plans give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from geartrain.collectives.codecs.exact import ExactCodec
from geartrain.collectives.codecs.fp8 import Fp8Codec
from geartrain.collectives.codecs.half import Bf16Codec, Fp16Codec
from geartrain.collectives.codecs.rows import Int4Codec, Int8Codec
from geartrain.collectives.codecs.topk import DEFAULT_FRACTION, TopKCodec
from geartrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from geartrain.collectives.codecs.protocol import Codec

_TOPK = "topk"

_MAKERS: dict[str, Callable[[], Codec]] = {
    "none": ExactCodec,
    "fp16": Fp16Codec,
    "bf16": Bf16Codec,
    "fp8": Fp8Codec,
    "int8": Int8Codec,
    "int4": Int4Codec,
    _TOPK: TopKCodec,
}

CODEC_NAMES = tuple(_MAKERS)
"""All names; ``topk`` also as ``topk:FRACTION``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecQuality:
    """What a codec does to the numbers and to training."""

    bytes_fraction: float
    """Of the float32 bytes, for long tensors."""
    relative_error: float
    """Norm of what is lost / norm of normally distributed values; an upper bound."""
    max_loss_ratio: float
    """Held-out loss after 500 steps / that of the exact exchange; tests hold it to this."""
    needs_feedback: bool
    """Whether that ratio supposes error feedback."""

    @property
    def allowed_in_auto(self) -> bool:
        """Whether ``compression="auto"`` may choose it: at most 1 % more loss."""
        return self.max_loss_ratio <= _AUTO_LOSS_RATIO


_AUTO_LOSS_RATIO = 1.01

QUALITY: dict[str, CodecQuality] = {
    "none": CodecQuality(
        bytes_fraction=1.0, relative_error=0.0, max_loss_ratio=1.0, needs_feedback=False
    ),
    "fp16": CodecQuality(
        bytes_fraction=0.5, relative_error=3e-4, max_loss_ratio=1.01, needs_feedback=False
    ),
    "bf16": CodecQuality(
        bytes_fraction=0.5, relative_error=2e-3, max_loss_ratio=1.01, needs_feedback=False
    ),
    "fp8": CodecQuality(
        bytes_fraction=0.251, relative_error=0.03, max_loss_ratio=1.01, needs_feedback=True
    ),
    "int8": CodecQuality(
        bytes_fraction=0.252, relative_error=9e-3, max_loss_ratio=1.01, needs_feedback=True
    ),
    "int4": CodecQuality(
        bytes_fraction=0.129, relative_error=0.13, max_loss_ratio=1.02, needs_feedback=True
    ),
    _TOPK: CodecQuality(
        bytes_fraction=0.082, relative_error=0.8, max_loss_ratio=1.02, needs_feedback=True
    ),
}
"""By name; other fractions of ``topk`` have no proven loss ratio."""

AUTO_CODECS = tuple(
    name for name, quality in QUALITY.items() if quality.allowed_in_auto and name != "none"
)
"""Those that ``compression="auto"`` may choose."""


def make_codec(name: str) -> Codec:
    """A new codec.

    Args:
        name: One of ``CODEC_NAMES``, or ``topk:FRACTION`` such as ``topk:0.01``.

    Raises:
        ConfigError: If there is no such codec, or the fraction is not in (0, 0.5].

    >>> make_codec("topk:0.25").name
    'topk:0.25'
    """
    kind, colon, fraction = name.partition(":")
    if colon and kind == _TOPK:
        return TopKCodec(_read_fraction(name, fraction))
    if name not in _MAKERS:
        msg = (
            f"compression {name!r} is unknown; expected one of {', '.join(CODEC_NAMES)}, "
            f"or topk:FRACTION such as topk:{DEFAULT_FRACTION:g}"
        )
        raise ConfigError(msg)
    return _MAKERS[name]()


def _read_fraction(name: str, fraction: str) -> float:
    try:
        return float(fraction)
    except ValueError as error:
        msg = f"compression {name!r}: {fraction!r} is not a number; write topk:0.01"
        raise ConfigError(msg) from error
