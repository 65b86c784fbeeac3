"""No pickle is ever loaded: neither by what the package imports nor by what it calls."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import geartrain
from geartrain.checkpoint import chunk_store, local_tier, state_tensors, whole_state
from geartrain.checkpoint.snapshot import load_snapshot, save_snapshot
from geartrain.checkpoint.tree_file import tree_from_bytes, tree_to_bytes

PACKAGE = Path(geartrain.__file__).parent
LOADERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
}
CALLS = {("torch", "load"), ("dist", "broadcast_object_list"), ("dist", "recv_object_list")}


def unsafe_uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in LOADERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "") in LOADERS:
            yield str(node.module)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in CALLS:
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield "allow_pickle"


def test_nothing_in_the_package_can_load_a_pickle() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {use}"
        for path in PACKAGE.rglob("*.py")
        for use in unsafe_uses(ast.parse(path.read_text()))
    }

    assert found == set()


def test_the_search_would_find_one() -> None:
    code = "import pickle\nfrom dill import loads\ntorch.load(p)\nf(allow_pickle=True)"

    found = set(unsafe_uses(ast.parse(code)))

    assert found == {"pickle", "dill", "torch.load", "allow_pickle"}


def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
    msg = "a pickle was loaded"
    raise AssertionError(msg)


def test_states_are_saved_and_loaded_where_pickle_is_not_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    whole_state.save_state(local_tier.LocalTier(tmp_path / "versions"), states, step=1)
    save_snapshot(tmp_path / "snapshot", states)
    read = [
        whole_state.load_state([chunk_store.FileStore(tmp_path / "versions")]),
        load_snapshot(tmp_path / "snapshot"),
        tree_from_bytes(tree_to_bytes(states)),
    ]

    for found in read:
        other = torch.nn.Linear(3, 2)
        other_optimizer = torch.optim.AdamW(other.parameters())
        state_tensors.restore_objects({"model": other, "optimizer": other_optimizer}, found)
        assert torch.equal(other.weight, model.weight)
