"""Plug-in files: one TOML file that adds modules with methods, data sets and suites to every command.

    plugin = ["my_detector", "my_recipe"]     # modules beside the file, or installed

    [data.pond]                               # a data set: maple train pond
    title = "Diatoms of our pond"
    path = "pond"                             # from the file on

    [suites.pond]                             # a table: maple benchmark pond
    source = "pond"
    columns = "accuracy auroc/debris"
    ...

``--plugin lab.toml`` names one; an installed package has one as ``plugin.toml`` beside the module that its entry point
``maple.plugins`` names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from maple.data.catalogue.table import DataSet, register_data_set
from maple.errors import ConfigError, MapleError, UsageError, suggest
from maple.evaluation.paper.profiles import Protocol
from maple.evaluation.paper.suites import register_suite
from maple.files import suggest_path
from maple.options import Values, option, read_toml, validate_options
from maple.progress import warn
from maple.registry import load_plugin

SUFFIX = ".toml"
ENTRY_POINTS = "maple.plugins"
INSTALLED = "plugin.toml"  # beside the module of an entry point
_SECTIONS = ("plugin", "data", "suites")


@dataclass(frozen=True, kw_only=True)
class PluginData:
    """A section ``[data.NAME]``."""

    path: str = option("", "file or folder, from the plug-in file on")
    title: str = option("", "what it shows")
    paper: str = option("", "where it was published")
    licence: str = option("", "what others may do with it")
    note: str = option("", "advice for its use")


@dataclass(frozen=True, kw_only=True)
class PluginSuite:
    """The images of a section ``[suites.NAME]``; its other keys are those of ``suites.toml``."""

    source: str = option("", "images to train on")
    test: str | None = option(None, "test images")
    ood: dict[str, str] = field(default_factory=dict, metadata={"help": "sources of unknown images by name"})
    near: tuple[str, ...] = option((), "names of unknown images in the near group")
    far: tuple[str, ...] = option((), "names of unknown images in the far group")
    flags: dict[str, Any] = field(default_factory=dict, metadata={"help": "options of all its trainings"})
    preset: str = option("", "preset of its trainings in profile 'paper'")


def load_plugin_file(path: Path) -> None:
    """Import the modules of a plug-in file, and make its data sets and suites known."""
    if not path.is_file():
        hint = suggest_path(path) or "check --plugin"
        raise UsageError(f"no plug-in file '{path}': {hint}")
    content, folder = read_toml(path), path.resolve().parent
    for key in content:
        if key not in _SECTIONS:
            raise ConfigError(f"unknown key '{key}' in the plug-in file '{path}': {suggest(key, _SECTIONS)}")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last: a file there must not replace an installed package
    for module in _table(content.get("plugin", []), list, path, "plugin"):
        load_plugin(module)
    for kind, add in (("data", _add_data), ("suites", _add_suite)):
        for name, section in _table(content.get(kind, {}), dict, path, kind).items():
            add(name, _table(section, dict, path, f"{kind}.{name}"), path)


def load_installed() -> None:
    """The plug-in files of installed packages; one that is broken must not break the command."""
    for point in entry_points(group=ENTRY_POINTS):
        try:
            spec = find_spec(point.module)
            if spec is None or spec.origin is None:
                raise UsageError(f"there is no module '{point.module}'")
            load_plugin_file(Path(spec.origin).with_name(INSTALLED))
        except (MapleError, ImportError) as error:
            warn(f"the plug-in '{point.name}' is left out: {error}")


def _table(value: Any, kind: type, path: Path, key: str) -> Any:
    if not isinstance(value, kind):
        raise ConfigError(f"'{key}' in '{path}' is {value!r}: write a {'list' if kind is list else 'section'}")
    return value


def _add_data(name: str, section: Mapping[str, Any], path: Path) -> None:
    where = f"[data.{name}] of '{path}'"
    found = PluginData(**validate_options(PluginData, section, where))
    if not found.path:
        raise ConfigError(f"{where} has no path: give the file or folder with its images")
    try:
        place = (path.resolve().parent / found.path).resolve()
    except ValueError as error:  # a null character
        raise ConfigError(f"the path of {where} cannot be used ({error}): correct it") from None
    register_data_set(
        DataSet(
            name=name,
            title=found.title or name,
            paper=found.paper,
            licence=found.licence,
            classes=0,
            path=str(place),
            note=found.note or f"its plug-in file '{path}' expects it at '{place}'",
        )
    )


def _add_suite(name: str, section: Mapping[str, Any], path: Path) -> None:
    """Split a section into its images, a protocol of the same name, and its table."""
    where = f"[suites.{name}] of '{path}'"
    own = {each.name for each in fields(PluginSuite)}
    asked = PluginSuite(**validate_options(PluginSuite, {k: v for k, v in section.items() if k in own}, where))
    if not asked.source:
        raise ConfigError(f"{where} has no source: name the images to train on")
    if unknown := [each for each in (*asked.near, *asked.far) if each not in asked.ood]:
        raise ConfigError(f"'{unknown[0]}' in {where} is in a group but not in ood: {suggest(unknown[0], asked.ood)}")
    flags: Values = dict(asked.flags)
    protocol = Protocol(
        asked.source, asked.ood, asked.test, flags=flags, preset=asked.preset, near=asked.near, far=asked.far
    )
    table = {"title": name, "place": path.name, "shows": "of a plug-in", "reference": "published"}
    register_suite(name, {**table, **{k: v for k, v in section.items() if k not in own}}, protocol, where)
