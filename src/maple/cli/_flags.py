"""Commands and their flags: made from the request of a command, from options, ``--set`` and ``--plugin``."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from maple.errors import UsageError

if TYPE_CHECKING:
    from maple.options import Flag

Declared = tuple[str, "Flag", inspect.Parameter]  # name, flag, and the parameter for Typer
Flags = dict[str, str | bool]  # values of flags as they were given, by option or by name.option
SWITCH = " "  # in place of a value in the help
WORDS = {bool: SWITCH, int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}  # of the help, for values
LIST = ",..."  # end of the word for an option that takes several values
FEW = 4  # values that stand in one word
_NO_DEFAULT = inspect.Parameter.empty


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


@dataclass(frozen=True)
class Command:
    """A function as a command: of a ``request``, of ``flags``, and of parameters with a :class:`~maple.options.Flag`.

    Each option of the ``sections`` becomes a flag; values given arrive in ``flags``, of the request or of the function.
    ``settings`` adds ``--set``, whose values arrive there by ``name.option``; all commands have ``--plugin``. ``rare``
    options are hidden from the help unless asked for. ``default`` is shown for flags whose default is not the option's
    own. ``settable`` is what ``--set`` takes, for the help. Options in ``without`` get no flag.

    Flags are made when the command is run, and what its annotations name, ``Flag`` and :mod:`maple.runs.requests`, is
    imported then: ``maple --help`` needs only names and docstrings.
    """

    function: Callable[..., None]
    sections: tuple[str, ...]
    without: tuple[str, ...] = ()
    settings: bool = False
    rare: bool = False
    default: str = ""
    settable: str = (
        "any option of a method or section, such as sngp.features=1024; may be repeated; see maple methods NAME"
    )

    @property
    def name(self) -> str:
        return self.function.__name__

    def with_flags(self) -> Callable[..., None]:
        """The function with one keyword per flag, which Typer reads; ``words`` are those of :class:`WithWords`."""
        from maple.options import Flag, flag_name
        from maple.runs import flag_values, requests

        taken = inspect.signature(self.function).parameters
        known = {**self.function.__globals__, "Flag": Flag, "flag_values": flag_values, "requests": requests}
        hints = get_type_hints(self.function, known, include_extras=True)
        request = hints.get("request")
        own = [each for name, taking in taken.items() for each in _list_flags(name, hints[name], taking.default)]
        made = [each for section in self.sections for each in self._section_flags(section)]
        shared = list(self._shared_flags())

        def run(**given: Any) -> None:
            known = {name: flag.read(given[name]) if flag.read else given[name] for name, flag, _ in (*shared, *own)}
            flags: Flags = {each.name: given[each.name] for each in made if given[each.name] is not None}
            known |= {"flags": flags | known.get("settings", {}), "command": command_line()}
            if request is not None:
                known["request"] = request(
                    **{each.name: known[each.name] for each in fields(request) if each.name in known}
                )
            self.function(**{name: known[name] for name in taken})

        parameters = [*(each for *_, each in own), *made, *(each for *_, each in shared)]
        run.__name__, run.__doc__ = self.name, self.function.__doc__
        run.words = {flag_name(name): flag.word for name, flag, _ in own if flag.word}  # type: ignore[attr-defined]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    def _shared_flags(self) -> Iterator[Declared]:
        """``--set`` of commands that know methods, and ``--plugin`` of all."""
        from maple.options import Flag
        from maple.runs.flag_values import load_all_plugins

        if self.settings:
            settings = Flag(
                self.settable,
                "--set",
                panel="Methods",
                metavar="NAME.OPTION=VALUE",
                takes=list[str],
                read=read_settings,
            )
            yield _declare("settings", settings)
        help = "Python module with methods, or TOML file that also adds data sets and suites; may be repeated"
        flag = Flag(help, "--plugin", panel="Plug-ins", metavar="MODULE|FILE", takes=list[str], read=load_all_plugins)
        yield _declare("plugins", flag)

    def _section_flags(self, name: str) -> Iterator[inspect.Parameter]:
        section = SECTIONS[name]
        hints = get_type_hints(section.group, include_extras=True)
        for option in fields(section.group):
            if option.metadata.get("flag", True) and option.name not in self.without:
                own = name == "serve" or not self.default  # the service has its own defaults
                default = option.metadata.get("shown") or option.default
                settings = typer.Option(
                    help=option.metadata["help"] + _default_text(default if own else self.default),
                    rich_help_panel=section.title,
                    metavar=value_text(hints[option.name]),
                    show_default=False,
                    hidden=option.metadata.get("rare", False) and not self.rare,
                )
                kind: Any = bool | None if option.type == "bool" else str | None
                yield _keyword(option.name, Annotated[kind, settings], None)


def command(*sections: str, **about: Any) -> Callable[[Callable[..., None]], Command]:
    """Make a :class:`Command` of a function."""
    return lambda function: Command(function, sections, **about)


class WithWords(TyperCommand):
    """A command whose switches may be followed by a word: ``--resume`` and ``--resume auto``.

    Typer's options take a value or none. Such a switch is an option with a value, which is added where it is left out.
    """

    words: Mapping[str, str] = MappingProxyType({})  # by the spelling of the switch

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = add_values(args, self.words)
        self._refuse_repeated_lists(ctx, args)
        return super().parse_args(ctx, args)

    def _refuse_repeated_lists(self, ctx: Any, args: list[str]) -> None:
        """Refuse ``--detector rmd --detector knn``: of an option that takes a list, only the last one would count."""
        *_, order = self.make_parser(ctx).parse_args(list(args))
        for option in {each for each in order if order.count(each) > 1}:
            if not getattr(option, "multiple", True) and (option.metavar or "").endswith(LIST):
                raise UsageError(f"{option.opts[0]} is given twice: give it once, with commas between its values")


def add_values(args: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """The arguments with ``=value`` at each switch of ``words`` that has none.

    >>> add_values(["--resume", "auto", "--resume", "slides", "--", "--resume"], {"--resume": "auto"})
    ['--resume=auto', '--resume=yes', 'slides', '--', '--resume']
    """
    from maple.options import ALONE

    left, made = list(args), []
    while left and left[0] != "--":
        name = left.pop(0)
        if name in words:
            followed = bool(left) and left[0] == words[name]
            made.append(f"{name}={left.pop(0) if followed else ALONE}")
        else:
            made.append(name)
    return made + left


# --- parameters for Typer ---------------------------------------------------------------------------------------------


def _list_flags(name: str, annotation: Any, default: Any) -> Iterator[Declared]:
    """The flag of a parameter; of a request, those of its fields."""
    if get_origin(annotation) is Annotated:
        kind, flag = get_args(annotation)
        yield _declare(name, flag, kind, default)
    elif name == "request":
        hints = get_type_hints(annotation, include_extras=True)
        for each in fields(annotation):
            kind, default = hints[each.name], _NO_DEFAULT if each.default is MISSING else each.default
            declared = Annotated[kind, each.metadata["flag"]] if "flag" in each.metadata else kind
            yield from _list_flags(each.name, declared, default)


def _declare(name: str, flag: Flag, kind: Any = None, default: Any = None) -> Declared:
    """The parameter of a flag; ``kind`` and ``default`` are those of the value if the flag does not read it."""
    from maple.options import flag_name

    if flag.takes is not None:
        kind, default = flag.takes | None, None
    metavar = f"[{flag.word}]" if flag.word else flag.metavar or value_text(kind)
    help = (flag.help if isinstance(flag.help, str) else flag.help()) + _default_text(flag.shown)
    if flag.positional:
        made = typer.Argument(help=help, metavar=flag.metavar)
        return name, flag, _keyword(name, Annotated[kind, made], default)
    names = [flag.name or flag_name(name)] if flag.name or default is False else []  # those have no --no- form
    made = typer.Option(
        *names,
        help=help,
        rich_help_panel=flag.panel,
        metavar=metavar,
        min=flag.min,
        envvar=flag.envvar,
        show_default=not flag.shown,  # which is in the text
    )
    return name, flag, _keyword(name, Annotated[kind, made], default)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default_text(default: Any) -> str:
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    if isinstance(default, bool):
        shown = "yes" if default else "no"
    return "" if shown in (None, "") else f" [dim]\\[default: {shown}][/]"


def value_text(annotation: Any) -> str:
    """What an option takes: ``sgd|adam``, ``NUMBER``, ``auto|NUMBER``, ``PATH``, ``TEXT``, or nothing for a switch.

    >>> value_text(Literal["auto"] | int), value_text(Path | None)
    ('auto|NUMBER', 'PATH')
    >>> value_text(tuple[Literal["png", "jpeg"], ...]), value_text(tuple[int, ...])
    ('NAME,...', 'NUMBER,...')
    """
    if annotation in WORDS:
        return WORDS[annotation]
    if get_origin(annotation) is Annotated:
        return value_text(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        return (" | " if len(values) > FEW else "|").join(values)  # many may be broken into lines
    if get_origin(annotation) is tuple:
        first = get_args(annotation)[0]
        return ("NAME" if first is str or get_origin(first) is Literal else "NUMBER") + LIST
    return "|".join(value_text(each) for each in get_args(annotation) if each is not NoneType)


def read_settings(pairs: list[str] | None) -> dict[str, str]:
    """Values of ``--set`` by ``name.option``.

    >>> read_settings(["sngp.features=1024"])
    {'sngp.features': '1024'}
    """
    from maple.options import read_pairs

    found: dict[str, str] = {}
    for key, value, error in read_pairs("--set", "NAME.OPTION=VALUE, such as sngp.features=1024", pairs):
        name, _, option = key.rpartition(".")
        if not (name and option):
            raise error
        if found.setdefault(key, value.strip()) != value.strip():
            raise UsageError(f"--set {key} is given twice: give it once")
    return found


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["maple", *hide_secrets(sys.argv[1:])])


def hide_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command line without keys and passwords: commands are kept in runs and shown to other users.

    >>> hide_secrets(["--api-key", "s3cret", "--storage=postgresql://me:s3cret@host/db"])
    ['--api-key', '***', '--storage=postgresql://me:***@host/db']
    """
    shown = [re.sub(r"(://[^/@:]*:)[^/]*@", r"\1***@", word) for word in words]
    for i, word in enumerate(shown):
        if word.startswith("--api-key="):
            shown[i] = "--api-key=***"
        elif i and shown[i - 1] == "--api-key":
            shown[i] = "***"
    return shown
