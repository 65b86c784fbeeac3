"""Reads copies of saved states in which a bit was turned: ``read_flipped FOLDER``.

Prints, as JSON, which were found out. Run in a process of its own, since it loads torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from geartrain.bench.chaos.evidence import FlippedBit
from geartrain.bench.chaos.flipped_bits import NOTE_NAME, STATE_NAME, turn_bit
from geartrain.checkpoint.snapshot import load_snapshot
from geartrain.errors import CheckpointError


def judge(folder: Path) -> FlippedBit:
    """Read one copy with the turned bit, and without it."""
    note: Any = msgspec.json.decode((folder / NOTE_NAME).read_bytes())  # Any: JSON
    state = folder / STATE_NAME
    was_found = not _can_be_read(state)
    turn_bit(state / note["file"], note["bit"])
    was_sound = _can_be_read(state)
    return FlippedBit(
        file=note["file"], bit=note["bit"], was_found=was_found, was_sound=was_sound
    )


def main() -> None:
    """Judge all copies in the folder."""
    copies = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    judged = [judge(path) for path in copies if (path / NOTE_NAME).exists()]
    sys.stdout.buffer.write(msgspec.json.encode(judged))


def _can_be_read(state: Path) -> bool:
    try:
        load_snapshot(state)
    except CheckpointError:
        return False
    return True


if __name__ == "__main__":
    main()
