"""The coordinator's shell against callers of all kinds, over real sockets."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from geartrain.elastic import caller as caller_module
from geartrain.elastic.asking import ask
from geartrain.elastic.connection import Connection, connect
from geartrain.elastic.control import ControlSettings
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.limits import Limits
from geartrain.elastic.messages import (
    LINE_LIMIT_BYTES,
    Answer,
    Beat,
    DrainAsked,
    Join,
    Status,
    StatusAsked,
    encode,
)
from geartrain.elastic.outcome import Committed
from geartrain.elastic.records import Committed as CommitRecord
from geartrain.elastic.records import JournalRecord
from geartrain.elastic.server import bind
from geartrain.errors import CheckpointError, CommunicationError, ConfigError
from running_coordinator import (
    CREDENTIALS,
    LIMIT_S,
    START,
    Coordinator,
    Member,
    MemoryLedger,
    commit_together,
    coordinator,
    members,
)


@pytest.fixture
def place() -> Iterator[Coordinator]:
    with coordinator(Limits(expected_members=1, build_s=5.0)) as running:
        yield running


@pytest.fixture
def trainer(place: Coordinator) -> Iterator[Member]:
    """A member that shows that the coordinator serves."""
    with members("a", place.settings()) as (found,):
        yield found


def _raw(place: Coordinator) -> socket.socket:
    connected = socket.create_connection(place.address, LIMIT_S)
    connected.settimeout(LIMIT_S)
    return connected


def _read_to_end(connected: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while got := connected.recv(1 << 16):
            data += got
    return data


def _still_commits(trainer: Member) -> None:
    commit_together([trainer])
    assert trainer.interruptions.empty()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\n",
        b"\xff\xfe\xfd\n",
        b"{" * 4000 + b"\n",
        b"[" * 3000 + b"\n",
        b'"\\ud800"\n',
        b"\n" * 1000,
        b'{"type":"challenge","version":1,"nonce":"00"}\n',
        b'{"type":"hello","run_id":"test","nonce":"","proof":"\\u00e4"}\n',
        b'{"type":"hello","run_id":"test","nonce":"00","proof":"00"}\n',
        b"x" * 100_000,
    ],
)
def test_what_is_no_greeting_is_refused_and_the_coordinator_serves_on(
    place: Coordinator, trainer: Member, nonsense: bytes
) -> None:
    with _raw(place) as connected:
        with contextlib.suppress(ConnectionError):
            connected.sendall(nonsense)
        assert b'"refused"' in _read_to_end(connected) or not nonsense.strip()
    _still_commits(trainer)


def test_half_a_frame_and_then_nothing_does_not_hold_others_up(
    place: Coordinator, trainer: Member
) -> None:
    with _raw(place) as connected:
        connected.sendall(b'{"type":"hello","run')
        _still_commits(trainer)
    with _joined(place, "y") as connection:
        connection.send(b'{"type":"beat","epo')
        _still_commits(trainer)


def test_garbage_after_the_greeting_counts_as_the_death_of_that_member_only() -> None:
    garbage = random.Random(7).randbytes(500) + b"\n"
    limits = Limits(expected_members=2, build_s=5.0)
    with coordinator(limits) as place, members("ab", place.settings()) as (a, b):
        commit_together([a, b])
        with b.client._link.changed:
            connection = b.client._link._connection
            assert connection is not None
            connection.send(garbage)
        assert "b is lost" in a.interruptions.get(timeout=LIMIT_S)
        a.enter_epoch()
        commit_together([a])


def test_a_line_that_is_too_long_is_not_kept(place: Coordinator, trainer: Member) -> None:
    with _joined(place, "y") as connection:
        piece = b"x" * (1 << 16)
        num_sent = 0
        with contextlib.suppress(OSError):
            while num_sent < 8 * LINE_LIMIT_BYTES:
                if connection.send(piece):
                    num_sent += len(piece)
        assert num_sent < 8 * LINE_LIMIT_BYTES
    _still_commits(trainer)


@pytest.mark.parametrize(
    "count", [500, pytest.param(10_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_flood_of_strangers_keeps_nobody_out_and_is_not_kept(
    place: Coordinator, trainer: Member, count: int
) -> None:
    rng = random.Random(3)
    before = _resident_bytes()
    strangers: collections.deque[socket.socket] = collections.deque()
    for index in range(count):
        strangers.append(_raw(place))
        with contextlib.suppress(ConnectionError):
            strangers[-1].sendall(rng.randbytes(rng.randrange(1, 3000)).replace(b"\n", b""))
        if len(strangers) > 200:
            strangers.popleft().close()
        if index % 100 == 0:
            _still_commits(trainer)
    assert len(place.server._strangers) <= 64
    with members("b", place.settings(), have_begun=False):
        _wait_until(lambda: "b" in place.server.state.peers)
    _wait_until(lambda: "b" not in place.server.state.peers)  # else it is let in below
    for stranger in strangers:
        stranger.close()
    _still_commits(trainer)
    assert _resident_bytes() - before < 32 << 20


def test_a_member_that_reads_nothing_is_dropped_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caller_module, "MOST_UNSENT_BYTES", 1 << 16)
    limits = Limits(expected_members=1, build_s=5.0)
    with coordinator(limits) as place, members("a", place.settings()) as (a,):
        with _joined(place, "deaf") as connection:
            request = encode(StatusAsked(request_id=1)) * 500
            deadline_s = time.monotonic() + LIMIT_S
            with contextlib.suppress(OSError):
                while time.monotonic() < deadline_s:
                    if not connection.send(request):
                        commit_together([a])
            _wait_until(lambda: "deaf" not in place.server.state.peers)
        commit_together([a])
        assert a.interruptions.empty()


def test_a_member_without_beats_is_dropped_after_its_limit() -> None:
    limits = Limits(expected_members=2, unmeasured_s=0.4, longest_s=0.4, build_s=5.0)
    with (
        coordinator(limits) as place,
        members("a", place.settings(), have_begun=False) as (a,),
        _joined(place, "mute", step=0, lineage=START),
    ):
        a.enter_epoch()
        assert "mute is lost" in a.interruptions.get(timeout=LIMIT_S)
        assert [m.member_id for m in a.enter_epoch().members] == ["a"]


def test_an_operator_can_ask_on_the_same_port(place: Coordinator, trainer: Member) -> None:
    commit_together([trainer])
    status = ask(place.address, CREDENTIALS, StatusAsked(request_id=5), LIMIT_S)
    assert isinstance(status, Status)
    assert (status.request_id, status.step) == (5, 1)
    assert [m.member_id for m in status.members] == ["a"]
    answer = ask(
        place.address, CREDENTIALS, DrainAsked(request_id=6, member_ids=("x",)), LIMIT_S
    )
    assert isinstance(answer, Answer)
    assert not answer.is_accepted
    assert trainer.interruptions.empty()


def test_who_asks_a_coordinator_that_is_gone_is_told_so() -> None:
    with coordinator(Limits()) as gone:
        pass
    with pytest.raises(CommunicationError, match="can't be reached"):
        ask(gone.address, CREDENTIALS, StatusAsked(request_id=1), 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname()
        with pytest.raises(CommunicationError, match="did not greet within"):
            ask(address, CREDENTIALS, StatusAsked(request_id=1), 0.2)


class _FullDisk(MemoryLedger):
    """A journal whose disk can be full."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.num_refused = 0

    def append(self, records: Sequence[JournalRecord], /) -> None:
        if self.is_full:
            self.num_refused += 1
            msg = "no space left on device"
            raise CheckpointError(msg)
        super().append(records)


