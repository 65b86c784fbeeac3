from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.devices.fleet_spec import check_cores, parse_fleet_spec
from geartrain.errors import ConfigError

KINDS = ("cpu", "cuda", "emulated")


def test_absent_spec_means_all_local_devices() -> None:
    assert parse_fleet_spec(None, KINDS).form == "local"


def test_emulated_spec_gives_fractions_and_memory_limits() -> None:
    spec = parse_fleet_spec("emulated:1.0, 0.5/2GiB,0.25", KINDS)

    assert spec.form == "emulated"
    assert [device.core_fraction for device in spec.emulated] == [1.0, 0.5, 0.25]
    assert [d.memory_limit_bytes for d in spec.emulated] == [None, 2 * 2**30, None]


def test_list_keeps_its_order() -> None:
    spec = parse_fleet_spec("cuda:1, cuda:0,cpu", KINDS)

    assert (spec.form, spec.device_ids) == ("list", ("cuda:1", "cuda:0", "cpu"))


def test_existing_file_is_taken_as_a_fleet(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_text("{}")

    spec = parse_fleet_spec(str(path), KINDS)

    assert (spec.form, spec.path) == ("file", path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ("emulated:", "core fraction '' is not a number"),
        ("emulated:0.5,", "emulated:1: core fraction ''"),
        ("emulated:fast", "'fast' is not a number"),
        ("emulated:-0.5", "core_fraction=-0.5"),
        ("emulated:0", "core_fraction=0 "),
        ("emulated:0.5,0.001", "emulated:1: core_fraction=0.001"),
        ("emulated:1.5", r"core_fraction=1\.5 must lie in 0\.02\.\.1"),
        ("emulated:nan", "core_fraction=nan"),
        ("emulated:0.5/lots", "'lots' is not an amount of memory"),
        ("emulated:0.5/", "not an amount of memory"),
        ("emulated:0.5/10kB", "expected at least 1.0 MiB"),
        ("emulated:0.5/2Gbit", "'Gbit'"),
        ("tpu:0", "unknown device kind 'tpu'; known: cpu, cuda, emulated"),
        ("cuda:0,cuda:0", "lists cuda:0 more than once"),
        ("cuda:x", "'cuda:x' in fleet"),
        ("cuda:0,emulated:1", "'emulated:1' in fleet"),
        ("absent.json", "absent.json does not exist"),
        ("some/dir", "some/dir does not exist"),
        ("./", "is there but is no file"),
        ("a fleet.json", "geartrain probe -o 'a fleet.json'"),
    ],
)
def test_wrong_spec_is_refused_with_what_was_seen(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_fleet_spec(text, KINDS)


def test_more_cores_than_present_need_to_be_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"add up to 2\.5 but 2 cores.*--oversubscribe"):
        check_cores([1.0, 1.0, 0.5], 2.0, oversubscribe=False)

    assert check_cores([1.0, 1.0, 0.5], 2.0, oversubscribe=True)
    assert not check_cores([1.0, 1.0], 2.0, oversubscribe=True)


@given(st.lists(st.integers(2, 100), min_size=1, max_size=20))
def test_rounding_of_a_full_machine_is_not_oversubscription(parts: list[int]) -> None:
    fractions = [part / 100 for part in parts]

    assert not check_cores(fractions, sum(parts) / 100, oversubscribe=False)
