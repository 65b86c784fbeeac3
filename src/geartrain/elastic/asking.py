"""An operator's request to a coordinator: one question, one answer, one connection."""

from __future__ import annotations

import contextlib
import selectors
import time

from geartrain.elastic.connection import Address, Connection, connect
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.messages import (
    LINE_LIMIT_BYTES,
    Answer,
    OperatorMessage,
    Status,
    decode_from_coordinator,
    encode,
)
from geartrain.errors import CommunicationError


def ask(
    address: Address, credentials: Credentials, request: OperatorMessage, limit_s: float
) -> Answer | Status:
    """Ask the coordinator of a run for something, and wait for what it says.

    Args:
        address: Host and port of the coordinator.
        credentials: Of the run.
        request: What is asked for.
        limit_s: Deadline for all of it.

    Raises:
        CommunicationError: If there is no answer in time.
        ConfigError: If the coordinator refuses these credentials.
    """
    deadline_s = time.monotonic() + limit_s
    connection = connect(address, credentials, LINE_LIMIT_BYTES, limit_s)
    with contextlib.closing(connection), selectors.DefaultSelector() as selector:
        try:
            connection.send(encode(request))
        except OSError as error:
            msg = f"the coordinator at {address[0]}:{address[1]} hung up ({error})"
            raise CommunicationError(msg) from error
        selector.register(connection, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0:
            selector.select(left_s)
            answer, is_closed = _read_answer(connection, request.request_id)
            if answer is not None:
                return answer
            if is_closed:
                msg = f"the coordinator at {address[0]}:{address[1]} hung up; ask again"
                raise CommunicationError(msg)
    msg = (
        f"the coordinator at {address[0]}:{address[1]} did not answer within "
        f"{limit_s:g} s; see its log"
    )
    raise CommunicationError(msg)


def _read_answer(
    connection: Connection, request_id: int
) -> tuple[Answer | Status | None, bool]:
    lines, is_closed = connection.receive()
    for line in lines:
        message = decode_from_coordinator(line)
        if isinstance(message, Answer | Status) and message.request_id == request_id:
            return message, is_closed
    return None, is_closed
