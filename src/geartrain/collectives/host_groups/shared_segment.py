"""A piece of memory that the processes of one host share.

It has no name: the leader makes an anonymous file (memfd) and hands its descriptor to the
others through a Unix socket of the abstract namespace, which belongs to the network
namespace and has no file either. So whatever process is killed at whatever time, the
kernel takes everything back; /dev/shm need not exist, and its size does not matter.

Each process holds a lock on one byte of the file. The kernel drops it when the process
ends, however it ends, and also across PID namespaces; that is how the others notice.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
import time
import weakref
from typing import TYPE_CHECKING

from geartrain.collectives.host_groups.meeting import (
    Patience,
    accept,
    address_of,
    explained,
    is_same_user,
    listening,
)
from geartrain.collectives.host_groups.shared_words import SharedWords
from geartrain.collectives.lost_peers import lost_peers
from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from geartrain.collectives.host_groups.meeting import Meeting

WORDS_PER_MEMBER = 16
"""A cache line of counters for each member, so that nobody writes another's line."""

_ABORT_WORD = 0
_BY_REQUEST = 2**31 - 1
_STATE = 0
"""A member's first counter: 0 setting up, 1 taking part, 2 left in good order."""
_LOCK = struct.Struct("@hhqqi4x")
"""struct flock: type, whence, start, length, pid. 64-bit Linux on all machines."""


