"""The first code of a worker process: prepares it, then runs the user's script.

``python -m geartrain.launch.worker OPTIONS SPEC SCRIPT [ARGUMENTS]``, started by the
launcher only. Torch is imported here because the launcher asks for it (``--preload``),
at full speed, before it throttles an emulated device.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import io
import os
import runpy
import socket
import sys
import threading
import time
from pathlib import Path

from geartrain.devices.profile import DeviceProfile, Fleet
from geartrain.errors import ConfigError, LeftTraining, TrainingStopped
from geartrain.launch.handshake import GO, READY
from geartrain.launch.parent_death import die_with_parent
from geartrain.launch.run_directory import failure_path, log_path
from geartrain.launch.script_failure import describe
from geartrain.parallel.worker_spec import (
    LEFT_EXIT_CODE,
    STOPPED_EXIT_CODE,
    WORKER_SPEC_VARIABLE,
    WorkerSpec,
)
from geartrain.telemetry import read_document, write_document


def main() -> None:
    """Prepare the process, wait until the launcher has set the device up, and run."""
    options = _parse(sys.argv[1:])
    die_with_parent(options.launcher_pid)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # shown as it comes, also in a pipe
    if options.threads is not None:
        # Before any library starts its pool; OpenBLAS and MKL follow this one too.
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.emulated_host:
        # Nobody names the host's addresses, of which torch would warn on each start.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read as torch is loaded
    for name in options.preload:
        importlib.import_module(name)
    _wait_for_go(options.launcher_fd)
    os.environ[WORKER_SPEC_VARIABLE] = str(options.spec)
    spec = read_document(options.spec, WorkerSpec)
    if spec.interface is not None:
        # Gloo would look up this machine's name, which is none of the host's addresses.
        os.environ["GLOO_SOCKET_IFNAME"] = spec.interface
    device = read_document(Path(spec.fleet_path), Fleet).devices[spec.rank]
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)  # as python SCRIPT has it
    _run(spec, device, options.script)


def _run(spec: WorkerSpec, device: DeviceProfile, script: Path) -> None:
    exit_code = 0
    try:
        with _memory_limit(device):
            runpy.run_path(str(script), run_name="__main__")
    except LeftTraining:
        _leave_quickly(LEFT_EXIT_CODE)  # here: its session has nobody to part with
    except TrainingStopped:
        exit_code = STOPPED_EXIT_CODE
    except Exception as error:  # noqa: BLE001 - whatever the script raised ends the run
        _report(spec, device, script, error)
    _leave_quickly(exit_code)


def _leave_quickly(exit_code: int) -> None:
    """Exit without dismantling the interpreter, which takes a slow device seconds.

    Everything a script may rely on still happens: its exit functions run, its output
    is flushed, and where it left threads at work the exit is an ordinary one.
    """
    if any(not t.daemon for t in threading.enumerate() if t is not threading.main_thread()):
        sys.exit(exit_code)
    atexit._run_exitfuncs()  # noqa: SLF001 - what the interpreter itself calls
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _report(
    spec: WorkerSpec, device: DeviceProfile, script: Path, error: Exception
) -> None:
    failure = describe(
        error, script=script, rank=spec.rank, device_id=device.device_id, at_s=time.time()
    )
    run_dir = Path(spec.run_dir)
    # Not to stderr: the launcher prints the cause first, and this may not be it.
    try:
        with log_path(run_dir, spec.rank).open("a") as log:
            log.write(failure.traceback)
        write_document(failure_path(run_dir, spec.rank), failure)
    except (OSError, ConfigError):  # a full disk: better out of order than lost
        sys.stderr.write(failure.traceback)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # No clean-up of the interpreter: process groups in it may wait for dead peers.
    os._exit(1)


def _memory_limit(device: DeviceProfile) -> contextlib.AbstractContextManager[object]:
    if device.kind != "emulated" or device.memory_limit_bytes is None:
        return contextlib.nullcontext()
    from geartrain.devices.emulation.memory_limit import (  # noqa: PLC0415 - needs torch
        TensorMemoryLimit,
    )

    return TensorMemoryLimit(device.memory_limit_bytes)


def _wait_for_go(launcher_fd: int) -> None:
    with socket.socket(fileno=launcher_fd) as channel:
        channel.sendall(READY)
        if channel.recv(1) != GO:
            sys.exit(1)  # the launcher gave up on the start


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="geartrain.launch.worker")
    parser.add_argument("--launcher-fd", type=int, required=True)
    parser.add_argument("--launcher-pid", type=int, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--emulated-host", action="store_true")
    parser.add_argument("--preload", action="append", default=[])
    parser.add_argument("spec", type=Path)
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
