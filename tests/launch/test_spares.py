"""Workers from warm processes: real ones, that import torch once for all tests here."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from example_fleets import emulated_fleet
from geartrain.launch.handshake import GO, READY
from geartrain.launch.spares import Spares, SpareSettings, WorkerOrder, spares_for
from geartrain.launch.started_worker import StartedWorker, end_workers
from geartrain.parallel.worker_spec import WorkerSpec
from geartrain.telemetry import write_document

PRELOAD = ("torch", "geartrain.session")
FACTS = """
import json, os, random, signal, sys, threading
import numpy, torch
facts = {
    "torch": torch.rand(2).tolist(),
    "numpy": float(numpy.random.rand()),
    "random": random.random(),
    "torch_threads": torch.get_num_threads(),
    "threads": len(os.listdir("/proc/self/task")),
    "files": sorted(int(n) for n in os.listdir("/proc/self/fd")),
    "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "session": os.getsid(0) == os.getpid() == os.getpgid(0),
    "arguments": sys.argv[1:],
    "path": sys.path[0],
    "omp": os.environ.get("OMP_NUM_THREADS"),
    "openblas": os.environ.get("OPENBLAS_NUM_THREADS"),
    "directory": os.getcwd(),
    "stdin": os.readlink("/proc/self/fd/0"),
}
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def spares(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spares]:
    log_path = tmp_path_factory.mktemp("spares") / "spares.log"
    settings = SpareSettings(preload=PRELOAD, forks=True, log_path=log_path)
    with contextlib.closing(Spares(settings)) as spares:
        wait_until(spares, lambda: spares.can_fork)
        yield spares


@pytest.fixture
def starter(tmp_path: Path, spares: Spares) -> Iterator[Starter]:
    with contextlib.closing(Starter(tmp_path, spares)) as starter:
        yield starter


class Starter:
    """Does what the launcher does with a worker."""

    def __init__(self, folder: Path, spares: Spares) -> None:
        self.folder = folder
        self.spares = spares
        self.workers: list[StartedWorker] = []
        write_document(folder / "fleet.json", emulated_fleet(1.0))
        spec = WorkerSpec(
            rank=0,
            world_size=1,
            fleet_path=str(folder / "fleet.json"),
            run_dir=str(folder),
        )
        write_document(folder / "worker-0.json", spec)

    def order(
        self, text: str, *arguments: str, threads: int | None = 1, **places: object
    ) -> WorkerOrder:
        script = self.folder / "train.py"
        script.write_text(text)
        return WorkerOrder(
            spec=self.folder / "worker-0.json",
            script=script,
            arguments=arguments,
            threads=threads,
            **places,  # type: ignore[arg-type]  # fields of the order
        )

    def start(
        self, order: WorkerOrder, spares: Spares | None = None
    ) -> tuple[StartedWorker, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            worker = (spares or self.spares).start(
                order, theirs, (subprocess.PIPE, subprocess.PIPE)
            )
        self.workers.append(worker)
        return worker, ours

    def go(self, order: WorkerOrder, spares: Spares | None = None) -> StartedWorker:
        """Start a worker and let it run the script."""
        worker, channel = self.start(order, spares)
        with channel:
            channel.settimeout(60)
            assert channel.recv(1) == READY
            channel.sendall(GO)
        return worker

    def run(self, order: WorkerOrder, spares: Spares | None = None) -> tuple[int, str, str]:
        """Run a worker to its end."""
        worker = self.go(order, spares)
        assert worker.stdout is not None
        assert worker.stderr is not None
        with worker.stdout, worker.stderr:
            out, err = worker.stdout.read().decode(), worker.stderr.read().decode()
        return wait_for_exit(worker), out, err

    def close(self) -> None:
        end_workers(self.workers, grace_s=0.0)
        for worker in self.workers:
            for stream in (worker.stdout, worker.stderr):
                if stream is not None:
                    stream.close()


def num_files(process_id: int) -> int:
    return sum(1 for _ in Path(f"/proc/{process_id}/fd").iterdir())


def wait_until(spares: Spares, condition: Callable[[], bool], within_s: float = 90) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s} s"
        spares.poll()
        select.select([], [], [], 0.005)


