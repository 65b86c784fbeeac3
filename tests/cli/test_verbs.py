"""The verbs, run in this process or, where torch must not be reached, in another."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from example_runs import make_records, planned, write_run
from geartrain import __version__
from geartrain.cli import main
from geartrain.cli.probe import print_fleet
from geartrain.devices.probe import resolve_fleet
from geartrain.devices.profile import DeviceProfile, Fleet, MeasuredRate
from geartrain.errors import DeviceError
from geartrain.planner import ComputeCurve, ExchangeProfile, ModelProfile, Plan
from geartrain.telemetry import read_document, write_document


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def last_json(result: Result) -> dict[str, object]:
    found = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A measured model: the second device has half the speed of the first."""
    curves = tuple(
        ComputeCurve(
            device_id=f"emulated:{index}",
            micro_batch_sizes=(1, 2, 4),
            seconds=(0.01 * slower, 0.02 * slower, 0.04 * slower),
            max_micro_batch_size=64,
            alpha_s=0.0,
            beta_s=0.01 * slower,
        )
        for index, slower in enumerate((1, 2, 4))
    )
    profile = ModelProfile(
        name="tiny",
        num_parameters=10,
        gradient_bytes=40,
        curves=curves,
        exchange=ExchangeProfile(
            num_bytes=40,
            all_devices_s=0.001,
            device_ids=("emulated:1", "emulated:2"),
            with_device_s=(0.001, 0.001),
        ),
        optimizer_s=(0.001, 0.001, 0.001),
    )
    path = tmp_path / "model.json"
    write_document(path, profile)
    return path


def test_version_is_the_packages() -> None:
    assert invoke("--version").output == f"geartrain, version {__version__}\n"


@pytest.mark.parametrize("verb", ["probe", "plan", "run", "report"])
def test_every_verb_speaks_json(verb: str) -> None:
    command = main.commands[verb]

    assert any("--json" in parameter.opts for parameter in command.params)


def test_config_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = invoke("report", tmp_path / "nothing")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: no run directory at")
    assert "Traceback" not in result.output


def test_error_with_json_ends_in_a_json_object(tmp_path: Path) -> None:
    result = invoke("report", "--json", tmp_path / "nothing")

    assert last_json(result)["kind"] == "ConfigError"


def test_other_deliberate_errors_end_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> int:
        msg = "cgroups are read-only"
        raise DeviceError(msg)

    monkeypatch.setattr("geartrain.cli.emulate.sweep_leftovers", fail)

    result = invoke("emulate", "sweep")

    assert (result.exit_code, result.stderr) == (1, "error: cgroups are read-only\n")


def test_report_says_where_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_dir = write_run(tmp_path / "a-run", make_records(3), [planned()])

    result = invoke("report", run_dir, "--json")

    assert last_json(result) == {"report": str(run_dir / "report.html")}
    assert (run_dir / "report.html").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("emulated:-1", "core_fraction=-1"),
        ("emulated:", "emulated"),
        ("tpu9:0", "tpu9"),
        ("no/such/fleet.json", "no/such/fleet.json"),
    ],
)
def test_wrong_fleet_is_a_clear_error(tmp_path: Path, spec: str, message: str) -> None:
    script = tmp_path / "train.py"
    script.touch()

    result = invoke("run", "--fleet", spec, script)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_more_cores_than_there_are_need_the_word_oversubscribe(tmp_path: Path) -> None:
    spec = "emulated:" + ",".join(["1.0"] * 600)
    script = tmp_path / "train.py"
    script.touch()

    result = invoke("run", "--fleet", spec, script)

    assert result.exit_code == 2
    assert "--oversubscribe" in result.stderr


def test_missing_script_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    result = invoke("run", "--fleet", "emulated:0.1", "no.py")

    assert result.exit_code == 2
    assert "no script at no.py" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--plan", "--emulate-schedule"])
def test_wrong_file_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "wrong").write_bytes(b"\xff\xfe")

    result = invoke("run", "--fleet", "emulated:0.1", option, "wrong", "train.py")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "runs").exists()


def test_emulate_set_without_a_run_says_so(tmp_path: Path) -> None:
    result = invoke("emulate", "set", "emulated:0", "0.5", "--run-dir", tmp_path)

    assert result.exit_code == 2
    assert "no emulated fleet is running" in result.stderr


