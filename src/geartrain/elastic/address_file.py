"""Where the coordinator of a run listens, in a file that is replaced as a whole."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from geartrain.errors import CommunicationError

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorAddress:
    """One coordinator process and its port."""

    host: str
    port: int
    process_id: int
    schema_version: int = SCHEMA_VERSION


def write_address(path: Path, address: CoordinatorAddress) -> None:
    """Announce it; a reader sees the old or the new one, never a part.

    Raises:
        OSError: If the file can't be written.
    """
    written = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        written.write_bytes(msgspec.json.encode(address))
        written.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            written.unlink()
        raise


def read_address(path: Path) -> CoordinatorAddress:
    """Read where it listens, or has listened.

    Raises:
        CommunicationError: If there is no such file yet, or it is something else.
    """
    try:
        address = msgspec.json.decode(path.read_bytes(), type=CoordinatorAddress)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} does not tell where the coordinator listens ({error}); did it start?"
        raise CommunicationError(msg) from error
    if address.schema_version != SCHEMA_VERSION:
        msg = (
            f"{path} has schema {address.schema_version}, expected {SCHEMA_VERSION}; use "
            "the same geartrain everywhere"
        )
        raise CommunicationError(msg)
    return address
