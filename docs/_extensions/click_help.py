"""Directive ``click-help``: what ``geartrain VERB --help`` prints, taken at build time."""

from __future__ import annotations

import importlib
from typing import ClassVar

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

LINE_WIDTH = 88


class ClickHelp(SphinxDirective):
    """One section a command of a click group, subcommands of subcommands too."""

    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        """Import ``module:attribute`` and write the help of all that hangs below it."""
        module, _, attribute = self.arguments[0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        context = click.Context(
            command, info_name="geartrain", max_content_width=LINE_WIDTH
        )
        return self._sections(command, context)

    def _sections(self, command: click.Command, context: click.Context) -> list[nodes.Node]:
        name = context.command_path
        section = nodes.section(ids=[nodes.make_id(name)], names=[name])
        section += nodes.title(text=name)
        text = command.get_help(context)
        section += nodes.literal_block(text, text, language="none")
        sections: list[nodes.Node] = [section]
        if isinstance(command, click.Group):
            for child_name in command.list_commands(context):
                child = command.get_command(context, child_name)
                if child is not None and not child.hidden:
                    sections += self._sections(child, _context(child, child_name, context))
        return sections


def _context(
    command: click.Command, name: str, parent: click.Context | None
) -> click.Context:
    return click.Context(
        command, info_name=name, parent=parent, max_content_width=LINE_WIDTH
    )


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("click-help", ClickHelp)
    return {"parallel_read_safe": True}
