"""Reads the one-line files of sysfs and procfs; None where there is nothing to read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_PCI_ADDRESS = re.compile(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")


def read_text(path: Path) -> str | None:
    """Read a file of one line; None if it is absent, unreadable or empty.

    Drivers answer with an error where a value makes no sense, such as the speed of an
    interface that is down.
    """
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return None
    return text or None


def read_int(path: Path) -> int | None:
    """Read a number, decimal or 0x; None as above."""
    text = read_text(path)
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None


def list_dir(path: Path) -> list[Path]:
    """List a directory in a stable order; empty if there is none."""
    try:
        return sorted(path.iterdir(), key=lambda entry: _natural(entry.name))
    except OSError:
        return []


def pci_path(device: Path) -> tuple[str, ...]:
    """Find the PCI path of a device: root complex, bridges, the device itself.

    Args:
        device: A directory below ``/sys/devices``, or a link to one.

    Returns:
        Names from the root complex down; empty if it is not on PCI.
    """
    parts = device.resolve().parts
    roots = [index for index, part in enumerate(parts) if part.startswith("pci0")]
    if not roots:
        return ()
    below: Iterable[str] = parts[roots[0] + 1 :]
    return (parts[roots[0]], *(part for part in below if _PCI_ADDRESS.match(part)))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort mlx5_2 before mlx5_10."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
