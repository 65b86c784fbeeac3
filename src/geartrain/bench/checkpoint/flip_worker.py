"""Flips single bits, one after the other, and looks whether they are found."""

from __future__ import annotations

import logging
import random
import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from geartrain.bench.checkpoint.orders import FlipCount, FlipOrder, FlipsFound
from geartrain.bench.checkpoint.small_state import read_all, save_bytes
from geartrain.bench.checkpoint.worker_process import read_order, write_result
from geartrain.checkpoint.agent.messages import LogStep, SnapshotFacts
from geartrain.checkpoint.agent.shard_layout import (
    SnapshotLabel,
    copy_gradients,
    copy_shard,
    lay_out,
    make_facts,
)
from geartrain.checkpoint.agent.shared_buffer import SharedBuffer
from geartrain.checkpoint.agent.shelf import Kept, find_damaged, take_checksums
from geartrain.checkpoint.gradient_log import encode_slot
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.ranges import StateRange, whole_ranges
from geartrain.checkpoint.verify import verify_store
from geartrain.errors import CheckpointError

_SMALL = {"model/w": 300, "model/b": 5, "optimizer/w.exp_avg": 300}
_LOCK_NAME = ".lock"
_SHOWN = 5

Flip = tuple[Path, int]


class _Counter:
    """Makes flips and counts what came of them."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._num = self._num_found = self._num_wrong = 0
        self._unfound: list[str] = []

    def flip_file(self, flip: Flip, look: Callable[[], tuple[bool, bool]]) -> None:
        """Flip a bit of a byte in a file, look, and put it back.

        Args:
            flip: The file and the byte.
            look: Says whether the damage is found, and whether a load is wrong.
        """
        path, position = flip
        with path.open("r+b") as stream:
            stream.seek(position)
            byte = stream.read(1)[0]
            stream.seek(position)
            stream.write(bytes([byte ^ (1 << self._source.randrange(8))]))
        try:
            self.note(f"{path.name}[{position}]", *look())
        finally:
            with path.open("r+b") as stream:
                stream.seek(position)
                stream.write(bytes([byte]))

    def flip_memory(self, view: memoryview, look: Callable[[], bool], what: str) -> None:
        """The same with every byte of memory."""
        for position in range(len(view)):
            byte = view[position]
            view[position] = byte ^ (1 << self._source.randrange(8))
            is_found = look()
            view[position] = byte
            self.note(f"{what}[{position}]", is_found, not is_found)

    def note(self, where: str, is_found: bool, is_wrong: bool) -> None:
        """Count one."""
        self._num += 1
        self._num_found += is_found
        self._num_wrong += is_wrong
        if not is_found:
            self._unfound.append(where)

    def count(self) -> FlipCount:
        """What was counted."""
        return FlipCount(
            num_flips=self._num,
            num_found=self._num_found,
            num_wrong=self._num_wrong,
            unfound=tuple(self._unfound[:_SHOWN]),
        )


class _Store:
    """A saved version, and a look at it."""

    def __init__(self, folder: Path, elements: dict[str, int]) -> None:
        source = random.Random(1)  # noqa: S311 - of no secret
        self._content = {n: source.randbytes(4 * k) for n, k in elements.items()}
        self._tier = LocalTier(folder)
        save_bytes(self._tier, self._content, 1)
        self.files = sorted(p for p in folder.rglob("*") if p.is_file() and _is_data(p))

    def look(self) -> tuple[bool, bool]:
        """Whether the store is found damaged, and whether it loads other bits."""
        is_found = not verify_store(self._tier.store).is_sound
        return is_found, self.is_wrong()

    def look_by_loading(self) -> tuple[bool, bool]:
        """The same for a large store, of which a load reads every byte anyway."""
        try:
            version = self._tier.latest()
            is_same = version is not None and (
                read_all(self._tier, version) == self._content
            )
        except CheckpointError:
            return True, False
        return False, not is_same

    def is_wrong(self) -> bool:
        """Whether a load gives other bits without an error."""
        return self.look_by_loading()[1]


def _is_data(path: Path) -> bool:
    return path.name != _LOCK_NAME and path.stat().st_size > 0


def _flips(files: Iterable[Path], every: int) -> list[Flip]:
    return [
        (path, position)
        for path in files
        for position in range(0, path.stat().st_size, every)
    ]


def _flip_store(order: FlipOrder, source: random.Random) -> FlipCount:
    store, counter = _Store(Path(order.folder, "small"), _SMALL), _Counter(source)
    for flip in _flips(store.files, order.every):
        counter.flip_file(flip, store.look)
    return counter.count()


def _flip_large(order: FlipOrder, source: random.Random) -> FlipCount:
    elements = {f"model/w{i}": order.large_bytes // 16 for i in range(4)}
    store, counter = _Store(Path(order.folder, "large"), elements), _Counter(source)
    chunks = [path for path in store.files if path.parent.parent.name == "objects"]
    for _ in range(order.num_in_large):
        path = source.choice(chunks)
        flip = path, source.randrange(path.stat().st_size)
        counter.flip_file(flip, store.look_by_loading)
    return counter.count()


def _flip_memory(source: random.Random) -> FlipCount:
    state = {name: torch.randn(count) for name, count in _SMALL.items()}
    layout = lay_out(state, whole_ranges(_SMALL))
    buffer = SharedBuffer.create(layout.num_bytes)
    copy_shard(layout, state, buffer.view)
    label = SnapshotLabel(
        member_id="d0", incarnation="bench", step=1, lineage="1", extras={}
    )
    facts: SnapshotFacts = take_checksums(make_facts(layout, label), buffer)
    kept, counter = Kept(facts=facts, buffer=buffer), _Counter(source)
    for index in range(len(facts.chunks)):  # not the gaps between them, which hold nothing
        counter.flip_memory(kept.chunk(index), lambda: bool(find_damaged(kept)), "memory")
    return counter.count()


def _flip_log(source: random.Random) -> FlipCount:
    gradient = torch.randn(2000)
    slot = memoryview(bytearray(4 * gradient.numel()))
    part = StateRange(name="model/w", start=0, stop=gradient.numel())
    record = LogStep(
        slot_index=0,
        step=1,
        previous_lineage="0",
        lineage="1",
        update={},
        parts=copy_gradients([(part, gradient)], slot),
    )
    data = bytearray(encode_slot(record, slot))
    crc32, counter = zlib.crc32(data), _Counter(source)
    # As every read of a log does; see AgentCaller.fetch_log.
    counter.flip_memory(memoryview(data), lambda: zlib.crc32(data) != crc32, "log")
    return counter.count()


def _flip_dcp(order: FlipOrder, source: random.Random) -> FlipCount:
    folder = Path(order.folder, "dcp")
    state = {name: torch.randn(count) for name, count in _SMALL.items()}
    save_dcp(dict(state), checkpoint_id=folder, no_dist=True)
    counter = _Counter(source)

    def look() -> tuple[bool, bool]:
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        try:
            load_dcp(target, checkpoint_id=folder, no_dist=True)
        except BaseException as error:  # noqa: BLE001 - torch's is no Exception
            return _note_error(error), False
        return False, any(not torch.equal(target[n], state[n]) for n in state)

    data = [path for path in folder.iterdir() if path.suffix == ".distcp"]
    flips = _flips(data, 1)
    for flip in source.sample(flips, min(order.num_dcp, len(flips))):
        counter.flip_file(flip, look)
    return counter.count()


def _note_error(error: BaseException) -> bool:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return True


def main() -> None:
    """Flip everything that is asked for."""
    order = read_order(FlipOrder)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # every flip is told, thousands of times
    torch.set_num_threads(1)
    torch.manual_seed(order.seed)
    source = random.Random(order.seed)  # noqa: S311 - of no secret
    found = FlipsFound(
        store=_flip_store(order, source),
        large=_flip_large(order, source),
        memory=_flip_memory(source),
        log=_flip_log(source),
        dcp=_flip_dcp(order, source),
    )
    write_result(order.result, found)


if __name__ == "__main__":
    main()
