"""The command line: ``maple COMMAND``. Heavy imports happen inside the commands, so that ``--help`` is quick."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from maple import __version__
from maple.cli._output import output
from maple.cli._overview import Overview
from maple.cli.catalogue import data, methods
from maple.cli.deploying import export, serve
from maple.cli.evaluating import benchmark, evaluate, report, update
from maple.cli.predicting import explain, monitor, predict
from maple.cli.training import demo, fit, train, tune
from maple.errors import MapleError, naming_extras
from maple.progress import is_first_process

INTERRUPTED = 130  # the exit code after Ctrl-C

app = typer.Typer(
    cls=Overview,
    help="Class, probability, uncertainty and an out-of-distribution decision from one forward pass.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for _command in (
    *(demo, train, fit, tune),
    *(predict, explain, evaluate, update),
    *(benchmark, methods, report, monitor),
    *(export, serve, data),
):
    app.command()(_command)


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
        errors.print("[bold red]error:[/] ", end="")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # outside Typer
        _print_interrupted(errors)
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            _print_interrupted(errors)
        if not stop.code and not is_first_process():
            _leave()
        raise


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