def test_probe_table_names_rates_spread_and_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rate = MeasuredRate(per_s=2.5e12, spread_fraction=0.03, num_repeats=5)
    device = DeviceProfile(
        device_id="cuda:0",
        node_id="here",
        vendor="NVIDIA",
        kind="cuda",
        name="H200",
        memory_bytes=2**37,
        flop_per_s={"float32": rate},
        memory_bytes_per_s=rate,
    )

    print_fleet(Fleet(devices=(device,)))

    text = capsys.readouterr().out
    assert "cuda:0  H200 (NVIDIA), 128.0 GiB, measured" in text
    assert "float32 matmul" in text
    assert "2.50 TFLOP/s" in text
    assert "median of 5, spread 3%" in text
    assert "1 device, measured" in text
    assert "noisy" not in text


def test_probe_table_says_which_rates_are_noise(capsys: pytest.CaptureFixture[str]) -> None:
    (device,) = resolve_fleet("cpu").devices
    rate = MeasuredRate(per_s=2.5e7, spread_fraction=82.5, num_repeats=5)

    print_fleet(Fleet(devices=(dataclasses.replace(device, flop_per_s={"float64": rate}),)))

    text = capsys.readouterr().out
    assert "median of 5, spread 8250%, noisy" in text
    assert "--no-cache measures again" in text


def test_plan_from_a_model_gives_faster_devices_more(
    model_path: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.json"

    result = invoke(
        "plan", "--model", model_path, "--global-batch-size", 70, "--json", "-o", output
    )

    assert result.exit_code == 0
    plan = read_document(output, Plan)
    assert [replica.share for replica in plan.replicas] == [40, 20, 10]
    assert last_json(result).keys() == {"plan", "explanation"}


def test_plan_explains_itself(model_path: Path) -> None:
    result = invoke("plan", "--explain", "--model", model_path, "--global-batch-size", 70)

    assert "emulated:0" in result.stdout
    assert "predicted to take" in result.stdout


def test_plan_on_a_smaller_fleet_takes_its_devices_only(
    model_path: Path, tmp_path: Path
) -> None:
    device = DeviceProfile(
        device_id="emulated:1",
        node_id="here",
        vendor="x",
        kind="emulated",
        name="x",
        memory_bytes=1,
    )
    fleet_path = tmp_path / "fleet.json"
    write_document(fleet_path, Fleet(devices=(device,)))

    result = invoke(
        *("plan", "--model", model_path, "--global-batch-size", 8),
        *("--fleet", fleet_path, "--json"),
    )

    assert '"device_id":"emulated:1","share":8' in result.stdout


def test_plan_from_a_model_takes_no_written_fleet(model_path: Path) -> None:
    result = invoke(
        *("plan", "--model", model_path, "--global-batch-size", 8),
        *("--fleet", "emulated:0.5,0.5"),
    )

    assert result.exit_code != 0
    assert "with --model, --fleet is a fleet.json, not 'emulated:0.5,0.5'" in result.output


@pytest.mark.parametrize(
    "arguments", [[], ["--model", "m.json", "train.py"], ["--model", "m.json"]]
)
def test_plan_needs_a_script_or_a_model_with_a_batch_size(arguments: list[str]) -> None:
    result = invoke("plan", *arguments)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_plan_from_a_model_never_imports_torch(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not to be reached')")
    fleet_path = tmp_path / "fleet.json"
    devices = tuple(
        DeviceProfile(
            device_id=f"emulated:{index}",
            node_id="here",
            vendor="x",
            kind="emulated",
            name="x",
            memory_bytes=1,
        )
        for index in range(3)
    )
    write_document(fleet_path, Fleet(devices=devices))
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    program += "from geartrain.cli import main; main()"

    done = subprocess.run(
        [
            *(sys.executable, "-c", program, "plan", "--explain", "--json"),
            *("--model", model_path, "--fleet", fleet_path, "--global-batch-size", "70"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["plan"]["global_batch_size"] == 70


def test_help_of_every_verb_is_whole() -> None:
    for name, command in main.commands.items():
        with click.Context(command, info_name=name) as context:
            assert "..." not in command.get_help(context).splitlines()[2]
