"""The global order of samples: what each step owns, whoever computes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geartrain.errors import ConfigError

ORDER_VERSION = 1
"""Changes whenever the same seed would give another order; kept in saved positions."""

_WORD = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalOrder:
    """One permutation an epoch, cut into global batches."""

    num_samples: int
    global_batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            msg = (
                f"global_batch_size={self.global_batch_size} must be >= 1; "
                "it is the number of samples of one optimizer step over all devices"
            )
            raise ConfigError(msg)
        if self.num_samples < self.global_batch_size:
            msg = (
                f"the dataset has {self.num_samples} samples, fewer than "
                f"global_batch_size={self.global_batch_size}; lower global_batch_size "
                f"to at most {self.num_samples}, or use a larger dataset"
            )
            raise ConfigError(msg)

    @property
    def num_steps(self) -> int:
        """Global batches in an epoch.

        >>> GlobalOrder(num_samples=10, global_batch_size=4).num_steps
        3
        >>> GlobalOrder(num_samples=10, global_batch_size=4, drop_last=True).num_steps
        2
        """
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def batch_bounds(self, step: int) -> tuple[int, int]:
        """First slot of a step's global batch, and the one after its last.

        Args:
            step: Position in the epoch, in 0..num_steps-1.

        >>> GlobalOrder(num_samples=10, global_batch_size=4).batch_bounds(2)
        (8, 10)
        """
        start = step * self.global_batch_size
        return start, min(start + self.global_batch_size, self.num_samples)

    def permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """Dataset index of each slot of an epoch, shape (num_samples,)."""
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        # NumPy promises the raw stream of a bit generator for ever, but not what
        # Generator.permutation makes of it, and a resumed run may meet another
        # NumPy. Sorting random words needs nothing but the stream.
        key = np.array([self.seed % _WORD, epoch % _WORD], dtype=np.uint64)
        words = np.random.Philox(key=key).random_raw(self.num_samples)
        return np.argsort(words, kind="stable").astype(np.int64, copy=False)
