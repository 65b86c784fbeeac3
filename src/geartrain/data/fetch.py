"""Turn dataset indices into a collated batch on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset, default_collate

from geartrain.data.batch_split import check_batch_size, slice_batch
from geartrain.data.batch_tree import Batch
from geartrain.data.placement import pin_batch
from geartrain.data.sample_rng import sample_scope
from geartrain.errors import ConfigError

CollateFn = Callable[[list[Any]], Any]  # Any: samples and batches are the user's

# Datasets are rarely safe to read from two threads (one file handle, one cache), and
# a training and an evaluation loader may hold the same one: one read at a time.
_dataset_lock = threading.RLock()


class MapDataset(Protocol):
    """A dataset with a length and random access, as torch calls map-style."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:  # Any: samples are the user's
        """Return one sample."""


class FetchCancelledError(Exception):
    """The batch being fetched ahead is no longer wanted. Never leaves the room."""


class SampleFetcher:
    """Fetches and collates samples; each sample draws from its own generator."""

    def __init__(
        self, dataset: MapDataset, *, seed: int, collate_fn: CollateFn | None, pin: bool
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = default_collate if collate_fn is None else collate_fn
        self._pin = pin
        self._empty: Batch = None

    def fetch(
        self,
        sample_indices: Sequence[int],
        epoch: int,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Batch:
        """Fetch samples, in order, and collate them; for no indices, a batch of 0 rows.

        Whatever the dataset raises comes through, with a note on the sample.

        Raises:
            ConfigError: If the batch has not one row a sample.
            FetchCancelledError: If ``is_cancelled`` turned true between two samples.
        """
        samples = []
        with sample_scope(self._seed, epoch) as scope:
            for index in sample_indices:
                if is_cancelled():
                    raise FetchCancelledError
                scope.begin(index)
                samples.append(self._fetch_sample(index, epoch))
        batch = self._collate(samples)
        check_batch_size(batch, len(samples))
        return pin_batch(batch) if self._pin else batch

    def fetch_empty(self, sample_index: int, epoch: int) -> Batch:
        """Make a batch of 0 rows with the structure and dtypes of a real one.

        Args:
            sample_index: The sample to learn the structure from, the first time.
            epoch: Its epoch.
        """
        if self._empty is None:
            one = self.fetch([sample_index], epoch)
            self._empty = slice_batch(one, 0, 0)
        return slice_batch(self._empty, 0, 0)  # anew: callers may pop from a mapping

    def _fetch_sample(self, index: int, epoch: int) -> Any:  # Any: samples are the user's
        try:
            with _dataset_lock:
                return self._dataset[index]
        except Exception as error:
            error.add_note(f"while the loader fetched sample {index} of epoch {epoch}")
            raise


def check_map_style(dataset: object) -> None:
    """Check that a dataset has a length and random access.

    Raises:
        ConfigError: If it is an iterable-style dataset, or lacks either.
    """
    missing = [
        name for name in ("__len__", "__getitem__") if not hasattr(type(dataset), name)
    ]
    if isinstance(dataset, IterableDataset) or missing:
        lacks = " and ".join(missing) or "random access"
        msg = (
            f"the dataset {type(dataset).__name__} lacks {lacks}; geartrain hands each "
            "device its own samples of a global order and needs a map-style dataset; "
            "give it __len__ and __getitem__, or read the stream into a list first"
        )
        raise ConfigError(msg)


def wants_pinning(device: torch.device) -> bool:
    """Say whether batches for this device should pass through page-locked memory."""
    return device.type == "cuda"
