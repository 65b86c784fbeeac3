"""The loops of the migration guides all train to the same losses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from run_command import EXAMPLES, run_command

LOSS = re.compile(r"epoch (\d+): loss ([0-9.]+)")
ROUNDING = 2e-4  # float32, 160 steps of AdamW
UNEVEN_FLEET = "emulated:0.5,0.3,0.1"


def losses_in(output: str, num_ranks_printing: int = 1) -> list[float]:
    """Losses of the epochs; every rank that prints must print the same ones."""
    printed = LOSS.findall(output)
    losses = {int(epoch): float(loss) for epoch, loss in printed}
    assert sorted(losses) == list(range(10)), output
    assert len(printed) == 10 * num_ranks_printing, output
    assert len(set(printed)) == 10, output
    return [losses[epoch] for epoch in range(10)]


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    return losses_in(run_command("python", EXAMPLES / "plain_loop.py", cwd=folder))


def test_plain_loop_learns(plain_losses: list[float]) -> None:
    assert plain_losses[-1] < 0.5 * plain_losses[0]


def test_geartrain_loop_on_one_device_prints_the_same_losses(
    plain_losses: list[float], tmp_path: Path
) -> None:
    output = run_command("python", EXAMPLES / "plain_loop_geartrain.py", cwd=tmp_path)

    assert losses_in(output) == pytest.approx(plain_losses, rel=ROUNDING)


def test_geartrain_loop_on_an_uneven_fleet_prints_the_same_losses(
    plain_losses: list[float], tmp_path: Path
) -> None:
    output = run_command(
        *("geartrain", "run", "--fleet", UNEVEN_FLEET),
        EXAMPLES / "plain_loop_geartrain.py",
        cwd=tmp_path,
    )

    assert losses_in(output) == pytest.approx(plain_losses, rel=ROUNDING)


def test_geartrain_loop_under_torchrun_prints_the_same_losses(
    plain_losses: list[float], tmp_path: Path
) -> None:
    output = run_command(
        *("torchrun", "--nproc-per-node", "2"),
        EXAMPLES / "plain_loop_geartrain.py",
        cwd=tmp_path,
    )

    assert losses_in(output, num_ranks_printing=2) == pytest.approx(
        plain_losses, rel=ROUNDING
    )


@pytest.mark.slow
def test_ddp_loop_runs_under_torchrun(tmp_path: Path) -> None:
    output = run_command(
        "torchrun", "--nproc-per-node", "2", EXAMPLES / "ddp_loop.py", cwd=tmp_path
    )

    losses = losses_in(output)
    assert losses[-1] < 0.5 * losses[0]


def test_own_forward_learns_on_one_device(tmp_path: Path) -> None:
    losses = losses_in(run_command("python", EXAMPLES / "own_forward.py", cwd=tmp_path))

    assert losses[-1] < 0.5 * losses[0]
