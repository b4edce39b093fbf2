"""Declaring options once, and reading them from Python keywords, TOML files and command-line flags.

Options are the fields of a frozen dataclass beside the code that reads them. A constructor keyword, a key in
``config.toml`` and a flag of ``maple train`` are the same name with the same default.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import tomli_w
from annotated_types import Interval

from maple.errors import ConfigError, UsageError, suggest

if TYPE_CHECKING:  # imported where options are checked: declaring them, for --help, must be quick
    from pydantic import TypeAdapter

Options = TypeVar("Options")
Positive = Annotated[int, Interval(ge=1)]
Share = Annotated[float, Interval(ge=0, le=1)]
NonNegative = Annotated[float, Interval(ge=0)]
AboveZero = Annotated[float, Interval(gt=0)]
N_SEEDS = 2**32
Seed = Annotated[int, Interval(ge=0, lt=N_SEEDS)]

Values = dict[str, Any]  # of options, by name


class NoneByName:
    """Marks an option that may be None, written 'none' in files and flags (a hook of pydantic)."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(lambda value: None if value == "none" else value, handler(source))


class DurationByName:
    """Marks an option in seconds that may be written ``20m`` or ``1h30m``, or 'none' (a hook of pydantic)."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(_read_duration, handler(source))


def _read_duration(value: Any) -> Any:
    """Seconds of a text such as ``1h30m``; anything else unchanged, for the check of the type.

    >>> [_read_duration(text) for text in ("20m", "1h30m", "1.5h", "90 s", "90", "none", "soon")]
    [1200.0, 5400.0, 5400.0, 90.0, '90', None, 'soon']
    """
    if value == "none" or not isinstance(value, str):
        return None if value == "none" else value
    parts = re.fullmatch(r"\s*(?:([\d.]+)\s*h)?\s*(?:([\d.]+)\s*m(?:in)?)?\s*(?:([\d.]+)\s*s)?\s*", value)
    if parts is None or not any(parts.groups()):
        return value
    try:
        return sum(unit * float(part) for unit, part in zip((3600.0, 60.0, 1.0), parts.groups()) if part)
    except ValueError:  # 1.2.3h
        return value


@dataclass(frozen=True)
class Range:
    """Where ``maple tune`` searches an option: values of a grid, and bounds of a Bayesian search."""

    grid: tuple[Any, ...]
    bounds: tuple[float, float] | None = None  # integers if both are; None: the values of the grid
    log: bool = False  # search on a logarithmic scale
    relative: bool = False  # values and bounds are multiples of the current value


def option(
    default: Any,
    help: str,
    *,
    flag: bool = True,
    rare: bool = False,
    needs: str = "",
    search: Range | None = None,
    shown: str = "",
) -> Any:
    """A field with a default and the sentence that ``--help`` shows.

    ``flag=False`` keeps it off the command line, ``rare`` off the help; ``needs`` names the switch without which it has
    no effect; ``search`` is its range in ``maple tune``; ``shown`` is the default in the help, if not the value.
    """
    about = {"help": help, "flag": flag, "rare": rare, "needs": needs, "search": search, "shown": shown}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Flag:
    """How the command line takes a parameter or a field: ``weights: Annotated[Path | None, Flag("...")] = None``."""

    help: str | Callable[[], str]  # a function if the text takes time
    name: str = ""  # the spelling, if not that of the field
    shown: str = ""  # the default in the help, if not the value
    panel: str | None = None
    metavar: str | None = None
    min: int | None = None
    envvar: str | None = None
    positional: bool = False
    takes: Any = None  # type of the value given, or None, of which ``read`` makes that of the field
    read: Callable[[Any], Any] | None = None
    word: str = ""  # that may follow a switch; ``read`` gets the word, or ``ALONE`` if it does not follow


ALONE = "yes"  # value of a switch that is followed by nothing, where a word could follow


def flag(default: Any, help: str | Callable[[], str], name: str = "", **about: Any) -> Any:
    """A field of a request that is a flag; ``about`` as in :class:`Flag`."""
    return field(default=default, metadata={"flag": Flag(help, name, **about)})


def list_options(group: Any) -> dict[str, Field[Any]]:
    """The options of a dataclass by name."""
    return {each.name: each for each in fields(group)}


def build_options(
    group: type[Options], values: Mapping[str, Any], where: str | None = "configuration", owner: str = ""
) -> Options:
    """Validate ``values`` and make the options of ``group``; an unknown key fails with a suggestion.

    Errors say ``where`` the values come from. ``None`` stands for the command line: flags, or ``--set owner.key=value``
    if there is an ``owner``.

    >>> @dataclass
    ... class Count:
    ...     epochs: Positive = option(16, "passes over the training images")
    >>> build_options(Count, {"epochs": "3"}).epochs
    3
    >>> build_options(Count, {"epoch": 3})
    Traceback (most recent call last):
    ...
    maple.errors.ConfigError: unknown key 'epoch' in configuration: did you mean 'epochs'?
    """
    return group(**validate_options(group, values, where, owner))


def validate_options(
    group: type, values: Mapping[str, Any], where: str | None = "configuration", owner: str = ""
) -> Values:
    """The values by the present names of their options, each in its type; see :func:`build_options`."""
    known = list_options(group)
    typed: Values = {}
    for key, value in values.items():
        name = find_option(group, key, where, owner)
        typed[name] = _validate(group, known[name], value, _name_value(key, value, where, owner))
    return typed


def find_option(group: type, key: str, where: str | None = "configuration", owner: str = "") -> str:
    """The present name of an option, which had the ``former_prefix`` of the group; see :func:`build_options`."""
    known = list_options(group)
    name = key if key in known else key.removeprefix(getattr(group, "former_prefix", ""))
    if name not in known:
        raise ConfigError(f"unknown key '{key}' in {where or '--set ' + owner}: {suggest(key, known)}")
    return name


def _validate(group: type, known: Field[Any], value: Any, named: str) -> Any:
    """The value in the type of the option; ``named`` is how an error calls option and value."""
    from pydantic import ValidationError

    if isinstance(known.default, tuple) and isinstance(value, str):
        value = read_names(value)
    try:
        return _validator(group, known.name).validate_python(value)
    except ValidationError as error:
        first, help = error.errors()[0], known.metadata.get("help") or "another value"
        if first["type"] == "literal_error" and isinstance(value, str) and not first["loc"]:
            names = re.findall(r"'([^']*)'", first["ctx"]["expected"])
            raise ConfigError(f"{named}: {suggest(value, names)}") from None
        # A message about one branch of a union or one item of a tuple says less than the help of the option.
        reason = f"expected {help}" if first["loc"] else f"{first['msg'].lower()} ({help})"
        raise ConfigError(f"{named}: {reason}") from None


@cache
def _validator(group: Any, name: str) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(get_type_hints(group, include_extras=True)[name])


def _name_value(key: str, value: Any, where: str | None, owner: str) -> str:
    if where is not None:
        return f"'{key}' in {where} is {value!r}"
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    return f"--set {owner}.{key}={text}" if owner else f"{flag_name(key)} {text}"


def flag_name(key: str) -> str:
    """The flag of an option.

    >>> flag_name("batch_size")
    '--batch-size'
    """
    return "--" + key.replace("_", "-")


def as_dict(options: Any, group: type | None = None) -> Values:
    """The options as plain values; with ``group``, only those that the group declares."""
    values = asdict(options)
    if group is not None:
        values = {f.name: values[f.name] for f in fields(group)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dictionary."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration '{path}': {error.strerror or error}; check the path"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' is not valid TOML ({error}): correct it, or restore it from a copy") from None


def read_names(text: str) -> list[str]:
    """Names separated by commas, or those in the file after an ``@``, one per line; lines with ``#`` are remarks.

    >>> read_names("detritus, fibre")
    ['detritus', 'fibre']
    """
    if not text.startswith("@"):
        return [name.strip() for name in text.split(",") if name.strip()]
    try:
        lines = Path(text[1:]).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot read the names in '{text[1:]}': {reason}; after @, give a text file with one name per line"
        ) from None
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def read_pairs(flag: str, takes: str, pairs: list[str] | None) -> Iterator[tuple[str, str, UsageError]]:
    """Name and value of each ``NAME=VALUE``, and the error for values that the caller cannot use."""
    for pair in pairs or ():
        error = UsageError(f"{flag} takes {takes}; got '{pair}'")
        name, separator, value = pair.partition("=")
        if not (separator and name.strip()):
            raise error
        yield name.strip(), value, error


def named_sources(pairs: list[str] | None) -> dict[str, str]:
    """Sources of ``--ood`` by name."""
    sources: dict[str, str] = {}
    for name, source, error in read_pairs("--ood", "NAME=SOURCE, such as svhn=svhn or debris=folder/debris", pairs):
        if not source:
            raise error
        if name in sources:
            raise UsageError(f"--ood names '{name}' twice: give each set its own name")
        sources[name] = source
    return sources


def named_values(pairs: list[str] | None) -> dict[str, list[str]]:
    """Values of ``--values`` by the name of the option."""
    values: dict[str, list[str]] = {}
    for name, listed, error in read_pairs("--values", "NAME=VALUE,..., such as max_clusters=3,5", pairs):
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


def to_toml(values: dict[str, Any]) -> str:
    """Nested dictionaries as TOML text; keys without a value (``None``) are left out."""
    return tomli_w.dumps(_drop_none(values))


def _drop_none(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _drop_none(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }
