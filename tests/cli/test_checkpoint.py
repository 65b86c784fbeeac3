"""``geartrain checkpoint``: what people and programs see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import OBJECTS
from geartrain.checkpoint.snapshot import save_snapshot
from geartrain.checkpoint.versions import list_versions
from geartrain.cli import main
from saved_versions import save_version, trained_components


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three versions, of steps 10, 20 and 30."""
    store = FileStore(tmp_path / "store")
    for step in (10, 20, 30):
        components = trained_components(step)
        save_version(store, components, step=step, config={"lr": step / 10})
    return tmp_path / "store"


def damage(place: Path) -> str:
    """Change a byte of the newest version's weights; returns the chunk's name."""
    store = FileStore(place)
    names = {found.name for found in store.list_objects(OBJECTS)}
    for name in sorted(names):
        data = bytearray(store.get(name))
        if len(data) == 104:  # of the model; the optimizer's is larger
            data[50] ^= 1
            (place / name).write_bytes(data)
            return name
    raise AssertionError(names)


def test_list_shows_each_version_and_which_is_the_latest(place: Path) -> None:
    shown = invoke("list", place)
    found = document(invoke("list", place, "--json"))

    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["10", "20", "30"]
    assert ["lineage-20" in line for line in lines[1:4]] == [False, True, False]
    assert ["latest" in line for line in lines[1:4]] == [False, False, True]
    assert [version["step"] for version in found["versions"]] == [10, 20, 30]
    assert found["latest"] == found["versions"][-1]["name"]
    assert found["stored_bytes"] == sum(
        version["num_bytes"] for version in found["versions"]
    )


def test_list_tells_of_missing_chunks_and_damaged_manifests(place: Path) -> None:
    store = FileStore(place)
    first, *_ = list_versions(store)
    (place / first).write_bytes(b"torn")
    (place / damage(place)).unlink()

    shown = invoke("list", place)
    found = document(invoke("list", place, "--json"))

    assert "1 chunks missing" in shown.stdout
    assert f"damaged: {first}" in shown.stdout
    assert list(found["damaged"]) == [first]


def test_verify_names_the_bad_chunk_and_repairs_it_from_another_place(
    place: Path, tmp_path: Path
) -> None:
    other = FileStore(tmp_path / "other")
    for step in (10, 20, 30):
        save_version(other, trained_components(step), step=step, config={"lr": step / 10})
    assert invoke("verify", place).exit_code == 0
    name = damage(place)

    found = invoke("verify", place)
    as_json = invoke("verify", place, "--json")
    repaired = invoke("verify", place, "--repair", tmp_path / "other")

    assert found.exit_code == 1
    assert f"damaged: {name}" in found.stdout
    assert "holds model/" in found.stdout
    assert as_json.exit_code == 1
    assert document(as_json)["damages"][0]["name"] == name
    assert repaired.exit_code == 0
    assert f"repaired: {name}" in repaired.stdout
    assert invoke("verify", place).exit_code == 0


def test_prune_first_says_and_then_does(place: Path) -> None:
    options = ("--keep-last", 1, "--keep-every", 20, "--min-age", 0)

    planned = invoke("prune", place, *options, "--dry-run")
    assert len(list_versions(FileStore(place))) == 3
    done = invoke("prune", place, *options, "--json")

    assert planned.exit_code == 0
    assert planned.stdout.count("would go ") == 1
    assert "its step is a multiple of 20" in planned.stdout
    assert document(done)["num_objects"] == 2
    assert len(list_versions(FileStore(place))) == 2
    assert invoke("verify", place).exit_code == 0


