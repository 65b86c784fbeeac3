"""Reports of finished and half-written runs."""

import builtins
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from example_runs import make_records, planned, write_run
from geartrain.errors import ConfigError
from geartrain.monitoring.report import write_report
from geartrain.telemetry import RunEvent

pytest.importorskip("matplotlib")

REPLANNED = RunEvent(
    step=5,
    at_s=1005.0,
    kind="replanned",
    device_id="emulated:0",
    message="34/17 -> <script>alert(1)</script>",
    values={"bound_samples_per_s": 60.0},
)


def test_page_holds_charts_tables_labels_and_versions(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a-run", make_records(12), [planned(), REPLANNED])

    page = write_report(run_dir).read_text()

    assert page.count("<svg") == 1
    assert '<span class="label">emulated</span>' in page
    for text in ("64.0 samples/s", "load-balance error", "emulated:3", "2.13.0"):
        assert text in page


def test_page_needs_no_network_and_escapes_what_users_wrote(tmp_path: Path) -> None:
    run_dir = write_run(
        tmp_path / "a-run", make_records(3), [REPLANNED], script="<b>&$x$.py"
    )

    page = write_report(run_dir).read_text()

    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<b>&$" not in page
    # Names of XML namespaces and the SVG's metadata are no references.
    shown = re.sub(r"<metadata>.*?</metadata>", "", page, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!#)', shown)
    assert "@import" not in shown


def test_image_is_a_png(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a-run", make_records(1), [])

    path = write_report(run_dir, tmp_path / "run.png")

    assert path.read_bytes().startswith(b"\x89PNG")


def test_long_run_gives_a_page_of_bounded_size(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a-run", make_records(5000), [])

    assert write_report(run_dir).stat().st_size < 3_000_000


def test_run_that_still_goes_on_is_reported_as_far_as_it_is(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a-run", make_records(4), [])
    with (run_dir / "run.jsonl").open("ab") as log:
        log.write(b'{"step": 4, "devi')

    assert "<td>4</td>" in write_report(run_dir).read_text()


def test_loss_that_is_not_a_number_is_drawn_as_a_gap(tmp_path: Path) -> None:
    records = [
        dataclasses.replace(r, loss=math.nan) if r.step == 2 else r for r in make_records(6)
    ]

    assert write_report(write_run(tmp_path / "a-run", records, [])).exists()


def test_missing_directory_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        write_report(tmp_path / "nothing")


def test_directory_that_is_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run\.json"):
        write_report(tmp_path)


def test_run_without_a_step_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no step"):
        write_report(write_run(tmp_path / "a-run", [], []))


def test_other_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.html or \.png"):
        write_report(tmp_path, tmp_path / "x.pdf")


def test_missing_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path / "a-run", make_records(3), [])
    real_import = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:  # Any: as __import__
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)

    with pytest.raises(ConfigError, match=r"geartrain\[report\]"):
        write_report(run_dir)
