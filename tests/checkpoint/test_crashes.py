"""A save that is killed, or meets a full disk, at any point."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from geartrain.checkpoint.snapshot import load_snapshot, save_snapshot
from geartrain.errors import CheckpointError

KILL_AT_EVERY_CALL = """
import os, signal, sys
from pathlib import Path
import torch
from geartrain.checkpoint.snapshot import load_snapshot, save_snapshot

path = Path(sys.argv[1])

def state(value):
    return {"model": {"w": torch.full((100,), value)}, "optimizer": {"value": value}}

def die_at(name, call, count, dies_after):
    def counted(*args, **kwargs):
        count[0] -= 1
        if count[0] == 0 and not dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        if count[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return counted

def save_and_die(value, at, dies_after):
    count = [at]
    for owner, names in ((os, ("fsync", "rename", "mkdir", "unlink", "rmdir", "open")),):
        for name in names:
            setattr(owner, name, die_at(name, getattr(owner, name), count, dies_after))
    save_snapshot(path, state(value))
    os._exit(0)

save_snapshot(path, state(0.0))
last, kills, finished = 0.0, 0, 0
for at in range(1, 60):
    value = float(at)
    pid = os.fork()
    if pid == 0:
        save_and_die(value, at, at % 2)
    _, status = os.waitpid(pid, 0)
    read = load_snapshot(path)
    assert read["optimizer"]["value"] in (last, value), (at, last, read["optimizer"])
    assert read["model"]["w"].eq(read["optimizer"]["value"]).all()
    last = read["optimizer"]["value"]
    kills += os.WIFSIGNALED(status)
    finished += os.WIFEXITED(status)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0 and last == value
save_snapshot(path, state(99.0))
assert [entry.name for entry in path.parent.iterdir()] == [path.name]
print(kills, finished)
"""


def test_a_kill_at_any_point_of_a_save_leaves_a_whole_snapshot(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILL_AT_EVERY_CALL, str(tmp_path / "snapshot")],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    kills, finished = map(int, ended.stdout.split())
    assert kills >= 15
    assert finished >= 1


KILLED_WHILE_SAVING = """
import sys
import torch
from geartrain.checkpoint.snapshot import save_snapshot

value = 0
while True:
    value += 1
    print(value, flush=True)
    tree = {"w": torch.full((200_000,), float(value))}
    save_snapshot(sys.argv[1], {"model": tree, "again": tree})
"""


@pytest.mark.slow
def test_kills_from_outside_leave_a_whole_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    for round_index in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED_WHILE_SAVING, str(path)],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            for _ in range(2 + round_index % 3):
                begun = int(process.stdout.readline())
            process.kill()

        read = load_snapshot(path)
        assert read["model"]["w"].eq(read["model"]["w"][0]).all()
        assert torch.equal(read["model"]["w"], read["again"]["w"])
        assert read["model"]["w"][0] >= begun - 1


FULL_DISK = """
import resource, sys
import torch
from geartrain.checkpoint.snapshot import load_snapshot, save_snapshot
from geartrain.errors import CheckpointError

save_snapshot(sys.argv[1], {"model": {"w": torch.ones(10)}})
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    save_snapshot(sys.argv[1], {"model": {"w": torch.zeros(100_000)}})
except CheckpointError as error:
    print(error)
assert load_snapshot(sys.argv[1])["model"]["w"].eq(1).all()
"""


def test_a_write_that_the_system_refuses_leaves_the_old_snapshot(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "snapshot")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert "File too large (needs 39" in ended.stdout
    assert "is intact" in ended.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["snapshot"]


@pytest.mark.root
def test_a_full_and_a_read_only_disk_are_named(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        save_snapshot(disk / "snapshot", {"model": {"w": torch.ones(10)}})
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_snapshot(disk / "snapshot", {"model": {"w": torch.zeros(1_000_000)}})
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            save_snapshot(disk / "snapshot", {"model": {"w": torch.zeros(10)}})

        assert load_snapshot(disk / "snapshot")["model"]["w"].eq(1).all()
        assert [entry.name for entry in disk.iterdir()] == ["snapshot"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
