"""What is said about racks, from the file that an option names."""

from __future__ import annotations

from pathlib import Path

import msgspec

from geartrain.errors import ConfigError
from geartrain.topology.labels import (
    Labels,
    labels_from_kubernetes,
    labels_from_scontrol,
    read_labels,
)


class _Metadata(msgspec.Struct):
    name: str
    labels: dict[str, str] = {}


class _Address(msgspec.Struct):
    address: str


class _Status(msgspec.Struct):
    addresses: list[_Address] = []


class _Node(msgspec.Struct):
    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)


class _Nodes(msgspec.Struct):
    items: list[_Node]


def read_rack_labels(
    racks: Path | None, scontrol: Path | None, kubernetes: Path | None
) -> Labels | None:
    """Read the labels of one of three files; None where none was given.

    Args:
        racks: A user's own, TOML or JSON.
        scontrol: What ``scontrol show topology`` printed.
        kubernetes: What ``kubectl get nodes -o json`` printed.

    Raises:
        ConfigError: If several are given, or one can't be read.
    """
    given = {"--racks": racks, "--scontrol": scontrol, "--kubernetes-labels": kubernetes}
    several = [name for name, path in given.items() if path is not None]
    if len(several) > 1:
        msg = f"{' and '.join(several)} may contradict each other; give one of them"
        raise ConfigError(msg)
    if racks is not None:
        return read_labels(racks)
    if scontrol is not None:
        text = _read(scontrol, "the output of `scontrol show topology`")
        return labels_from_scontrol(text)
    if kubernetes is not None:
        return labels_from_kubernetes(_node_labels(kubernetes))
    return None


def _node_labels(path: Path) -> dict[str, dict[str, str]]:
    """Labels by node name and by every address of the node."""
    expected = "the output of `kubectl get nodes -o json`"
    text = _read(path, expected)
    try:
        nodes = msgspec.json.decode(text, type=_Nodes).items
    except msgspec.DecodeError as error:
        msg = f"{path} is not {expected}: {error}"
        raise ConfigError(msg) from error
    found: dict[str, dict[str, str]] = {}
    for node in nodes:
        names = [entry.address for entry in node.status.addresses]
        found |= dict.fromkeys([node.metadata.name, *names], node.metadata.labels)
    if not found:
        msg = f"{path} lists no node; expected {expected}"
        raise ConfigError(msg)
    return found


def _read(path: Path, expected: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        msg = f"cannot read {path}: {why}; expected {expected}"
        raise ConfigError(msg) from error
