"""What a run leaves behind is found, each kind of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from geartrain.bench.chaos.leftovers import (
    end_marked,
    find_leftovers,
    marked_processes,
    shared_memory_of,
)
from geartrain.bench.chaos.run_process import marked
from geartrain.devices.emulation.network import NetworkLab, parse_links

WAIT = "import sys; print('up', flush=True); sys.stdin.read()"


@contextmanager
def marked_child(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        marked(mark, [sys.executable, "-c", WAIT]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"up\n"
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def test_process_that_still_runs_is_found_and_can_be_ended() -> None:
    mark = f"test-{os.getpid()}"
    with marked_child(mark) as child:
        assert marked_processes(mark) == [child.pid]
        left = find_leftovers(mark, launcher_id=2**22 + 1, process_ids=())
        end_marked(mark)
        child.wait(timeout=10)

    assert len(left) == 1
    assert left[0].startswith(f"process {child.pid} (python")
    assert find_leftovers(mark, launcher_id=2**22 + 1, process_ids=()) == []


def test_others_processes_are_not_ours() -> None:
    with marked_child(f"test-{os.getpid()}-a"):
        assert marked_processes(f"test-{os.getpid()}") == []


def test_shared_memory_is_found_by_the_process_in_its_name(tmp_path: Path) -> None:
    for name in ("torch_4711_12_0", "psm_47110", "gloo.4712", "x"):
        (tmp_path / name).touch()

    found = shared_memory_of([4711, 4712], tmp_path)

    assert [path.name for path in found] == ["gloo.4712", "torch_4711_12_0"]


@pytest.mark.root
def test_network_namespaces_are_found_by_who_made_them() -> None:
    with NetworkLab(parse_links("100Mbit,100Mbit")):
        left = find_leftovers("nobody", os.getpid(), ())

    assert len(left) == 4  # the fabric, the hub, two hosts
    assert all(text.startswith("network namespace geartrain-") for text in left)
    assert find_leftovers("nobody", os.getpid(), ()) == []
