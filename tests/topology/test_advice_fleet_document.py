"""A fleet.json carries devices and links, and whoever knows only devices reads it too."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_fleets import cpu_fleet
from fabric_hosts import right_roce
from geartrain.devices.profile import Fleet
from geartrain.errors import ConfigError
from geartrain.telemetry import read_document, write_document
from geartrain.topology.fleet_document import (
    FleetDocument,
    extend_fleet,
    read_fleet_document,
)
from geartrain.topology.profile import Tier, Topology


def make_topology() -> Topology:
    host = Tier(kind="host", tier_id="node-1", member_ids=("cpu:0",))
    rack = Tier(kind="rack", tier_id="rack-a", member_ids=("node-1",))
    return Topology(tiers=(host, rack))


def test_fleet_with_links_reads_back_equal(tmp_path: Path) -> None:
    facts = right_roce(tmp_path).read()
    document = extend_fleet(cpu_fleet(1), make_topology(), facts)
    write_document(tmp_path / "fleet.json", document)

    assert read_fleet_document(tmp_path / "fleet.json") == document


def test_reader_of_devices_passes_over_the_links(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    write_document(path, extend_fleet(cpu_fleet(2), make_topology()))

    assert read_document(path, Fleet) == cpu_fleet(2)


def test_fleet_without_links_has_no_topology(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    write_document(path, cpu_fleet(1))

    assert read_fleet_document(path).topology is None


@pytest.mark.parametrize("kind", [Fleet, FleetDocument])
def test_misspelt_name_is_still_found(tmp_path: Path, kind: type[Fleet]) -> None:
    path = tmp_path / "fleet.json"
    write_document(path, extend_fleet(cpu_fleet(1), make_topology()))
    path.write_text(path.read_text().replace('"topology"', '"topologie"'))

    with pytest.raises(ConfigError, match=r"\$\.topologie"):
        read_document(path, kind)


def test_misspelt_name_within_the_links_is_found(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    write_document(path, extend_fleet(cpu_fleet(1), make_topology()))
    path.write_text(path.read_text().replace('"probe_s"', '"probe_seconds"'))

    with pytest.raises(ConfigError, match=r"\$\.topology\.probe_seconds"):
        read_fleet_document(path)
