"""Real worker processes running small scripts without a session."""

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from example_fleets import cpu_fleet, emulated_fleet
from geartrain.devices.profile import Fleet
from geartrain.errors import DeviceError
from geartrain.launch import LaunchResult, LaunchSettings, launch
from geartrain.launch.output import OutputPump
from geartrain.launch.settings import StreamName

RANK = """
import json, os, sys
spec = json.load(open(os.environ["GEARTRAIN_WORKER_SPEC"]))
rank = spec["rank"]
"""


class Recorder:
    """Keeps what an observer is told."""

    def __init__(self) -> None:
        self.output: dict[StreamName, bytes] = {"stdout": b"", "stderr": b""}
        self.notices: list[str] = []

    def on_output(self, stream: StreamName, data: bytes) -> None:
        self.output[stream] += data

    def on_notice(self, text: str) -> None:
        self.notices.append(text)

    def on_tick(self) -> None:
        pass


RunScript = Callable[..., tuple[LaunchResult, Recorder]]


@pytest.fixture
def run(tmp_path: Path) -> RunScript:
    def run(
        text: str,
        *arguments: str,
        fleet: Fleet | None = None,
        **options: Any,  # Any: fields of LaunchSettings
    ) -> tuple[LaunchResult, Recorder]:
        script = tmp_path / "train.py"
        script.write_text(RANK + text)
        settings = LaunchSettings(
            script=script,
            arguments=arguments,
            fleet=fleet or cpu_fleet(2),
            run_dir=tmp_path / "run",
            **options,
        )
        recorder = Recorder()
        return launch(settings, recorder), recorder

    return run


def wait_for_end(process_id: int, timeout_s: float = 5.0) -> bool:
    """Wait until a process of somebody else has ended; False at the deadline."""
    try:
        handle = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


def test_script_gets_its_arguments_untouched_and_only_rank_0_is_shown(
    run: RunScript, tmp_path: Path
) -> None:
    text = "print('rank', rank, sys.argv[1:], sys.path[0])\n"

    result, recorder = run(text, "--json", "-o", "x", "--", "--threads=3")

    shown = recorder.output["stdout"].decode()
    assert (result.outcome, result.exit_code) == ("finished", 0)
    assert shown == f"rank 0 ['--json', '-o', 'x', '--', '--threads=3'] {tmp_path}\n"
    assert "rank 1" in (tmp_path / "run" / "worker-1.log").read_text()


def test_workers_meet_at_the_store(run: RunScript) -> None:
    text = """
from torch.distributed import TCPStore
store = TCPStore(spec["store_host"], spec["store_port"], is_master=False)
store.set(f"rank-{rank}", "here")
store.wait([f"rank-{r}" for r in range(spec["world_size"])])
"""

    result, _ = run(text)

    assert result.outcome == "finished"


def test_exit_code_of_the_script_is_kept(run: RunScript) -> None:
    result, _ = run("sys.exit(7)\n")

    assert (result.outcome, result.exit_code) == ("failed", 7)


def test_failing_rank_ends_the_others_within_five_seconds_and_is_the_cause(
    run: RunScript,
) -> None:
    text = """
import signal
if rank == 1:
    raise ValueError("boo")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # even one that does not want to go
signal.pause()
"""
    result, _ = run(text)

    ended_at_s = time.time()
    failed_at_s = (Path(result.run_dir) / "failure-1.json").stat().st_mtime
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert result.details.startswith("Traceback")
    assert result.details.rstrip().endswith("ValueError: boo")
    assert result.message.startswith("rank 1 (cpu:1): ValueError: boo")
    assert ended_at_s - failed_at_s < 5


