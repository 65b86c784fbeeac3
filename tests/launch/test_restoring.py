"""What a run goes on from where nobody holds its state any more."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from example_fleets import emulated_fleet
from geartrain.checkpoint.snapshot import save_snapshot
from geartrain.devices.emulation.network import parse_links
from geartrain.launch.comebacks import Comebacks
from geartrain.launch.respawn import RespawnSettings
from geartrain.launch.restoring import restore
from geartrain.launch.run_directory import order_fleet, write_run_files
from geartrain.launch.settings import LaunchSettings
from geartrain.launch.stop_requests import StopRequests
from geartrain.parallel.worker_spec import WorkerLoss
from geartrain.telemetry import write_document

QUICK = RespawnSettings(first_wait_s=0.01, max_wait_s=0.01, max_device_failures=2)
NAMES = ("emulated:0", "emulated:1")


def settings(folder: Path, *, saved: bool = True, min_devices: int = 1) -> LaunchSettings:
    if saved:
        state = {"model": {"w": torch.ones(2)}, "training": {"step_index": 3}}
        save_snapshot(folder / "checkpoint", state, metadata={"step": 3})
    (folder / "train.py").touch()
    made = LaunchSettings(
        script=folder / "train.py",
        fleet=emulated_fleet(0.5, 0.5),
        run_dir=folder,
        min_devices=min_devices,
    )
    write_run_files(made)
    return made


def lost(*device_ids: str, respawn: RespawnSettings | None = QUICK) -> Comebacks:
    comebacks = Comebacks(respawn)
    for device_id in device_ids:
        comebacks.note_lost(device_id, "was killed")
    return comebacks


def test_run_goes_on_from_its_newest_save_with_all_devices(tmp_path: Path) -> None:
    comebacks = lost(*NAMES)
    loss = WorkerLoss(
        rank=1, device_id=NAMES[1], at_s=1.0, step=5, reason="killed", incarnation="1.0"
    )
    write_document(tmp_path / WorkerLoss.file_name("1.0"), loss)

    restored = restore(settings(tmp_path), comebacks, StopRequests())

    assert restored is not None
    assert restored.settings.resume is not None
    assert restored.settings.resume.step == 3
    assert [d.device_id for d in restored.settings.fleet.devices] == list(NAMES)
    assert "after step 3" in restored.notice
    assert not list(tmp_path.glob("lost-*.json"))
    assert not any(comebacks.returns(name) for name in NAMES)


def test_device_that_was_let_go_or_failed_too_often_stays_away(tmp_path: Path) -> None:
    comebacks = lost(NAMES[0])
    comebacks.note_left(NAMES[1], "drained")

    restored = restore(settings(tmp_path), comebacks, StopRequests())

    assert restored is not None
    assert [d.device_id for d in restored.settings.fleet.devices] == [NAMES[0]]
    for _ in range(QUICK.max_device_failures):
        comebacks.note_lost(NAMES[0], "was killed")
    assert restore(settings(tmp_path), comebacks, StopRequests()) is None


def test_run_ends_where_there_is_no_save_or_devices_are_not_started_again(
    tmp_path: Path,
) -> None:
    assert restore(settings(tmp_path, saved=False), lost(*NAMES), StopRequests()) is None
    assert restore(settings(tmp_path), lost(*NAMES, respawn=None), StopRequests()) is None


def test_devices_keep_the_hosts_they_had(tmp_path: Path) -> None:
    fleet = emulated_fleet(0.2, 0.5)  # rank 0 is the second host's
    began = replace(settings(tmp_path), fleet=fleet)
    write_run_files(replace(began, fleet=order_fleet(fleet)))

    restored = restore(began, lost(*NAMES), StopRequests())

    assert restored is not None
    assert restored.settings.fleet == fleet


@pytest.mark.root
def test_run_ends_where_its_emulated_links_are_for_more_devices(tmp_path: Path) -> None:
    linked = replace(settings(tmp_path), links=parse_links("100Mbit", 2))
    comebacks = lost(NAMES[0])
    comebacks.note_left(NAMES[1], "drained")

    assert restore(linked, comebacks, StopRequests()) is None


def test_run_ends_with_fewer_devices_than_it_needs(tmp_path: Path) -> None:
    comebacks = lost(NAMES[0])
    comebacks.note_left(NAMES[1], "drained")

    assert restore(settings(tmp_path, min_devices=2), comebacks, StopRequests()) is None


def test_request_to_stop_ends_the_wait(tmp_path: Path) -> None:
    patient = RespawnSettings(first_wait_s=60.0, max_wait_s=60.0)
    requests = StopRequests()
    requests.count = 1
    began_s = time.monotonic()

    assert restore(settings(tmp_path), lost(*NAMES, respawn=patient), requests) is None
    assert time.monotonic() < began_s + 30
