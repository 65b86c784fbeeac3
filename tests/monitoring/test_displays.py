"""What is shown while a run goes on."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from example_runs import make_records, planned, write_run
from geartrain.monitoring.live_display import LiveDisplay, headline, render
from geartrain.monitoring.plain_display import PlainDisplay
from geartrain.monitoring.progress import RunProgress
from geartrain.telemetry import RunEvent, RunLogWriter


def draw(run_dir: Path, title: str = "train.py") -> str:
    progress = RunProgress(run_dir)
    progress.poll()
    shown = io.StringIO()
    console = Console(file=shown, width=100)
    console.print(render(progress.snapshot(), title))
    progress.close()
    return shown.getvalue()


def test_display_shows_loss_rate_efficiency_shares_and_time_left(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, make_records(10), [planned(total_steps=100)])

    text = draw(run_dir)

    assert "step 10/100" in text
    assert f"loss {5.0 * 0.98**9 + 1:.4f}" in text
    assert "64.0 samples/s" in text
    assert "efficiency 0.91" in text
    assert "ETA 1 min 30 s" in text
    assert "planned at step 0: planned 4 devices" in text
    assert [line.split()[1:3] for line in text.splitlines() if "emulated:" in line] == [
        [f"emulated:{i}", str(share)] for i, share in enumerate((34, 17, 9, 4))
    ]


def test_bar_is_cut_by_where_the_time_went(tmp_path: Path) -> None:
    records = make_records(10, shares=(4,), busy_s=(0.5,), exchange_s=0.2)
    run_dir = write_run(tmp_path, records, [])

    row = next(line for line in draw(run_dir).splitlines() if "emulated:0" in line)

    assert (row.count("█"), row.count("▓"), row.count("░")) == (15, 6, 9)


def test_display_says_what_goes_on_before_the_first_step(tmp_path: Path) -> None:
    event = RunEvent(step=0, at_s=1.0, kind="profiled", message="4 devices measured")
    run_dir = write_run(tmp_path, [], [event])

    assert "profiled: 4 devices measured" in draw(run_dir)


def test_text_of_the_script_is_not_markup(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, make_records(3), [])

    assert "[red]train[/red].py" in draw(run_dir, title="[red]train[/red].py")


def test_rates_are_those_of_the_last_steps_and_the_window_stays_small(
    tmp_path: Path,
) -> None:
    slow = make_records(50, shares=(4,), busy_s=(0.9,))
    fast = [
        record
        for record in make_records(100, shares=(8,), busy_s=(0.9,))
        if record.step >= 50
    ]
    progress = RunProgress(write_run(tmp_path, slow + fast, []))

    progress.poll()
    snapshot = progress.snapshot()
    progress.close()

    assert snapshot.num_steps == 100
    assert snapshot.recent.num_steps == 20
    assert snapshot.recent.samples_per_s == pytest.approx(8.0)


def test_progress_follows_a_growing_log(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, make_records(3), [])
    progress = RunProgress(run_dir)
    log = RunLogWriter(run_dir)

    seen = [progress.poll(), progress.poll()]
    log.add_steps([r for r in make_records(5) if r.step >= 3])
    seen.append(progress.poll())
    log.close()

    assert seen == [True, False, True]
    assert "step 5" in headline(progress.snapshot())
    progress.close()


def test_log_that_cannot_be_read_ends_the_display_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = write_run(tmp_path, make_records(3), [])
    with (run_dir / "run.jsonl").open("ab") as log:
        log.write(b"nonsense\n")
    progress = RunProgress(run_dir)

    seen = [progress.poll(), progress.poll()]
    progress.close()

    assert seen == [False, False]
    assert [r.message.startswith("the display stops") for r in caplog.records] == [True]


def test_script_output_stands_in_whole_lines_above_the_live_display(tmp_path: Path) -> None:
    write_run(tmp_path, make_records(3), [])
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)

    with LiveDisplay(tmp_path, "train.py", console) as display:
        display.on_tick()
        display.on_output("stdout", b"epoch 1 ac")
        display.on_output("stderr", b"careful\n")
        display.on_output("stdout", "curacy [0.9] \u00e4\n".encode())
        display.on_output("stdout", b"10%\r20%\r")
    text = shown.getvalue()

    assert "epoch 1 accuracy [0.9] ä" in text
    assert text.index("careful") < text.index("epoch 1")
    assert "20%" in text
    assert "64.0 samples/s" in text


def test_live_display_is_not_drawn_more_often_than_it_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, make_records(3), [])
    now_s = [100.0]
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)

    with LiveDisplay(tmp_path, "train.py", console, clock=lambda: now_s[0]) as display:
        display.on_tick()
        first = len(shown.getvalue())
        now_s[0] += 0.05
        display.on_tick()
        second = len(shown.getvalue())

    assert second == first


def test_plain_display_hands_output_on_and_adds_a_line_every_few_seconds(
    tmp_path: Path,
) -> None:
    now_s = [100.0]
    write_run(tmp_path, make_records(3), [planned()])
    out, err = io.BytesIO(), io.BytesIO()

    with PlainDisplay(tmp_path, out, err, clock=lambda: now_s[0]) as display:
        display.on_output("stdout", b"\x00partial")
        for _ in range(12):
            now_s[0] += 1.0
            display.on_tick()
    lines = err.getvalue().decode().splitlines()

    assert out.getvalue() == b"\x00partial"
    assert lines == ["[geartrain] planned at step 0: planned 4 devices"]


def test_plain_display_reports_steps_made_since_the_last_line(tmp_path: Path) -> None:
    now_s = [100.0]
    write_run(tmp_path, [], [])
    log = RunLogWriter(tmp_path)
    err = io.BytesIO()

    with PlainDisplay(tmp_path, io.BytesIO(), err, clock=lambda: now_s[0]) as display:
        for step in range(12):
            log.add_steps([r for r in make_records(12) if r.step == step])
            now_s[0] += 1.0
            display.on_tick()
    log.close()
    steps = [line.split()[2] for line in err.getvalue().decode().splitlines()]

    assert steps == ["5", "10"]


def test_plain_display_tells_of_all_that_happened_up_to_the_end(tmp_path: Path) -> None:
    stdout, stderr = io.BytesIO(), io.BytesIO()

    with PlainDisplay(tmp_path, stdout, stderr):
        log = RunLogWriter(tmp_path)
        for kind in ("slowdown", "replanned"):
            log.add_event(RunEvent(step=3, at_s=1.0, kind=kind, message="why"))
        log.close()

    assert stderr.getvalue().decode().splitlines() == [
        "[geartrain] slowdown at step 3: why",
        "[geartrain] replanned at step 3: why",
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_ends_the_record_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    log = RunLogWriter(tmp_path)

    log.add_steps(make_records(1))
    log.add_steps(make_records(2))
    log.close()

    assert caplog.text.count("no longer recorded") == 1
    assert "No space left on device" in caplog.text
