"""Training goes on whatever becomes of its saves; the user is told, the next one works."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from geartrain.checkpoint.chunks import ObjectStore
from geartrain.checkpoint.durable_tier import DurableStore
from geartrain.parallel import tiered_saves
from geartrain.parallel.resume import find_resumable, take_up
from geartrain.parallel.save_spec import SaveSpec
from geartrain.parallel.tiered_saves import TieredSaves
from saved_training import Told, Training, every, spec_of
from small_disk import small_disk

DEADLINE_S = 60.0


class Kept:
    """A training whose saves go wrong in between."""

    def __init__(self, spec: SaveSpec) -> None:
        self.training, self.told = Training(), Told()
        self.saves = TieredSaves(spec, self.told)

    def train_until(self, kind: str, *, num_times: int = 1) -> str:
        """Make steps until something was told so many times more; returns the text."""
        before, found = self.texts(kind), self.texts(kind)
        deadline_s = time.monotonic() + DEADLINE_S
        while len(found) < len(before) + num_times:
            assert time.monotonic() < deadline_s, (kind, self.told.events)
            self.training.train(self.saves, 1)
            self.let_write()
            found = self.texts(kind)
        return found[-1]

    def let_write(self) -> None:
        """Give the writers some time, as a step of a larger model does."""
        writer = self.saves._writer
        assert writer is not None
        writer.wait(0.1)
        self.saves.report()

    def texts(self, kind: str) -> list[str]:
        return [text for one, text in self.told.events if one == kind]

    def check_resumes(self, place: Path | str) -> None:
        """Close, and check that the newest version is whole and holds a later step."""
        self.saves.close()
        found, resumed = find_resumable(str(place)), Training(seed=1)
        take_up(found.spec, resumed.state)
        expected = Training()
        for _ in range(found.spec.step):
            expected.step()
        assert torch.equal(resumed.weights(), expected.weights())


def check_told_once(kept: Kept, go_wrong: Callable[[], None], why: str) -> None:
    """A save works; then none does, and it is told once; training makes steps."""
    kept.train_until("saved")
    go_wrong()
    text = kept.train_until("unsaved")
    assert why in text
    assert "training goes on" in text
    step = kept.training.step_index
    kept.training.train(kept.saves, 20)
    assert kept.training.step_index == step + 20
    assert len(kept.texts("unsaved")) == 1


@pytest.mark.root
def test_a_full_disk_is_told_and_the_save_after_it_works(tmp_path: Path) -> None:
    with small_disk(tmp_path, "4m") as disk:
        kept = Kept(spec_of(disk / "checkpoints", every(1)))

        def fill() -> None:
            with (disk / "filler").open("wb", buffering=0) as filler:
                try:
                    while filler.write(bytes(4096)):
                        pass
                except OSError:
                    return

        check_told_once(kept, fill, "No space left on device")
        (disk / "filler").unlink()
        kept.train_until("saved")
        kept.check_resumes(disk)


@pytest.mark.root
def test_a_read_only_disk_is_told_and_the_save_after_it_works(tmp_path: Path) -> None:
    with small_disk(tmp_path, "4m") as disk:
        kept = Kept(spec_of(disk / "checkpoints", every(1)))

        def remount(how: str) -> None:
            options = ["mount", "-o", f"remount,{how}", str(disk)]
            deadline_s = time.monotonic() + DEADLINE_S
            while subprocess.run(options, check=False, capture_output=True).returncode:
                assert time.monotonic() < deadline_s  # a file is being written

        check_told_once(kept, lambda: remount("ro"), "Read-only file system")
        remount("rw")
        kept.train_until("saved")
        kept.check_resumes(disk)


def test_a_vanished_store_is_told_and_the_save_after_its_return_works(
    tmp_path: Path,
) -> None:
    place, away = tmp_path / "store", tmp_path / "away"
    kept = Kept(spec_of(place / "checkpoints", every(1)))

    def vanish() -> None:
        place.rename(away)
        place.write_text("where something else is now")

    check_told_once(kept, vanish, "Not a directory")
    place.unlink()
    away.rename(place)
    kept.train_until("saved")
    kept.check_resumes(place)


def test_a_directory_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    kept = Kept(spec_of(tmp_path / "checkpoints", every(1)))
    kept.train_until("saved")
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)

    kept.train_until("saved", num_times=2)  # one may have been on its way

    kept.check_resumes(tmp_path)


class Blocking(DurableStore):
    """Hangs while it is told to, as a network mount does whose server is gone."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.hangs, self.answers = threading.Event(), threading.Event()

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        if not self.answers.is_set():
            self.hangs.set()
            assert self.answers.wait(DEADLINE_S)
        return super().put_if_absent(name, data)


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Blocking]:
    store = Blocking(f"memory://{tmp_path.name}")

    def open_store(url: str) -> ObjectStore:
        assert url == store.label
        return store

    monkeypatch.setattr(tiered_saves, "open_store", open_store)
    yield store
    store.answers.set()


def test_a_store_that_hangs_holds_up_neither_training_nor_the_other_tier(
    tmp_path: Path, blocking: Blocking
) -> None:
    kept = Kept(spec_of(tmp_path / "checkpoints", every(1), durable=blocking.label))
    kept.train_until("saved", num_times=3)
    assert blocking.hangs.wait(DEADLINE_S)
    assert not any(blocking.label in text for text in kept.texts("saved"))

    blocking.answers.set()
    while blocking.label not in kept.train_until("saved"):
        pass

    kept.check_resumes(blocking.label)


def test_the_end_of_a_run_does_not_wait_for_a_store_that_hangs(
    tmp_path: Path,
    blocking: Blocking,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tiered_saves, "_LAST_SAVES_S", 0.2)
    kept = Kept(spec_of(tmp_path / "checkpoints", every(1), durable=blocking.label))
    kept.train_until("saved")
    assert blocking.hangs.wait(DEADLINE_S)
    began_s = time.monotonic()

    kept.saves.close()

    assert time.monotonic() - began_s < DEADLINE_S / 2
    assert "is given up" in caplog.text
