"""Codes on the slow hop, with what they lose added to the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from geartrain.planner.exchange.schedule import EXACT

if TYPE_CHECKING:
    from geartrain.collectives.codecs.protocol import Codec
    from geartrain.collectives.exchange.buffers import BufferPool

CodecFactory = Callable[[str], "Codec"]


class Feedback(Protocol):
    """What a code lost is added to the next step's values."""

    def compensate(self, key: str, start: int, values: torch.Tensor) -> None:
        """Add to the values what codes lost there before."""

    def keep(
        self, key: str, start: int, values: torch.Tensor, decoded: torch.Tensor
    ) -> None:
        """Remember what this code lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coder:
    """One codec as one stage thread uses it: codecs keep scratch memory.

    Args:
        codec: The codec.
        feedback: Where its losses are kept; None loses them.
        key: The bucket's name there.
    """

    codec: Codec
    feedback: Feedback | None
    key: str

    def encode(
        self, values: torch.Tensor, start: int, pool: BufferPool, *, replace: bool
    ) -> torch.Tensor:
        """Code the values.

        Args:
            values: float32, shape (num_elements,); losses of before are added in place.
            start: Of the values in the bucket, in elements.
            pool: Where the code's buffer comes from; give it back when it was sent.
            replace: Put what the code stands for into ``values``, as receivers see it.

        Returns:
            The code, uint8.
        """
        num_elements = values.numel()
        code = pool.take(self.codec.encoded_bytes(num_elements), torch.uint8)
        if self.feedback is not None:
            self.feedback.compensate(self.key, start, values)
        self.codec.encode(values, code)
        if self.feedback is None:
            if replace:
                self.codec.decode(code, values)
            return code
        decoded = pool.take(num_elements, torch.float32)
        self.codec.decode(code, decoded)
        self.feedback.keep(self.key, start, values, decoded)
        if replace:
            values.copy_(decoded)
        pool.give(decoded)
        return code


class CoderTable:
    """The coders of one stage thread.

    Args:
        make_codec: A codec by its name.
        feedback: Of this stage's codes.
    """

    def __init__(self, make_codec: CodecFactory, feedback: Feedback | None) -> None:
        self._make_codec = make_codec
        self._feedback = feedback
        self._codecs: dict[str, Codec] = {}

    def coder(self, codec_name: str, key: str | None) -> Coder | None:
        """The coder of a bucket; None where nothing is coded."""
        if codec_name == EXACT or key is None:
            return None
        if codec_name not in self._codecs:
            self._codecs[codec_name] = self._make_codec(codec_name)
        return Coder(codec=self._codecs[codec_name], feedback=self._feedback, key=key)