def num_header_bytes(num_members: int) -> int:
    """Bytes of counters before the first byte that is free for use."""
    words = WORDS_PER_MEMBER * (1 + num_members)
    return -(-4 * words // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedSegment:
    """Memory of one host's processes, with counters and a way to notice the dead.

    All members construct it at the same time; it returns when all have mapped it.

    Args:
        meeting: Who takes part and how they meet.
        num_bytes: Size, counters included.

    Raises:
        CommunicationError: If the others did not come in time, died meanwhile, or are
            not in the same network namespace.
    """

    def __init__(self, meeting: Meeting, num_bytes: int) -> None:
        self._names = meeting.names
        self.index = meeting.index
        self._timeout_s = meeting.timeout_s
        self._spin_s = meeting.spin_s
        self._is_closed = False
        patience = Patience(meeting)
        if meeting.index == 0:
            self._lead(meeting, num_bytes, patience)
        else:
            self._join(meeting, num_bytes, patience)

    @property
    def num_members(self) -> int:
        """Processes that share it."""
        return len(self._names)

    def name(self, index: int) -> str:
        """What a member is called in errors."""
        return self._names[index]

    def counter(self, member: int, which: int) -> int:
        """Index of one of a member's counters, ``which`` from 1 on."""
        return WORDS_PER_MEMBER * (1 + member) + which

    def wait(self, member: int, which: int, target: int, what: str) -> None:
        """Wait for a member's counter.

        Raises:
            CommunicationError: If the group was aborted, a member ended, or the outer
                limit passed; says who was waited for.
        """
        index = self.counter(member, which)
        deadline_at_s = time.monotonic() + self._timeout_s
        self.words.wait(
            index, target, lambda: self._check(member, index, target, what, deadline_at_s)
        )
        if self.is_aborted:
            self._raise_aborted()

    @property
    def is_aborted(self) -> bool:
        """Whether any member gave this segment up."""
        return self.words.read(_ABORT_WORD) != 0

    def abort(self, lost_member: int | None = None) -> None:
        """Make every wait of every member raise, now and later."""
        value = _BY_REQUEST if lost_member is None else 1 + lost_member
        if not self.is_aborted:
            self.words.set_and_wake_all(_ABORT_WORD, value)

    def raise_if_aborted(self) -> None:
        """Raise what a wait would raise.

        Raises:
            CommunicationError: If the group was aborted.
        """
        if self._is_closed or self.is_aborted:
            self._raise_aborted()

    def close(self) -> None:
        """Leave; the memory goes when the last tensor in it goes.

        Members that are still reading what this one wrote are not disturbed.
        """
        if not self._is_closed:
            self._is_closed = True
            state = self.counter(self.index, _STATE)
            if self.words.read(state):  # else it never took part
                self.words.add(state)
            self._finalizer()

    def _is_alive(self, member: int) -> bool:
        if member == self.index:
            return True
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, member, 1, 0)
        try:
            answer = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked)
        except OSError:
            return False  # closed here: nobody is reached any more
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def _check(
        self, member: int, index: int, target: int, what: str, deadline_at_s: float
    ) -> None:
        if self._is_closed or self.is_aborted:
            self._raise_aborted()
        for other in range(self.num_members):
            # One that has done its part may have left, so look at its counter again.
            reached = self.words.has_reached(index, target & (2**32 - 1))
            if not reached and not self._is_alive(other):
                if other != member and self._has_left(other):
                    continue
                self.abort(other)
                self._raise_aborted()
        if time.monotonic() > deadline_at_s:
            self.abort(member)
            msg = (
                f"waited {self._timeout_s:g} s for {self._names[member]} to {what} in "
                "shared memory; it may hang: look at that worker's log"
            )
            raise CommunicationError(msg)

    def _has_left(self, member: int) -> bool:
        """Whether it closed the group in good order; who waits for it still fails."""
        return self.words.read(self.counter(member, _STATE)) > 1

    def _raise_aborted(self) -> None:
        value = self.words.read(_ABORT_WORD)
        lost = self._lost() if value in {0, _BY_REQUEST} else self._names[value - 1]
        if lost:
            msg = f"lost {lost} in the exchange among the processes of this host"
        else:
            msg = "the exchange among the processes of this host was aborted"
        msg += "; the step was not applied. Look at the workers' logs"
        raise CommunicationError(msg)

    def _lost(self) -> str:
        """Who has died; a member may have heard of it elsewhere and only said stop."""
        if self._is_closed:
            return ""  # the locks can't be asked any more
        return ", ".join(
            self._names[member]
            for member in range(self.num_members)
            if not self._is_alive(member) and not self._has_left(member)
        )

    def _lead(self, meeting: Meeting, num_bytes: int, patience: Patience) -> None:
        descriptor = os.memfd_create(
            "geartrain-exchange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        os.ftruncate(descriptor, num_bytes)
        # Nobody can shrink it under a mapping, which would kill the others by SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        self._map(descriptor, num_bytes)
        token = secrets.token_hex(16)
        with (
            listening(token, len(meeting.names)) as listener,
            contextlib.ExitStack() as held,
        ):
            meeting.store.set("segment", token)
            try:
                guests = self._receive_guests(listener, held, patience)
                for index, guest in guests.items():
                    self._expect_mapped(guest, index, patience)
            except CommunicationError:
                self.abort()
                self.close()
                raise
        self.words.add(self.counter(0, _STATE))

    def _receive_guests(
        self, listener: socket.socket, held: contextlib.ExitStack, patience: Patience
    ) -> dict[int, socket.socket]:
        guests: dict[int, socket.socket] = {}
        while len(guests) < len(self._names) - 1:
            missing = [n for i, n in enumerate(self._names) if i and i not in guests]
            with explained(f"waiting for {', '.join(missing)} to share memory"):
                guest = held.enter_context(patience.until(listener, accept))
                if not is_same_user(guest):
                    continue
                index = int.from_bytes(patience.until(guest, lambda g: g.recv(4)), "little")
                if 0 < index < len(self._names) and index not in guests:
                    socket.send_fds(guest, [b"memory"], [self._descriptor])
                    guests[index] = guest
        return guests

    def _expect_mapped(self, guest: socket.socket, index: int, patience: Patience) -> None:
        with explained(f"waiting for {self._names[index]} to map shared memory"):
            if patience.until(guest, lambda g: g.recv(1)) != b"y":
                msg = "it ended meanwhile"
                raise ConnectionError(msg)

    def _join(self, meeting: Meeting, num_bytes: int, patience: Patience) -> None:
        leader = meeting.names[0]
        waiting = f"waiting for {leader} to offer shared memory"
        with lost_peers(waiting), explained(waiting):
            patience.until_set(meeting.store, "segment")
            token = meeting.store.get("segment").decode()
        doing = f"taking shared memory from {leader} (is it in this network namespace?)"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest:
            with explained(doing):
                guest.connect(address_of(token))
                guest.sendall(meeting.index.to_bytes(4, "little"))
                _, descriptors, _, _ = patience.until(
                    guest, lambda g: socket.recv_fds(g, 16, 1)
                )
                if not descriptors:
                    msg = "it ended meanwhile"
                    raise ConnectionError(msg)
            self._take(descriptors[0], num_bytes)
            with explained(doing):
                guest.sendall(b"y")
        self._wait_for_all(leader, patience)

    def _take(self, descriptor: int, num_bytes: int) -> None:
        found_bytes = os.fstat(descriptor).st_size
        if found_bytes != num_bytes:
            os.close(descriptor)
            msg = (
                f"{self._names[0]} shares {found_bytes} bytes, {self._names[self.index]} "
                f"expected {num_bytes}; start all workers with the same settings"
            )
            raise CommunicationError(msg)
        self._map(descriptor, num_bytes)

    def _wait_for_all(self, leader: str, patience: Patience) -> None:
        index = self.counter(0, _STATE)

        def check() -> None:
            if self.is_aborted or not self._is_alive(0):
                msg = f"{leader} gave shared memory up while setting it up; see its log"
                raise CommunicationError(msg)
            try:
                patience.check()
            except OSError as error:
                msg = f"{leader} did not finish setting up shared memory: {error}"
                raise CommunicationError(msg) from error

        try:
            self.words.wait(index, 1, check)
            self.raise_if_aborted()
        except CommunicationError:
            self.close()
            raise
        self.words.add(self.counter(self.index, _STATE))

    def _map(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        self.memory = mmap.mmap(descriptor, num_bytes)
        num_words = WORDS_PER_MEMBER * (1 + self.num_members)
        self.words = SharedWords(self.memory, num_words, self._spin_s)
        own = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self.index, 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_SETLK, own)
