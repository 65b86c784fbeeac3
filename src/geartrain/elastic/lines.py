"""Cuts what comes over a connection into lines, and keeps no more of it than is allowed."""

from __future__ import annotations

from geartrain.errors import CommunicationError


class LineBuffer:
    r"""What was received and is no whole line yet.

    Args:
        longest_bytes: A line that is longer is nothing that the other side would send.

    >>> lines = LineBuffer(100)
    >>> lines.feed(b'one\ntwo\nthr'), lines.feed(b'ee\n')
    ([b'one', b'two'], [b'three'])
    """

    def __init__(self, longest_bytes: int) -> None:
        self.longest_bytes = longest_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add what came; returns the lines that are whole now, without their ends.

        Raises:
            CommunicationError: If a line is too long.
        """
        if b"\n" not in data:
            self._rest += data
            self._check(len(self._rest))
            return []
        *lines, rest = (bytes(self._rest) + data).split(b"\n")
        self._rest = bytearray(rest)
        self._check(max(len(rest), *map(len, lines)))
        return lines

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.longest_bytes:
            self._rest.clear()
            msg = (
                f"a line of {num_bytes} bytes or more, at most {self.longest_bytes} are "
                "allowed; something else than geartrain is at the other end"
            )
            raise CommunicationError(msg)
