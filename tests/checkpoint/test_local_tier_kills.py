"""kill -9 in the middle of a save: the version before, or the new one, always loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.verify import verify_store
from stored_versions import make_content, read_content, save

# Every save has content of its own, so each version says which one it is.
KILLED_AT_A_CALL = """
import os, random, signal, sys
from pathlib import Path
sys.path.append(sys.argv[3])
from stored_versions import make_content, read_content, save
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.verify import verify_store

directory, trials = Path(sys.argv[1]), int(sys.argv[2])
SIZES = {"model/w": 1_100_000, "model/b": 10, "optimizer/m": 270_000}
CALLS = ("fsync", "rename", "link", "mkdir", "unlink", "open", "write", "close", "stat")
source = random.Random(5)

def dying(call, count, dies_after):
    def counted(*args, **kwargs):
        count[0] -= 1
        if count[0] == 0 and not dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        if count[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return counted

def save_and_die(step, at, dies_after):
    count = [at]
    for name in CALLS:
        setattr(os, name, dying(getattr(os, name), count, dies_after))
    save(LocalTier(directory), make_content(SIZES, seed=step), step=step)
    os._exit(0)

save(LocalTier(directory), make_content(SIZES, seed=0), step=0)
last, kills, finished = 0, 0, 0
for step in range(1, trials + 1):
    at = source.randrange(1, 125)  # of some 100 calls
    pid = os.fork()
    if pid == 0:
        save_and_die(step, at, step % 2)
    _, status = os.waitpid(pid, 0)
    tier = LocalTier(directory)
    latest = tier.latest()
    assert latest.manifest.step in (last, step), (last, step, latest.manifest.step)
    last = latest.manifest.step
    assert read_content(tier.reader(latest), latest) == make_content(SIZES, seed=last)
    assert os.WIFSIGNALED(status) or last == step
    kills += os.WIFSIGNALED(status)
    finished += not os.WIFSIGNALED(status)
    for name in tier.versions():
        if name != latest.name:
            tier.remove(name)
    tier.collect_garbage(min_age_s=0)
report = verify_store(LocalTier(directory).store)
assert report.is_sound and report.num_versions == 1, report
chunks = {p.name for p in (directory / "objects").rglob("*") if p.is_file()}
assert chunks == set(latest.manifest.chunks), chunks
assert not list(directory.glob("drafts/*"))
print(kills, finished)
"""


def kill_saves(directory: Path, num_trials: int) -> tuple[int, int]:
    ended = subprocess.run(
        [
            *(sys.executable, "-c", KILLED_AT_A_CALL),
            *(str(directory), str(num_trials), str(Path(__file__).parents[1])),
        ],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    kills, finished = map(int, ended.stdout.split())
    return kills, finished


def test_a_kill_at_any_call_leaves_a_whole_version(tmp_path: Path) -> None:
    kills, _ = kill_saves(tmp_path, num_trials=15)

    assert kills >= 8


@pytest.mark.slow
def test_two_hundred_kills_leave_whole_versions(tmp_path: Path) -> None:
    kills, finished = kill_saves(tmp_path, num_trials=200)

    assert kills >= 120
    assert finished >= 5


SAVING_FOR_EVER = """
import sys
sys.path.append(sys.argv[2])
from stored_versions import make_content, save
from geartrain.checkpoint.local_tier import LocalTier

tier, step = LocalTier(sys.argv[1]), 0
while True:
    step += 1
    print(step, flush=True)
    save(tier, make_content({"model/w": 1_500_000, "model/b": 5}, seed=step), step=step)
"""


@pytest.mark.slow
def test_kills_from_outside_leave_whole_versions(tmp_path: Path) -> None:
    for round_index in range(15):
        with subprocess.Popen(
            [
                *(sys.executable, "-c", SAVING_FOR_EVER),
                *(str(tmp_path), str(Path(__file__).parents[1])),
            ],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            begun = 0
            for _ in range(2 + round_index % 4):
                begun = int(process.stdout.readline())
            process.kill()

        tier = LocalTier(tmp_path)
        latest = tier.latest()
        assert latest is not None
        assert latest.manifest.step >= begun - 1
        expected = make_content(
            {"model/w": 1_500_000, "model/b": 5}, seed=latest.manifest.step
        )
        assert read_content(tier.reader(latest), latest) == expected
    assert verify_store(LocalTier(tmp_path).store).is_sound
    save(LocalTier(tmp_path), make_content({"model/w": 1}), step=10**6)
