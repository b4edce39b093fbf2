"""Flags made from options, ``--set``, ``--plugin``, and the parameters that several commands share."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from maple.data.options import DataOptions
from maple.decisions.options import DecisionOptions
from maple.deploy.serve.options import ServeOptions
from maple.detectors.options import DetectorOptions
from maple.errors import ConfigError, UsageError
from maple.networks.options import ModelOptions
from maple.options import read_names, read_toml
from maple.training.options import MapleOptions, TrainOptions

DataRoot = Annotated[
    Path | None,
    typer.Option(help="folder of named data sets, <name>/<split>.parquet [dim]\\[default: environment MAPLE_DATA][/]"),
]
RunDataRoot = Annotated[
    Path | None,
    typer.Option(help="folder of named data sets [dim]\\[default: the one the run was trained with][/]"),
]
Workers = Annotated[int, typer.Option(min=0, help="processes that decode images which do not fit in memory")]
OodSources = Annotated[list[str] | None, typer.Option(help="NAME=SOURCE of unknown images; may be repeated")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
TextAsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an existing run")]
BatchSize = Annotated[int, typer.Option(min=1, help="images per forward pass")]
ConfigFile = Annotated[Path | None, typer.Option(help="TOML file with options; flags take precedence")]
Trust = Annotated[bool, typer.Option("--trust", help="allow a network that runs code: TorchScript, .pt2 and python:")]


@dataclass(frozen=True)
class Section:
    """A group of options as a panel of flags."""

    title: str
    group: type


SECTIONS = {
    "data": Section("Data", DataOptions),
    "model": Section("Model", ModelOptions),
    "train": Section("Training", TrainOptions),
    "maple": Section("MAPLE recipe", MapleOptions),
    "detector": Section("Detector", DetectorOptions),
    "decision": Section("Decision", DecisionOptions),
    "serve": Section("Serving", ServeOptions),
}
_METHODS = "Methods"
_SETTINGS = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME.OPTION=VALUE",
        help="any option of a method or section, such as sngp.features=1024; may be repeated; see maple methods NAME",
        rich_help_panel=_METHODS,
    ),
]


def _load_plugins(modules: list[str] | None) -> list[str] | None:
    from maple.registry import load_plugin

    for module in modules or ():
        load_plugin(module)
    return modules


_PLUGINS = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        callback=lambda modules: _load_plugins(modules) if modules else modules,
        help="Python module that registers methods, installed or in the current folder; may be repeated",
        rich_help_panel=_METHODS,
    ),
]


def with_options(
    *sections: str, settable: bool = False, rare: bool = False, default: str | None = None
) -> Callable[[Callable], Callable]:
    """Give a command ``--plugin``, and one flag per option of these sections; values given arrive in ``flags``.

    ``settable`` adds ``--set``, whose values arrive in ``flags`` by ``name.option``. ``rare`` options are hidden from
    the help unless asked for. ``default`` is shown for flags whose default is not the option's own.
    """

    def decorate(command: Callable) -> Callable:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name])
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name != "flags"
        ]
        made = [flag for section in sections for flag in _section_flags(section, rare, default)]
        names = [flag.name for flag in made]
        shared = [_keyword("settings", _SETTINGS)] if settable else []
        parameters = [*own, *made, *shared, _keyword("plugins", _PLUGINS)]

        def wrapper(**given: Any) -> Any:
            given.pop("plugins")
            flags = {name: value for name in names if (value := given.pop(name)) is not None}
            flags |= read_settings(given.pop("settings") or []) if settable else {}
            return command(**given, **({"flags": flags} if "flags" in hints else {}))

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _section_flags(name: str, rare: bool, default: str | None) -> Iterator[inspect.Parameter]:
    section = SECTIONS[name]
    hints = get_type_hints(section.group, include_extras=True)
    for option in fields(section.group):
        if option.metadata.get("flag", True):
            shown = default if default and name != "serve" else _default_text(option)  # the service has its own
            flag = typer.Option(
                help=option.metadata["help"] + (f" [dim]\\[default: {shown}][/]" if shown else ""),
                rich_help_panel=section.title,
                metavar=value_text(hints[option.name]),
                show_default=False,
                hidden=option.metadata.get("rare", False) and not rare,
            )
            kind: Any = bool | None if option.type == "bool" else str | None
            yield _keyword(option.name, Annotated[kind, flag])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default_text(option: Field[Any]) -> str:
    if isinstance(option.default, tuple):
        return ",".join(map(str, option.default))
    return "" if option.default is None else str(option.default)


def value_text(annotation: Any) -> str | None:
    """What an option takes: ``sgd|adam``, ``NUMBER``, ``auto|NUMBER``, or None for plain text.

    >>> value_text(Literal["auto"] | int)
    'auto|NUMBER'
    """
    if annotation in (int, float):
        return "NUMBER"
    if get_origin(annotation) is Annotated:
        return value_text(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) is tuple:
        return "NAME,..." if str in get_args(annotation) else "NUMBER,..."
    return "|".join(filter(None, map(value_text, get_args(annotation)))) or None


# --- values that are more than one word ------------------------------------------------------------------------------


def read_settings(pairs: list[str]) -> dict[str, str]:
    """Values of ``--set`` by ``name.option``.

    >>> read_settings(["sngp.features=1024"])
    {'sngp.features': '1024'}
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        name, _, option = key.strip().rpartition(".")
        if not (separator and name and option):
            raise UsageError(f"--set takes NAME.OPTION=VALUE, such as sngp.features=1024; got '{pair}'")
        if found.setdefault(f"{name}.{option}", value.strip()) != value.strip():
            raise UsageError(f"--set {name}.{option} is given twice: give it once")
    return found