def wait_for_exit(worker: StartedWorker, within_s: float = 20.0) -> int:
    deadline_s = time.monotonic() + within_s
    while (exit_code := worker.peek_exit_code()) is None:
        assert time.monotonic() < deadline_s, f"{worker.pid} runs on after {within_s} s"
        select.select([], [], [], 0.002)
    return exit_code


def wait_for_end(process_id: int, within_s: float = 10.0) -> bool:
    try:
        handle = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def facts_of(starter: Starter, *arguments: str) -> dict[str, object]:
    exit_code, out, err = starter.run(starter.order(FACTS, *arguments))
    assert exit_code == 0, err
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_forked_worker_finds_what_a_cold_one_finds(
    starter: Starter, tmp_path: Path
) -> None:
    forked = facts_of(starter, "--json", "-x")
    never = contextlib.closing(Spares(SpareSettings(preload=PRELOAD)))
    with never as nothing_warm:
        order = starter.order(FACTS, "--json", "-x")
        exit_code, out, err = starter.run(order, nothing_warm)
    cold = json.loads(out)

    assert exit_code == 0, err
    assert [worker.way for worker in starter.workers] == ["forked", "cold"]
    same = set(cold) - {"torch", "numpy", "random", "files", "threads"}
    assert {n: forked[n] for n in same} == {n: cold[n] for n in same}
    assert forked["threads"] == forked["torch_threads"] == 1
    assert forked["arguments"] == ["--json", "-x"]
    assert forked["path"] == str(tmp_path)
    assert len(forked["files"]) <= len(cold["files"]), "no file of the server is open"  # type: ignore[arg-type]


def test_forked_workers_draw_different_numbers_where_new_processes_would(
    starter: Starter,
) -> None:
    first, second = facts_of(starter), facts_of(starter)

    for generator in ("torch", "numpy", "random"):
        assert first[generator] != second[generator]
    assert first["files"] == second["files"], "no files pile up"


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("raise ValueError('boo')", 1),
        ("from geartrain.errors import TrainingStopped; raise TrainingStopped", 75),
        ("import threading; threading.Thread(target=print).start()", 0),
        ("import atexit; atexit.register(print, 'bye')", 0),
    ],
)
def test_exit_of_a_forked_worker_is_told(
    starter: Starter, text: str, exit_code: int
) -> None:
    found, out, _ = starter.run(starter.order(text))

    assert found == exit_code
    assert ("bye" in out) == ("atexit" in text)


def test_number_of_an_ended_worker_stays_its_own_until_it_is_reaped(
    starter: Starter,
) -> None:
    worker = starter.go(starter.order("pass"))
    wait_for_exit(worker)

    assert Path(f"/proc/{worker.pid}").exists()

    worker.reap()
    wait_until(starter.spares, lambda: not Path(f"/proc/{worker.pid}").exists(), 10)
    assert worker.peek_exit_code() == 0


def test_server_survives_killed_workers_and_leaves_nothing_behind(
    starter: Starter,
) -> None:
    (server_id,) = starter.spares.process_ids
    files_before = num_files(server_id)
    own_before = num_files(os.getpid())
    for _ in range(5):
        worker, channel = starter.start(starter.order("pass"))
        with channel:
            worker.signal_group(signal.SIGKILL)
            assert wait_for_exit(worker) == -signal.SIGKILL
        end_workers([worker])
        for stream in (worker.stdout, worker.stderr):
            assert stream is not None
            stream.close()

    assert starter.run(starter.order("print('still')"))[1] == "still\n"
    end_workers(starter.workers)
    assert starter.spares.process_ids == (server_id,)
    children = Path(f"/proc/{server_id}/task/{server_id}/children")
    wait_until(starter.spares, lambda: not children.read_text().split(), 10)
    assert num_files(server_id) == files_before
    assert num_files(os.getpid()) == own_before


def test_what_a_forked_worker_started_ends_with_its_group(starter: Starter) -> None:
    text = """
import subprocess, time
print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
time.sleep(1000)
"""
    worker = starter.go(starter.order(text))
    assert worker.stdout is not None
    child_id = int(worker.stdout.readline())

    end_workers([worker], grace_s=0.0)

    assert wait_for_end(child_id)


def test_stopped_worker_is_ended_too(starter: Starter) -> None:
    worker, channel = starter.start(starter.order("pass"))
    with channel:
        os.kill(worker.pid, signal.SIGSTOP)
        end_workers([worker], grace_s=0.1)

    assert worker.peek_exit_code() in {-signal.SIGKILL, -signal.SIGTERM}


