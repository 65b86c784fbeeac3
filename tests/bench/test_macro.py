"""What ``geartrain bench macro`` accepts, where it writes, and one real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from geartrain.bench.macro import MacroOptions, default_output, run_macro
from geartrain.bench.macro_report import MacroResult
from geartrain.bench.provenance import current_commit
from geartrain.cli import main
from geartrain.errors import ConfigError
from geartrain.telemetry import read_document
from lab_traffic import needs_networks
from measured_runs import KEYS_OF_THE_CLAIMS
from run_command import run_command


def ignore(_text: str) -> None:
    """Progress that nobody watches."""


@pytest.mark.parametrize("fleet", ["cpu", "emulated:0.5"])
def test_fleet_that_cannot_be_compared_is_refused(fleet: str) -> None:
    with pytest.raises(ConfigError, match="two or more emulated devices"):
        run_macro(MacroOptions(fleet=fleet), ignore)


def test_batch_smaller_than_the_fleet_is_refused() -> None:
    with pytest.raises(ConfigError, match="smaller than the number of devices, 2"):
        run_macro(MacroOptions(fleet="emulated:0.1,0.1", global_batch_size=1), ignore)


def test_wrong_fleet_ends_the_command_with_one_line() -> None:
    done = CliRunner().invoke(main, ["bench", "macro", "--fleet", "emulated:x", "--json"])

    assert done.exit_code == 2
    assert "core fraction 'x' is not a number" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kind"] == "ConfigError"


def test_quick_takes_a_smaller_batch_unless_told_otherwise() -> None:
    assert MacroOptions().batch_size == 256
    assert MacroOptions(quick=True).batch_size < 256
    assert MacroOptions(quick=True, global_batch_size=96).batch_size == 96


def test_raw_result_goes_to_the_results_folder_only_where_there_is_one(
    tmp_path: Path,
) -> None:
    fleet = "emulated:0.5,0.25/1GiB"
    assert default_output("macro", fleet, 0.0, tmp_path, quick=True) is None

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)

    name = "macro-emulated-0.5-0.25-1GiB-quick-19700101-000000.json"
    assert default_output("macro", fleet, 0.0, tmp_path, quick=True) == results / name


def test_no_repository_has_no_commit(tmp_path: Path) -> None:
    assert current_commit(tmp_path) == ""


def test_links_of_another_number_of_hosts_are_refused() -> None:
    asked = MacroOptions(fleet="emulated:0.1,0.1", links="2x2:50Mbit:5Mbit")
    with pytest.raises(ConfigError, match="describe 4 hosts, but there are 2 devices"):
        run_macro(asked, ignore)


@pytest.mark.root
@pytest.mark.slow
@needs_networks
@pytest.mark.timeout(400)
def test_quick_run_over_links_is_compared_with_their_bound(tmp_path: Path) -> None:
    printed = run_command(
        "geartrain",
        *("bench", "macro", "--quick", "--json", "-o", "raw.json"),
        *("--fleet", "emulated:0.4,0.2", "--links", "40Mbit"),
        cwd=tmp_path,
        timeout_s=390,
    )

    flat = json.loads(printed.splitlines()[-1])
    assert flat["links"] == "40Mbit"
    assert flat["link_bound_step_s"] == pytest.approx(
        4 * flat["num_parameters"] / (40e6 / 8)
    )
    assert 0.2 < flat["link_bound_efficiency"] < 1.1
    assert flat["loss_difference_vs_one_device"] < 1e-4
    stored = read_document(tmp_path / "raw.json", MacroResult)
    assert stored.raw.links is not None
    assert stored.raw.links.num_hosts == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_quick_run_measures_every_claim(tmp_path: Path) -> None:
    printed = run_command(
        "geartrain",
        *("bench", "macro", "--quick", "--json", "-o", "raw.json"),
        *("--fleet", "emulated:0.4,0.2"),
        cwd=tmp_path,
        timeout_s=390,
    )

    flat = json.loads(printed.splitlines()[-1])
    assert flat.keys() >= KEYS_OF_THE_CLAIMS
    assert flat["quick"] is True
    assert flat["labels"] == "emulated"
    assert flat["ddp_samples_per_s"] > 0
    assert 0.3 < flat["efficiency"] < 1.3
    assert flat["loss_difference_vs_one_device"] < 1e-4
    stored = read_document(tmp_path / "raw.json", MacroResult)
    assert stored.result["efficiency"] == flat["efficiency"]
    assert "raw result: raw.json" in printed
