"""Fingerprints: when a measured profile may be used again."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROBE_VERSION = 1
"""Raise it when the probes measure differently."""


def fingerprint(*facts: object) -> str:
    """Hash the facts that a measurement depends on, torch and probe version included.

    >>> fingerprint("cpu", 4) == fingerprint("cpu", 8)
    False
    """
    key = repr((PROBE_VERSION, torch_version(), facts))
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def torch_version() -> str:
    """Version of the installed torch, found without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "absent"


def driver_version(*paths: str) -> str:
    """First line of the first file that exists, where kernels tell a driver's version."""
    for path in paths:
        try:
            return Path(path).read_text().partition("\n")[0].strip()
        except OSError:
            continue
    return "unknown"
