"""One rank of the overhead benchmark: makes steps when it is ordered to.

``geartrain run ... overhead_worker.py VARIANT SOCKET``, VARIANT being ddp or geartrain.
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

import geartrain as gt
from geartrain.bench.byte_gpt import (
    SourceWindows,
    byte_losses,
    make_model,
    make_optimizer,
)
from geartrain.bench.competitors import DdpTrainer, GlobalBatches
from geartrain.bench.elastic.overhead import Greeting, Told, read_line
from geartrain.bench.macro_settings import ModelSize

_SEED = 0
_GLOBAL_BATCH_SIZE = 16
_SIZE = ModelSize(context=64)


def main() -> None:
    """Serve orders until there are no more."""
    variant, path = sys.argv[1:]
    session = gt.Session(seed=_SEED)
    make_step = _geartrain(session) if variant == "geartrain" else _ddp(session)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as desk:
        desk.connect(path)
        greeting = Greeting(variant=variant, rank=session.rank)  # type: ignore[arg-type]  # checked by who reads it
        desk.sendall(msgspec.json.encode(greeting) + b"\n")
        while True:
            try:
                order = int(read_line(desk))
            except (EOFError, OSError):
                return
            started_at_s = time.perf_counter()
            for _ in range(order):
                make_step()
            told = Told(seconds=time.perf_counter() - started_at_s)
            desk.sendall(msgspec.json.encode(told) + b"\n")


def _geartrain(session: gt.Session) -> Callable[[], object]:
    model = make_model(_SIZE, _SEED)
    share = _GLOBAL_BATCH_SIZE // session.world_size
    session.setup(model, make_optimizer(model), loss_fn=byte_losses, micro_batch_size=share)
    loader = session.setup_dataloader(
        SourceWindows(_SIZE.context),
        global_batch_size=_GLOBAL_BATCH_SIZE,
        seed=_SEED,
        drop_last=True,
    )
    batches = _endless(loader)
    return lambda: session.step(next(batches))


def _ddp(session: gt.Session) -> Callable[[], object]:
    share = _GLOBAL_BATCH_SIZE // session.world_size
    trainer = DdpTrainer(
        make_model(_SIZE, _SEED),
        (share,) * session.world_size,
        session.rank,
        share,
        GlobalBatches(SourceWindows(_SIZE.context), _GLOBAL_BATCH_SIZE, _SEED),
    )
    return trainer.step


def _endless(loader: Any) -> Iterator[Any]:  # Any: the loader's batches
    return itertools.chain.from_iterable(itertools.repeat(loader))


if __name__ == "__main__":
    main()
