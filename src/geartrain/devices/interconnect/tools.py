"""Asks a program for facts; whatever goes wrong becomes the reason for their absence."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TIMEOUT_S = 5.0
"""A vendor's tool can hang on a sick driver; facts are not worth more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What a program printed, or why there is nothing."""

    text: str | None = None
    reason: str = ""


AskTool = Callable[[Sequence[str]], ToolAnswer]
"""Runs a command that only reads; tests hand in one that answers from a table."""


def ask_tool(command: Sequence[str]) -> ToolAnswer:
    """Run a program that only reads.

    Args:
        command: Program name and arguments; no shell.

    Returns:
        Its output, or the reason why there is none; never an exception.

    >>> ask_tool(["no-such-program-here"]).reason
    'no-such-program-here is not installed'
    """
    program = shutil.which(command[0])
    if program is None:
        return ToolAnswer(reason=f"{command[0]} is not installed")
    shown = " ".join(command)
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ToolAnswer(reason=f"{shown} did not answer within {_TIMEOUT_S:g} s")
    except OSError as error:
        return ToolAnswer(reason=f"{shown} could not be started: {error.strerror}")
    if done.returncode != 0 or not done.stdout.strip():
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[0]
        return ToolAnswer(reason=f"{shown} ended with {done.returncode}: {said}")
    return ToolAnswer(text=done.stdout)
