"""Sessions as ``geartrain run`` starts them, within the ranks of a test."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import geartrain as gt
from geartrain.devices import Fleet
from geartrain.devices.registry import load_adapter
from geartrain.parallel.worker_spec import WorkerSpec
from geartrain.telemetry import write_document


def worker_session(
    rank: int, world_size: int, folder: Path, *, deterministic: bool = False, **spec: Any
) -> gt.Session:
    """A session that joins by a WorkerSpec, on devices ``emulated:0``, ...

    Args:
        rank: Of run_ranks, whose process group it replaces.
        world_size: Of run_ranks.
        folder: For the fleet file and the run's records.
        deterministic: As for ``gt.Session``.
        spec: Further fields of the WorkerSpec.
    """
    store: Any = _get_default_store()  # of the test's own process: no rank's death ends it
    while not hasattr(store, "port"):
        store = store.underlying_store
    port = int(store.port)
    if rank == 0:
        (profile,) = load_adapter("cpu").list_devices()
        devices = [
            dataclasses.replace(profile, device_id=f"emulated:{r}", kind="emulated")
            for r in range(world_size)
        ]
        write_document(folder / "fleet.json", Fleet(devices=tuple(devices)))
    dist.barrier()
    dist.destroy_process_group()
    return gt.Session(
        deterministic=deterministic,
        spec=WorkerSpec(
            rank=rank,
            world_size=world_size,
            fleet_path=str(folder / "fleet.json"),
            run_dir=str(folder),
            store_port=port,
            timeout_s=60.0,
            **spec,
        ),
    )
