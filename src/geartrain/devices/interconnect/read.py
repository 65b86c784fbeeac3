"""Asks every vendor's software once, and remembers what could not be asked."""

from __future__ import annotations

from pathlib import Path

from geartrain.devices.interconnect.facts import AbsentFact, InterconnectFacts
from geartrain.devices.interconnect.nvlink import Nvml, read_nvlink
from geartrain.devices.interconnect.tools import AskTool, ask_tool
from geartrain.devices.interconnect.topology_matrix import parse_matrix
from geartrain.devices.interconnect.xgmi import read_xgmi

_NVIDIA_MATRIX = ("nvidia-smi", "topo", "-m")
_OTHER_MATRICES = (
    ("HCCS", ("npu-smi", "info", "-t", "topo")),
    ("Xe Link", ("xpu-smi", "topology", "-m")),
)


def read_interconnect(
    sysfs_root: Path = Path("/sys"), *, ask: AskTool = ask_tool, nvml: Nvml | None = None
) -> InterconnectFacts:
    """Read the links between the devices of this host, whoever made them.

    Args:
        sysfs_root: Where sysfs is mounted.
        ask: Runs a vendor's tool.
        nvml: The ``pynvml`` module; None imports it where it is installed.
    """
    nvlink = read_nvlink(nvml)
    if not nvlink.links:  # the tool comes with the driver, pynvml does not
        nvlink = _or_else(nvlink, _read_matrix("NVLink", _NVIDIA_MATRIX, ask))
    found = [nvlink, read_xgmi(sysfs_root)]
    found += [_read_matrix(what, command, ask) for what, command in _OTHER_MATRICES]
    return InterconnectFacts(
        links=tuple(link for facts in found for link in facts.links),
        absent=tuple(absent for facts in found for absent in facts.absent),
    )


def _or_else(first: InterconnectFacts, second: InterconnectFacts) -> InterconnectFacts:
    if second.links:
        return second
    reasons = [absent.reason for absent in (*first.absent, *second.absent)]
    return InterconnectFacts(absent=(AbsentFact(what="NVLink", reason="; ".join(reasons)),))


def _read_matrix(what: str, command: tuple[str, ...], ask: AskTool) -> InterconnectFacts:
    answer = ask(command)
    shown = " ".join(command)
    if answer.text is None:
        return InterconnectFacts(absent=(AbsentFact(what=what, reason=answer.reason),))
    links = parse_matrix(answer.text, shown)
    if not links:
        reason = f"{shown} lists no direct link"
        return InterconnectFacts(absent=(AbsentFact(what=what, reason=reason),))
    return InterconnectFacts(links=links)
