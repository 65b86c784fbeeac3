from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.chaos.doctored import Doctored, done
from geartrain.bench.chaos.evidence import Deed
from geartrain.bench.chaos.report import render_chaos_report, write_chaos_report
from geartrain.bench.chaos.result import ChaosResult
from geartrain.bench.chaos.schedule import Fault
from geartrain.bench.chaos.settings import ChaosOptions
from geartrain.bench.chaos.sum_up import sum_up
from geartrain.errors import ConfigError
from geartrain.telemetry import read_document, write_document


class Balance(HTMLParser):
    """Every element is closed, in the right order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag


def result(folder: Path) -> ChaosResult:
    skipped = Deed(
        fault=Fault(at_s=0.6, kind="kill", device_id="b"),
        outcome="skipped",
        began_at_s=1000.6,
        note="it would leave <1> device",
    )
    evidence = Doctored(
        folder=folder,
        lost_at_step=5,
        deeds=(done("kill", "c", 0.45), done("stop", "a", 0.5, 0.2), skipped),
    ).write()
    return sum_up(evidence, ChaosOptions(seed=7, duration_s=1.0), 0.5)


def test_page_is_whole_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    page = render_chaos_report(result(tmp_path))

    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert balance.seen.count("svg") == 2
    assert balance.seen.count("circle") == 2
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page


def test_page_tells_checks_faults_and_what_was_left_out(tmp_path: Path) -> None:
    page = render_chaos_report(result(tmp_path))

    for text in (
        'Chaos, seed 7: <span class="passed">passed</span>',
        "one_state_hash",
        "kill at 0.45 s",
        "left out: it would leave &lt;1&gt; device",
        "was lost: closed the connection",
    ):
        assert text in page


def test_failed_check_is_told_in_the_title(tmp_path: Path) -> None:
    evidence = Doctored(folder=tmp_path, options={"leftovers": ("process 1 (x)",)}).write()

    page = render_chaos_report(sum_up(evidence, ChaosOptions(), 0.0))

    assert '<span class="failed">failed</span>' in page
    assert "process 1 (x)" in page


def test_result_reads_back_equal_and_says_what_failed(tmp_path: Path) -> None:
    before = result(tmp_path / "run")

    write_document(tmp_path / "result.json", before)

    assert read_document(tmp_path / "result.json", ChaosResult) == before
    figures = before.as_json()
    assert (figures["passed"], figures["faults"], figures["faults_left_out"]) == (
        True,
        2,
        1,
    )
    assert (figures["steps"], figures["devices_left"]) == (10, 2)


def test_page_that_can_t_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot write"):
        write_chaos_report(result(tmp_path / "run"), tmp_path / "file" / "x.html")
