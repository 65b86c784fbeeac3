"""How long a worker takes from its start until it is ready, and until its first step.

    .venv/bin/python benchmarks/worker_start.py OUTPUT.json

Forked, from a waiting warm process, and cold; one worker at a time, at full speed, as
workers are until they are let go.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import msgspec

from geartrain.bench.provenance import current_commit
from geartrain.devices.probe import resolve_fleet
from geartrain.launch.handshake import GO, READY
from geartrain.launch.run_directory import collect_versions
from geartrain.launch.spares import Spares, SpareSettings, WorkerOrder
from geartrain.launch.started_worker import end_workers
from geartrain.parallel.worker_spec import WorkerSpec
from geartrain.telemetry import write_document

PRELOAD = ("torch", "geartrain.session")
WARM_UP_LIMIT_S = 180.0
SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 2))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(4, 20)).sum().backward()
optimizer.step()
print("stepped", flush=True)
"""
WAYS = {
    "forked": (SpareSettings(preload=PRELOAD, forks=True), 50),
    "warm": (SpareSettings(preload=PRELOAD, num_waiting=1), 5),
    "cold": (SpareSettings(preload=PRELOAD), 5),
}
"""What is kept ready, and how many workers are started."""


def main() -> None:
    """Measure, and write the result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_run(folder)
        ways = {way: _measure(folder, way) for way in WAYS}
    result = {
        "ways": ways,
        "labels": ["emulated"],
        "load_average": os.getloadavg(),
        "num_cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "versions": collect_versions(),
        "command": " ".join(["python", *sys.argv]),
        "commit": current_commit(Path(__file__).parent),
    }
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    Path(sys.argv[1]).write_bytes(text + b"\n")
    for way, found in ways.items():
        click.echo(f"{way}: {found}")


def _write_run(folder: Path) -> None:
    write_document(folder / "fleet.json", resolve_fleet("emulated:1.0"))
    spec = WorkerSpec(
        rank=0, world_size=1, fleet_path=str(folder / "fleet.json"), run_dir=str(folder)
    )
    write_document(folder / "worker-0.json", spec)
    (folder / "train.py").write_text(SCRIPT)


def _measure(folder: Path, way: str) -> dict[str, Any]:  # Any: numbers and lists
    settings, num_starts = WAYS[way]
    order = WorkerOrder(
        spec=folder / "worker-0.json",
        script=folder / "train.py",
        threads=None if way == "warm" else 1,
    )
    ready_s, step_s = [], []
    with closing(Spares(settings)) as spares:
        for _ in range(num_starts):
            _wait_until_warm(spares, settings)
            times = _start(spares, order, way)
            ready_s.append(times[0])
            step_s.append(times[1])
    return {
        "num_starts": num_starts,
        "ready_p50_s": statistics.median(ready_s),
        "ready_p95_s": _p95(ready_s),
        "first_step_p50_s": statistics.median(step_s),
        "first_step_p95_s": _p95(step_s),
    }


def _wait_until_warm(spares: Spares, settings: SpareSettings) -> None:
    deadline_s = time.monotonic() + WARM_UP_LIMIT_S
    while spares.can_fork != settings.forks or spares.num_waiting < settings.num_waiting:
        if time.monotonic() > deadline_s:
            sys.exit(f"nothing is warm after {WARM_UP_LIMIT_S:g} s")
        spares.poll()
        time.sleep(0.02)


def _start(spares: Spares, order: WorkerOrder, way: str) -> tuple[float, float]:
    ours, theirs = socket.socketpair()
    began_s = time.perf_counter()
    with ours, theirs:
        outputs = (subprocess.PIPE, subprocess.DEVNULL)
        worker = spares.start(order, theirs, outputs)
        ours.settimeout(WARM_UP_LIMIT_S)
        if ours.recv(1) != READY or worker.way != way or worker.stdout is None:
            sys.exit(f"a worker was started {worker.way}, not {way}, or did not start")
        ready_s = time.perf_counter() - began_s
        ours.sendall(GO)
        with worker.stdout:
            worker.stdout.readline()
        step_s = time.perf_counter() - began_s
        end_workers([worker], grace_s=0.0)
    return ready_s, step_s


def _p95(values: list[float]) -> float:
    return sorted(values)[round(0.95 * (len(values) - 1))]


if __name__ == "__main__":
    main()