def test_export_writes_weights_that_plain_torch_loads(place: Path, tmp_path: Path) -> None:
    result = invoke("export", f"{place}@20", "-o", tmp_path / "weights.safetensors")

    assert result.exit_code == 0, result.output
    assert "step 20 written to" in result.stdout
    weights = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    expected = trained_components(20)["model"]
    assert isinstance(expected, dict)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_distributed_checkpoint_goes_out_and_comes_in_equal(
    place: Path, tmp_path: Path
) -> None:
    dcp, store = tmp_path / "dcp", tmp_path / "again"

    assert invoke("export", place, "--format", "dcp", "-o", dcp).exit_code == 0
    unknown_step = invoke("import", dcp, store)
    imported = document(invoke("import", dcp, store, "--step", 30, "--json"))
    compared = document(invoke("diff", place, store, "--json"))

    assert unknown_step.exit_code == 2
    assert "add --step N" in unknown_step.stderr
    assert imported["components"] == ["model", "optimizer"]
    assert compared["tensors"] == []
    assert compared["num_equal"] == 16


def test_a_snapshot_comes_in_with_its_step(tmp_path: Path) -> None:
    save_snapshot(
        tmp_path / "snapshot", {"model": {"w": torch.ones(3)}}, metadata={"step": 7}
    )

    found = document(invoke("import", tmp_path / "snapshot", tmp_path / "store", "--json"))

    assert found["step"] == 7
    assert invoke("verify", tmp_path / "store").exit_code == 0
    refused = invoke("list", tmp_path / "snapshot")
    assert refused.exit_code == 2
    assert "geartrain checkpoint import" in refused.stderr


def test_diff_names_tensors_and_settings(place: Path) -> None:
    shown = invoke("diff", f"{place}@10", f"{place}@20")
    found = document(invoke("diff", f"{place}@10", f"{place}@20", "--json"))

    assert "model/0.weight" in shown.stdout
    assert "config lr: 1.0 -> 2.0" in shown.stdout
    assert found["config"][0]["name"] == "lr"
    assert not found["is_equal"]
    assert document(invoke("diff", place, f"{place}@30", "--json"))["is_equal"]


def test_diff_tells_two_histories_from_one_that_was_changed(tmp_path: Path) -> None:
    for name, seed, lineage in (("a", 1, "aaaa"), ("b", 1, "bbbb"), ("c", 2, "aaaa")):
        components = trained_components(seed) | {"training": {"lineage": lineage}}
        save_version(FileStore(tmp_path / name), components, lineage=lineage)

    other = invoke("diff", tmp_path / "a", tmp_path / "b")
    changed = invoke("diff", tmp_path / "a", tmp_path / "c")
    same = document(invoke("diff", tmp_path / "a", tmp_path / "a", "--json"))

    assert "both are of step 1, by different histories: aaaa, bbbb" in other.stdout
    assert "0 tensors differ" in other.stdout
    assert "value" not in other.stdout
    assert "history aaaa), so one of them was changed" in changed.stdout
    assert same["has_same_history"]
    assert same["is_equal"]


def test_diff_writes_json_also_of_what_is_no_number(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", float("nan"))):
        save_version(FileStore(tmp_path / name), {"m": {"w": torch.tensor([value])}})

    found = document(invoke("diff", tmp_path / "a", tmp_path / "b", "--json"))

    assert found["tensors"][0]["max_abs_difference"] == "nan"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "nowhere"), "there is no directory nowhere"),
        (("list", "."), "holds no versions"),
        (("list", "nosuch://place"), "can't be opened"),
        (("verify", "nowhere"), "there is no directory nowhere"),
        (("prune", "STORE", "--keep-last", "0"), "keep_last=0 must be >= 1"),
        (
            ("export", "STORE@5", "-o", "x"),
            "no version of step 5; the last ones are 10",
        ),
        (("export", "STORE", "-o", "x", "--hf-config", "y"), "leave it out"),
        (("import", "nowhere", "x"), "neither a distributed checkpoint"),
        (("diff", "STORE", "STORE@7"), "no version of step 7"),
    ],
)
def test_a_wrong_word_is_one_clear_line(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")

    result = invoke(*(one.replace("STORE", str(place)) for one in arguments))

    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_looking_at_a_store_needs_no_torch(place: Path) -> None:
    script = (
        "import sys; from geartrain.cli import main\n"
        f"for words in (['list', {str(place)!r}], ['verify', {str(place)!r}],"
        f" ['prune', {str(place)!r}, '--dry-run']):\n"
        "    main(['checkpoint', *words], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )

    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
