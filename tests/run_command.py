"""Runs a command as a user would: the environment's programs are on PATH."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = REPOSITORY / "examples"


def run_command(*command: str | Path, cwd: Path, timeout_s: float = 150.0) -> str:
    """Run a command to its end; it must succeed.

    Returns:
        What it printed.

    Raises:
        AssertionError: If it failed; with all that it printed.
        subprocess.TimeoutExpired: If it took longer than the deadline.
    """
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=user_environment(cwd),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, (
        f"{command} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"
    )
    return result.stdout


def user_environment(cwd: Path) -> dict[str, str]:
    """An activated virtual environment, one torch thread a process.

    Emulated fleets are registered below ``cwd``, so that a test sees its own one only.
    """
    programs = Path(sys.executable).parent
    return os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
        "XDG_STATE_HOME": str(cwd / ".state"),
        "OMP_NUM_THREADS": "1",
    }
