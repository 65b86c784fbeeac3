from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from geartrain.data.batch_split import batch_size_of, check_batch_size, slice_batch
from geartrain.data.placement import move_batch
from geartrain.errors import ConfigError


class Pair(NamedTuple):
    x: torch.Tensor
    y: list[Any]


@dataclass(frozen=True)
class Sentences:
    tokens: torch.Tensor
    text: list[str]
    scale: float = 2.0


def x(rows: int = 4) -> torch.Tensor:
    return torch.arange(rows * 2).reshape(rows, 2)


def test_nested_structure_is_kept_and_rows_are_cut() -> None:
    batch = {
        "pair": Pair(x(), [x(), {"mask": x().bool()}]),
        "text": ["a", "b", "c", "d"],
        "array": np.arange(4),
        "max_length": 9,
        "temperature": torch.tensor(0.5),
        "nothing": None,
    }

    cut = slice_batch(batch, 1, 3)

    assert batch_size_of(cut) == 2
    assert isinstance(cut["pair"], Pair)
    assert torch.equal(cut["pair"].y[1]["mask"], x().bool()[1:3])
    assert cut["text"] == ["b", "c"]
    assert cut["array"].tolist() == [1, 2]
    assert (cut["max_length"], cut["temperature"].item(), cut["nothing"]) == (9, 0.5, None)
    assert batch_size_of(batch) == 4


def test_a_dataclass_batch_is_cut_and_keeps_its_constants() -> None:
    cut = slice_batch(Sentences(x(), ["a", "b", "c", "d"]), 2, 4)

    assert isinstance(cut, Sentences)
    assert (cut.tokens.tolist(), cut.text, cut.scale) == ([[4, 5], [6, 7]], ["c", "d"], 2.0)


def test_mapping_types_survive() -> None:
    cut = slice_batch(OrderedDict(a=x()), 0, 1)

    assert type(cut) is OrderedDict


def test_a_batch_encoding_of_transformers_is_cut() -> None:
    transformers = pytest.importorskip(
        "transformers", reason="the extra hf is not installed"
    )
    batch = transformers.BatchEncoding({"input_ids": x(), "attention_mask": x()})

    cut = slice_batch(batch, 0, 3)

    assert type(cut) is transformers.BatchEncoding
    assert batch_size_of(cut) == 3
    assert batch_size_of(batch) == 4


def test_slices_are_views() -> None:
    batch = x()

    assert slice_batch(batch, 1, 2).data_ptr() == batch[1].data_ptr()


def test_no_rows_keep_structure_and_dtype() -> None:
    empty = slice_batch((x(), ["a", "b", "c", "d"]), 0, 0)

    assert batch_size_of(empty) == 0
    assert empty[0].shape == (0, 2)
    assert empty[0].dtype == torch.int64


def test_differing_leading_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"batch\['x'\]: 4, batch\['y'\]\[0\]: 3"):
        batch_size_of({"x": x(4), "y": [x(3)]})


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tensor with a sample dimension"):
        batch_size_of({"scale": 1.0})


def test_a_batch_that_has_not_one_row_a_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="leading size 4 from 2 samples"):
        check_batch_size(x(4), 2)


def test_moving_reaches_every_tensor_and_leaves_the_rest() -> None:
    moved = move_batch({"x": x(), "names": ["a"] * 4}, torch.device("meta"))

    assert moved["x"].device.type == "meta"
    assert moved["names"] == ["a"] * 4
