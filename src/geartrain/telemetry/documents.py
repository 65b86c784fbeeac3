"""Dataclasses on disk: JSON that reads back equal, written atomically.

msgspec checks every field's type on the way in and runs ``__post_init__``, so a
file that holds a bad value cannot become an object.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from geartrain.errors import ConfigError

T = TypeVar("T")


def encode_document(document: Any) -> bytes:  # Any: every dataclass of the project
    """Encode a dataclass as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def decode_document(data: bytes | str, kind: type[T], source: str = "document") -> T:
    """Decode JSON into a dataclass.

    A name that it does not know is an error, since it may be a typo; but for those in
    its ``extension_names``, which a document that extends it may have added.

    Args:
        data: JSON text.
        kind: The dataclass expected.
        source: What to call the input in an error.

    Raises:
        ConfigError: If it is not JSON, or not such a dataclass.
    """
    try:
        document = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:  # ValidationError is one of them
        msg = f"{source} is not a valid {kind.__name__}: {error}; write it anew"
        raise ConfigError(msg) from error
    except ConfigError as error:  # what the dataclass itself finds wrong
        msg = f"{source} is not a valid {kind.__name__}: {error}"
        raise ConfigError(msg) from error
    _check_version(document, source)
    raw, known = msgspec.json.decode(data), msgspec.to_builtins(document)
    if isinstance(raw, dict):
        # What a richer document above adds, and readers of this one have no use for.
        for name in getattr(kind, "extension_names", ()):
            raw.pop(name, None)
            known.pop(name, None)
    if unknown := _find_unknown(raw, known):
        msg = (
            f"{source} has {unknown}, which a {kind.__name__} does not know; correct the "
            "name or take it out"
        )
        raise ConfigError(msg)
    return document


def _check_version(document: object, source: str) -> None:
    if not dataclasses.is_dataclass(document):
        return
    for field in dataclasses.fields(document):
        found = getattr(document, field.name)
        if field.name == "schema_version" and found != field.default:
            msg = (
                f"{source} has schema_version={found}, but this geartrain reads "
                f"{field.default}; write it anew with this version"
            )
            raise ConfigError(msg)


def _find_unknown(raw: Any, known: Any, where: str = "$") -> str | None:  # Any: JSON
    """Find a name in JSON that decoding passed over: in a file edited by hand, a typo."""
    if isinstance(raw, dict) and isinstance(known, dict):
        pairs = [(f"{where}.{key}", value, known.get(key)) for key, value in raw.items()]
        for key in raw:
            if key not in known:
                return f"{where}.{key}"
    elif isinstance(raw, list) and isinstance(known, list | tuple):
        pairs = [
            (f"{where}[{index}]", *pair)
            for index, pair in enumerate(zip(raw, known, strict=True))
        ]
    else:
        return None
    found = (_find_unknown(value, other, path) for path, value, other in pairs)
    return next((path for path in found if path is not None), None)


def read_document(path: Path, kind: type[T]) -> T:
    """Read a dataclass from a JSON file.

    Raises:
        ConfigError: If the file is missing, unreadable, or holds something else.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror}; expected a {kind.__name__} file"
        raise ConfigError(msg) from error
    return decode_document(data, kind, source=str(path))


def write_document(path: Path, document: Any) -> None:  # Any: see encode_document
    """Write a dataclass to a JSON file; a reader sees the old or the new one.

    Raises:
        ConfigError: If the file cannot be written.
    """
    write_atomically(path, encode_document(document))


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step.

    Raises:
        ConfigError: If the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        msg = f"cannot write {path}: {error.strerror}; choose another place"
        raise ConfigError(msg) from error