def test_nothing_is_committed_while_the_journal_can_not_be_written() -> None:
    ledger = _FullDisk()
    limits = Limits(expected_members=1, build_s=5.0)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(coordinator(limits, ledger=ledger))
        (a,) = stack.enter_context(members("a", place.settings()))
        commit_together([a])
        ledger.is_full = True
        a.vote()
        _wait_until(lambda: ledger.num_refused >= 2)
        with pytest.raises(CommunicationError):
            a.settle(limit_s=0.05)
        ledger.is_full = False
        assert isinstance(a.settle(), Committed)
        commit_together([a])
    steps = [r.step for r in ledger.records if isinstance(r, CommitRecord)]
    assert steps == [1, 2, 3]


def test_beyond_loopback_it_listens_with_a_token_only() -> None:
    with pytest.raises(ConfigError, match="token"):
        bind("0.0.0.0", 0, Credentials(run_id="r"))
    with pytest.raises(ConfigError, match="IP address"):
        bind("localhost", 0, Credentials(run_id="r"))
    with bind("127.0.0.1", 0, Credentials(run_id="r")) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_what_it_says_is_not_held_back_until_what_it_said_before_is_acknowledged() -> None:
    async def accepted() -> socket.socket:
        found: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

        class Caller(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                found.set_result(transport.get_extra_info("socket"))

        listening = bind("127.0.0.1", 0, Credentials(run_id="r"))
        loop = asyncio.get_running_loop()
        async with await loop.create_server(Caller, sock=listening):
            with socket.create_connection(listening.getsockname()[:2], LIMIT_S):
                return (await asyncio.wait_for(found, LIMIT_S)).dup()

    with asyncio.run(accepted()) as connected:
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_token_shows_in_no_text() -> None:
    assert "0123456789abcdef" not in repr(CREDENTIALS)
    settings = ControlSettings(credentials=CREDENTIALS, find_address=lambda: ("x", 1))
    assert "0123456789abcdef" not in repr(settings)


def test_members_of_ten_commit_many_steps_together() -> None:
    limits = Limits(expected_members=10, build_s=5.0)
    with coordinator(limits) as place, members("abcdefghij", place.settings()) as found:
        threads = [threading.Thread(target=_train, args=(m, 30)) for m in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert {(m.step, m.lineage) for m in found} == {(30, found[0].lineage)}


def _train(member: Member, num_steps: int) -> None:
    while member.step < num_steps:
        member.vote()
        member.settle()


@contextlib.contextmanager
def _joined(
    place: Coordinator, name: str, *, step: int = 0, lineage: str = ""
) -> Iterator[Connection]:
    connection = connect(place.address, CREDENTIALS, LINE_LIMIT_BYTES, LIMIT_S)
    join = Join(
        epoch=0,
        step=step,
        lineage=lineage,
        member_id=name,
        incarnation=f"{name}-1",
        host_id="host",
    )
    connection.send(encode(join))
    connection.send(encode(Beat(epoch=0, step=step, lineage=lineage, progress=1)))
    with contextlib.closing(connection):
        yield connection


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _wait_until(is_true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.005)
