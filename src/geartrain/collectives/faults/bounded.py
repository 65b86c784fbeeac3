"""Calls that can't be told to give up, with a deadline all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from geartrain.errors import CommunicationError

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T], what: str) -> T:
    """Run a call in a thread of its own and wait for it that long.

    A torch store whose server's machine is gone may keep its caller for minutes.

    Args:
        limit_s: Deadline.
        call: Left to itself when it is late.
        what: What is waited for, as in "<what> did not answer".

    Raises:
        CommunicationError: After the deadline, or if torch reports a failure.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(limit_s)
    if results:
        return results[0]
    if not errors:
        msg = f"{what} did not answer within {limit_s:g} s; is its machine reachable?"
        raise CommunicationError(msg)
    if isinstance(errors[0], (RuntimeError, ConnectionError)):
        reason = (str(errors[0]).strip() or type(errors[0]).__name__).splitlines()[0]
        msg = f"{what} failed: {reason}; does the process that holds it still run?"
        raise CommunicationError(msg) from errors[0]
    raise errors[0]
