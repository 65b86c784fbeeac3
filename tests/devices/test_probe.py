"""From ``--fleet`` to a fleet: real listing and probing, in processes of their own."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from devices.emulation.busy_process import favour_cgroups
from geartrain.devices import DeviceProfile, Fleet, MeasuredRate, probe
from geartrain.devices.emulation.cgroups import usable_cgroups
from geartrain.devices.emulation.owner import current_owner
from geartrain.devices.emulation.start import open_throttle
from geartrain.devices.emulation.throttle import Throttle
from geartrain.devices.host import cores_present, host_memory_bytes
from geartrain.devices.probe import probe_fleet, resolve_fleet
from geartrain.devices.probe_cache import ProbeCache
from geartrain.devices.probe_client import probe_client
from geartrain.devices.probe_process import ProbeRequest
from geartrain.errors import ConfigError, DeviceError
from geartrain.telemetry import read_document, write_document


def measured(profile: DeviceProfile, per_s: float = 1e9) -> DeviceProfile:
    rate = MeasuredRate(per_s=per_s, spread_fraction=0.1, num_repeats=5)
    return dataclasses.replace(profile, flop_per_s={"float32": rate}, measured_at_s=1.0)


def open_favoured(devices: Sequence[DeviceProfile]) -> Throttle:
    throttle = open_throttle(devices)
    favour_cgroups()
    return throttle


def test_emulated_fleet_needs_no_probe_and_no_torch() -> None:
    code = """
import sys
from geartrain.devices.probe import resolve_fleet
fleet = resolve_fleet("emulated:0.5,0.25/1GiB")
assert "torch" not in sys.modules
print([d.device_id for d in fleet.devices], fleet.labels)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert result.stdout == "['emulated:0', 'emulated:1'] ('emulated',)\n", result.stderr


def test_emulated_fleet_carries_its_fractions_and_limits() -> None:
    fleet = resolve_fleet("emulated:0.5,0.25/1GiB")

    first, second = fleet.devices
    assert (first.core_fraction, second.core_fraction) == (0.5, 0.25)
    assert (first.memory_limit_bytes, second.memory_limit_bytes) == (None, 2**30)
    assert (first.memory_bytes, second.memory_bytes) == (host_memory_bytes() // 2, 2**30)
    assert first.source == "emulated"
    assert fleet.spec == "emulated:0.5,0.25/1GiB"


def test_oversubscribed_fleet_says_so() -> None:
    text = "emulated:" + ",".join(["1.0"] * (int(cores_present()) + 1))

    with pytest.raises(ConfigError, match="--oversubscribe"):
        resolve_fleet(text)

    assert "oversubscribed" in resolve_fleet(text, oversubscribe=True).labels


def test_memory_limit_above_the_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"emulated:0: memory limit of .* lower it"):
        resolve_fleet("emulated:0.5/900TiB")


def test_absent_device_is_named_with_those_present() -> None:
    with pytest.raises(ConfigError, match=r"cuda:99 is not here; present are .*cpu"):
        resolve_fleet("cpu,cuda:99")


def test_local_fleet_ends_with_the_cpu() -> None:
    fleet = resolve_fleet(None)

    assert fleet.devices[-1].device_id == "cpu"
    assert fleet.labels == ("measured",)


def test_fleet_file_reads_back_equal_and_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    fleet = resolve_fleet("emulated:0.5,0.25")
    write_document(path, fleet)

    assert resolve_fleet(str(path)) == fleet

    too_many = (
        *fleet.devices,
        *(
            dataclasses.replace(
                fleet.devices[0], device_id=f"emulated:{i}", core_fraction=1.0
            )
            for i in range(2, 3 + int(cores_present()))
        ),
    )
    write_document(path, dataclasses.replace(fleet, devices=too_many))
    with pytest.raises(ConfigError, match="--oversubscribe"):
        resolve_fleet(str(path))
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a valid Fleet"):
        resolve_fleet(str(path))


def test_cached_profile_is_used_until_the_fingerprint_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = resolve_fleet("cpu")
    cache = ProbeCache(tmp_path)
    cache.keep(measured(fleet.devices[0]))
    monkeypatch.setattr(probe, "probe_client", None)  # nothing may be measured

    found = probe_fleet(fleet, cache_dir=tmp_path)

    assert found.devices == (measured(fleet.devices[0]),)
    changed = dataclasses.replace(fleet.devices[0], fingerprint="other")
    assert cache.find(changed) is None


def test_unreadable_cache_file_counts_as_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (device,) = resolve_fleet("cpu").devices
    cache = ProbeCache(tmp_path)
    cache.keep(measured(device))
    (path,) = tmp_path.iterdir()
    path.write_text("{")

    assert cache.find(device) is None
    assert "probing cpu again" in caplog.text


def test_datasheet_numbers_are_not_cached(tmp_path: Path) -> None:
    (device,) = resolve_fleet("cpu").devices
    sheet = dataclasses.replace(measured(device), source="datasheet", fingerprint="")

    ProbeCache(tmp_path).keep(sheet)

    assert list(tmp_path.iterdir()) == []


def test_probe_process_that_dies_is_an_error_with_its_status() -> None:
    with probe_client() as client:
        client._process.kill()
        with pytest.raises(DeviceError, match="ended with status -9"):
            client.ask(ProbeRequest(action="prepare"))


def test_probe_process_hands_on_what_an_adapter_refuses() -> None:
    with (
        probe_client() as client,
        pytest.raises(DeviceError, match="xpu:9 is not a xpu device here"),
    ):
        client.ask(ProbeRequest(action="probe", device_ids=("xpu:9",)))


def test_cpu_is_measured_and_remembered(tmp_path: Path) -> None:
    told: list[str] = []

    fleet = resolve_fleet("cpu", probe=True, on_progress=told.append, cache_dir=tmp_path)
    again = resolve_fleet("cpu", probe=True, on_progress=told.append, cache_dir=tmp_path)

    (cpu,) = fleet.devices
    assert "float32" in cpu.flop_per_s
    assert cpu.memory_bytes_per_s is not None
    assert cpu.source == "measured"
    assert told[0] == "cpu: matmul float32"
    assert len(told) == len(set(told)), "the second call measured again"
    assert again == fleet
    (path,) = tmp_path.iterdir()
    assert read_document(path, DeviceProfile) == cpu


@pytest.mark.slow
def test_emulated_devices_are_measured_by_throttled_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "emulated:0.8,0.2"

    monkeypatch.setattr("geartrain.devices.probe_client.open_throttle", open_favoured)

    fleet = resolve_fleet(text, probe=True, cache_dir=tmp_path)

    assert isinstance(fleet, Fleet)
    fast, slow = (device.flop_per_s["float32"].per_s for device in fleet.devices)
    assert fast > 1.5 * slow
    assert resolve_fleet(text, probe=True, cache_dir=tmp_path) == fleet
    cgroups = usable_cgroups()
    if cgroups is not None:
        assert not any((r / current_owner().name).exists() for r in cgroups.roots)
