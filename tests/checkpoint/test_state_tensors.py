"""Whole trainings, saved and taken up again: bits equal, whatever the optimizer keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.manifest import ITEM_BYTES
from geartrain.checkpoint.pieces import StateFacts
from geartrain.checkpoint.ranges import StateRange, split_ownership
from geartrain.checkpoint.state_tensors import (
    held_pieces,
    restore_objects,
    take_apart,
)
from geartrain.checkpoint.tree_file import tree_to_bytes
from geartrain.checkpoint.versions import Version
from geartrain.checkpoint.whole_state import load_state, save_state
from geartrain.errors import CheckpointError

Objects = dict[str, Any]  # models, optimizers, and whatever has a state


def save(place: Path, objects: Objects) -> Version:
    return save_state(LocalTier(place), objects, step=1)


def bits(tree: Any) -> bytes:  # Any: a tree
    return tree_to_bytes(tree).numpy().tobytes()


class Average:
    """Something of a user's: a moving average of weights, with odd company."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = copy.deepcopy(model.state_dict())
        self.settings = {"decay": 0.9, "seen": (1, 2), "best": float("inf"), "none": None}

    def update(self, model: nn.Module) -> None:
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                self.shadow[name].lerp_(value, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "settings": self.settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.settings = state["shadow"], state["settings"]


class EightBit(torch.optim.Optimizer):
    """Momentum as codes of 8 bits with a scale a block, as 8-bit optimizers keep it."""

    def __init__(self, params: Any, lr: float) -> None:  # Any: as torch takes them
        super().__init__(params, {"lr": lr, "levels": torch.linspace(-1, 1, 256)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # no closure here
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["codes"] = torch.full(p.shape, 127, dtype=torch.uint8)
                    state["scale"] = torch.zeros(p.shape[0], dtype=torch.float16)
                    state["step"] = 0
                rows = p.grad.reshape(len(p), -1)
                scale = rows.abs().amax(1)
                codes = (rows / scale.clamp_min(1e-8)[:, None] + 1) * 127.5
                state["codes"] = codes.to(torch.uint8).reshape(p.shape)
                state["scale"] = scale.half()
                state["step"] += 1
                decoded = group["levels"][state["codes"].long()].reshape(len(p), -1)
                p.sub_(
                    (decoded * state["scale"][:, None].float()).reshape(p.shape), alpha=0.1
                )


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1)),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
    "muon": lambda m: torch.optim.Muon(matrices(m), lr=0.1),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.1),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=2),
    "8-bit": lambda m: EightBit(m.parameters(), lr=0.1),
}


def build(make: Callable[[nn.Module], torch.optim.Optimizer], seed: int) -> Objects:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)
    )
    optimizer = make(model)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=50, cycle_momentum=False
        ),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**7),
        "average": Average(model),
    }


def train(objects: Objects, steps: range) -> None:
    model, optimizer = objects["model"], objects["optimizer"]
    for step in steps:
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))

        def loss(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            value = model(inputs).square().mean()
            value.backward()
            return value  # type: ignore[no-any-return] # what a model returns

        loss()
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(loss)  # type: ignore[no-untyped-call] # torch's
        else:
            optimizer.step()
        objects["schedule"].step()
        objects["average"].update(model)


def states(objects: Objects) -> dict[str, bytes]:
    return {name: bits(value.state_dict()) for name, value in objects.items()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    undisturbed = build(OPTIMIZERS[kind], seed=1)
    train(undisturbed, range(6))
    first = build(OPTIMIZERS[kind], seed=1)
    train(first, range(3))
    save(tmp_path, first)

    resumed = build(OPTIMIZERS[kind], seed=2)
    restore_objects(resumed, load_state(tmp_path))
    assert states(resumed) == states(first)
    train(resumed, range(3, 6))

    assert states(resumed) == states(undisturbed)


def test_moments_of_another_dtype_than_their_weights_keep_their_bits(
    tmp_path: Path,
) -> None:
    weight = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moments = torch.randn(5), [torch.randn(3), torch.arange(3)]
    optimizer.state[weight]["exp_avg"], optimizer.state[weight]["nested"] = moments
    saved = {"optimizer": optimizer}
    save(tmp_path, saved)

    resumed = {"optimizer": torch.optim.AdamW([nn.Parameter(weight.detach().clone())])}
    restore_objects(resumed, load_state(tmp_path))

    assert states(resumed) == states(saved)


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    ramp = torch.arange(num_bytes).mul(37).remainder(251).to(torch.uint8)
    if dtype == torch.bool:
        ramp = ramp.remainder(2)
    return ramp.view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_any_dtype_and_shape_keeps_its_bits(tmp_path: Path) -> None:
    dtypes = [getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)]
    tree = {
        f"{dtype}{shape}": make_tensor(dtype, shape)
        for dtype in dtypes
        for shape in ((), (0,), (3, 0), (5,), (2, 3))
    }

    save(tmp_path, {"all": tree})
    read = load_state(tmp_path)["all"]

    assert len(dtypes) >= 18
    assert list(read) == list(tree)
    for name, tensor in tree.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(read[name]) == raw(tensor)


def test_sizes_of_elements_are_those_of_torch() -> None:
    for name, item_bytes in ITEM_BYTES.items():
        if hasattr(torch, name):
            assert getattr(torch, name).itemsize == item_bytes, name


def test_views_tied_and_random_states_are_kept(tmp_path: Path) -> None:
    tied = torch.randn(300, 2)
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "embed": tied,
        "head": tied,
        "views": [base.T, base[::2, 1:3], torch.ones(2, dtype=torch.cfloat).conj()],
        "rng": torch.get_rng_state(),
        "counts": {0: 2**127, "nan": float("nan")},
    }

    version = save(tmp_path, {"tree": tree})
    read = load_state(tmp_path)["tree"]

    assert read["embed"] is read["head"]
    assert sum("e" in name for name in version.manifest.tensors) == 5
    for value, expected in zip(read["views"], tree["views"], strict=True):  # type: ignore[call-overload] # a list
        assert torch.equal(value, expected)
    assert torch.equal(read["rng"], torch.get_rng_state())
    assert bits(read["counts"]) == bits(tree["counts"])


