"""Methods by name: one registry of detectors, one of recipes, each complete wherever it is used from.

A class registers itself with a decorator beside its definition. Modules of the package are found by scanning folders,
so a new method is one new file. A module is imported when one of its names is asked for, or for a full listing:
``create_detector("knn")`` does not load torch. Methods from outside the package come from an entry point of an
installed distribution or from a module named with ``--plugin`` (:func:`load_plugin`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from maple.errors import EXTRAS, MapleError, UsageError, suggest
from maple.options import build_options
from maple.progress import warn
from maple.types import About

Kind = TypeVar("Kind")
AnyClass = TypeVar("AnyClass", bound=type)
_REGISTRIES = ("maple.detectors.registry", "maple.training.recipe")
_loading: list[str] = []  # plug-ins that are being imported, innermost last
_registered: set[str] = set()  # plug-ins that have registered a method or a network
_registries: list[Registry[Any]] = []


@dataclass(frozen=True, eq=False)
class Method(Generic[Kind]):
    """A registered name: a class, and the options that the name fixes."""

    name: str
    kind: type[Kind]
    about: About
    fixed: Mapping[str, Any] = field(default_factory=dict)
    plugin: str = ""  # that registered it; empty for methods of the package

    @cached_property
    def options(self) -> dict[str, Field[Any]]:
        """The options that have an effect, by name: without fixed ones, and without those of a switch fixed to off."""
        own: tuple[Field[Any], ...] = fields(self.kind) if is_dataclass(self.kind) else ()
        return {
            each.name: each
            for each in own
            if each.name not in self.fixed and self.fixed.get(each.metadata.get("needs", ""), True)
        }

    def create(self, options: Mapping[str, Any], where: str | None) -> Kind:
        """An instance with these options; errors say ``where`` the options come from, ``None`` for ``--set``."""
        if not is_dataclass(self.kind):
            for option in options:
                raise UsageError(f"unknown option '{option}' in {where or '--set ' + self.name}: it has no options")
            return self.kind()
        return build_options(self.kind, {**options, **self.fixed}, where, owner=self.name)


class Registry(Generic[Kind]):
    """Classes by name. ``word`` is what an entry is called: ``register_<word>`` decorates, entry points are of the
    group ``maple.<word>s``."""

    def __init__(self, word: str, folders: Sequence[str], reserved: Sequence[str] = ()) -> None:
        self.word = word
        self.folders = folders
        self.reserved = reserved  # names that mean something else in ``--set NAME.OPTION``
        self._methods: dict[str, Method[Kind]] = {}
        self._renamed: dict[str, str] = {}  # present name by former one
        self._missing: dict[str, str] = {}  # extra by module that cannot be imported without it
        self._loaded = False
        _registries.append(self)

    def register(
        self, name: str, about: About | None = None, was: str = "", **fixed: Any
    ) -> Callable[[AnyClass], AnyClass]:
        """Class decorator that makes a class known by ``name``, with ``fixed`` options.

        ``was`` is a former name, still accepted but not listed.
        """

        def decorate(kind: AnyClass) -> AnyClass:
            self._check(name, kind)
            if not fixed:
                kind.name = name  # type: ignore[attr-defined]
            self._methods[name] = Method(name, kind, about or About.of(kind), fixed, self._plugin_loading(kind))
            if was:
                self._renamed[was] = name
            note_plugin(kind)
            return kind

        return decorate

    def find(self, name: str, plugin: str | None = None) -> Method[Kind]:
        """The method called ``name``; ``plugin`` is the one that a run was made with, named in the error only."""
        if name not in self._methods and name in self._modules:
            self._import(self._modules[name])
        name = self.present_name(name)
        if name not in self._methods:
            raise UsageError(f"unknown {self.word} '{name}': {self._hint(name, plugin)}")
        return self._methods[name]

    def present_name(self, name: str) -> str:
        """The name itself, or the one that replaced it."""
        if name not in self._methods:
            self._load_all()
        return self._renamed.get(name, name)

    def __contains__(self, name: str) -> bool:
        if name not in self._methods and name not in self._modules:
            name = self.present_name(name)
        return name in self._methods or name in self._modules

    def names(self) -> list[str]:
        """All names; those that need an extra which is not installed are left out."""
        self._load_all()
        return sorted(self._methods)

    def plugin_of(self, name: str) -> str:
        """The plug-in that registered ``name``; empty for methods of the package and classes without a name."""
        return self._methods[name].plugin if name in self._methods else ""

    def registered(self) -> list[Method[Kind]]:
        """The methods imported so far."""
        return list(self._methods.values())

    def _hint(self, name: str, plugin: str | None) -> str:
        if plugin:
            return (
                f"the run was made with the plug-in '{plugin}': install it, or give --plugin {plugin} if you trust it"
            )
        if module := self._modules.get(name):
            return f"it needs an extra: pip install 'maple-uncertainty[{self._missing.get(module, 'torch')}]'"
        return suggest(name, self._methods)

    # -- discovery

    @cached_property
    def _modules(self) -> dict[str, str]:
        """Module of each name in the package, read from the decorators in its source without importing anything."""
        found: dict[str, str] = {}
        decorator = re.compile(rf'^@register_{self.word}\(\s*"([^"]+)"', re.MULTILINE)
        for module, source in _sources(self.folders):
            found |= dict.fromkeys(decorator.findall(source), module)
        return found

    def _load_all(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for module in dict.fromkeys(self._modules.values()):
            self._import(module)
        for point in entry_points(group=f"maple.{self.word}s"):
            self._load_entry_point(point)

    def _import(self, module: str) -> None:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            extra = EXTRAS.get(error.name or "")
            if extra is None:
                raise
            self._missing[module] = extra

    def _load_entry_point(self, point: EntryPoint) -> None:
        """Import an installed plug-in; one that is broken must not break the methods of the package."""
        try:
            with _registering(point.module):
                point.load()
        except (Exception, SystemExit) as error:
            warn(f"the {self.word} '{point.name}' of the plug-in '{point.module}' is left out: {_one_line(error)}")

    # -- checks

    def _check(self, name: str, kind: type) -> None:
        known = self._methods[name].kind if name in self._methods else None
        module = self._modules.get(name) if known is None else known.__module__
        same = known is None or known.__qualname__ == kind.__qualname__  # a module that is loaded again
        if name in self.reserved or (module is not None and not (module == kind.__module__ and same)):
            raise UsageError(f"the name '{name}' of {self.word} {kind.__qualname__} is taken: choose another name")
        for each in fields(kind) if is_dataclass(kind) else ():
            if each.default is MISSING and each.default_factory is MISSING:
                raise UsageError(f"option '{each.name}' of {self.word} '{name}' has no default: give it one")
            if any(_is_member(vars(base).get(each.name)) for base in kind.__mro__[1:]):
                raise UsageError(f"option '{each.name}' of {self.word} '{name}' is a name of its base class: rename it")
        if self._plugin_loading(kind):
            self._check_owner(name, kind)

    def _plugin_loading(self, kind: type) -> str:
        """The plug-in that defines a class; empty for classes of the package, even if a plug-in imports them first."""
        return "" if not _loading or kind.__module__ in self._modules.values() else _loading[-1]

    def _check_owner(self, name: str, kind: type) -> None:
        """``--set NAME.OPTION`` must say whether an option is the recipe's or the detector's."""
        own = {each.name for each in fields(kind)} if is_dataclass(kind) else set()
        for other in _registries:
            if other is not self and name in other and (both := own & other.find(name).options.keys()):
                raise UsageError(
                    f"option '{min(both)}' of {self.word} '{name}' is also one of the {other.word} '{name}': rename one"
                )


def _is_member(value: Any) -> bool:
    return callable(value) or isinstance(value, property)


def _sources(folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and source text of each module in these folders and in folders inside them."""
    for folder in folders:
        spec = find_spec(folder)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(place).rglob("*.py")):
                inner = path.relative_to(place).with_suffix("").parts
                yield ".".join([folder, *inner]).removesuffix(".__init__"), path.read_text(encoding="utf-8")


