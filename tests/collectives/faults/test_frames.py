"""What members tell each other, whole or in pieces, and what is refused."""

from __future__ import annotations

import pytest

from geartrain.collectives.faults.frames import (
    Aborted,
    Beat,
    Bye,
    Count,
    Frame,
    Hello,
    authenticate,
    is_authentic,
    pack,
    unpack,
)
from geartrain.errors import CommunicationError

FRAMES: list[Frame] = [
    Hello(3, b"mac"),
    Beat((Count(1, 2, 3), Count(2, 0, 0)), 0.5),
    Aborted("cpu#1 died", (1,)),
    Bye(),
]


def test_frames_come_back_equal_from_any_pieces() -> None:
    stream = b"".join(pack(frame) for frame in FRAMES)
    for size in (1, 3, 7, len(stream)):
        received = bytearray()
        found: list[Frame] = []
        for start in range(0, len(stream), size):
            received += stream[start : start + size]
            found += unpack(received)
        assert found == FRAMES
        assert not received


@pytest.mark.parametrize(
    "data", [b"\xff" * 8, b"\x00\x00\x00\x03abc", b"\x00\x00\x00\x01\x80"]
)
def test_what_is_none_of_ours_is_refused(data: bytes) -> None:
    with pytest.raises(CommunicationError, match="frame"):
        unpack(bytearray(data))


def test_only_who_knows_the_secret_is_authentic_and_only_on_this_connection() -> None:
    mac = authenticate(b"secret", b"nonce", 3)

    assert is_authentic(b"secret", b"nonce", Hello(3, mac))
    assert not is_authentic(b"secret", b"nonce", Hello(2, mac))
    assert not is_authentic(b"secret", b"other", Hello(3, mac))
    assert not is_authentic(b"another", b"nonce", Hello(3, mac))
    assert not is_authentic(b"secret", b"nonce", Hello(-1, mac))