def test_members_that_hold_it_all_write_a_share_each(tmp_path: Path) -> None:
    objects = build(OPTIMIZERS["adamw"], seed=1)
    train(objects, range(2))
    named = take_apart(objects)
    sizes = {name: facts.num_elements for name, facts in named.facts.items()}
    owned = split_ownership(sizes, {"a": 1.0, "b": 5.0, "c": 2.5})

    pieces = [p for ranges in owned.values() for p in held_pieces(named.tensors, ranges)]
    facts = StateFacts(
        step=1,
        lineage="x",
        created_at_s=1.0,
        tensors=named.facts,
        structure=named.structure,
    )
    LocalTier(tmp_path).save(facts, pieces)

    resumed = build(OPTIMIZERS["adamw"], seed=2)
    restore_objects(resumed, load_state(tmp_path))
    assert states(resumed) == states(objects)


def test_facts_of_a_version_are_kept(tmp_path: Path) -> None:
    objects = {"model": nn.Linear(2, 2)}

    version = save_state(
        LocalTier(tmp_path),
        objects,
        step=7,
        lineage="abc",
        extras={"position": [3, 14]},
    )

    manifest = LocalTier(tmp_path).read(version.name).manifest
    assert (manifest.step, manifest.lineage, manifest.kind) == (7, "abc", "weights")
    assert manifest.extras == {"position": [3, 14]}
    assert manifest.num_bytes == 24


def test_the_first_store_that_is_undamaged_serves(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    for name in ("a", "b"):
        save(tmp_path / name, {"model": model})
    for path in (tmp_path / "a" / "objects").rglob("*/*"):
        path.write_bytes(path.read_bytes()[::-1])

    stores = [LocalTier(tmp_path / name).store for name in ("a", "b")]
    read = load_state(stores, map_location="cpu")

    assert bits(read["model"]) == bits(model.state_dict())


def test_a_place_without_versions_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no version in .*nothing"):
        load_state(tmp_path / "nothing")


def test_a_component_can_be_read_alone(tmp_path: Path) -> None:
    objects = build(OPTIMIZERS["adamw"], seed=1)
    save(tmp_path, objects)

    assert list(load_state(tmp_path, ("model",))) == ["model"]
    with pytest.raises(CheckpointError, match="has no 'ema', only model, optimizer"):
        load_state(tmp_path, ("ema",))


def test_a_plain_script_loads_the_weights(tmp_path: Path) -> None:
    objects = build(OPTIMIZERS["adamw"], seed=1)
    save(tmp_path, objects)
    model = build(OPTIMIZERS["adamw"], seed=2)["model"]

    model.load_state_dict(load_state(tmp_path, ["model"])["model"])

    assert bits(model.state_dict()) == bits(objects["model"].state_dict())


@pytest.mark.parametrize(
    ("objects", "problem"),
    [
        ({"a/b": {}}, "must not be empty or hold '/'"),
        ({"": {}}, "must not be empty"),
        ({"user": {"f": len}}, r"user\['f'\] is a builtins.builtin_function_or_method"),
        ({"user": {"w": torch.ones(2).to_sparse()}}, r"user\['w'\] is a torch.Tensor"),
    ],
)
def test_what_cannot_be_kept_is_named(objects: Objects, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        take_apart(objects)


def test_a_state_that_does_not_fit_is_named(tmp_path: Path) -> None:
    save(tmp_path, {"model": nn.Linear(2, 2)})
    loaded = load_state(tmp_path)

    with pytest.raises(CheckpointError, match="state of 'model' does not fit: Error"):
        restore_objects({"model": nn.Linear(2, 3)}, loaded)
    with pytest.raises(CheckpointError, match="no state was saved for 'optimizer'"):
        restore_objects({"optimizer": torch.optim.SGD([torch.ones(1)])}, loaded)


def test_pieces_that_are_not_held_are_refused() -> None:
    tensors = {"model/w": torch.ones(4)}

    for name, stop, problem in (("v", 1, "not held here"), ("model/w", 5, "beyond the 4")):
        with pytest.raises(CheckpointError, match=problem):
            list(held_pieces(tensors, [StateRange(name=name, start=0, stop=stop)]))
