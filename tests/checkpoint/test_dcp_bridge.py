"""To and from torch's distributed checkpoints."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.dcp_bridge import export_dcp, import_dcp
from geartrain.checkpoint.dcp_tensor import read_item
from geartrain.checkpoint.difference import StoredVersion
from geartrain.checkpoint.pickle_reader import Call, Name, read_pickle
from geartrain.checkpoint.versions import read_version
from geartrain.errors import CheckpointError, ConfigError
from local_ranks import run_ranks
from saved_versions import save_version, trained_components

ODD = {
    "bfloat16": torch.arange(5).to(torch.bfloat16),
    "complex": torch.complex(torch.arange(3.0), torch.ones(3)),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "list": [torch.ones(1), 2, "x", None],
    "uint16": torch.arange(3).to(torch.uint16),
    "float8": torch.arange(3.0).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "transposed": torch.arange(6).reshape(2, 3).T,
    "part": torch.arange(10)[3:7:2],
    "nothing": None,
    "nested": {"numbers": [1, 2.5, True], "text": "straße", "pair": (1, 2)},
}


def save_dcp(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(path), no_dist=True)


def stored(tmp_path: Path, components: dict[str, object]) -> StoredVersion:
    store = FileStore(tmp_path / "store")
    version = read_version((store,), save_version(store, components))
    return StoredVersion(stores=(store,), manifest=version.manifest)


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert torch.equal(
            left.contiguous().reshape(-1).view(torch.uint8),
            right.contiguous().reshape(-1).view(torch.uint8),
        )
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_equal(value, right[key])
    elif isinstance(left, list | tuple):
        assert type(left) is type(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right
        assert type(left) is type(right)


def test_what_dcp_saved_is_read_with_equal_bits(tmp_path: Path) -> None:
    state = trained_components() | {"odd": ODD, "epoch": 3}
    save_dcp(state, tmp_path / "dcp")

    found = import_dcp(tmp_path / "dcp")

    assert found.pop("values") == {"epoch": 3}
    state.pop("epoch")
    assert_equal(dict(state["model"]), found["model"])  # type: ignore[call-overload]
    assert_equal(state["optimizer"], found["optimizer"])
    assert_equal(state["odd"], found["odd"])


def test_tensors_at_the_top_are_a_model(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    save_dcp(model.state_dict(), tmp_path / "dcp")

    found = import_dcp(tmp_path / "dcp")

    assert_equal(dict(model.state_dict()), found["model"])


def load_exported(rank: int, world_size: int, directory: str) -> dict[str, torch.Tensor]:
    """Load on several ranks as a plain user does, each into a shard of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    sharded = distribute_tensor(torch.zeros(7, 4), mesh, [Shard(0)])
    state = {"model": {"weight": sharded, "bias": torch.zeros(3)}}
    load(state, checkpoint_id=directory)
    return {
        "weight": sharded.full_tensor(),
        "bias": state["model"]["bias"],
    }


