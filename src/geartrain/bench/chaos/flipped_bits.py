"""Turns a bit in a copy of a saved state, and lets a process of its own read it."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from geartrain.bench.chaos.evidence import FlippedBit
from geartrain.bench.chaos.run_process import marked
from geartrain.errors import DeviceError

STATE_NAME = "state"
NOTE_NAME = "flipped.json"
_TIMEOUT_S = 180.0


def flip_in_copy(saved: Path, folder: Path, dice: random.Random) -> Path:
    """Copy a saved state and turn one of its bits, all bits alike.

    Args:
        saved: A directory.
        folder: New; the copy lies in it under ``state``.
        dice: Chooses the bit.

    Returns:
        The file with the turned bit.

    Raises:
        OSError: If it can't be copied, or is empty.
    """
    state = folder / STATE_NAME
    shutil.copytree(saved, state)
    files = [path for path in sorted(state.rglob("*")) if path.is_file()]
    total = sum(path.stat().st_size for path in files) * 8
    if not total:
        msg = f"{saved} holds no byte"
        raise OSError(msg)
    bit = dice.randrange(total)
    for path in files:
        num_bits = path.stat().st_size * 8
        if bit < num_bits:
            turn_bit(path, bit)
            note = {"file": str(path.relative_to(state)), "bit": bit}
            (folder / NOTE_NAME).write_bytes(msgspec.json.encode(note))
            return path
        bit -= num_bits
    raise AssertionError


def turn_bit(path: Path, bit: int) -> None:
    """Turn a bit of a file; turned twice it is as before."""
    with path.open("r+b") as stream:
        stream.seek(bit // 8)
        (value,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([value ^ (1 << bit % 8)]))


def judge_flips(folder: Path, mark: str) -> tuple[FlippedBit, ...]:
    """Have all copies read by a process that imports torch.

    Raises:
        DeviceError: If that process fails.
    """
    if not folder.is_dir():
        return ()
    command = [sys.executable, "-m", "geartrain.bench.chaos.read_flipped", str(folder)]
    done = subprocess.run(
        marked(mark, command), capture_output=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        msg = f"the copies in {folder} could not be judged: {done.stderr.decode()[-400:]}"
        raise DeviceError(msg)
    return msgspec.json.decode(done.stdout, type=tuple[FlippedBit, ...])
