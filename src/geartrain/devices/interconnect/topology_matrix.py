"""The matrices that vendors' tools print: who is linked to whom, and by what."""

from __future__ import annotations

import re
from collections.abc import Iterator

from geartrain.devices.interconnect.facts import DeviceLink, LinkKind

_ROW = re.compile(r"^(GPU|NPU)\d+(/\d+)?\s")
_CELLS: tuple[tuple[re.Pattern[str], LinkKind], ...] = (
    (re.compile(r"NV(?P<count>\d+)$"), "nvlink"),
    (re.compile(r"HCCS(_SW)?(?P<count>\d*)$"), "hccs"),
    (re.compile(r"XL\d+(?P<count>)$"), "xelink"),  # the number is of lanes; XL* is indirect
    (re.compile(r"XGMI(?P<count>\d*)$"), "xgmi"),
)


def parse_matrix(text: str, read_from: str) -> tuple[DeviceLink, ...]:
    r"""Read a matrix such as that of ``nvidia-smi topo -m`` or ``npu-smi info -t topo``.

    Cells that name no direct link (PIX, PHB, SYS...) are left out: PCIe distances are
    read from sysfs, which all vendors share.

    Args:
        text: What the tool printed; terminal colours are removed.
        read_from: The command, for the record.

    >>> table = "NPU0 NPU1 CPU\nNPU0 X HCCS 0-23\nNPU1 HCCS X 0-23"
    >>> [(link.source, link.target) for link in parse_matrix(table, "npu-smi")]
    [('NPU0', 'NPU1'), ('NPU1', 'NPU0')]
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("|", " ")
    lines = re.sub(r"\b(GPU|NPU) (?=\d)", r"\1", plain).splitlines()  # "GPU 0/1": xpu-smi
    lines = [line.strip() for line in lines if line.strip()]
    rows = [line for line in lines if _ROW.match(line) and _is_row(line)]
    names = [line.split()[0] for line in rows]
    return tuple(link for line in rows for link in _read_row(line, names, read_from))


def _is_row(line: str) -> bool:
    """A row has a cell ``X`` for itself; the head has only names."""
    return any(cell in {"X", "S"} for cell in line.split()[1:])


def _read_row(line: str, names: list[str], read_from: str) -> Iterator[DeviceLink]:
    source, *cells = line.split()
    for target, cell in zip(names, cells, strict=False):  # then come NICs and CPUs
        for pattern, kind in _CELLS:
            match = pattern.match(cell)
            if match is None or source == target:
                continue
            count = int(match["count"] or 1)
            yield DeviceLink(
                source=source,
                target=target,
                kind=kind,
                num_links=count,
                num_active=count,
                read_from=read_from,
            )
