"""Run directories and what is written there at the start."""

import sys
from pathlib import Path
from typing import Any

import pytest

from example_fleets import cpu_fleet, emulated_fleet
from geartrain.devices.profile import Fleet
from geartrain.errors import ConfigError
from geartrain.launch import LaunchSettings, create_run_directory
from geartrain.launch.run_directory import (
    Contacts,
    Seat,
    order_fleet,
    write_run_files,
    write_worker_spec,
)
from geartrain.parallel.worker_spec import WorkerSpec
from geartrain.telemetry import RunManifest, read_document


def test_two_runs_of_the_same_second_get_two_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"

    first, second = create_run_directory(script), create_run_directory(script)

    assert first != second
    assert first.parent == tmp_path / "runs"


def test_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()

    with pytest.raises(ConfigError, match="holds a run already"):
        create_run_directory(tmp_path / "train.py", tmp_path)


def test_place_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="--run-dir"):
        create_run_directory(tmp_path / "train.py", tmp_path / "file" / "run")


def test_fastest_device_comes_first_and_the_others_keep_their_order() -> None:
    ordered = order_fleet(emulated_fleet(0.2, 0.4, 0.8, 0.8, 0.1))

    ids = [device.device_id for device in ordered.devices]
    assert ids == [f"emulated:{i}" for i in (2, 0, 1, 3, 4)]


def test_accelerator_comes_before_the_cpu() -> None:
    cpu = cpu_fleet(1).devices[0]
    gpu = emulated_fleet(0.5).devices[0]
    gpu = type(gpu)(
        **{f: getattr(gpu, f) for f in gpu.__dataclass_fields__}
        | {"device_id": "cuda:0", "kind": "cuda", "core_fraction": None}
    )

    ordered = order_fleet(Fleet(devices=(cpu, gpu)))

    assert ordered.devices[0].device_id == "cuda:0"


def test_run_files_and_worker_specs_read_back(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    settings = LaunchSettings(
        script=script,
        arguments=("--json",),
        fleet=emulated_fleet(0.5, 0.5),
        run_dir=tmp_path,
        deterministic=True,
    )

    write_run_files(settings)
    path = write_worker_spec(settings, Seat(1), Contacts(store_port=1234))

    manifest = read_document(tmp_path / "run.json", RunManifest)
    spec = read_document(path, WorkerSpec)
    assert manifest.arguments == ("--json",)
    assert manifest.labels == ("emulated",)
    assert manifest.versions["python"] == sys.version.split()[0]
    assert (spec.rank, spec.world_size, spec.store_port) == (1, 2, 1234)
    assert spec.deterministic
    assert spec.torch_threads == 1


def test_real_devices_keep_torchs_number_of_threads(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    settings = LaunchSettings(script=script, fleet=cpu_fleet(1), run_dir=tmp_path)

    path = write_worker_spec(settings, Seat(0), Contacts(store_port=1))

    assert read_document(path, WorkerSpec).torch_threads is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"replan_threshold": 0.0}, "replan_threshold=0.0 must be > 0"),
        ({"replan_threshold": float("nan")}, "replan_threshold=nan"),
        ({"tail_fraction": 1.0}, "tail_fraction=1.0 must lie in 0..1"),
    ],
)
def test_wrong_settings_are_refused(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    script = tmp_path / "train.py"
    script.touch()

    with pytest.raises(ConfigError, match=message):
        LaunchSettings(script=script, fleet=cpu_fleet(1), run_dir=tmp_path, **wrong)


def test_missing_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no script at"):
        LaunchSettings(script=tmp_path / "no.py", fleet=cpu_fleet(1), run_dir=tmp_path)
