"""Commands and their flags: made from the arguments of a command, from options, ``--set`` and ``--plugin``."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from maple.errors import ConfigError, UsageError

Request = TypeVar("Request")
Flags = dict[str, str | bool]  # values of flags as they were given, by option or by name.option
SWITCH = " "  # in place of a value in the help
DataRoot = Annotated[
    Path | None,
    typer.Option(help="folder of named data sets, <name>/<split>.parquet [dim]\\[default: environment MAPLE_DATA][/]"),
]
RunDataRoot = Annotated[
    Path | None,
    typer.Option(help="folder of named data sets [dim]\\[default: the one the run was trained with][/]"),
]
Workers = Annotated[
    int, typer.Option(min=0, metavar="NUMBER", help="processes that decode images which do not fit in memory")
]
OodSources = Annotated[list[str] | None, typer.Option(metavar="NAME=SOURCE", help="unknown images; may be repeated")]
AsJson = Annotated[bool, typer.Option("--json", metavar=SWITCH, help="print JSON instead of a table")]
TextAsJson = Annotated[bool, typer.Option("--json", metavar=SWITCH, help="print JSON instead of text")]
BatchSize = Annotated[int, typer.Option(min=1, metavar="NUMBER", help="images per forward pass")]
Trust = Annotated[
    bool,
    typer.Option("--trust", metavar=SWITCH, help="allow a network that runs code (TorchScript, .pt2 and python:...)"),
]


@dataclass(frozen=True)
class Section:
    """A group of options as a panel of flags; its class is imported for the commands that use it."""

    title: str
    place: str

    @property
    def group(self) -> type:
        return resolve_name(self.place)


SECTIONS = {
    "data": Section("Data", "maple.data.options:DataOptions"),
    "model": Section("Model", "maple.networks.options:ModelOptions"),
    "train": Section("Training", "maple.training.options:TrainOptions"),
    "maple": Section("MAPLE recipe", "maple.training.options:MapleOptions"),
    "detector": Section("Detector", "maple.detectors.options:DetectorOptions"),
    "decision": Section("Decision", "maple.decisions.options:DecisionOptions"),
    "serve": Section("Serving", "maple.deploy.serve.options:ServeOptions"),
}
# --- declaring commands -----------------------------------------------------------------------------------------------


def argument(help: str, metavar: str, default: Any = MISSING) -> Any:
    """A positional argument, as a field of the arguments of a command."""
    return field(default=default, metadata={"typer": lambda _: typer.Argument(help=help, metavar=metavar)})


def flag(
    default: Any, help: str | Callable[[], str], name: str = "", shown: str = "", panel: str | None = None, **more: Any
) -> Any:
    """A flag, as a field of the arguments of a command.

    ``help`` is a function if the text takes time. ``name`` is the spelling if it is not that of the field; a switch
    that is off has no ``--no-`` form. ``shown`` is the default in the help if that is not the value. The rest is for
    Typer.
    """

    def make(own_name: str) -> Any:
        from maple.options import flag_name

        names = [name or flag_name(own_name)] if name or default is False else []
        text = (help if isinstance(help, str) else help()) + _default_text(shown)
        if isinstance(default, bool) or "min" in more:
            more.setdefault("metavar", SWITCH if isinstance(default, bool) else "NUMBER")
        return typer.Option(*names, help=text, rich_help_panel=panel, **more)

    return field(default=default, metadata={"typer": make})


def _load_plugins(modules: list[str] | None) -> list[str] | None:
    if modules:
        from maple.registry import load_plugin

        for module in modules:
            load_plugin(module)
    return modules


@dataclass(frozen=True)
class _MethodFlags:
    """Flags of commands that know methods."""

    settings: list[str] | None = flag(None, "", "--set", panel="Methods", metavar="NAME.OPTION=VALUE")
    plugins: list[str] | None = flag(
        None,
        "Python module that registers methods, installed or in the current folder; may be repeated",
        "--plugin",
        panel="Methods",
        metavar="MODULE",
        callback=_load_plugins,
    )


@dataclass(frozen=True)
class Command:
    """A function of ``given``, a dataclass of arguments and flags, and perhaps of ``flags``, as a command.

    Each option of the ``sections`` becomes a flag; values given arrive in ``flags``. ``settings`` adds ``--set``, whose
    values arrive there by ``name.option``; ``plugins`` adds ``--plugin``. ``rare`` options are hidden from the help
    unless asked for. ``default`` is shown for flags whose default is not the option's own. ``settable`` is what
    ``--set`` takes, for the help.

    Flags are made when the command is run: ``maple --help`` needs only names and docstrings.
    """

    function: Callable[..., None]
    sections: tuple[str, ...]
    settings: bool = False
    plugins: bool = True
    rare: bool = False
    default: str = ""
    settable: str = "any option of a method or section, such as sngp.features=1024"

    @property
    def name(self) -> str:
        return self.function.__name__

    def with_flags(self) -> Callable[..., None]:
        """The function with one keyword per flag, which Typer reads."""
        hints = get_type_hints(self.function)
        arguments = hints["given"]
        own = list(_argument_flags(arguments))
        made = [each for section in self.sections for each in self._section_flags(section)]
        shared = [each for each in _argument_flags(_MethodFlags) if getattr(self, each.name)]
        for each in shared:
            if each.name == "settings":
                each.annotation.__metadata__[0].help = f"{self.settable}; may be repeated; see maple methods NAME"

        def run(**given: Any) -> None:
            flags: Flags = {each.name: given[each.name] for each in made if given[each.name] is not None}
            flags |= read_settings(given.get("settings"))
            record = arguments(**{each.name: given[each.name] for each in own})
            self.function(record, *([flags] if "flags" in hints else []))

        parameters = [*own, *made, *shared]
        run.__name__, run.__doc__ = self.name, self.function.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    def _section_flags(self, name: str) -> Iterator[inspect.Parameter]:
        section = SECTIONS[name]
        hints = get_type_hints(section.group, include_extras=True)
        for option in fields(section.group):
            if option.metadata.get("flag", True):
                own = name == "serve" or not self.default  # the service has its own defaults
                settings = typer.Option(
                    help=option.metadata["help"] + _default_text(option.default if own else self.default),
                    rich_help_panel=section.title,
                    metavar=SWITCH if option.type == "bool" else value_text(hints[option.name]),
                    show_default=False,
                    hidden=option.metadata.get("rare", False) and not self.rare,
                )
                kind: Any = bool | None if option.type == "bool" else str | None
                yield _keyword(option.name, Annotated[kind, settings])


def command(*sections: str, **about: Any) -> Callable[[Callable[..., None]], Command]:
    """Make a :class:`Command` of a function."""
    return lambda function: Command(function, sections, **about)


def _argument_flags(arguments: type) -> Iterator[inspect.Parameter]:
    """One parameter per field: declared by :func:`argument` or :func:`flag`, or annotated for Typer already."""
    hints = get_type_hints(arguments, include_extras=True)
    for each in fields(arguments):
        kind, make = hints[each.name], each.metadata.get("typer")
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        yield _keyword(each.name, Annotated[kind, make(each.name)] if make else kind, default)


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default_text(default: Any) -> str:
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return "" if shown in (None, "") else f" [dim]\\[default: {shown}][/]"


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


def _pairs(flag: str, takes: str, pairs: list[str] | None) -> Iterator[tuple[str, str, UsageError]]:
    """Name and value of each ``NAME=VALUE``, and the error for values that the caller cannot use."""
    for pair in pairs or ():
        error = UsageError(f"{flag} takes {takes}; got '{pair}'")
        name, separator, value = pair.partition("=")
        if not (separator and name.strip()):
            raise error
        yield name.strip(), value, error


def read_settings(pairs: list[str] | None) -> dict[str, str]:
    """Values of ``--set`` by ``name.option``.

    >>> read_settings(["sngp.features=1024"])
    {'sngp.features': '1024'}
    """
    found: dict[str, str] = {}
    for key, value, error in _pairs("--set", "NAME.OPTION=VALUE, such as sngp.features=1024", pairs):
        name, _, option = key.rpartition(".")
        if not (name and option):
            raise error
        if found.setdefault(key, value.strip()) != value.strip():
            raise UsageError(f"--set {key} is given twice: give it once")
    return found


def read_config(path: Path | None) -> dict[str, Any]:
    """The sections of the user's configuration file; its plug-ins, ``plugin = [...]``, are imported."""
    from maple.options import read_toml

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
    for name, source, error in _pairs("--ood", "NAME=SOURCE, such as svhn=svhn or debris=folder/debris", pairs):
        if not source:
            raise error
        if name in sources:
            raise UsageError(f"--ood names '{name}' twice: give each set its own name")
        sources[name] = source
    return sources


