"""Ctrl-C, SIGTERM and kill -9 of a launcher, which is a process of its own here."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from geartrain.devices.emulation.network import NetworkLab, parse_links
from lab_traffic import needs_networks

DRIVER = """
import sys
from collections.abc import Iterator
from pathlib import Path
sys.path.append({tests!r})
from example_fleets import cpu_fleet, emulated_fleet
from geartrain.devices.emulation.network import parse_links
from geartrain.launch import LaunchSettings, launch

class Printing:
    def on_output(self, stream, data):
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    def on_notice(self, text):
        print("notice:", text, flush=True)
    def on_tick(self):
        pass

here = Path({here!r})
result = launch(
    LaunchSettings(
        script=here / "train.py",
        fleet={fleet},
        run_dir=here / "run",
        stop_timeout_s={stop_timeout_s},
        links={links},
    ),
    Printing(),
)
print("result:", result.outcome, result.exit_code, result.message, flush=True)
"""

# Stands in for a session: saves when asked to stop. Rank 0 says "ready" last of all.
SCRIPT = """
import json, os, signal, sys
spec = json.load(open(os.environ["GEARTRAIN_WORKER_SPEC"]))
rank, run_dir = spec["rank"], spec["run_dir"]
def stop(*_):
    {on_stop}
signal.signal(signal.SIGUSR1, stop)
pipe = os.path.join(os.path.dirname(__file__), "pipe")
if rank == 1:
    with open(pipe, "w") as stream:
        stream.write(str(os.getpid()))
else:
    print("ready", os.getpid(), open(pipe).read(), flush=True)
while True:
    signal.pause()
"""
SAVE_AND_STOP = "os.makedirs(run_dir + '/checkpoint', exist_ok=True); sys.exit(75)"
IGNORE = "pass"
LINKED_FLEET = "emulated_fleet(0.4, 0.4)"
LINKS = "parse_links('8Mbit', 2)"


@contextlib.contextmanager
def launcher(
    tmp_path: Path,
    *,
    on_stop: str,
    fleet: str = "cpu_fleet(2)",
    stop_timeout_s: float = 30.0,
    links: str = "None",
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a launcher and wait until its workers run; yields it and their ids."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "train.py").write_text(SCRIPT.format(on_stop=on_stop))
    driver = DRIVER.format(
        tests=str(Path(__file__).parents[1]),
        here=str(tmp_path),
        fleet=fleet,
        stop_timeout_s=stop_timeout_s,
        links=links,
    )
    process = subprocess.Popen(
        [sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        word, *ids = process.stdout.readline().split()
        assert word == "ready"
        yield process, [int(i) for i in ids]
    finally:
        process.kill()
        process.communicate()


def wait_for_end(process_ids: list[int], timeout_s: float = 5.0) -> None:
    """Wait until processes that are not ours have ended."""
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(process_id)
            ended = select.select([handle], [], [], timeout_s)[0]
            os.close(handle)
            assert ended, f"process {process_id} still runs"


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_first_signal_has_all_workers_save_and_stop(
    tmp_path: Path, number: signal.Signals
) -> None:
    with launcher(tmp_path, on_stop=SAVE_AND_STOP) as (process, ids):
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)

    assert "notice: stopping: rank 0 (cpu:0), rank 1 (cpu:1) save" in output
    assert f"stopped 130 stopped; saved in {tmp_path}/run/checkpoint" in output
    wait_for_end(ids)


def test_second_signal_kills_workers_that_do_not_stop(tmp_path: Path) -> None:
    with launcher(tmp_path, on_stop=IGNORE) as (process, ids):
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("notice: stopping")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)

    assert "result: stopped 130 killed on request; nothing was saved" in output
    wait_for_end(ids)


def test_workers_that_do_not_stop_in_time_are_named_and_killed(tmp_path: Path) -> None:
    on_stop = f"if rank == 0: {SAVE_AND_STOP.split('; ')[1]}"
    with launcher(tmp_path, on_stop=on_stop, stop_timeout_s=1.0) as (process, ids):
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)

    assert "killed rank 1 (cpu:1), which did not stop within 1 s" in output
    wait_for_end(ids)


def test_workers_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launcher(tmp_path, on_stop=IGNORE) as (process, ids):
        process.kill()
        process.wait()

        wait_for_end(ids)


@pytest.mark.root
@pytest.mark.slow
def test_cgroups_of_a_killed_launcher_are_swept_by_the_next_start(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    fleet = "emulated_fleet(0.3, 0.3)"
    with launcher(first, on_stop=IGNORE, fleet=fleet) as (process, ids):
        groups = find_groups(process.pid)
        process.kill()
        process.wait()
        wait_for_end(ids)
    with launcher(second, on_stop=SAVE_AND_STOP, fleet=fleet) as (process, _):
        left = [group for group in groups if group.exists()]
        control = json.loads((second / "run" / "emulation.json").read_text())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)

    assert groups
    assert left == []
    assert control == {"emulated:0": 0.3, "emulated:1": 0.3}


@pytest.mark.root
@needs_networks
def test_first_signal_stops_workers_on_emulated_hosts(tmp_path: Path) -> None:
    with launcher(tmp_path, on_stop=SAVE_AND_STOP, fleet=LINKED_FLEET, links=LINKS) as (
        process,
        ids,
    ):
        made = find_namespaces(process.pid)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)

    assert f"stopped 130 stopped; saved in {tmp_path}/run/checkpoint" in output
    wait_for_end(ids)
    assert len(made) == 4  # two hosts, the hub, the fabric
    assert find_namespaces(process.pid) == []


@pytest.mark.root
@needs_networks
def test_network_of_a_killed_launcher_is_swept_by_the_next_start(tmp_path: Path) -> None:
    with launcher(tmp_path, on_stop=IGNORE, fleet=LINKED_FLEET, links=LINKS) as (
        process,
        ids,
    ):
        process.kill()
        process.wait()
        wait_for_end(ids)
    made = find_namespaces(process.pid)

    with NetworkLab(parse_links("8Mbit", 1)):
        left = find_namespaces(process.pid)

    assert len(made) == 4
    assert left == []


def find_namespaces(process_id: int) -> list[str]:
    """Network namespaces that a launcher made."""
    return [p.name for p in Path("/run/netns").glob(f"geartrain-{process_id}-*")]


def find_groups(process_id: int) -> list[Path]:
    """Cgroups that a launcher made."""
    return list(Path("/sys/fs/cgroup").glob(f"**/geartrain-{process_id}-*"))
