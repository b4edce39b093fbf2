"""Commands that list methods and data sets: methods, data."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

from maple.cli import _flags as cli
from maple.cli._output import output, print_facts, print_line, print_named
from maple.errors import UsageError

if TYPE_CHECKING:
    from maple.options import Flag
    from maple.runs import flag_values
    from maple.runs.listings import MethodFacts


@cli.command()
def methods(
    name: Annotated[
        str | None,
        Flag(
            "recipe or detector to describe, with its options [dim]\\[default: list all][/]",
            metavar="NAME",
            positional=True,
        ),
    ] = None,
    as_json: flag_values.AsJson = False,
) -> None:
    """List recipes (training methods) and detectors (OOD scores) with papers and cost, or describe one of them.

    Options of a method are set with --set NAME.OPTION=VALUE, or in its section of a TOML file.
    """
    from maple.runs.listings import find_methods, list_methods

    if name is not None:
        found = find_methods(name)
        if as_json:
            print(json.dumps([_method_dict(each) for each in found], indent=1))
        for each in found if not as_json else ():
            _print_method(each)
    elif as_json:
        print(json.dumps(list_methods(), indent=1))
    else:
        _print_methods(list_methods())


def _print_methods(rows: list[dict[str, Any]]) -> None:
    for kind, heading in (("recipe", "maple train --recipe NAME"), ("detector", "maple evaluate --detector NAME,...")):
        own = [row for row in rows if row["kind"] == kind]
        print_line(f"\n{heading}")
        print_named(
            {
                row["name"]: (f"{row['title']} ({row['paper']})" if row["paper"] else row["title"], _cost(row))
                for row in own
            }
        )


def _cost(row: dict[str, Any]) -> str:
    facts = [f"{key} {row[key]}" for key in ("needs", "adds") if row[key]]
    return "; ".join([f"{row['passes']} pass" if row["passes"] == "1" else row["passes"], *facts])


def _print_method(found: MethodFacts) -> None:
    row = found.to_dict()
    print_line(f"{found.kind} {row['name']}: {row['title']}")
    facts = {"paper": " ".join(filter(None, (row["paper"], row["url"]))), "cost": _cost(row)}
    if found.method.plugin:
        facts["plug-in"] = found.method.plugin
    print_facts({key: value for key, value in facts.items() if value})
    options = {f"{row['name']}.{each['name']}": each for each in _option_rows(found)}
    texts = {name: (each["help"], f"{each['takes']}, default {_as_typed(each)}") for name, each in options.items()}
    if texts:
        print_named(texts)
    else:
        print_line("no options")


def _as_typed(option: dict[str, Any]) -> str:
    """The default of an option as it is given with ``--set``."""
    default = option["default"]
    return str(default).lower() if isinstance(default, bool) else str(default)


def _method_dict(found: MethodFacts) -> dict[str, Any]:
    return {**found.to_dict(), "plugin": found.method.plugin or None, "options": _option_rows(found)}


def _option_rows(found: MethodFacts) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "takes": "true|false" if annotation is bool else cli.value_text(annotation),
            "default": list(each.default) if isinstance(each.default, tuple) else each.default,
            "help": each.metadata.get("help", ""),
        }
        for name, (annotation, each) in found.options().items()
    ]


@cli.command()
def data(
    source: Annotated[
        str | None, Flag("data set to describe [dim]\\[default: list all][/]", metavar="SOURCE", positional=True)
    ] = None,
    get: Annotated[bool, Flag("fetch the original files and convert them, if missing")] = False,
    data_root: flag_values.DataRoot = None,
    as_json: flag_values.AsJson = False,
) -> None:
    """List data sets and where they are searched for, or describe one of them and how to get it."""
    from maple.runs.listings import describe_source, list_sources

    if get:
        from maple.data.catalogue.get import get_data_set

        if source is None:
            raise UsageError("--get needs the name of a data set: maple data cifar10 --get")
        get_data_set(source, data_root)
    found = list_sources(data_root) if source is None else describe_source(source, data_root)
    if as_json:
        print(json.dumps(found, indent=1))
    elif isinstance(found, dict):
        print_facts({name: fact for name, fact in found.items() if fact != ""})
    else:
        _print_sources(found)
        root = data_root or os.environ.get("MAPLE_DATA")
        print_line(f"data root: {root or 'none: set MAPLE_DATA or give --data-root'}")


def _print_sources(rows: list[dict[str, Any]]) -> None:
    """A table of data sets; those that are missing are dim."""
    from rich.markup import escape
    from rich.table import Table

    columns = ("source", "splits", "where")
    table = Table(*columns)
    for row in rows:
        table.add_row(*(escape(row[key]) for key in columns), style=None if row["found"] else "dim")
    output.print(table)
