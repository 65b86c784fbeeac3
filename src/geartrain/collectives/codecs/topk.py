"""The largest values alone: their places, and each rounded to fp16."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from geartrain.collectives.codecs.chunk_code import ChunkCodec
from geartrain.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_FRACTION = 0.1

_MAX_FRACTION = 0.5
_PLACE_BLOCK = 1 << 16
"""Places within such a block take 2 bytes each."""
_SAMPLE_STRIDE = 61
"""A prime, so that the sample does not follow the columns of a weight."""
_SMALLEST_SAMPLE = 256


class TopKCodec(ChunkCodec):
    """Exactly the k values of largest magnitude; of equal ones the first.

    From 6 % on the places are one bit a value, below that two bytes a place: 10 % take
    0.081 of the bytes, 1 % takes 0.010.

    Args:
        fraction: Of the values that are sent.

    Raises:
        ConfigError: If the fraction is not in (0, 0.5].
    """

    format_id = 6
    peak_exponent = 15

    def __init__(self, fraction: float = DEFAULT_FRACTION) -> None:
        super().__init__()
        if not 0.0 < fraction <= _MAX_FRACTION:
            msg = (
                f"top-k fraction {fraction} must be in (0, {_MAX_FRACTION}], such as 0.1; "
                "above that fp16 moves as little and loses nothing"
            )
            raise ConfigError(msg)
        self.fraction = fraction
        self.name = "topk" if fraction == DEFAULT_FRACTION else f"topk:{fraction:g}"

    def num_selected(self, num_elements: int) -> int:
        """How many of that many values are sent; at least one."""
        return min(num_elements, max(1, int(num_elements * self.fraction)))

    def _body_bytes(self, num_elements: int) -> int:
        num_selected = self.num_selected(num_elements)
        places = min(_bitmap_bytes(num_elements), _list_bytes(num_elements, num_selected))
        return 2 * num_selected + places

    def _write(self, values: torch.Tensor, body: torch.Tensor, exponent: int) -> None:
        num_elements, num_selected = values.numel(), self.num_selected(values.numel())
        magnitudes = self._scratch.get("magnitudes", num_elements, torch.float32)
        torch.abs(values, out=magnitudes)
        places = largest_places(magnitudes.numpy(), num_selected)
        selected = torch.from_numpy(values.numpy().take(places)).mul_(2.0**exponent)
        # Through torch: NumPy converts fp16 20x slower.
        body[: 2 * num_selected] = selected.to(torch.float16).view(torch.uint8)
        coded = body.numpy()
        if _is_bitmap(num_elements, num_selected):
            mask = self._scratch.get("mask", num_elements, torch.bool).zero_().numpy()
            mask[places] = True
            coded[2 * num_selected :] = np.packbits(mask)
        else:
            coded[2 * num_selected :] = _list_places(places, num_elements)

    def _read(self, body: torch.Tensor, values: torch.Tensor, exponent: int) -> None:
        num_elements, num_selected = values.numel(), self.num_selected(values.numel())
        coded = body.numpy()
        if _is_bitmap(num_elements, num_selected):
            bits = np.unpackbits(coded[2 * num_selected :], count=num_elements).view(bool)
            places = np.flatnonzero(bits)
        else:
            places = _listed_places(coded[2 * num_selected :], num_selected)
        if len(places) != num_selected or places.max() >= num_elements:
            msg = (
                f"a top-k code names {len(places)} places of {num_elements}, expected "
                f"{num_selected}; the message was damaged, or made by another version"
            )
            raise CommunicationError(msg)
        halves = torch.empty(num_selected, dtype=torch.float16)
        halves.view(torch.uint8).copy_(body[: 2 * num_selected])
        values.zero_()
        values.numpy()[places] = halves.float().mul_(2.0**-exponent).numpy()


def largest_places(magnitudes: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Places of the largest magnitudes, rising; of equal ones the first.

    A sample gives a threshold that a few more pass than are wanted, and the exact choice
    is made among those: 8x faster than a full selection.

    Args:
        magnitudes: Not NaN, shape (num_elements,).
        count: How many, at most num_elements.
    """
    candidates = np.flatnonzero(magnitudes >= _likely_threshold(magnitudes, count))
    if len(candidates) < count:
        candidates = np.arange(len(magnitudes))
    among = magnitudes.take(candidates)
    smallest = np.partition(among, len(among) - count)[len(among) - count]
    chosen = among > smallest
    equal = np.flatnonzero(among == smallest)
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    places: NDArray[np.intp] = candidates[chosen]
    return places


def _likely_threshold(magnitudes: NDArray[np.float32], count: int) -> float:
    """A magnitude that at least ``count`` values reach, almost surely."""
    sample = magnitudes[::_SAMPLE_STRIDE]
    if len(sample) < _SMALLEST_SAMPLE:
        return 0.0
    expected = count / len(magnitudes) * len(sample)
    rank = math.ceil(expected + 4.0 * math.sqrt(expected) + 4.0)  # 4 standard deviations
    if rank >= len(sample):
        return 0.0
    return float(np.partition(sample, len(sample) - rank)[len(sample) - rank])


def _bitmap_bytes(num_elements: int) -> int:
    return -(-num_elements // 8)


def _list_bytes(num_elements: int, num_selected: int) -> int:
    return 4 * -(-num_elements // _PLACE_BLOCK) + 2 * num_selected


def _is_bitmap(num_elements: int, num_selected: int) -> bool:
    return _bitmap_bytes(num_elements) <= _list_bytes(num_elements, num_selected)


def _list_places(places: NDArray[np.intp], num_elements: int) -> NDArray[np.uint8]:
    """How many places each block has (uint32), then each within its block (uint16)."""
    edges = np.arange(0, num_elements + _PLACE_BLOCK, _PLACE_BLOCK)
    counts = np.diff(np.searchsorted(places, edges)).astype("<u4")
    within = (places % _PLACE_BLOCK).astype("<u2")
    return np.concatenate([counts.view(np.uint8), within.view(np.uint8)])


def _listed_places(listed: NDArray[np.uint8], num_selected: int) -> NDArray[np.intp]:
    counts_stop = len(listed) - 2 * num_selected
    counts = listed[:counts_stop].view("<u4").astype(np.int64)
    if int(counts.sum()) != num_selected:
        return np.empty(0, dtype=np.intp)
    blocks = np.repeat(np.arange(len(counts)) * _PLACE_BLOCK, counts)
    places: NDArray[np.intp] = blocks + listed[counts_stop:].view("<u2")
    return places