def named_values(pairs: list[str] | None) -> dict[str, list[str]]:
    """Values of ``--values`` by the name of the option."""
    from maple.options import read_names

    values: dict[str, list[str]] = {}
    for name, listed, error in _pairs("--values", "NAME=VALUE,..., such as max_clusters=3,5", pairs):
        if not (found := read_names(listed)):
            raise error
        if name in values:
            raise UsageError(f"--values names '{name}' twice: give all its values at once, {name}=VALUE,...")
        values[name] = found
    return values


def read_numbers(text: str | None, flag: str, kind: type, takes: str, length: int | None = None) -> Any:
    """Numbers separated by commas, ``length`` of them; ``takes`` is what an error asks for. None stays None.

    >>> read_numbers("0,1", "--seeds", int, "numbers such as 0,1,2")
    (0, 1)
    """
    if text is None:
        return None
    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or length not in (None, len(numbers)):
        raise UsageError(f"{flag} takes {takes}; got '{text}'")
    return numbers


# --- requests ---------------------------------------------------------------------------------------------------------


def to_request(given: Any, kind: type[Request], **values: Any) -> Request:
    """A request of this kind from the arguments that it knows, and from ``values``, which take precedence."""
    known = {each.name for each in fields(kind)} & vars(given).keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(given, name) for name in known} | values)


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["maple", *sys.argv[1:]])
