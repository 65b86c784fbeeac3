from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geartrain.checkpoint.tree import flatten
from geartrain.checkpoint.tree_file import tree_from_bytes, tree_to_bytes
from geartrain.errors import CheckpointError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]


def there_and_back(tree: Any) -> Any:  # Any: a tree
    return tree_from_bytes(tree_to_bytes(tree))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)], ids=str)
def test_a_tensor_of_any_dtype_and_shape_keeps_its_bits(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    num_bytes = math.prod(shape) * dtype.itemsize
    ramp = torch.arange(num_bytes, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)
    if dtype == torch.bool:
        ramp = ramp.remainder(2)
    tensor = ramp.view(dtype).reshape(shape)

    read = there_and_back({"x": [tensor]})["x"][0]

    assert (read.dtype, read.shape) == (dtype, torch.Size(shape))
    assert raw(read) == raw(tensor)


def test_views_are_kept_by_their_values() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    views = [
        base.T,
        base[::2, 1:3],
        base[1].expand(2, 4),
        torch.ones(2, dtype=torch.cfloat).conj(),
    ]

    for view, read in zip(views, there_and_back(views), strict=True):
        assert torch.equal(view, read)


def test_one_tensor_in_two_places_is_one_tensor_again() -> None:
    weight = torch.ones(1000)

    block = tree_to_bytes({"embed": weight, "head": weight.detach()})
    read = tree_from_bytes(block)

    assert read["embed"] is read["head"]
    assert len(block) < 2 * weight.numel() * 4


def test_slices_of_one_storage_stay_apart() -> None:
    buffer = torch.arange(10.0)

    read = there_and_back([buffer[:5], buffer[5:], buffer])

    assert [r.tolist() for r in read] == [
        buffer[:5].tolist(),
        buffer[5:].tolist(),
        buffer.tolist(),
    ]


def test_a_parameter_is_read_as_a_tensor() -> None:
    read = there_and_back({"w": torch.nn.Parameter(torch.ones(2))})

    assert type(read["w"]) is torch.Tensor
    assert not read["w"].requires_grad


def test_containers_and_numbers_keep_their_types_and_order() -> None:
    tree = {
        "state": {0: {"step": 3}, (1, "a"): None, True: 1, None: 2, 1.5: 3},
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(dict, {"x": {}}),
        "milestones": Counter({30: 1, 80: 2}),
        "betas": (0.9, 0.999, (1,)),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "text": 'quote " newline \n umlaut ü surrogate \ud800',
        "large": 10**30,
        "empty": [{}, [], ()],
    }

    read = there_and_back(tree)

    assert read == tree
    assert list(read["ordered"]) == ["b", "a"]
    for name in ("ordered", "default", "milestones", "betas", "size"):
        assert type(read[name]) is type(tree[name])
    assert read["default"].default_factory is dict
    assert type(read["state"][0]["step"]) is int


def test_floats_keep_their_bits() -> None:
    payload = struct.unpack(">d", bytes.fromhex("7ff80000deadbeef"))[0]
    values = [
        0.1,
        -0.0,
        5e-324,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        math.nan,
        payload,
    ]

    read = there_and_back(values)

    assert [struct.pack(">d", v) for v in read] == [struct.pack(">d", v) for v in values]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 3)),
        np.array(1.5),
        np.array(["a", "bc"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_numpy_arrays_keep_dtype_shape_and_values(array: np.ndarray[Any, Any]) -> None:
    read = there_and_back({"a": array})["a"]

    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert read.tolist() == array.tolist()


@pytest.mark.parametrize(
    "value", [np.float64(0.1), np.int32(7), np.bool_(True), np.str_("x")]
)
def test_numpy_scalars_keep_their_type(value: np.generic) -> None:
    read = there_and_back([value])[0]

    assert type(read) is type(value)
    assert read == value


def test_random_states_are_kept() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.PCG64(1).state
    tree = {"torch": torch_state, "numpy": numpy_state}

    read = there_and_back(tree)

    assert torch.equal(read["torch"], torch_state)
    assert read["numpy"] == numpy_state


def test_names_that_collide_do_not_lose_a_tensor() -> None:
    tree = {
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "__metadata__": torch.full((1,), 2.0),
    }

    read = there_and_back(tree)

    assert [read["a.b"].item(), read["a"]["b"].item(), read["__metadata__"].item()] == [
        0,
        1,
        2,
    ]


class Colour(Enum):
    RED = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: 0, "builtins.function"),
        ({1, 2}, "builtins.set"),
        (b"bytes", "builtins.bytes"),
        (Colour.RED, "Colour"),
        (Text("x"), "Text"),
        (1j, "builtins.complex"),
        (object(), "builtins.object"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "meta"),
        (np.array([None]), "numpy.ndarray"),
    ],
)
def test_anything_else_is_refused_by_its_place_and_type(value: object, kind: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"opt\['groups'\]\[1\]\['x'\] is a "
    ) as caught:
        flatten({"groups": [0, {"x": value}]}, "opt")

    assert kind in str(caught.value)


def test_a_key_of_another_type_is_refused() -> None:
    with pytest.raises(CheckpointError, match="Colour"):
        flatten({Colour.RED: 1})


def test_a_default_factory_that_is_code_is_refused() -> None:
    with pytest.raises(CheckpointError, match="default_factory"):
        flatten(defaultdict(lambda: 3))


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)

    with pytest.raises(CheckpointError, match="contains itself"):
        flatten(tree)


def test_bytes_that_are_no_tree_are_refused() -> None:
    block = tree_to_bytes({"w": torch.ones(4)})

    for damaged in (block[:4], block[:60], block[:-1], torch.zeros(100, dtype=torch.uint8)):
        with pytest.raises(CheckpointError, match="does not hold a state"):
            tree_from_bytes(damaged)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(keys, inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
    ),
    max_leaves=20,
)


@given(trees)
def test_any_nesting_reads_back_equal(tree: Any) -> None:  # Any: a tree
    read = there_and_back(tree)

    assert repr(read) == repr(tree)
