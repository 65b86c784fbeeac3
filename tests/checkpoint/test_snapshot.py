from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from geartrain.checkpoint.snapshot import (
    load_snapshot,
    read_manifest,
    save_snapshot,
    verify_snapshot,
)
from geartrain.errors import CheckpointError


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def save(path: Path, value: float = 1.0) -> None:
    tree = {"w": torch.full((50,), value), "step": 3}
    save_snapshot(path, {"model": tree, "optimizer": {"lr": value}}, metadata={"step": 3})


def value_at(path: Path) -> float:
    return float(load_snapshot(path)["model"]["w"][0])


def test_components_and_metadata_read_back(tmp_path: Path) -> None:
    save(tmp_path / "snapshot", 2.5)

    read = load_snapshot(tmp_path / "snapshot")

    assert set(read) == {"model", "optimizer"}
    assert torch.equal(read["model"]["w"], torch.full((50,), 2.5))
    assert read["optimizer"] == {"lr": 2.5}
    assert read_manifest(tmp_path / "snapshot").metadata == {"step": 3}


def test_the_weights_load_without_geartrain(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_snapshot(tmp_path / "snapshot", {"model": model.state_dict()})

    weights = safetensors.torch.load_file(tmp_path / "snapshot" / "model.safetensors")
    other.load_state_dict(weights)

    assert list(weights) != []
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_tied_weights_are_one_tensor_again(tmp_path: Path) -> None:
    save_snapshot(tmp_path / "snapshot", {"model": Tied().state_dict()})

    state = load_snapshot(tmp_path / "snapshot")["model"]

    assert state["embed.weight"] is state["head.weight"]
    assert state._metadata["norm"] == {"version": 2}


def test_tensors_go_where_they_are_asked_to(tmp_path: Path) -> None:
    save(tmp_path / "snapshot")

    state = load_snapshot(tmp_path / "snapshot", map_location="meta")

    assert state["model"]["w"].device.type == "meta"


def test_a_loaded_tensor_does_not_depend_on_the_file(tmp_path: Path) -> None:
    save(tmp_path / "snapshot", 4.0)
    state = load_snapshot(tmp_path / "snapshot")

    file = tmp_path / "snapshot" / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))

    assert state["model"]["w"].eq(4.0).all()


def test_saving_again_replaces_the_snapshot(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        save(tmp_path / "snapshot", value)

    assert value_at(tmp_path / "snapshot") == 3.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["snapshot"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    save(tmp_path / "first", 1.0)
    (tmp_path / "latest").symlink_to("first")

    save(tmp_path / "latest", 2.0)

    assert (tmp_path / "latest").is_symlink()
    assert value_at(tmp_path / "first") == 2.0


@pytest.mark.parametrize(
    "name", ["manifest.json", "model.safetensors", "optimizer.safetensors"]
)
def test_any_flipped_byte_is_noticed(tmp_path: Path, name: str) -> None:
    save(tmp_path / "snapshot")
    file = tmp_path / "snapshot" / name
    intact = file.read_bytes()
    step = max(1, len(intact) // 60)

    for position in range(0, len(intact), step):
        damaged = bytearray(intact)
        damaged[position] ^= 0x41
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"damaged|schema_version"):
            load_snapshot(tmp_path / "snapshot")

    file.write_bytes(intact)
    assert value_at(tmp_path / "snapshot") == 1.0


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_cut_off_file_is_noticed(tmp_path: Path, name: str) -> None:
    save(tmp_path / "snapshot")
    file = tmp_path / "snapshot" / name
    file.write_bytes(file.read_bytes()[:-5])

    with pytest.raises(CheckpointError, match="damaged"):
        verify_snapshot(tmp_path / "snapshot")


@pytest.mark.parametrize(
    ("name", "message"),
    [("manifest.json", "is not a snapshot"), ("model.safetensors", "cannot be read")],
)
def test_a_missing_file_is_noticed(tmp_path: Path, name: str, message: str) -> None:
    save(tmp_path / "snapshot")
    (tmp_path / "snapshot" / name).unlink()

    with pytest.raises(CheckpointError, match=message):
        load_snapshot(tmp_path / "snapshot")


def test_another_schema_version_is_named(tmp_path: Path) -> None:
    save(tmp_path / "snapshot")
    file = tmp_path / "snapshot" / "manifest.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"schema_version": 9}))

    with pytest.raises(CheckpointError, match="schema_version=9, expected 1"):
        load_snapshot(tmp_path / "snapshot")


def test_what_is_not_a_snapshot_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a snapshot"):
        load_snapshot(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is not a snapshot"):
        load_snapshot(tmp_path)


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")

    with pytest.raises(CheckpointError, match="other than a snapshot"):
        save(tmp_path / "home")

    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    save(tmp_path / "empty")

    assert value_at(tmp_path / "empty") == 1.0


def test_a_state_that_cannot_be_kept_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path / "snapshot", 1.0)

    with pytest.raises(CheckpointError, match=r"optimizer\['f'\] is a builtins.function"):
        save_snapshot(tmp_path / "snapshot", {"model": {}, "optimizer": {"f": lambda: 0}})

    assert value_at(tmp_path / "snapshot") == 1.0
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "metadata", [{"x": float("nan")}, {"x": object()}, {1: 2}, {"x": (1,)}]
)
def test_metadata_that_would_not_read_back_is_refused(
    tmp_path: Path, metadata: dict[Any, Any]
) -> None:
    with pytest.raises(CheckpointError, match="metadata"):
        save_snapshot(tmp_path / "snapshot", {}, metadata=metadata)


@pytest.mark.parametrize("name", ["../model", "", "a/b", "manifest.json"])
def test_component_names_are_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="component name"):
        save_snapshot(tmp_path / "snapshot", {name: {}})


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(
        CheckpointError, match=r"cannot save a snapshot .*File exists: .*file"
    ):
        save(tmp_path / "file" / "snapshot")


def test_the_old_snapshot_is_found_while_the_new_one_is_put_in_place(
    tmp_path: Path,
) -> None:
    save(tmp_path / "snapshot", 1.0)
    # What a kill between the two renames leaves behind.
    (tmp_path / "snapshot").rename(tmp_path / ".snapshot.previous")
    shutil.copytree(tmp_path / ".snapshot.previous", tmp_path / ".snapshot.saving-dead")

    assert value_at(tmp_path / "snapshot") == 1.0
    save(tmp_path / "snapshot", 2.0)

    assert value_at(tmp_path / "snapshot") == 2.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["snapshot"]
