from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from geartrain.bench.chaos.flipped_bits import flip_in_copy, turn_bit
from geartrain.bench.chaos.read_flipped import judge
from geartrain.checkpoint.snapshot import save_snapshot


def test_turned_bit_is_turned_back(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\x00\x00")

    turn_bit(path, 10)
    turned = path.read_bytes()
    turn_bit(path, 10)

    assert turned == b"\x00\x04"
    assert path.read_bytes() == b"\x00\x00"


def test_a_bit_of_any_file_of_a_saved_state_is_found_by_reading(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save_snapshot(saved, {"model": {"w": torch.arange(3.0)}, "training": {"step": 1}})
    before = {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()}
    files = set()
    for seed in range(12):
        folder = tmp_path / str(seed)
        files.add(flip_in_copy(saved, folder, random.Random(seed)).name)
        judged = judge(folder)
        assert (judged.was_found, judged.was_sound) == (True, True), judged

    assert len(files) > 1
    assert before == {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()}


def test_copy_that_was_unsound_before_is_told_apart(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save_snapshot(saved, {"model": {"w": torch.arange(3.0)}})
    turn_bit(saved / "model.safetensors", 9)
    flip_in_copy(saved, tmp_path / "copy", random.Random(0))

    assert not judge(tmp_path / "copy").was_sound


def test_nothing_saved_is_nothing_to_flip(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()

    with pytest.raises(OSError, match="holds no byte"):
        flip_in_copy(tmp_path / "saved", tmp_path / "copy", random.Random(0))
