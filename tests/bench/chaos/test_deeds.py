"""Faults are made on real processes, and undone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from example_fleets import cpu_fleet, emulated_fleet
from geartrain.bench.chaos.capabilities import (
    COORDINATOR_MODULE,
    Asked,
    find_missing,
)
from geartrain.bench.chaos.deeds import Scene, is_running, perform
from geartrain.bench.chaos.kinds import KINDS
from geartrain.bench.chaos.run_process import marked
from geartrain.bench.chaos.schedule import Fault
from geartrain.bench.chaos.victims import NotPossibleError
from geartrain.telemetry import read_document, write_document

UP = "import sys; print('up', flush=True); sys.stdin.read()"


@contextmanager
def worker(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    command = argv or (sys.executable, "-c", UP)
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def scene(folder: Path, process_id: int | None = None) -> Scene:
    return Scene(
        launcher_id=os.getpid(),
        mark=f"deeds-{os.getpid()}",
        run_dir=folder,
        folder=folder,
        core_fractions={"a": 0.4, "b": 0.05},
        saved=Path("saved"),
        worker_ids={} if process_id is None else {"a": process_id},
    )


def fault(kind: str, device_id: str = "a") -> Fault:
    return Fault(at_s=1.0, kind=kind, device_id=device_id, duration_s=0.1)


def state_of(process_id: int) -> str:
    """As ps shows it, once the kernel has delivered what it has to."""
    _, status = os.waitpid(process_id, os.WUNTRACED | os.WCONTINUED)
    if os.WIFSTOPPED(status):
        return "stopped"
    return "running" if os.WIFCONTINUED(status) else "ended"


@pytest.mark.parametrize("kind", ["kill", "kill_in_rebuild", "kill_in_save"])
def test_killed_worker_has_ended_and_is_not_killed_again(tmp_path: Path, kind: str) -> None:
    with worker() as child:
        here = scene(tmp_path, child.pid)

        assert perform(here, fault(kind)) is None
        child.wait(timeout=10)

        assert not is_running(child.pid)
        with pytest.raises(NotPossibleError, match="a has no worker that runs"):
            perform(here, fault(kind))


def test_stopped_worker_goes_on_when_the_fault_ends(tmp_path: Path) -> None:
    with worker() as child:
        undo = perform(scene(tmp_path, child.pid), fault("stop"))
        assert undo is not None
        assert state_of(child.pid) == "stopped"
        assert is_running(child.pid)

        undo()

        assert state_of(child.pid) == "running"


def test_frozen_worker_stays_so(tmp_path: Path) -> None:
    with worker() as child:
        assert perform(scene(tmp_path, child.pid), fault("freeze")) is None
        assert state_of(child.pid) == "stopped"


def test_slowed_device_gets_its_share_back(tmp_path: Path) -> None:
    control = tmp_path / "emulation.json"
    write_document(control, {"a": 0.4, "b": 0.05})
    here = scene(tmp_path, os.getpid())

    undo = perform(here, fault("slow"))

    assert undo is not None
    assert read_document(control, dict[str, float]) == {"a": 0.1, "b": 0.05}
    undo()
    assert read_document(control, dict[str, float]) == {"a": 0.4, "b": 0.05}


def test_device_without_a_worker_is_no_victim(tmp_path: Path) -> None:
    for kind in ("kill", "stop", "freeze", "slow", "link_cut", "link_slow"):
        with pytest.raises(NotPossibleError, match="b has no worker that runs"):
            perform(scene(tmp_path), fault(kind, "b"))


def test_no_bit_is_turned_where_nothing_was_saved(tmp_path: Path) -> None:
    with pytest.raises(NotPossibleError, match="nothing has been saved yet"):
        perform(scene(tmp_path), fault("bit_flip"))


def test_coordinator_is_found_by_what_it_runs(tmp_path: Path) -> None:
    here = scene(tmp_path)
    with pytest.raises(NotPossibleError, match=COORDINATOR_MODULE):
        perform(here, fault("coordinator_kill"))
    command = [sys.executable, "-c", UP, "-m", COORDINATOR_MODULE]
    with worker(*marked(here.mark, command)) as child:
        perform(here, fault("coordinator_kill"))
        child.wait(timeout=10)

        assert child.returncode == -9


def test_what_is_missing_is_told_with_the_way_out() -> None:
    missing = find_missing(Asked(fleet=cpu_fleet(2), has_links=False, saves=False))
    emulated = find_missing(
        Asked(fleet=emulated_fleet(0.5, 0.5), has_links=True, saves=True)
    )

    assert "use --devices emulated:" in missing["emulated devices"]
    assert "--saved" in missing["saves"]
    assert not emulated.keys() & {"emulated devices", "emulated links", "saves"}


def test_every_kind_has_a_deed() -> None:
    from geartrain.bench.chaos.deeds import _DEEDS

    assert set(_DEEDS) == set(KINDS)
