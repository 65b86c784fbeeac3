"""What fsspec's file systems can do, and what they leave to their users.

Each kind of store has its own word for an object's age, its own errors, and its own way
to refuse an overwrite; here they become one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from geartrain.errors import ConfigError

_S3_OPTIONS = {
    # Without these a vanished endpoint is waited for through five tries of a minute.
    "config_kwargs": {
        "connect_timeout": 10,
        "read_timeout": 60,
        "retries": {"max_attempts": 3},
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAbility:
    """What a kind of store can do; what isn't known is taken to be absent."""

    puts_whole: bool = False
    """Whether a put that is cut off leaves nothing."""
    has_create: bool = False
    """Whether ``mode="create"`` refuses to overwrite."""
    has_match: bool = False
    """Whether a put can ask for the version that it replaces."""
    is_flat: bool = False
    """Whether one listing reaches all below a prefix."""


_S3 = StoreAbility(puts_whole=True, has_create=True, has_match=True, is_flat=True)
_CLOUD = StoreAbility(puts_whole=True, has_create=True, is_flat=True)
_ABILITIES = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _CLOUD,
    "gcs": _CLOUD,
    "abfs": _CLOUD,
    "abfss": _CLOUD,
    "az": _CLOUD,
    "memory": StoreAbility(puts_whole=True, has_create=True),
}


def ability_of(protocol: str) -> StoreAbility:
    """Return what a kind of store can do; of an unknown one, only what all can."""
    return _ABILITIES.get(protocol, StoreAbility())


def connect(
    url: str,
    options: dict[str, Any],  # Any: whatever fsspec's class takes
    label: str,
) -> tuple[Any, str]:  # Any: fsspec is not annotated
    """Open a file system.

    Args:
        url: Where the objects lie.
        options: For fsspec's class.
        label: The URL for people, without secrets.

    Returns:
        The file system, and the path of the place within it.

    Raises:
        ConfigError: If the URL is of no known kind, or what it needs isn't installed.
    """
    protocol = url.partition("://")[0]
    if importlib.util.find_spec("fsspec") is None:
        msg = f"{label} needs fsspec; pip install fsspec"
        raise ConfigError(msg)
    core = importlib.import_module("fsspec.core")  # here, for those alone who use it
    if protocol in {"s3", "s3a"}:
        options = _S3_OPTIONS | options
    try:
        files, root = core.url_to_fs(url, **options)
    except ImportError as error:
        msg = f"{label} needs another package: {error}"
        raise ConfigError(msg) from error
    except (ValueError, TypeError) as error:
        msg = f"{label} can't be opened: {error}; write a path or a URL as s3://bucket/name"
        raise ConfigError(msg) from error
    return files, str(root)


def without_secrets(url: str) -> str:
    """Return a URL without user, password and query.

    >>> without_secrets("s3://key:secret@host/bucket/run?token=1")
    's3://host/bucket/run'
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}".rstrip("/")


def modified_at_s(entry: Mapping[str, Any]) -> float:  # Any: fsspec's own
    """Return the Unix time at which a listed object was written; inf where not told."""
    for key in ("LastModified", "mtime", "last_modified", "updated", "created"):
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
    # Without an age it counts as new: nobody collects what may just have been written.
    return float("inf")


def is_failed_condition(error: OSError) -> bool:
    """Whether a store refused a conditional put; s3fs gives S3's answer as the cause."""
    response = getattr(error.__cause__, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    return code in {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
