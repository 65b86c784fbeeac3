"""Runs whose devices are hosts of their own, with links between them."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from example_fleets import cpu_fleet, emulated_fleet
from geartrain.bench.fleet_run import MEASUREMENT_NAME, run_script
from geartrain.bench.gpu_settings import ExactnessMeasurement, ExactnessSettings
from geartrain.bench.macro_settings import ModelSize
from geartrain.devices import Fleet
from geartrain.devices.emulation.network import parse_links
from geartrain.devices.emulation.network.spec import AddressFamilies
from geartrain.errors import ConfigError, DeviceError
from geartrain.launch import LaunchSettings, launch
from geartrain.launch.settings import SilentObserver
from geartrain.planner import Plan, Replica, Stage
from geartrain.telemetry import read_document
from lab_traffic import needs_networks

LINKS = parse_links("100Mbit", 2)
IPV6 = (
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs IPv6"),
)
# Says where it is, and that the store answers there; rank 0 is the faster device.
SCRIPT = """
import json, os, socket
spec = json.load(open(os.environ["GEARTRAIN_WORKER_SPEC"]))
with socket.create_server((spec["address"], 0)) as own:
    store = socket.create_connection((spec["store_host"], spec["store_port"]), 5)
    found = {"spec": spec, "network": os.readlink("/proc/self/ns/net"),
             "gloo": os.environ["GLOO_SOCKET_IFNAME"],
             "reaches_the_store_from": store.getsockname()[0]}
with open(os.path.join(spec["run_dir"], f"found-{spec['rank']}.json"), "w") as file:
    json.dump(found, file)
"""


def write_script(folder: Path, text: str = "") -> Path:
    script = folder / "train.py"
    script.write_text(text)
    return script


@pytest.mark.root
@needs_networks
def test_every_worker_is_on_the_host_of_its_device(tmp_path: Path) -> None:
    fleet = emulated_fleet(0.3, 0.6)
    settings = LaunchSettings(
        script=write_script(tmp_path, SCRIPT), fleet=fleet, run_dir=tmp_path, links=LINKS
    )

    result = launch(settings, SilentObserver())

    assert result.outcome == "finished", result.details
    for rank in range(2):  # torch warns of addresses that have no name
        assert "[W" not in (tmp_path / f"worker-{rank}.log").read_text()
    found = [json.loads((tmp_path / f"found-{r}.json").read_text()) for r in range(2)]
    # The second device is faster and so rank 0; its host stays the second one.
    for one, address in zip(found, ("198.18.0.2", "198.18.0.1"), strict=True):
        assert one["spec"]["address"] == one["reaches_the_store_from"] == address
        assert one["spec"]["interface"] == one["gloo"] == "eth0"
    networks = {one["network"] for one in found}
    assert len(networks | {str(Path("/proc/self/ns/net").readlink())}) == 3
    manifest = json.loads((tmp_path / "run.json").read_text())
    assert manifest["labels"] == ["emulated", f"links {LINKS}"]
    written = read_document(tmp_path / "fleet.json", Fleet)
    assert [d.node_id for d in written.devices] == ["here/host1", "here/host0"]
    spec = found[0]["spec"]
    with pytest.raises(OSError, match=r"unreachable|refused|timed out"):
        socket.create_connection((spec["store_host"], spec["store_port"]), timeout=0.3)


@pytest.mark.root
@needs_networks
@pytest.mark.timeout(120)
@pytest.mark.parametrize("families", ["ipv4", pytest.param("ipv6", marks=IPV6)])
def test_gradient_over_emulated_links_is_that_of_one_device(
    tmp_path: Path, families: AddressFamilies
) -> None:
    links = replace(LINKS, families=families)
    fleet = emulated_fleet(0.5, 0.5)
    shares = {"emulated:0": 5, "emulated:1": 3}
    replicas = tuple(
        Replica(device_id=i, share=n, micro_batch_size=n, num_micro_batches=1)
        for i, n in shares.items()
    )
    plan = Plan(global_batch_size=8, stages=(Stage(stage_index=0, replicas=replicas),))
    settings = ExactnessSettings(
        plan=plan, dtype="float64", model=ModelSize(dim=32, num_layers=1, context=16)
    )

    run_script("exactness_worker", fleet, settings, tmp_path, lambda _: None, links=links)

    measured = read_document(tmp_path / MEASUREMENT_NAME, ExactnessMeasurement)
    assert measured.gradient_error < 1e-12
    assert measured.loss_error < 1e-12


def test_links_between_real_devices_are_refused(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    with pytest.raises(ConfigError, match="cpu:0, cpu:1 of the fleet are real"):
        LaunchSettings(script=script, fleet=cpu_fleet(2), run_dir=tmp_path, links=LINKS)


def test_links_of_another_number_of_hosts_are_refused(tmp_path: Path) -> None:
    script, fleet = write_script(tmp_path), emulated_fleet(0.5, 0.5, 0.5)
    with pytest.raises(ConfigError, match=r"2 hosts, but the fleet .* has 3 devices"):
        LaunchSettings(script=script, fleet=fleet, run_dir=tmp_path, links=LINKS)


def test_links_without_root_are_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, fleet = write_script(tmp_path), emulated_fleet(0.5, 0.5)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DeviceError, match="need root"):
        LaunchSettings(script=script, fleet=fleet, run_dir=tmp_path, links=LINKS)
