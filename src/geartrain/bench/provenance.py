"""Where a result comes from: command, versions, commit."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

_GIT_TIMEOUT_S = 5.0


def command_line() -> str:
    """The command that is running, as a user would type it."""
    return shlex.join(["geartrain", *sys.argv[1:]])


def current_commit(folder: Path) -> str:
    """The git commit of a checkout, ``-dirty`` with changes; "" outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        described = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or no repository
        return ""
    return described.stdout.strip()
