"""What torch.distributed raises, as the error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from geartrain.errors import CommunicationError


@contextmanager
def lost_peers(what: str) -> Iterator[None]:
    """Turn a failure of torch.distributed or its store into a CommunicationError.

    Args:
        what: What was being done, as in "<what> failed".

    Raises:
        CommunicationError: If a peer was lost or late.
    """
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        msg = f"{what} failed: {reason}; a peer was lost or late: look at its log"
        raise CommunicationError(msg) from error
