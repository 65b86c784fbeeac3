"""Ctrl-C ends every verb alike."""

from __future__ import annotations

import click
from click.testing import CliRunner

from geartrain.cli.verb import Verb


@click.command(cls=Verb)
def interrupted() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_ends_a_verb_as_a_shell_expects() -> None:
    result = CliRunner().invoke(interrupted)

    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"