def test_launcher_that_gives_up_ends_a_worker_that_waits(starter: Starter) -> None:
    worker, channel = starter.start(starter.order("pass"))
    channel.settimeout(30)
    assert channel.recv(1) == READY
    channel.close()

    assert wait_for_exit(worker) == 1


def test_many_workers_run_at_once(starter: Starter) -> None:
    order = starter.order("import os; print(os.getpid())")
    started = [starter.start(order) for _ in range(8)]
    for worker, channel in started:
        with channel:
            channel.settimeout(60)
            assert channel.recv(1) == READY
            channel.sendall(GO)
        assert wait_for_exit(worker) == 0

    printed = [worker.stdout.read() for worker, _ in started if worker.stdout]
    assert printed == [f"{worker.pid}\n".encode() for worker, _ in started]


def test_long_argument_arrives(starter: Starter) -> None:
    text = "import sys; print(len(sys.argv[1]))"

    assert starter.run(starter.order(text, "x" * 300_000))[1] == "300000\n"


def test_worker_whose_cgroup_is_missing_says_so_and_ends(starter: Starter) -> None:
    order = starter.order("pass", cgroup_files=("/sys/fs/cgroup/absent/cgroup.procs",))

    worker, channel = starter.start(order)
    with channel:
        assert wait_for_exit(worker) == 1
    assert worker.stderr is not None
    assert b"absent" in worker.stderr.read()


@pytest.mark.root
def test_forked_worker_enters_its_cgroup_before_the_script(starter: Starter) -> None:
    from geartrain.devices.emulation.cgroup_throttle import CgroupThrottle
    from geartrain.devices.emulation.cgroups import usable_cgroups
    from geartrain.devices.emulation.owner import Owner

    cgroups = usable_cgroups()
    if cgroups is None:
        pytest.skip("no cgroups may be made here")
    devices = emulated_fleet(0.5).devices
    owner = Owner(pid=os.getpid(), start_ticks=1)  # beside that of other tests
    throttle = CgroupThrottle(cgroups, devices, owner)
    with contextlib.closing(throttle):
        files = tuple(
            str(root / owner.name / "emulated-0" / "cgroup.procs") for root in cgroups.roots
        )
        order = starter.order("print(open('/proc/self/cgroup').read())", cgroup_files=files)
        _, out, err = starter.run(order)
        end_workers(starter.workers)

    assert out.count(f"{owner.name}/emulated-0") == len(cgroups.roots), err


@pytest.mark.root
def test_forked_worker_enters_its_network_namespace(starter: Starter) -> None:
    name = f"geartrain-spares-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        order = starter.order("import socket; print(socket.if_nameindex())", namespace=name)
        _, out, err = starter.run(order)
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)

    assert out == "[(1, 'lo')]\n", err


def test_spares_follow_the_kinds_of_devices() -> None:
    emulated = spares_for(["emulated", "emulated"], PRELOAD)
    mixed = spares_for(["cuda", "cpu", "emulated"], PRELOAD)

    assert (emulated.forks, emulated.num_waiting) == (sys.platform == "linux", 0)
    assert (mixed.forks, mixed.num_waiting) == (sys.platform == "linux", 1)


def test_hung_server_makes_no_second_worker_when_it_wakes_up(tmp_path: Path) -> None:
    settings = SpareSettings(preload=(), forks=True)
    with contextlib.closing(Spares(settings)) as spares:
        wait_until(spares, lambda: spares.can_fork)
        (server_id,) = spares.process_ids
        starter = Starter(tmp_path, spares)
        order = starter.order("print('once')")
        earlier, earlier_channel = starter.start(order)
        os.kill(server_id, signal.SIGSTOP)
        ours, theirs = socket.socketpair()
        with theirs:
            late = spares.start(order, theirs, (subprocess.PIPE,) * 2, within_s=0.2)
        starter.workers.append(late)

        os.kill(server_id, signal.SIGCONT)

        children = Path(f"/proc/{server_id}/task/{server_id}/children")
        wait_until(spares, lambda: len(children.read_text().split()) == 2, 20)  # it forked
        (second_id,) = {int(n) for n in children.read_text().split()} - {earlier.pid}
        assert wait_for_end(second_id)
        assert (earlier.way, late.way) == ("forked", "cold")
        assert earlier.peek_exit_code() is None, "the server serves those it has"
        with ours:
            ours.settimeout(60)
            assert ours.recv(2) == READY
            ours.sendall(GO)
            assert wait_for_exit(late) == 0
        earlier_channel.close()
        assert wait_for_exit(earlier) == 1, "its launcher has gone"
        end_workers([earlier, late])
        wait_until(spares, lambda: server_id not in spares.process_ids)
        assert wait_for_end(server_id), "nothing needs it any more"
        starter.close()


