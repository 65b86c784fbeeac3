"""Writing tier by tier beside training: slow, failing and hanging stores."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from geartrain.checkpoint.background_writer import BackgroundWriter
from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.save_attempt import (
    SaveAttempt,
    TierStatus,
    TierTarget,
    WriterLimits,
)
from geartrain.checkpoint.verify import verify_store
from geartrain.checkpoint.versions import find_latest
from geartrain.errors import CheckpointError, ConfigError

DEADLINE_S = 30.0
QUICK = WriterLimits(first_pause_s=0.001, longest_pause_s=0.002)

Write = Callable[[int, SaveAttempt], None]


class Stores:
    """Two tiers, what was written to them, and which states came free."""

    def __init__(self, local: Write, durable: Write, limits: WriterLimits = QUICK) -> None:
        self.released: list[int] = []
        targets = [
            TierTarget(tier=tier, place=f"{tier} place", write=write)
            for tier, write in (("local", local), ("durable", durable))
        ]
        self.writer = BackgroundWriter[int](
            targets, limits=limits, on_release=self.released.append
        )

    def status(self, tier: str) -> TierStatus:
        return next(one for one in self.writer.status() if one.tier == tier)

    def wait_saved(self, tier: str, step: int) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while True:
            status = self.status(tier)
            if status.saved_step == step and status.writing_step is None:
                return
            assert time.monotonic() < end_s, f"{tier} has not saved step {step}: {status}"
            self.writer.wait(0.001)


def into(written: list[int]) -> Write:
    return lambda state, _: written.append(state)


def test_each_tier_is_written_once_and_the_state_comes_free_after_the_last() -> None:
    local, durable = list[int](), list[int]()
    stores = Stores(into(local), into(durable))

    taken = stores.writer.offer(7, step=7, tiers=["durable", "local"])

    assert taken == ("local", "durable")
    assert stores.writer.wait(DEADLINE_S)
    assert local == durable == [7]
    assert stores.released == [7]
    assert stores.status("durable").saved_step == 7
    assert stores.status("durable").save_s is not None
    assert stores.writer.close()


def test_a_store_that_hangs_holds_neither_training_nor_the_other_tier_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers, begun, local = threading.Event(), threading.Event(), list[int]()

    def hang(state: int, _: SaveAttempt) -> None:
        begun.set()
        assert answers.wait(DEADLINE_S)

    limits = WriterLimits(deadline_s=0.001, first_pause_s=0.001)
    stores = Stores(into(local), hang, limits)
    stores.writer.offer(1, step=1, tiers=["local", "durable"])
    assert begun.wait(DEADLINE_S)
    stores.wait_saved("local", 1)

    for step in range(2, 12):
        stores.writer.offer(step, step=step, tiers=["local", "durable"])
        stores.wait_saved("local", step)

    assert local == list(range(1, 12))
    assert sum("does not answer" in record.message for record in caplog.records) == 1
    held = 11 - len(stores.released)
    assert held <= limits.max_states
    answers.set()
    assert stores.writer.wait(DEADLINE_S)
    assert stores.status("durable").saved_step == 11
    assert sorted(stores.released) == list(range(1, 12))
    assert stores.writer.close()


def test_a_failing_store_is_tried_again_and_the_user_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries, durable = list[int](), list[int]()

    def fail_four_times(state: int, attempt: SaveAttempt) -> None:
        tries.append(state)
        if len(tries) <= 4:
            raise OSError(28, "No space left on device")
        durable.append(state)

    stores = Stores(into([]), fail_four_times)
    caplog.set_level(logging.WARNING)

    stores.writer.offer(3, step=3, tiers=["durable"])

    assert stores.writer.wait(DEADLINE_S)
    assert durable == [3]
    status = stores.status("durable")
    assert (status.num_failed_tries, status.num_saved) == (4, 1)
    assert not status.is_failing
    assert status.last_error is not None
    assert "No space left" in status.last_error
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert "step 3 could not be saved to durable place" in told[0]
    assert "works again" in told[1]
    assert stores.writer.close()


def test_after_a_deadline_the_save_is_given_up_and_the_next_one_succeeds() -> None:
    is_full, durable = threading.Event(), list[int]()
    is_full.set()

    def write(state: int, _: SaveAttempt) -> None:
        if is_full.is_set():
            raise OSError(28, "No space left on device")
        durable.append(state)

    limits = WriterLimits(deadline_s=0.05, first_pause_s=0.001)
    stores = Stores(into([]), write, limits)
    stores.writer.offer(1, step=1, tiers=["durable"])
    assert stores.writer.wait(DEADLINE_S)
    assert stores.status("durable").num_skipped == 1
    assert stores.released == [1]
    is_full.clear()

    stores.writer.offer(2, step=2, tiers=["durable"])

    assert stores.writer.wait(DEADLINE_S)
    assert durable == [2]
    assert stores.writer.close()


def test_a_newer_state_takes_the_place_of_one_that_cannot_be_written() -> None:
    tried: list[int] = []
    failed = threading.Event()

    def write(state: int, _: SaveAttempt) -> None:
        tried.append(state)
        if state == 1:
            failed.set()
            raise OSError(5, "gone")

    stores = Stores(into([]), write, WriterLimits(first_pause_s=60))
    stores.writer.offer(1, step=1, tiers=["durable"])
    assert failed.wait(DEADLINE_S)

    stores.writer.offer(2, step=2, tiers=["durable"])

    assert stores.writer.wait(DEADLINE_S)
    assert tried == [1, 2]
    assert stores.writer.close()


def test_a_cooperative_writer_ends_at_its_deadline() -> None:
    def never_ends(state: int, attempt: SaveAttempt) -> None:
        while True:
            attempt.check()

    limits = WriterLimits(deadline_s=0.02, first_pause_s=0.001)
    stores = Stores(into([]), never_ends, limits)

    stores.writer.offer(1, step=1, tiers=["durable"])

    assert stores.writer.wait(DEADLINE_S)
    assert "its deadline is over" in str(stores.status("durable").last_error)
    assert stores.writer.close()


def test_closing_ends_a_save_between_two_objects_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = threading.Event()

    def never_ends(state: int, attempt: SaveAttempt) -> None:
        begun.set()
        while True:
            attempt.check()

    stores = Stores(into([]), never_ends)
    stores.writer.offer(1, step=1, tiers=["durable"])
    assert begun.wait(DEADLINE_S)

    assert stores.writer.close(DEADLINE_S)

    assert stores.released == [1]
    assert not caplog.records
    with pytest.raises(ConfigError, match="was closed"):
        stores.writer.offer(2, step=2, tiers=["durable"])


def test_an_error_that_is_no_exception_does_not_end_the_thread() -> None:
    """As torch's CheckpointException is one."""
    tried: list[int] = []

    def write(state: int, _: SaveAttempt) -> None:
        tried.append(state)
        if len(tried) == 1:
            raise BaseException  # noqa: TRY002 - what torch does

    stores = Stores(into([]), write)

    stores.writer.offer(1, step=1, tiers=["durable"])

    assert stores.writer.wait(DEADLINE_S)
    assert tried == [1, 1]
    assert stores.writer.close()


