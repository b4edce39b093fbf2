"""Flags that commands share, and values that are more than one word: configuration files, plug-ins, names, channels.

This module imports nothing heavy, so that ``--help`` is quick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

from maple.errors import ConfigError, UsageError
from maple.options import ALONE, Flag, flag, named_sources, read_names, read_numbers, read_toml

Run = Annotated[Path, Flag("run folder", metavar="RUN", positional=True)]
DataRoot = Annotated[
    Path | None,
    Flag("folder of named data sets, <name>/<split>.parquet [dim]\\[default: environment MAPLE_DATA][/]"),
]
RunDataRoot = Annotated[
    Path | None, Flag("folder of named data sets [dim]\\[default: the one the run was trained with][/]")
]
Workers = Annotated[int, Flag("processes that decode images which do not fit in memory", min=0)]
BatchSize = Annotated[int, Flag("images per forward pass", min=1)]
OodSources = Annotated[
    Mapping[str, str],
    Flag("unknown images; may be repeated", metavar="NAME=SOURCE", takes=list[str], read=named_sources),
]
Trust = Annotated[bool, Flag("allow a network that runs code (TorchScript, .pt2 and python:...)")]
Overwrite = Annotated[bool, Flag("replace an existing run")]
AsJson = Annotated[bool, Flag("print JSON instead of a table", "--json")]
TextAsJson = Annotated[bool, Flag("print JSON instead of text", "--json")]


def read_config(path: Path | None) -> dict[str, Any]:
    """The sections of the user's configuration file; its plug-ins, ``plugin = [...]``, are imported."""
    sections = read_toml(path) if path else {}
    modules = sections.pop("plugin", [])
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise ConfigError(f"'plugin' in '{path}' is {modules!r}: write a list of module names, plugin = ['my_module']")
    if modules and "origin" in sections:
        raise ConfigError(f"'{path}' belongs to a run, whose plug-ins are never imported: give --plugin {modules[0]}")
    load_plugins(modules)
    return sections


def load_plugins(names: Sequence[str] | None) -> None:
    """Load what ``--plugin`` names: Python modules and plug-in files."""
    for name in names or ():
        if name.endswith(".toml"):
            from maple.runs.plugins import load_plugin_file

            load_plugin_file(Path(name))
        else:
            from maple.registry import load_plugin

            load_plugin(name)


def load_all_plugins(names: Sequence[str] | None) -> None:
    """Load the plug-in files of installed packages, then what ``--plugin`` names."""
    if entry_points(group="maple.plugins"):
        from maple.runs.plugins import load_installed

        load_installed()
    load_plugins(names)


def read_resume(value: str | None) -> bool | Literal["auto"]:
    """The value of ``--resume``, which "auto" may follow.

    >>> [read_resume(value) for value in (None, ALONE, "auto")]
    [False, True, 'auto']
    """
    if value in (None, ALONE):
        return value is not None
    if value != "auto":
        raise UsageError(f"--resume={value}: give --resume to continue a run, or --resume auto to start it if need be")
    return "auto"


def list_names(text: str | None) -> tuple[str, ...]:
    return tuple(read_names(text or ""))


def as_tuple(values: Sequence[Any] | None) -> tuple[Any, ...]:
    return tuple(values or ())


def paths(help: str, **about: Any) -> Any:
    """A flag that takes any number of paths."""
    return flag((), help, takes=list[Path], read=as_tuple, **about)


def ood_group(name: str) -> Any:
    """The flag of a group of unknown images."""
    help = f"{name}-OOD sets, whose means are shown: names of --ood, or sources such as svhn"
    return flag((), help, metavar="NAME,...", takes=str, read=lambda text: tuple(dict.fromkeys(read_names(text or ""))))


def list_detectors(text: str | None) -> list[str] | None:
    if text is not None and not read_names(text):
        raise UsageError("--detector is empty: name detectors, such as rmd,energy (maple methods lists them)")
    return None if text is None else read_names(text)


def channels(help: str, name: str, neutral: str) -> Any:
    """A flag that takes one number per channel."""

    def read(text: str | None) -> tuple[float, ...] | None:
        return read_numbers(text, name, float, "three numbers, such as 0.485,0.456,0.406", length=3)

    return flag(None, help, shown=f"its own, or {neutral}", metavar="R,G,B", takes=str, read=read)


def describe_presets() -> str:
    from maple.runs.setup.presets import list_presets

    return f"settings by name: {', '.join(list_presets())}"
