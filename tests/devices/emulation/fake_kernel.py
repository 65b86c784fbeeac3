"""A cgroup file system in a temporary directory, behaving like the kernel's."""

from __future__ import annotations

import shutil
from pathlib import Path

from geartrain.devices.emulation.cgroup_files import CgroupFiles

_V1_CPU = {
    "cpu.cfs_period_us": "100000",
    "cpu.cfs_quota_us": "-1",
    "cpu.shares": "1024",
    "cgroup.procs": "",
}
_V1_MEMORY = {
    "memory.limit_in_bytes": "9223372036854771712",
    "memory.memsw.limit_in_bytes": "9223372036854771712",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0",
    "cgroup.procs": "",
}
_V2 = {
    "cgroup.controllers": "cpuset cpu io memory pids",
    "cgroup.subtree_control": "",
    "cgroup.procs": "",
}
_V2_CPU = {"cpu.max": "max 100000", "cpu.weight": "100"}
_V2_MEMORY = {
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0",
}


class FakeKernel(CgroupFiles):
    """Makes the control files of a group appear, and answers writes as Linux does.

    ``refused`` maps a file's name to what the kernel keeps instead of what is written.
    """

    def __init__(self, root: Path, version: int) -> None:
        self.root = root
        self.version = version
        self.refused: dict[str, str] = {}
        if version == 1:
            self._fill(root / "cpu", _V1_CPU)
            self._fill(root / "memory", _V1_MEMORY)
        else:
            self._fill(root, _V2)

    def make(self, group: Path) -> None:
        missing = [p for p in (group, *group.parents) if not p.exists()]
        for directory in reversed(missing):
            directory.mkdir()
            if self.version == 1:
                is_cpu = (self.root / "cpu") in directory.parents
                self._fill(directory, _V1_CPU if is_cpu else _V1_MEMORY)
            else:
                enabled = (directory.parent / "cgroup.subtree_control").read_text()
                self._fill(directory, _V2)
                if "cpu" in enabled:
                    self._fill(directory, _V2_CPU)
                if "memory" in enabled:
                    self._fill(directory, _V2_MEMORY)

    def remove(self, group: Path) -> bool:
        if not group.exists():
            return True
        if any(path.is_dir() for path in group.iterdir()):
            return False
        shutil.rmtree(group)
        return True

    def write(self, path: Path, value: str) -> None:
        if path.name in self.refused:
            path.write_text(self.refused[path.name])
        elif path.name == "cgroup.subtree_control":
            path.write_text(value.replace("+", ""))
        elif path.name == "cgroup.procs":
            path.write_text(path.read_text() + value + "\n")
        elif path.name.startswith("memory.") and value.isdigit():
            path.write_text(str(int(value) // 4096 * 4096))  # whole pages
        else:
            super().write(path, value)

    @staticmethod
    def _fill(directory: Path, files: dict[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text)
