"""What import-linter cannot say: which modules load where torch does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

REFUSE_TORCH = """
import importlib.abc, sys

class RefuseTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is out of bounds in this process")

sys.meta_path.insert(0, RefuseTorch())
"""

TORCH_FREE = [
    "geartrain",
    "geartrain.errors",
    "geartrain.units",
    "geartrain.telemetry",
    "geartrain.devices.profile",
    "geartrain.devices.fleet_spec",
    "geartrain.planner",
    "geartrain.parallel.worker_spec",
    "geartrain.monitoring",
    "geartrain.launch",
    "geartrain.launch.worker",
    "geartrain.cli",
]


def run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", REFUSE_TORCH + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_guard_really_refuses_torch() -> None:
    result = run_without_torch("import torch")

    assert result.returncode != 0
    assert "torch is out of bounds" in result.stderr


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_loads_where_torch_cannot_be_imported(module: str) -> None:
    result = run_without_torch(f"import {module}")

    assert result.returncode == 0, result.stderr


def test_public_errors_are_reached_without_torch() -> None:
    result = run_without_torch("import geartrain; print(geartrain.ConfigError.__name__)")

    assert result.stdout.strip() == "ConfigError", result.stderr


def test_every_public_name_exists() -> None:
    code = "import geartrain\nfor name in geartrain.__all__: getattr(geartrain, name)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert result.returncode == 0, result.stderr
