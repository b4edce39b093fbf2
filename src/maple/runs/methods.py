"""Listings of recipes and detectors with their options, and detectors with options from ``--set``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

from maple.detectors.base import Detector
from maple.detectors.registry import DETECTORS, create_detector
from maple.errors import UsageError, suggest
from maple.registry import Method, Registry
from maple.training.recipe import RECIPES


@dataclass(frozen=True)
class OptionFacts:
    """An option of a method: its type annotation, default and help."""

    name: str
    annotation: Any
    default: Any
    help: str


@dataclass(frozen=True)
class MethodFacts:
    """A method of one kind, with the options that have an effect."""

    kind: str  # recipe or detector
    method: Method[Any]
    options: tuple[OptionFacts, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.method.name, **asdict(self.method.about)}


def list_methods() -> list[dict[str, Any]]:
    """All recipes and detectors: what they are, their papers, their cost and what they need."""
    registries: tuple[Registry[Any], ...] = (RECIPES, DETECTORS)
    return [_facts(registry, name).to_dict() for registry in registries for name in registry.names()]


def find_methods(name: str) -> list[MethodFacts]:
    """The recipe and the detector called ``name``, those that exist.

    >>> [(found.kind, len(found.options)) for found in find_methods("knn")]
    [('detector', 3)]
    """
    registries: tuple[Registry[Any], ...] = (RECIPES, DETECTORS)
    found = [_facts(registry, name) for registry in registries if name in registry]
    if not found:
        known = {*RECIPES.names(), *DETECTORS.names()}
        raise UsageError(f"unknown method '{name}': {suggest(name, known)}")
    return found


def _facts(registry: Registry[Any], name: str) -> MethodFacts:
    method = registry.find(name)
    hints = get_type_hints(method.kind, include_extras=True) if method.options else {}
    options = (
        OptionFacts(name, hints[name], field.default, field.metadata.get("help", ""))
        for name, field in method.options.items()
        if field.metadata.get("flag", True)
    )
    return MethodFacts(registry.word, method, tuple(options))


def create_detectors(names: Sequence[str], settings: Mapping[str, Any]) -> list[Detector]:
    """Detectors by name, each once, with options from ``settings`` by ``name.option``.

    >>> create_detectors(["energy", "knn"], {"knn.k": "10"})[1].k
    10
    """
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in settings.items():
        name, _, option = key.rpartition(".")
        if name not in DETECTORS:
            raise UsageError(f"--set {key}: unknown detector '{name}', {suggest(name, DETECTORS.names())}")
        if name not in options:
            raise UsageError(f"--set {key}: '{name}' is not compared here, add --detector {name}")
        options[name][option] = value
    return [create_detector(name, **own) for name, own in options.items()]
