"""Messages and files between the launcher and its warm processes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from geartrain.errors import CommunicationError
from geartrain.launch.spare_messages import (
    Message,
    MessageChannel,
    ReapWorker,
    StartWorker,
    WorkerEnded,
)


@pytest.fixture
def ends() -> Iterator[tuple[MessageChannel, MessageChannel]]:
    one, other = (MessageChannel(end) for end in socket.socketpair())
    with contextlib.closing(one), contextlib.closing(other):
        yield one, other


def order(order_id: int, *arguments: str) -> StartWorker:
    return StartWorker(order_id=order_id, arguments=arguments, directory="/", num_files=2)


def take_one(end: MessageChannel) -> None:
    for _, files in end.receive(within_s=5):
        for file in files:
            os.close(file)
    end.close()


def test_files_stay_with_the_message_they_were_sent_with(
    ends: tuple[MessageChannel, MessageChannel],
) -> None:
    one, other = ends
    pipes = [os.pipe() for _ in range(4)]
    one.send(ReapWorker(process_id=1), within_s=5)
    one.send(order(1), (pipes[0][1], pipes[1][1]), within_s=5)
    one.send(ReapWorker(process_id=2), within_s=5)
    one.send(order(2), (pipes[2][1], pipes[3][1]), within_s=5)

    received: list[tuple[Message, tuple[int, ...]]] = []
    while len(received) < 4:
        received += other.receive(within_s=5)

    files = [file for _, several in received for file in several]
    for number, file in enumerate(files):
        os.write(file, str(number).encode())
        os.close(file)
    assert [len(several) for _, several in received] == [0, 2, 0, 2]
    assert [os.read(reading, 1) for reading, _ in pipes] == [b"0", b"1", b"2", b"3"]
    for reading, writing in pipes:
        os.close(reading)
        os.close(writing)


def test_long_message_arrives_whole(ends: tuple[MessageChannel, MessageChannel]) -> None:
    one, other = ends
    sent = order(7, "x" * 1_000_000)
    with open(os.devnull, "rb") as file:  # noqa: PTH123 - its number is what counts
        files = (file.fileno(), file.fileno())
        sender = threading.Thread(
            target=one.send, args=(sent, files), kwargs={"within_s": 20}
        )
        sender.start()
        ((message, copies),) = other.receive(within_s=20)
        sender.join()

    assert message == sent
    for copy in copies:
        os.close(copy)


def test_files_that_nobody_took_are_closed() -> None:
    one, other = (MessageChannel(end) for end in socket.socketpair())
    reading, writing = os.pipe()
    one.send(WorkerEnded(process_id=1, exit_code=0, num_files=0), (writing,), within_s=5)
    other.receive(within_s=5)
    os.close(writing)

    one.close()
    other.close()

    assert os.read(reading, 1) == b"", "the last writer is gone"
    os.close(reading)


def test_end_of_the_other_side_is_seen_at_once(
    ends: tuple[MessageChannel, MessageChannel],
) -> None:
    one, other = ends
    one.close()

    assert other.receive(within_s=20) == []
    assert other.has_ended
    with pytest.raises(CommunicationError, match="is gone"):
        other.send(ReapWorker(process_id=1), within_s=5)


def test_message_that_arrived_is_sent_though_its_reader_closes_at_once() -> None:
    for _ in range(200):
        one, other = (MessageChannel(end) for end in socket.socketpair())
        reader = threading.Thread(target=take_one, args=(other,))
        reader.start()
        with open(os.devnull, "rb") as file:  # noqa: PTH123 - its number is what counts
            one.send(order(1), (file.fileno(), file.fileno()), within_s=5)
        reader.join()
        one.close()


def test_side_that_reads_nothing_has_a_deadline(
    ends: tuple[MessageChannel, MessageChannel],
) -> None:
    one, _ = ends

    with pytest.raises(CommunicationError, match=r"not taken within 0\.1 s"):
        one.send(order(1, "x" * 3_000_000), within_s=0.1)


@pytest.mark.parametrize(
    "sent",
    [b"nonsense\n", b'{"type":"Unknown"}\n', b'{"type":"ReapWorker"}\n', b"\xff\n", b"\n"],
)
def test_what_is_no_message_is_an_error(sent: bytes) -> None:
    end, other = socket.socketpair()
    channel = MessageChannel(other)
    with end, contextlib.closing(channel):
        end.sendall(sent)
        with pytest.raises(CommunicationError, match="is no message"):
            channel.receive(within_s=5)


def test_endless_message_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geartrain.launch.spare_messages.MAX_MESSAGE_BYTES", 1000)
    end, other = socket.socketpair()
    channel = MessageChannel(other)
    with end, contextlib.closing(channel):
        end.sendall(b"x" * 2000)
        with pytest.raises(CommunicationError, match="more than 1000 bytes"):
            channel.receive(within_s=5)
