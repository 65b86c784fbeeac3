"""One torchft replica, or its lighthouse, for the comparison.

``torchft_worker.py replica LIGHTHOUSE FOLDER INDEX``, or ``torchft_worker.py lighthouse
FILE``, which writes the address into the file and serves until it is killed.

It writes what the members of our runs write, so that both are read by the same code.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from geartrain.bench.chaos.exact_training import NUM_INPUTS, NUM_OUTPUTS
from geartrain.bench.chaos.witness import state_digest
from geartrain.bench.chaos.witness_log import Commit, Hello, WitnessWriter, Work

# What was found to recover fastest without patches; by default every limit is 60 s.
MIN_REPLICAS = 2
TIMEOUT_S = 1.0
JOIN_TIMEOUT_MS = 200
HEARTBEAT_TIMEOUT_MS = 500
HEARTBEAT_S = 0.03
QUORUM_TICK_MS = 5
STEP_S = 0.04
"""Slept in each step: what computing takes in our runs."""
_BATCH_SIZE = 16


def main() -> None:
    """Be what the first argument says."""
    role, *arguments = sys.argv[1:]
    if role == "lighthouse":
        _serve(Path(arguments[0]))
    else:
        lighthouse, folder, index = arguments
        _train(lighthouse, Path(folder), int(index))


def _serve(path: Path) -> None:
    coordination: Any = import_module("torchft.coordination")  # Any: it is no dependency
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=MIN_REPLICAS,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
        quorum_tick_ms=QUORUM_TICK_MS,
    )
    written = path.with_suffix(".part")
    written.write_text(server.address())
    written.rename(path)
    signal.pause()


def _train(lighthouse: str, folder: Path, index: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    writer = WitnessWriter(folder, f"replica-{index}-{os.getpid()}")
    writer.write(
        Hello(at_s=time.time(), pid=os.getpid(), rank=index, device_id=f"replica:{index}")
    )
    model = nn.Linear(NUM_INPUTS, NUM_OUTPUTS, bias=False).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7)
    manager, training = _managed(lighthouse, index, model, optimizer)
    ours, theirs = training
    dice = torch.Generator().manual_seed(index)
    while True:
        before = manager.current_step()
        writer.write(_work(before))
        theirs.zero_grad()
        inputs = torch.randn(_BATCH_SIZE, NUM_INPUTS, generator=dice).double()
        loss = ours(inputs).abs().mean()
        time.sleep(STEP_S)
        loss.backward()
        theirs.step()
        step = manager.current_step()
        if step > before:
            digest = state_digest(model, optimizer)
            writer.write(
                Commit(at_s=time.time(), step=step, plan="", loss=None, digest=digest)
            )


def _managed(
    lighthouse: str, index: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, tuple[Any, Any]]:  # Any: torchft has no types here
    torchft: Any = import_module("torchft")  # Any: it is no dependency

    def load(state: dict[str, Any]) -> None:  # Any: state dicts
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:  # Any: state dicts
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    limit = timedelta(seconds=TIMEOUT_S)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=MIN_REPLICAS,
        timeout=limit,
        quorum_timeout=timedelta(seconds=60),
        connect_timeout=limit,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{index}",
        heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
        hostname="127.0.0.1",
    )
    manager.geartrain_store = store  # lives as long as the manager
    return manager, (
        torchft.DistributedDataParallel(manager, model),
        torchft.Optimizer(manager, optimizer),
    )


def _work(step: int) -> Work:
    return Work(
        at_s=time.time(),
        step=step,
        plan="",
        epoch=0,
        step_in_epoch=0,
        start=0,
        stop=0,
        count=0,
        num_tail=0,
        samples=(),
        epoch_steps=1,
    )


if __name__ == "__main__":
    main()
