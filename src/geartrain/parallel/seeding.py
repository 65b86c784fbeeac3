"""Seeds of the ranks' generators: a function of (seed, step, rank) alone.

So nothing about generators has to be saved, and a resumed run draws what an
uninterrupted one draws.
"""

from __future__ import annotations

import hashlib
import struct

import torch

_WORD = 2**64


def step_seed(seed: int, step: int, rank: int) -> int:
    """Hash (seed, step, rank) into a seed of 63 bits.

    >>> step_seed(0, 1, 0) != step_seed(0, 0, 1)
    True
    """
    key = b"step" + struct.pack("<QQQ", seed % _WORD, step % _WORD, rank % _WORD)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's default generators for one rank's part of a step."""
    torch.manual_seed(step_seed(seed, step, rank))
