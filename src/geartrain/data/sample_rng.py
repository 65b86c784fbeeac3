"""Randomness of one sample: the same whoever fetches it, and whenever.

A dataset with random transforms asks for its generator where it needs one::

    def __getitem__(self, index):
        generator = geartrain.data.sample_generator()
        shift = torch.randint(-2, 3, (2,), generator=generator)

The loader has set it from (seed, epoch, sample index), so neither shares nor
prefetching nor a resume change what is drawn.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_WORD = 2**64


class _LazyGenerator:
    """Most datasets draw nothing, and a generator costs kilobytes: make it late."""

    def __init__(self, seed: int, epoch: int, sample_index: int) -> None:
        self._key = (seed, epoch, sample_index)
        self._generator: torch.Generator | None = None

    def get(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator()
            self._generator.manual_seed(sample_seed(*self._key))
        return self._generator


_current: ContextVar[_LazyGenerator | None] = ContextVar("sample_generator", default=None)


def sample_generator() -> torch.Generator:
    """Return the CPU generator of the sample being fetched.

    Call it inside ``__getitem__``, on the thread that called it; repeated calls for
    one sample continue one stream. Outside a loader's fetch (``dataset[0]`` in a
    notebook) it is torch's default generator.
    """
    lazy = _current.get()
    return torch.default_generator if lazy is None else lazy.get()


def sample_seed(seed: int, epoch: int, sample_index: int) -> int:
    """Hash (seed, epoch, sample index) into a seed of 63 bits.

    A hash, because neighbouring seeds of a generator give streams that are alike.

    >>> sample_seed(0, 0, 0) != sample_seed(0, 0, 1)
    True
    """
    key = struct.pack("<QQQ", seed % _WORD, epoch % _WORD, sample_index % _WORD)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@contextmanager
def sample_scope(seed: int, epoch: int, sample_index: int) -> Iterator[None]:
    """Set the generator that ``sample_generator`` returns meanwhile."""
    token = _current.set(_LazyGenerator(seed, epoch, sample_index))
    try:
        yield
    finally:
        _current.reset(token)
