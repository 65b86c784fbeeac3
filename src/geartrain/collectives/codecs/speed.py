"""How fast this host codes, for the planner to weigh against its links."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import torch

from geartrain.collectives.codecs.registry import make_codec
from geartrain.planner.exchange.schedule import CodecProfile

if TYPE_CHECKING:
    from collections.abc import Callable

_NUM_ELEMENTS = 1 << 18
"""1 MiB: the size of a chunk, and long enough to tell microseconds."""
_BYTES_PER_ELEMENT = 4
_SECONDS_EACH = 0.02
_FEWEST_RUNS = 3
_SEED = 0


@functools.cache
def measure_codec(name: str) -> CodecProfile:
    """Time a codec on one thread of this host; once per process, under 0.15 s.

    Args:
        name: As for ``make_codec``.

    Returns:
        Bytes and rates; the rates are those of the fastest run, since slower ones were
        disturbed.

    Raises:
        ConfigError: If there is no such codec.
    """
    codec = make_codec(name)
    generator = torch.Generator().manual_seed(_SEED)
    values = torch.randn(_NUM_ELEMENTS, generator=generator)
    code = torch.zeros(codec.encoded_bytes(_NUM_ELEMENTS), dtype=torch.uint8)
    decoded = torch.zeros_like(values)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a stage of the exchange has one thread
    try:
        encode_s = _fastest_s(lambda: codec.encode(values, code))
        decode_s = _fastest_s(lambda: codec.decode(code, decoded))
    finally:
        torch.set_num_threads(num_threads)
    num_bytes = _BYTES_PER_ELEMENT * _NUM_ELEMENTS
    return CodecProfile(
        name=codec.name,
        bytes_fraction=code.numel() / num_bytes,
        encode_bytes_per_s=num_bytes / encode_s,
        decode_bytes_per_s=num_bytes / decode_s,
    )


def _fastest_s(run: Callable[[], None]) -> float:
    run()  # makes the scratch buffers
    times: list[float] = []
    end_at = time.perf_counter() + _SECONDS_EACH
    while len(times) < _FEWEST_RUNS or time.perf_counter() < end_at:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
