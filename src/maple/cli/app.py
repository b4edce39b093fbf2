"""The command line: ``maple COMMAND``. Heavy imports happen inside the commands, so that ``--help`` is quick.

The list of commands is drawn here, in the manner of Typer: Typer itself would load Markdown, tracebacks and syntax
highlighting for it, and read the flags of all commands, which takes longer than all the rest. The help of each command
is Typer's.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperArgument, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from maple import __version__
from maple.cli import commands
from maple.cli._flags import SWITCH, WithWords
from maple.cli._output import make_grid, output
from maple.cli.catalogue import data, methods
from maple.errors import MapleError, describe_failure, naming_extras
from maple.progress import is_first_process

FIRST_STEPS = (
    "First steps: maple demo; or maple train FOLDER, with one subfolder of images per class, then maple predict "
    "runs/FOLDER NEW_IMAGES. maple COMMAND --help describes a command."
)
HELP = "show this help"
INTERRUPTED = 130  # the exit code after Ctrl-C
COMMANDS = {
    each.name: each
    for each in (
        *(commands.demo, commands.train, commands.fit, commands.tune),
        *(commands.predict, commands.explain, commands.evaluate, commands.update, commands.clean),
        *(commands.benchmark, methods, commands.report, commands.monitor),
        *(commands.export, commands.push, commands.serve, data),
    )
}


class Described(WithWords):
    """A command whose help has no names of Python types: arguments have their name, switches take nothing."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for each in params:
            if isinstance(each, TyperArgument):
                each.display_type_rich = _show_nothing  # type: ignore[method-assign]
                each.get_usage_pieces = partial(_show_name, each)  # type: ignore[method-assign]
            elif each.name == "help":
                each.metavar, each.help = SWITCH, HELP  # type: ignore[attr-defined]
        return params


def _show_nothing(ctx: Any) -> None:
    return None


def _show_name(argument: TyperArgument, ctx: Any) -> list[str]:
    """An argument in the first line of the help: ``RUN``, ``[PREDICTIONS]`` or ``IMAGES...``."""
    name = argument.display_name_raw if argument.required else f"[{argument.display_name_raw}]"
    return [f"{name}..." if argument.nargs != 1 else name]


class Overview(TyperGroup):
    """The commands: each is made when it is asked for, and listed by its name and the first paragraph of its help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        function = COMMANDS[cmd_name].with_flags()
        help = "\n\n".join(_paragraphs(function.__doc__))
        info = CommandInfo(cmd_name, cls=Described, callback=function, help=help)
        command = get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=self.rich_markup_mode)
        command.words = function.words  # type: ignore[attr-defined]
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        helps = {"help": HELP}
        options = [
            (", ".join(each.opts), helps.get(each.name) or getattr(each, "help", None) or "")
            for each in self.get_params(ctx)
        ]
        commands = [(name, _paragraphs(each.function.__doc__)[0]) for name, each in COMMANDS.items()]
        console = Console(highlight=False)
        console.print(Padding(Text(self.get_usage(ctx).strip(), style="bold"), 1))
        console.print(Padding(self.help or "", (0, 1, 1, 1)))
        for title, rows in (("Options", options), ("Commands", commands)):
            grid = make_grid([(name, escape(text)) for name, text in rows], "bold cyan")
            console.print(Panel(grid, title=title, title_align="left", border_style="dim"))
        console.print(Padding(FIRST_STEPS, (0, 1, 1, 1)))


def _paragraphs(text: str | None) -> list[str]:
    """The paragraphs of a text, at least one, each on one line: the terminal has a width of its own.

    >>> _paragraphs("Add images to a run,\\nwithout retraining.\\n\\nThresholds are void then.")
    ['Add images to a run, without retraining.', 'Thresholds are void then.']
    """
    return [" ".join(paragraph.split()) for paragraph in (text or "").split("\n\n")]


app = typer.Typer(
    cls=Overview,
    help="Class, probability, uncertainty and an out-of-distribution decision from one forward pass.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(show: bool) -> None:
    if show:
        output.print(f"maple {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: an error is one sentence on standard error, with exit code 2 for wrong use and 1 for failure.

    Of several processes only the first prints.
    """
    errors = Console(stderr=True, quiet=not is_first_process())
    try:
        with naming_extras():
            app(prog_name="maple")
    except MapleError as error:
        errors.quiet &= not error.said_here
        _print_error(errors, str(error))
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        if (said := describe_failure(error)) is None:
            raise
        _print_error(errors, said)
        raise SystemExit(MapleError.exit_code) from None
    except KeyboardInterrupt:  # outside Typer
        _print_interrupted(errors)
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            _print_interrupted(errors)
        if not stop.code and not is_first_process():
            _leave()
        raise


def _print_error(errors: Console, text: str) -> None:
    errors.print("[bold red]error:[/] ", end="")
    errors.print(text, markup=False, highlight=False, soft_wrap=True)


def _leave() -> None:
    """End a process that is done without stopping its threads.

    Threads of torch.distributed can abort a process that ends before the first one; torchrun would then end the first
    one too, in the middle of its evaluation.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _print_interrupted(errors: Console) -> None:
    errors.print(
        "\ninterrupted: saved results are intact; rerun the same command to resume (maple train: with --resume)",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
