"""Exports load in plain torch, safetensors and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.difference import StoredVersion
from geartrain.checkpoint.export import export_hf, export_safetensors
from geartrain.checkpoint.versions import read_version
from geartrain.errors import CheckpointError, ConfigError
from saved_versions import save_version


class Tied(torch.nn.Module):
    """An output that shares the embedding's weights, as language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.output = torch.nn.Linear(4, 8, bias=False)
        self.output.weight = self.embedding.weight


def stored(tmp_path: Path, components: dict[str, object]) -> StoredVersion:
    store = FileStore(tmp_path / "store")
    version = read_version((store,), save_version(store, components))
    return StoredVersion(stores=(store,), manifest=version.manifest)


def assert_same_weights(left: torch.nn.Module, right: torch.nn.Module) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_weights_load_in_three_lines_of_plain_torch(tmp_path: Path) -> None:
    trained = Tied().to(torch.bfloat16)
    version = stored(tmp_path, {"model": trained, "optimizer": {"state": {}}})

    report = export_safetensors(version, tmp_path / "out" / "weights.safetensors")

    weights = safetensors.torch.load_file(tmp_path / "out" / "weights.safetensors")
    model = Tied().to(torch.bfloat16)
    model.load_state_dict(weights)
    assert_same_weights(model, trained)
    assert report.num_tensors == len(trained.state_dict())
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["weights.safetensors"]


def test_large_weights_become_shards_with_an_index(tmp_path: Path) -> None:
    trained = Tied()
    version = stored(tmp_path, {"model": trained})

    report = export_hf(version, tmp_path / "hf", max_shard_bytes=130)

    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0].startswith("model-00001-of-0000")
    assert set(report.files) == {*files, "model.safetensors.index.json"}
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        shard = safetensors.torch.load_file(tmp_path / "hf" / file)
        assert {index["weight_map"][name] for name in shard} == {file}
        weights |= shard
    model = Tied()
    model.load_state_dict(weights)
    assert_same_weights(model, trained)
    assert index["metadata"]["total_size"] == report.num_bytes


@pytest.mark.slow  # importing transformers takes seconds
def test_transformers_loads_the_directory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)
    trained = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path / "config")
    version = stored(tmp_path, {"model": trained.state_dict()})

    export_hf(
        version,
        tmp_path / "hf",
        config=tmp_path / "config" / "config.json",
        max_shard_bytes=2000,
    )

    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert_same_weights(model, trained)


def test_what_is_no_tensor_is_left_out_and_named(tmp_path: Path) -> None:
    version = stored(tmp_path, {"model": {"w": torch.ones(2), "extra": {"note": "x"}}})

    report = export_safetensors(version, tmp_path / "weights.safetensors")

    assert report.left_out == ("extra.note",)
    assert safetensors.torch.load_file(tmp_path / "weights.safetensors").keys() == {"w"}


def test_what_the_format_cannot_hold_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        msg = "no such dtype"
        raise safetensors.SafetensorError(msg)

    monkeypatch.setattr("safetensors.torch.save_file", refuse)
    version = stored(tmp_path, {"model": {"w": torch.ones(2)}})

    with pytest.raises(CheckpointError, match="export them as dcp instead"):
        export_safetensors(version, tmp_path / "out" / "weights.safetensors")
    with pytest.raises(CheckpointError, match="export them as dcp instead"):
        export_hf(version, tmp_path / "out" / "hf")

    assert not list((tmp_path / "out").iterdir())


def test_a_component_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    version = stored(tmp_path, {"model": {"w": torch.ones(2)}, "ema": {}})

    with pytest.raises(CheckpointError, match="has no 'modl', only model, ema"):
        export_safetensors(version, tmp_path / "out", component="modl")


@pytest.mark.parametrize("export", [export_safetensors, export_hf])
def test_nothing_is_written_over(tmp_path: Path, export: Any) -> None:
    version = stored(tmp_path, {"model": {"w": torch.ones(2)}})
    target = tmp_path / "mine"
    target.write_text("kept")

    with pytest.raises(ConfigError, match="exists and is left alone"):
        export(version, target)

    assert target.read_text() == "kept"


def test_a_damaged_chunk_is_taken_from_the_next_store(tmp_path: Path) -> None:
    version = stored(tmp_path, {"model": {"w": torch.arange(9.0)}})
    other = FileStore(tmp_path / "other")
    (store,) = version.stores
    for found in store.list_objects("objects/"):
        other.put_if_absent(found.name, store.get(found.name))
        path = tmp_path / "store" / found.name
        path.write_bytes(path.read_bytes()[:-1] + b"!")

    with pytest.raises(CheckpointError, match="no store has chunk"):
        export_safetensors(version, tmp_path / "weights")

    both = StoredVersion(stores=(store, other), manifest=version.manifest)
    export_safetensors(both, tmp_path / "weights")
    weights = safetensors.torch.load_file(tmp_path / "weights")
    assert torch.equal(weights["w"], torch.arange(9.0))


def test_a_configuration_that_is_none_is_refused(tmp_path: Path) -> None:
    version = stored(tmp_path, {"model": {"w": torch.ones(2)}})
    (tmp_path / "config.json").write_text("[]")

    for config in (tmp_path / "config.json", tmp_path / "nothing"):
        with pytest.raises(ConfigError, match=r"give a model's config\.json"):
            export_hf(version, tmp_path / "hf", config=config)
