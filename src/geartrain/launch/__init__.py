"""Starts a worker a device, watches them, and ends them together. Torch-free."""

from geartrain.launch.launcher import launch
from geartrain.launch.run_directory import create_run_directory
from geartrain.launch.settings import (
    LaunchObserver,
    LaunchResult,
    LaunchSettings,
    SilentObserver,
    check_script,
)

__all__ = [
    "LaunchObserver",
    "LaunchResult",
    "LaunchSettings",
    "SilentObserver",
    "check_script",
    "create_run_directory",
    "launch",
]
