"""The agent's side of the connection to one trainer: its buffers, its log."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
import zlib
from collections.abc import Callable

import msgspec

from geartrain.checkpoint.agent.coding_pace import CodingPace
from geartrain.checkpoint.agent.messages import (
    Begin,
    BufferFree,
    LogEntry,
    LogStep,
    Refused,
    Reserve,
    Reserved,
    Seal,
    SlotFree,
    SnapshotKept,
)
from geartrain.checkpoint.agent.shared_buffer import SharedBuffer
from geartrain.checkpoint.agent.shelf import Kept, Shelf, take_checksums
from geartrain.checkpoint.agent.wire import send_message, send_with_descriptors
from geartrain.checkpoint.gradient_log import encode_slot
from geartrain.errors import CheckpointError

logger = logging.getLogger(__name__)

_NOTICE_S = 5.0
Job = Callable[[], None]


class TrainerDesk:
    """Serves one trainer; checksums and coding have a thread each.

    Args:
        sock: The connection.
        shelf: What the agent holds.
    """

    def __init__(self, sock: socket.socket, shelf: Shelf) -> None:
        self._sock = sock
        self._shelf = shelf
        self._member_id = ""
        self._incarnation = ""
        self._buffers: list[SharedBuffer] = []
        self._slots: list[SharedBuffer] = []
        self._send_lock = threading.Lock()
        self._sealing = _Worker("geartrain-seal")
        self._logging = _Worker("geartrain-log")
        self._pace = CodingPace()

    @property
    def member_id(self) -> str:
        """Whose trainer it is; empty before it has reserved anything."""
        return self._member_id

    def answer(self, request: Reserve | Begin | Seal | LogStep) -> None:
        """Carry out a request of the trainer.

        Raises:
            OSError: If the connection fails.
        """
        try:
            match request:
                case Reserve():
                    self._reserve(request)
                case Begin():
                    self._begin(request.buffer_index)
                case Seal():
                    self._seal(request)
                case LogStep():
                    self._log(request)
        except CheckpointError as error:
            self.send(Refused(reason=str(error)))

    def send(self, message: msgspec.Struct) -> None:
        """Send an answer or a notice.

        Raises:
            OSError: If the trainer does not take it.
        """
        with self._send_lock:
            send_message(self._sock, message, _NOTICE_S)

    def close(self) -> None:
        """Let go of the trainer; what it has sealed stays."""
        self._sealing.close()
        self._logging.close()

    def _reserve(self, request: Reserve) -> None:
        slots_bytes = request.num_slots * request.slot_bytes
        own_bytes = 2 * request.snapshot_bytes + slots_bytes
        self._shelf.adopt(request, own_bytes)
        self._member_id, self._incarnation = request.member_id, request.incarnation
        self._own_bytes = own_bytes
        self._buffers = [SharedBuffer.create(request.snapshot_bytes) for _ in range(2)]
        self._slots = [
            SharedBuffer.create(request.slot_bytes) for _ in range(request.num_slots)
        ]
        descriptors = [buffer.descriptor for buffer in (*self._buffers, *self._slots)]
        with self._send_lock:
            send_with_descriptors(self._sock, Reserved(), descriptors, _NOTICE_S)

    def _begin(self, buffer_index: int) -> None:
        buffer = _pick(self._buffers, buffer_index, "snapshot buffer")
        is_free = self._shelf.withdraw(self._member_id, buffer)
        self.send(BufferFree(buffer_index=buffer_index, is_free=is_free))

    def _seal(self, request: Seal) -> None:
        buffer = _pick(self._buffers, request.buffer_index, "snapshot buffer")
        facts = request.facts
        if (facts.member_id, facts.incarnation) != (self._member_id, self._incarnation):
            msg = f"{facts.member_id} sealed what {self._member_id} has reserved"
            raise CheckpointError(msg)
        self._shelf.expect(self._member_id, facts.lineage)
        self._sealing.put(lambda: self._keep(request, buffer))

    def _keep(self, request: Seal, buffer: SharedBuffer) -> None:
        start_s = time.monotonic()
        step = request.facts.step
        try:
            facts = take_checksums(request.facts, buffer)
            self._shelf.add(Kept(facts=facts, buffer=buffer))
            self._shelf.settle(self._member_id, self._own_bytes, self._buffers)
        except CheckpointError as error:
            self._notify(SnapshotKept(step=step, seal_s=0.0, problem=str(error)))
            return
        self._notify(SnapshotKept(step=step, seal_s=time.monotonic() - start_s))

    def _log(self, request: LogStep) -> None:
        slot = _pick(self._slots, request.slot_index, "log slot")
        self._logging.put(lambda: self._code(request, slot))

    def _code(self, request: LogStep, slot: SharedBuffer) -> None:
        is_logged, began_s = False, time.thread_time()
        try:
            # Behind already: bytes as they are cost memory, but no time.
            is_hurried = self._logging.num_waiting > 0
            now_s = time.monotonic()
            compress = not is_hurried and self._pace.allows(now_s)
            data = encode_slot(request, slot.view, compress=compress)
            self._pace.note(time.thread_time() - began_s if compress else None, now_s)
            entry = LogEntry(
                member_id=self._member_id,
                incarnation=self._incarnation,
                step=request.step,
                previous_lineage=request.previous_lineage,
                lineage=request.lineage,
                num_bytes=len(data),
                crc32=zlib.crc32(data),
            )
            is_logged = self._shelf.add_log(entry, data)
        except CheckpointError:
            logger.exception("step %d of %s is not logged", request.step, self._member_id)
        log_bytes, wants_snapshot = self._shelf.log_state(self._member_id)
        self._notify(
            SlotFree(
                slot_index=request.slot_index,
                step=request.step,
                is_logged=is_logged,
                log_bytes=log_bytes,
                wants_snapshot=wants_snapshot or not is_logged,
                code_s=time.thread_time() - began_s,
            )
        )

    def _notify(self, notice: msgspec.Struct) -> None:
        try:
            self.send(notice)
        except OSError:  # the trainer is gone; what it left behind stays
            logger.debug("%s is gone: %s is not told", self._member_id, notice)


class _Worker:
    """A thread that does jobs in order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun."""
        return self._jobs.qsize()

    def put(self, job: Job) -> None:
        """Do this after all that was put before; slots and buffers bound how many."""
        self._jobs.put(job)

    def close(self) -> None:
        """End after what was put: a snapshot sealed by a trainer that died counts."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _pick(buffers: list[SharedBuffer], index: int, what: str) -> SharedBuffer:
    if index >= len(buffers):
        msg = f"{what} {index} does not exist, {len(buffers)} were reserved; reserve more"
        raise CheckpointError(msg)
    return buffers[index]