def load_plugin(module: str) -> None:
    """Import a module that registers methods; the current folder is searched too.

    An error names the module, whatever went wrong in it.
    """
    path = Path(module)
    if path.suffix == ".py" or len(path.parts) > 1 or module.startswith("."):
        name = path.stem.lstrip(".")
        raise UsageError(f"plug-in '{module}' is a path: give the module name: --plugin {name}, in its folder")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file here must not replace an installed package
    try:
        for registry in _REGISTRIES:  # whose names and options it is checked against
            import_module(registry)
        is_new = module not in sys.modules
        with _registering(module):
            found = import_module(module)
    except MapleError as error:
        raise UsageError(f"plug-in '{module}': {error}") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"cannot import the plug-in '{module}' ({_one_line(error)}): check --plugin") from None
    if is_new and module not in _registered:
        place = getattr(found, "__file__", None) or "a folder without __init__.py"
        warn(
            f"the plug-in '{module}' ({place}) registers no detector, recipe or network: "
            "check that it is the module you mean"
        )


def note_plugin(made: Any) -> None:
    """Note that the plug-in being imported registers ``made``, a class or function that is not of the package."""
    own = made.func if isinstance(made, partial) else made
    if _loading and not own.__module__.startswith(f"{__package__}."):
        _registered.add(_loading[-1])


@contextmanager
def _registering(plugin: str) -> Iterator[None]:
    _loading.append(plugin)
    try:
        yield
    finally:
        _loading.pop()


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