def read_config(path: Path | None) -> dict[str, Any]:
    """The sections of the user's configuration file; its plug-ins, ``plugin = [...]``, are imported."""
    sections = read_toml(path) if path else {}
    modules = sections.pop("plugin", [])
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise ConfigError(f"'plugin' in '{path}' is {modules!r}: write a list of module names, plugin = ['my_module']")
    if modules and "origin" in sections:
        raise ConfigError(f"'{path}' belongs to a run, whose plug-ins are never imported: give --plugin {modules[0]}")
    _load_plugins(modules)
    return sections


def named_sources(pairs: list[str] | None) -> dict[str, str]:
    """Sources of ``--ood`` by name."""
    sources: dict[str, str] = {}
    for pair in pairs or ():
        name, separator, source = pair.partition("=")
        if not separator or not name or not source:
            raise UsageError(f"--ood takes NAME=SOURCE, such as svhn=svhn or debris=folder/debris; got '{pair}'")
        if name in sources:
            raise UsageError(f"--ood names '{name}' twice: give each set its own name")
        sources[name] = source
    return sources


def named_values(pairs: list[str] | None) -> dict[str, list[str]]:
    """Values of ``--values`` by the name of the option."""
    values: dict[str, list[str]] = {}
    for pair in pairs or ():
        name, separator, listed = pair.partition("=")
        if not separator or not read_names(listed):
            raise UsageError(f"--values takes NAME=VALUE,..., such as max_clusters=3,5; got '{pair}'")
        values[name.strip()] = read_names(listed)
    return values


def read_channels(text: str | None, flag: str) -> tuple[float, ...] | None:
    """Three numbers, one per colour channel."""
    if text is None:
        return None
    try:
        red, green, blue = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} takes three numbers, such as 0.485,0.456,0.406; got '{text}'") from None
    return red, green, blue


def read_seeds(text: str | None) -> tuple[int, ...] | None:
    """Seeds separated by commas."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--seeds takes numbers such as 0,1,2; got '{text}'") from None


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["maple", *sys.argv[1:]])