def test_cause_is_reported_though_a_peer_noticed_first(
    run: RunScript, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = """
from collections.abc import Callable
from pathlib import Path
from typing import Any
from geartrain.errors import CommunicationError
pipe = str(Path(__file__).parent / "pipe")
if rank == 1:
    open(pipe, "w")
    raise CommunicationError("rank 0 is gone")
open(pipe).read()  # until rank 1 has gone
raise ValueError("the cause")
"""
    result, _ = run(text)

    assert result.message.startswith("rank 0 (cpu:0): ValueError: the cause")
    assert "rank 1 (cpu:1) failed in consequence" in result.message


def test_deliberate_error_is_its_message_without_a_traceback(run: RunScript) -> None:
    text = """
from geartrain.errors import ConfigError
raise ConfigError("dataset holds 3 samples")
"""
    result, recorder = run(text)

    assert result.exit_code == 2
    assert result.message.startswith("dataset holds 3 samples\n  raised by rank")
    assert "in consequence" not in result.message
    assert result.details == ""
    assert recorder.output["stderr"] == b""


def test_worker_killed_by_a_signal_is_named(run: RunScript) -> None:
    text = """
import signal
if rank == 1:
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""
    result, _ = run(text)

    assert result.exit_code == 1
    assert "rank 1 (cpu:1): was killed by SIGKILL" in result.message
    assert result.details.endswith("last words")


def test_what_a_script_started_does_not_outlive_the_run(
    run: RunScript, tmp_path: Path
) -> None:
    text = """
import subprocess
child = subprocess.Popen(["sleep", "1000"])
open(f"{spec['run_dir']}/child-{rank}", "w").write(str(child.pid))
"""
    run(text)

    for rank in range(2):
        assert wait_for_end(int((tmp_path / "run" / f"child-{rank}").read_text()))


def test_worker_that_hangs_before_the_script_has_a_deadline(
    run: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging_module.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(DeviceError, match=r"rank 0 \(cpu:0\), rank 1 .* did not start"):
        run("", preload=("hanging_module",), start_timeout_s=3.0)


def test_worker_that_dies_before_the_script_is_reported_with_its_log(
    run: RunScript,
) -> None:
    with pytest.raises(DeviceError, match="before the script began"):
        run("", preload=("no_such_module",))


def test_script_whose_output_nobody_reads_any_more_runs_to_its_end(
    run: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Recorder, "on_output", refuse)
    text = "print('x' * 1_000_000)  # more than a pipe holds\n"

    result, _ = run(text, fleet=cpu_fleet(1))

    assert result.outcome == "finished"


@pytest.mark.root
def test_emulated_worker_is_throttled_before_the_script_runs(run: RunScript) -> None:
    text = """
print([line for line in open("/proc/self/cgroup") if "geartrain-" in line])
print(os.environ["OMP_NUM_THREADS"])
"""
    result, recorder = run(text, fleet=emulated_fleet(0.5, 0.3))

    groups, threads = recorder.output["stdout"].decode().splitlines()
    assert result.outcome == "finished"
    assert "emulated" in groups
    assert threads == "1"


def test_tensors_above_a_devices_memory_raise_torchs_own_error(run: RunScript) -> None:
    fleet = emulated_fleet(0.5, memory_limit_bytes=64 * 2**20)
    text = """
import torch
try:
    torch.zeros(2**25)
except torch.OutOfMemoryError:
    print("caught")
torch.zeros(2**25)
"""
    result, recorder = run(text, fleet=fleet)

    assert recorder.output["stdout"] == b"caught\n"
    assert "OutOfMemoryError" in result.message


@pytest.mark.root
def test_kill_by_the_kernel_is_reported_as_out_of_memory_of_the_device(
    run: RunScript,
) -> None:
    fleet = emulated_fleet(0.5, memory_limit_bytes=64 * 2**20)

    result, _ = run("kept = b'x' * 2**30\n", fleet=fleet)

    assert result.outcome == "failed"
    assert "rank 0 (emulated:0): the kernel killed it: out of memory" in result.message


def test_stop_before_the_script_begins_saves_nothing(
    run: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The module asks the launcher to stop, as Ctrl-C would, and then never gets ready.
    (tmp_path / "stopping_module.py").write_text(
        "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\nsignal.pause()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    result, _ = run("", preload=("stopping_module",), fleet=cpu_fleet(1))

    assert (result.outcome, result.exit_code) == ("stopped", 130)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_cannot_be_logged_on_a_full_disk_is_still_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read_fd, write_fd = os.pipe()
    recorder = Recorder()
    pump = OutputPump(os.fdopen(read_fd, "rb"), "stdout", Path("/dev/full"), recorder)

    for text in (b"hello\n", b"again\n"):
        os.write(write_fd, text)
    os.close(write_fd)
    pump.show_since(0.0)
    pump.join()

    assert recorder.output["stdout"] == b"hello\nagain\n"
    assert "No space left on device" in caplog.text
