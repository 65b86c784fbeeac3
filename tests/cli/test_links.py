"""``--links`` on the command line: what is refused, and before what."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from geartrain.cli import main


def invoke(tmp_path: Path, links: str, *, fleet: str = "emulated:0.2,0.2") -> Result:
    script = tmp_path / "train.py"
    script.write_text("")
    where = ["--run-dir", str(tmp_path / "run")]
    return CliRunner().invoke(
        main, ["run", "--fleet", fleet, "--links", links, *where, str(script)]
    )


@pytest.mark.parametrize(
    ("links", "complaint"),
    [
        ("2x4:500Mbit:50Mbit", "describe 8 hosts, but there are 2 devices"),
        ("50MB", "'50MB' is not a data rate"),
        ("2x1:50Mbit", "have no uplinks"),
    ],
)
def test_links_that_do_not_fit_end_the_run_before_a_directory_is_made(
    tmp_path: Path, links: str, complaint: str
) -> None:
    done = invoke(tmp_path, links)

    assert done.exit_code == 2
    assert complaint in done.stderr
    assert not (tmp_path / "run").exists()


def test_links_without_root_end_the_run_before_a_directory_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    done = invoke(tmp_path, "50Mbit")

    assert done.exit_code == 1
    assert "emulated links need root" in done.stderr
    assert not (tmp_path / "run").exists()


def test_links_have_no_meaning_for_a_model_that_was_measured(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    options = ["--model", str(model), "--global-batch-size", "8", "--links", "50Mbit"]
    done = CliRunner().invoke(main, ["plan", *options])

    assert done.exit_code == 2
    assert "--links emulates links for a SCRIPT" in done.stderr
