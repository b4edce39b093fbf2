"""What ``maple --help`` prints: the commands, drawn in the manner of Typer.

Typer itself would load Markdown, tracebacks and syntax highlighting for it, which takes longer than all the rest. The
help of each command is Typer's, of paragraphs without line breaks: Typer keeps those of a docstring, and the terminal
has a width of its own.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup


class Overview(TyperGroup):
    """A group of commands whose help is quick; each command's own is Typer's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in self.commands.values():
            command.help = "\n\n".join(_paragraphs(command.help))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        options = [(", ".join(option.opts), getattr(option, "help", None) or "") for option in self.get_params(ctx)]
        commands = [(name, _paragraphs(self.commands[name].help)[0]) for name in self.list_commands(ctx)]
        console = Console(highlight=False)
        console.print(Padding(Text(self.get_usage(ctx).strip(), style="bold"), 1))
        console.print(Padding(self.help or "", (0, 1, 1, 1)))
        console.print(_panel("Options", options))
        console.print(_panel("Commands", commands))


def _paragraphs(text: str | None) -> list[str]:
    """The paragraphs of a text, at least one, each on one line.

    >>> _paragraphs("Add images to a run,\\nwithout retraining.\\n\\nThresholds are void then.")
    ['Add images to a run, without retraining.', 'Thresholds are void then.']
    """
    return [" ".join(paragraph.split()) for paragraph in (text or "").split("\n\n")]


def _panel(title: str, rows: list[tuple[str, str]]) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    for name, text in rows:
        table.add_row(name, Text(text))
    return Panel(table, title=title, title_align="left", border_style="dim")
