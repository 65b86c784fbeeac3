"""The commands that the documentation shows do what it says."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from run_command import REPOSITORY, run_command, user_environment

COMMANDS = Path(__file__).parent / "commands.sh"
BLOCK = re.compile(r"^# begin (.+)\n((?:.*\n)*?)# end \1$", re.MULTILINE)
BLOCKS = dict(BLOCK.findall(COMMANDS.read_text()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    return tmp_path


def run_block(name: str, folder: Path, timeout_s: float = 150.0) -> str:
    return run_command("bash", "-ec", BLOCKS[name], cwd=folder, timeout_s=timeout_s)


def make_would_run(target: str) -> str:
    options = "--dry-run", "--no-print-directory", "NUM_CORES=2"
    return subprocess.run(
        ["make", *options, target], cwd=REPOSITORY, text=True, check=True, stdout=-1
    ).stdout


def words_after_program(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", ""))[1:]


def test_every_block_is_shown_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (REPOSITORY / "docs").rglob("*.md"))

    unseen = [name for name in BLOCKS if f'"# begin {name}"' not in pages]

    assert BLOCKS
    assert not unseen


def test_make_train_runs_the_command_of_the_tutorial() -> None:
    last_line = make_would_run("train").splitlines()[-1]

    assert words_after_program(last_line) == words_after_program(BLOCKS["train"])


def test_plain_script_runs_without_launcher(folder: Path) -> None:
    assert "epoch 9: loss" in run_block("plain", folder)


@pytest.mark.slow
def test_probe_lists_the_emulated_devices(folder: Path) -> None:
    table = run_block("probe", folder)

    assert all(f"emulated:{index}" in table for index in range(4))


@pytest.mark.slow
def test_torchrun_starts_a_script(folder: Path) -> None:
    assert "epoch 9: loss" in run_block("torchrun", folder)


@pytest.mark.slow
def test_written_plan_is_explained_and_carried_out(folder: Path) -> None:
    explanation = run_block("plan", folder)
    assert "emulated:2" in explanation
    assert (folder / "plan.json").exists()

    assert "test accuracy" in run_block("pinned", folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tutorial_from_training_to_report(folder: Path) -> None:
    on_fleet = run_block("train", folder, timeout_s=400)
    assert "held-out bits per byte" in on_fleet

    run_block("report", folder)
    assert list(folder.rglob("*.html"))

    on_one_device = run_block("one device", folder, timeout_s=400)
    assert "held-out bits per byte" in on_one_device


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_running_device_is_slowed_down(folder: Path) -> None:
    run = subprocess.Popen(
        ["bash", "-ec", BLOCKS["train"]],
        cwd=folder,
        env=user_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the interrupt reaches the launcher, as Ctrl-C
    )
    assert run.stdout is not None
    try:
        assert any("step 20: loss" in line for line in run.stdout)
        run_block("slow down", folder)
        assert any("step 40: loss" in line for line in run.stdout)
    finally:
        os.killpg(run.pid, signal.SIGINT)
        run.communicate(timeout=120)

    (events,) = folder.glob("runs/*/events.jsonl")
    slowdowns = [line for line in events.read_text().splitlines() if "slowdown" in line]
    assert any("emulated:0" in line for line in slowdowns)
    assert (events.parent / "checkpoint").is_dir()