def test_killed_server_takes_its_workers_along_and_is_replaced(tmp_path: Path) -> None:
    settings = SpareSettings(preload=(), forks=True)
    with contextlib.closing(Spares(settings)) as spares:
        wait_until(spares, lambda: spares.can_fork)
        (server_id,) = spares.process_ids
        starter = Starter(tmp_path, spares)
        text = """
import subprocess, time
print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
time.sleep(1000)
"""
        worker = starter.go(starter.order(text))
        assert worker.stdout is not None
        child_id = int(worker.stdout.readline())

        os.kill(server_id, signal.SIGKILL)

        assert wait_for_exit(worker) == -signal.SIGKILL
        spares.poll()
        assert wait_for_end(child_id), "what it started is ended too"
        wait_until(spares, lambda: spares.can_fork)
        assert starter.run(starter.order("print('again')"))[:2] == (0, "again\n")
        assert starter.workers[-1].way == "forked"
        starter.close()


def test_warm_process_becomes_the_worker_and_is_replaced(tmp_path: Path) -> None:
    settings = SpareSettings(preload=(), num_waiting=1)
    with contextlib.closing(Spares(settings)) as spares:
        wait_until(spares, lambda: spares.num_waiting == 1)
        (warm_id,) = spares.process_ids
        starter = Starter(tmp_path, spares)

        order = starter.order("import os; print(os.getpid(), os.getsid(0))", threads=None)
        exit_code, out, err = starter.run(order)

        assert (exit_code, out) == (0, f"{warm_id} {warm_id}\n"), err
        assert starter.workers[0].way == "warm"
        wait_until(spares, lambda: spares.num_waiting == 1)
        (next_id,) = spares.process_ids
        assert next_id != warm_id
        starter.close()
    assert not Path(f"/proc/{next_id}").exists()


def test_warm_processes_and_their_workers_die_with_the_launcher(tmp_path: Path) -> None:
    text = f"""
import os, select, signal, socket, subprocess, sys
from pathlib import Path
sys.path.append({str(Path(__file__).parents[1])!r})
from geartrain.launch.spares import SpareSettings, Spares, WorkerOrder
spares = Spares(SpareSettings(preload=(), forks=True, num_waiting=1))
while not (spares.can_fork and spares.num_waiting):
    spares.poll()
    select.select([], [], [], 0.01)
ours, theirs = socket.socketpair()
order = WorkerOrder(spec=Path("s"), script=Path("s"), threads=1)
worker = spares.start(order, theirs, (subprocess.DEVNULL,) * 2)
theirs.close()
ours.recv(1)
print(*spares.process_ids, worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    process_ids = [int(word) for word in done.stdout.split()]
    assert len(process_ids) == 3, done.stderr
    assert all(wait_for_end(process_id) for process_id in process_ids)


def test_process_that_can_not_warm_up_is_tried_again_later_and_workers_start_cold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = [0.0]
    monkeypatch.setattr("geartrain.launch.spares._MAX_FAILURES", 2)
    monkeypatch.setattr("geartrain.launch.spares.time.monotonic", lambda: clock_s[0])
    log_path = tmp_path / "spares.log"
    settings = SpareSettings(preload=("no_such_module",), forks=True, log_path=log_path)
    with contextlib.closing(Spares(settings)) as spares:
        seen = set()
        for _ in range(2):
            (process_id,) = spares.process_ids
            seen.add(process_id)
            assert wait_for_end(process_id)
            spares.poll()
            assert spares.process_ids == (), "not at once"
            clock_s[0] += 60
            spares.poll()

        assert spares.process_ids == ()
        assert len(seen) == 2
        assert "started cold from now on" in caplog.text
        assert "no_such_module" in log_path.read_text()