def test_a_release_that_fails_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    written = list[int]()

    def fail(state: int) -> None:
        raise ValueError(state)

    target = TierTarget(tier="local", place="here", write=into(written))
    writer = BackgroundWriter[int]([target], limits=QUICK, on_release=fail)

    for step in (1, 2):
        assert writer.offer(step, step=step, tiers=["local"]) == ("local",)
        assert writer.wait(DEADLINE_S)

    assert written == [1, 2]
    assert writer.close()
    assert "release of step 1 failed" in caplog.text


def test_a_tier_of_another_name_is_refused() -> None:
    stores = Stores(into([]), into([]))

    with pytest.raises(ConfigError, match="no tier 'cloud'; there are local, durable"):
        stores.writer.offer(1, step=1, tiers=["cloud"])


SAVING = """
import sys
import torch
from geartrain.checkpoint.background_writer import BackgroundWriter
from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.save_attempt import TierTarget
from saved_versions import save_version

store = FileStore(sys.argv[1])

def write(step, attempt):
    attempt.check()
    save_version(store, {"model": {"w": torch.full((300_000,), float(step))}}, step=step)
    print(step, flush=True)

writer = BackgroundWriter([TierTarget(tier="local", place="here", write=write)])
step = 0
while True:
    step += 1
    writer.offer(step, step=step, tiers=["local"])
    writer.wait(60)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_an_end_in_the_middle_of_a_save_leaves_the_version_before(
    tmp_path: Path, ending: signal.Signals
) -> None:
    tests = Path(__file__).parents[1]
    paths = f"{tests}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with subprocess.Popen(
        [sys.executable, "-c", SAVING, str(tmp_path / "store")],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for _ in range(3):
            saved = int(process.stdout.readline())
        process.send_signal(ending)
        process.wait(DEADLINE_S)

    store = FileStore(tmp_path / "store")
    latest = find_latest((store,))
    assert latest is not None
    assert latest.manifest.step >= saved
    assert verify_store(store).is_sound


def test_a_store_function_may_ask_whether_to_go_on() -> None:
    attempt = SaveAttempt(float("inf"), lambda: None)

    attempt.check()

    with pytest.raises(CheckpointError, match="given up: training ends"):
        SaveAttempt(float("inf"), lambda: "training ends").check()