def test_an_export_loads_by_dcp_on_two_ranks_and_on_one_with_equal_bits(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = {"weight": torch.randn(7, 4), "bias": torch.randn(3)}
    export_dcp(stored(tmp_path, {"model": model}), tmp_path / "dcp")

    state = {"model": {name: torch.zeros_like(value) for name, value in model.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        load(state, checkpoint_id=tmp_path / "dcp")
    assert_equal(state["model"], model)
    for found in run_ranks(load_exported, 2, str(tmp_path / "dcp")):
        assert_equal(found, model)


def test_an_export_comes_back_equal_and_loads_into_an_optimizer(tmp_path: Path) -> None:
    components = trained_components()
    report = export_dcp(stored(tmp_path, components), tmp_path / "dcp")

    found = import_dcp(tmp_path / "dcp")

    assert ".metadata" in report.files
    assert_equal(components["optimizer"], found["optimizer"])
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    model.load_state_dict(found["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(found["optimizer"])
    assert_equal(components["optimizer"], optimizer.state_dict())


def test_a_place_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "mine").write_text("kept")

    with pytest.raises(ConfigError, match="exists and is left alone"):
        export_dcp(stored(tmp_path, trained_components()), tmp_path / "dcp")

    assert [one.name for one in (tmp_path / "dcp").iterdir()] == ["mine"]


def test_every_flipped_byte_of_the_tensors_is_found(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(64.0)}}
    save_dcp(state, tmp_path / "dcp")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    whole = file.read_bytes()
    start = whole.index(torch.arange(64.0).numpy().tobytes())
    for position in range(start, start + 256):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            import_dcp(tmp_path / "dcp")
    file.write_bytes(whole)
    assert_equal(import_dcp(tmp_path / "dcp"), state)


def test_any_damage_of_the_metadata_is_an_error_or_harmless(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0)}}
    save_dcp(state, tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    whole = path.read_bytes()
    num_refused = 0
    for position in range(0, len(whole), 5):
        for flip in (1, 0x80):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            path.write_bytes(damaged)
            try:
                import_dcp(tmp_path / "dcp")  # DCP has no checksum of it
            except CheckpointError:
                num_refused += 1
        path.write_bytes(whole[:position])
        with pytest.raises(CheckpointError):
            import_dcp(tmp_path / "dcp")
    assert num_refused > len(whole) / 10


class Attack:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._command = f"touch {path}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def test_a_hostile_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    save_dcp({"model": {"w": torch.ones(2)}}, tmp_path / "dcp")
    path, proof = tmp_path / "dcp" / ".metadata", tmp_path / "proof"
    metadata = pickle.loads(path.read_bytes())
    for hostile in (Attack(proof), Metadata({"w": Attack(proof)})):  # type: ignore[dict-item]
        path.write_bytes(pickle.dumps(hostile))
        with pytest.raises(CheckpointError):
            import_dcp(tmp_path / "dcp")
    metadata.planner_data = Attack(proof)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is not what torch"):
        import_dcp(tmp_path / "dcp")

    assert not proof.exists()


def test_a_hostile_item_is_refused_and_not_run(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    buffer = io.BytesIO()
    torch.save({"x": Attack(proof)}, buffer)

    with pytest.raises(CheckpointError, match=r"holds a posix\.system"):
        read_item(buffer.getvalue(), "item")

    assert not proof.exists()


def test_a_file_outside_the_directory_is_not_read(tmp_path: Path) -> None:
    save_dcp({"model": {"w": torch.ones(2)}}, tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../outside"
    path.write_bytes(pickle.dumps(metadata))
    shutil.copy(tmp_path / "dcp" / "__0_0.distcp", tmp_path / "outside")

    with pytest.raises(CheckpointError, match="leads out of the directory"):
        import_dcp(tmp_path / "dcp")


def test_an_item_that_would_fill_the_memory_is_refused() -> None:
    buffer = io.BytesIO()
    torch.save(torch.ones(1).expand(2**40), buffer)

    with pytest.raises(CheckpointError, match="has 4 bytes"):
        read_item(buffer.getvalue(), "item")


def test_lists_that_hold_each_other_many_times_over_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("geartrain.checkpoint.dcp_tensor._MAX_NODES", 10_000)
    bomb: list[Any] = []
    for _ in range(40):
        bomb = [bomb, bomb]
    buffer = io.BytesIO()
    torch.save(bomb, buffer)

    with pytest.raises(CheckpointError, match="more than"):
        read_item(buffer.getvalue(), "item")


def test_an_incomplete_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"")

    with pytest.raises(CheckpointError, match="no complete distributed checkpoint"):
        import_dcp(tmp_path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_read_from_a_pickle_of_any_protocol(protocol: int) -> None:
    data: dict[Any, Any] = {
        "a": [1, -2, 2**40, 2**70, 0.5, None, True],
        ("x", 1): ("é" * 300, {}),
    }

    assert read_pickle(pickle.dumps(data, protocol=protocol), "pickle") == data


def test_what_a_pickle_would_call_is_only_described() -> None:
    found = read_pickle(pickle.dumps(torch.Size([2, 3])), "pickle")

    assert isinstance(found, Call)
    assert found.path == "torch.Size"
    assert found.arguments == ((2, 3),)
    named = read_pickle(pickle.dumps(os.system), "pickle")
    assert isinstance(named, Name)
    assert named.path == "posix.system"
