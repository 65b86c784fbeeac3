"""What vendors' software says of links between devices, and what it does not say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fabric_hosts import NoNvml
from geartrain.devices.interconnect.nvlink import read_nvlink
from geartrain.devices.interconnect.read import read_interconnect
from geartrain.devices.interconnect.tools import ToolAnswer, ask_tool
from geartrain.devices.interconnect.topology_matrix import parse_matrix
from geartrain.devices.interconnect.xgmi import read_xgmi

NPU_MATRIX = """\
\t   NPU0       NPU1       NPU2       CPU Affinity
NPU0       X          HCCS       PHB        144-167
NPU1       HCCS       X          HCCS       144-167
NPU2       PHB        HCCS       X          96-119

Legend:
  X    = Self
  HCCS = Connection traversing HCCS.
"""
NVIDIA_MATRIX = """\
\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-47\t0
GPU1\tNV18\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\t X \t\t
"""
XPU_MATRIX = """\
         GPU 0/0|GPU 0/1|GPU 1/0|CPU Affinity
GPU 0/0 |S      |MDF    |XL16   |0-23
GPU 0/1 |MDF    |S      |XL*    |0-23
GPU 1/0 |XL16   |XL*    |S      |24-47
"""


class FakeNvml:
    """Two GPUs with three links each: two to the other one or a switch, one down."""

    NVML_NVLINK_MAX_LINKS = 4
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    class NVMLError(Exception):
        pass

    def __init__(self, *, remote_type: int = 0, fails: bool = False) -> None:
        self.remote_type = remote_type
        self.fails = fails
        self.was_shut_down = False

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names, here and below
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.was_shut_down = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        if self.fails:
            msg = "Driver Not Loaded"
            raise self.NVMLError(msg)
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"0000000{handle}:1B:00.0".encode())

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if link == 3:
            msg = "Invalid Argument"
            raise self.NVMLError(msg)
        return int(link < 2)

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:  # noqa: N802
        return 4

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:  # noqa: N802
        return self.remote_type

    def nvmlDeviceGetNvLinkRemotePciInfo(  # noqa: N802
        self, handle: int, link: int
    ) -> SimpleNamespace:
        return self.nvmlDeviceGetPciInfo(1 - handle)


def no_tool(command: object) -> ToolAnswer:
    return ToolAnswer(reason="no tool here")


def test_nvlinks_are_counted_by_remote_device() -> None:
    nvml = FakeNvml()

    links = read_nvlink(nvml).links

    found = {(one.source, one.target): (one.num_links, one.num_active) for one in links}
    assert found == {
        ("0000:1b:00.0", "0001:1b:00.0"): (2, 2),
        ("0000:1b:00.0", "unknown"): (1, 0),
        ("0001:1b:00.0", "0000:1b:00.0"): (2, 2),
        ("0001:1b:00.0", "unknown"): (1, 0),
    }
    assert nvml.was_shut_down


def test_nvlink_rate_follows_its_version_and_the_active_links() -> None:
    first = read_nvlink(FakeNvml()).links[0]

    assert (first.version, first.bytes_per_s) == ("4", 50e9)


def test_links_to_a_switch_are_named_so() -> None:
    targets = {one.target for one in read_nvlink(FakeNvml(remote_type=2)).links}

    assert targets == {"switch", "unknown"}


def test_failing_driver_is_an_absence_and_is_shut_down() -> None:
    nvml = FakeNvml(fails=True)

    (absent,) = read_nvlink(nvml).absent

    assert absent.reason == "NVML: Driver Not Loaded"
    assert nvml.was_shut_down


def test_tool_stands_in_where_the_library_is_not(tmp_path: Path) -> None:
    def ask(command: object) -> ToolAnswer:
        if command == ("nvidia-smi", "topo", "-m"):
            return ToolAnswer(text=NVIDIA_MATRIX)
        return no_tool(command)

    facts = read_interconnect(tmp_path, ask=ask, nvml=NoNvml())

    assert [(one.source, one.target, one.num_links) for one in facts.links] == [
        ("GPU0", "GPU1", 18),
        ("GPU1", "GPU0", 18),
    ]
    assert "NVLink" not in {absent.what for absent in facts.absent}


def test_absence_names_every_way_that_was_tried(tmp_path: Path) -> None:
    facts = read_interconnect(tmp_path, ask=no_tool, nvml=NoNvml())

    reasons = {absent.what: absent.reason for absent in facts.absent}
    assert set(reasons) == {"NVLink", "XGMI", "HCCS", "Xe Link"}
    assert reasons["NVLink"] == (
        "NVML does not start: NVML Shared Library Not Found; no tool here"
    )


@pytest.mark.parametrize(
    ("matrix", "kind", "pairs"),
    [
        (NPU_MATRIX, "hccs", {("NPU0", "NPU1"), ("NPU1", "NPU2")}),
        (NVIDIA_MATRIX, "nvlink", {("GPU0", "GPU1")}),
        (XPU_MATRIX, "xelink", {("GPU0/0", "GPU1/0")}),
    ],
)
def test_matrix_of_a_vendors_tool_is_read(
    matrix: str, kind: str, pairs: set[tuple[str, str]]
) -> None:
    links = parse_matrix(matrix, "tool")

    assert {(one.source, one.target) for one in links} == pairs | {
        (target, source) for source, target in pairs
    }
    assert {one.kind for one in links} == {kind}


def test_xgmi_is_read_from_the_kernels_topology(tmp_path: Path) -> None:
    nodes = tmp_path / "class/kfd/kfd/topology/nodes"

    def write(path: str, **values: int) -> None:
        file = nodes / path / "properties"
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"{name} {value}\n" for name, value in values.items()))

    write("0", cpu_cores_count=64, simd_count=0)
    write("1", simd_count=304, location_id=0x2F00, domain=0)
    write("2", simd_count=304, location_id=0x3300, domain=0)
    write("1/io_links/0", type=2, node_from=1, node_to=0, max_bandwidth=64000)
    write("1/io_links/1", type=11, node_from=1, node_to=2, max_bandwidth=50000)

    (link,) = read_xgmi(tmp_path).links

    assert (link.source, link.target) == ("0000:2f:00.0", "0000:33:00.0")
    assert link.bytes_per_s == 50e9


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('fine')", ""),
        ("import sys; sys.exit('driver broken')", "driver broken"),
        ("", "no output"),
    ],
)
def test_tool_answers_or_says_why_not(code: str, reason: str) -> None:
    answer = ask_tool([sys.executable, "-c", code])

    assert (answer.text is None) == bool(reason)
    assert reason in answer.reason
