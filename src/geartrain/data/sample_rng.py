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


class SampleScope:
    """The sample that is being fetched now, one after the other.

    Its generator is made when it is asked for: most datasets draw nothing, and a
    generator costs kilobytes.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._seed = seed
        self._epoch = epoch
        self._sample_index = 0
        self._generator: torch.Generator | None = None

    def begin(self, sample_index: int) -> None:
        """Turn to the next sample."""
        self._sample_index = sample_index
        self._generator = None

    def get(self) -> torch.Generator:
        """Return the sample's generator."""
        if self._generator is None:
            self._generator = torch.Generator()
            seed = sample_seed(self._seed, self._epoch, self._sample_index)
            self._generator.manual_seed(seed)
        return self._generator


_current: ContextVar[SampleScope | None] = ContextVar("sample_generator", default=None)


def sample_generator() -> torch.Generator:
    """Return the CPU generator of the sample being fetched.

    Call it inside ``__getitem__``, on the thread that called it; repeated calls for
    one sample continue one stream. Outside a loader's fetch (``dataset[0]`` in a
    notebook) it is torch's default generator.
    """
    scope = _current.get()
    return torch.default_generator if scope is None else scope.get()


def sample_seed(seed: int, epoch: int, sample_index: int) -> int:
    """Hash (seed, epoch, sample index) into a seed of 63 bits.

    A hash, because neighbouring seeds of a generator give streams that are alike.

    >>> sample_seed(0, 0, 0) != sample_seed(0, 0, 1)
    True
    """
    key = struct.pack("<QQQ", seed % _WORD, epoch % _WORD, sample_index % _WORD)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@contextmanager
def sample_scope(seed: int, epoch: int) -> Iterator[SampleScope]:
    """Let ``sample_generator`` return the generators of this scope meanwhile."""
    scope = SampleScope(seed, epoch)
    token = _current.set(scope)
    try:
        yield scope
    finally:
        _current.reset(token)
