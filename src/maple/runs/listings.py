"""Rows of ``maple data`` and ``maple methods``: data sets, recipes and detectors with their options."""

from __future__ import annotations

from dataclasses import Field, asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from maple.data.catalogue.get import describe_data_set, locate
from maple.data.catalogue.table import CATALOGUE, find_data_set, is_built_in
from maple.data.sources import open_images
from maple.data.sources.names import list_data_sets, split_files
from maple.detectors.registry import DETECTORS
from maple.errors import UsageError, suggest
from maple.progress import counting
from maple.registry import Method, Registry
from maple.training.recipe import RECIPES

_REGISTRIES: tuple[Registry[Any], ...] = (RECIPES, DETECTORS)
_MAX_SPLITS = 7  # named in a row; of more, the first three and their number


# --- data sets --------------------------------------------------------------------------------------------------------


def list_sources(data_root: Path | None = None) -> list[dict[str, Any]]:
    """The data sets of the catalogue, found or not, those built in, and those under the data root."""
    rows: dict[str, dict[str, Any]] = {}
    for name in (*list_data_sets(data_root), *CATALOGUE):
        if name in rows or (name.rpartition("/")[0] in rows and not is_built_in(name)):  # cifar10 covers cifar10/test
            continue
        path = locate(name, data_root)
        splits = list(split_files(path)) if path is not None and path.is_dir() else []
        where = str(path.resolve()) if path is not None else f"not found, see maple data {name}"
        rows[name] = {
            "source": name,
            "splits": ", ".join(splits if len(splits) <= _MAX_SPLITS else [*splits[:3], f"{len(splits) - 3} more"]),
            "where": "built in" if is_built_in(name) else where,
            "found": is_built_in(name) or path is not None,
        }
    return list(rows.values())


def describe_source(source: str, data_root: Path | None = None) -> dict[str, Any]:
    """The content of a source; of a data set of the catalogue also its description, places searched and download."""
    data_set = find_data_set(source)
    about = {} if data_set is None else describe_data_set(data_set, data_root)
    if data_set is not None and not is_built_in(source) and locate(source, data_root) is None:
        return {"source": source, "found": False, **about}
    with counting("decoding") as progress:
        images = open_images(source, data_root=data_root, progress=progress)
    counts = np.bincount(images.labels[images.labels >= 0], minlength=len(images.class_names))
    return {
        "source": images.name,
        "found": True,
        "images": len(images),
        "classes": len(images.class_names),
        "per class": f"{counts.min()} to {counts.max()}" if len(counts) else "",
        "size": images.size,
        "skipped": len(images.skipped),
        **about,
    }


# --- methods ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MethodFacts:
    """A method and its kind."""

    kind: str  # recipe or detector
    method: Method[Any]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.method.name, **asdict(self.method.about)}

    def options(self) -> dict[str, tuple[Any, Field[Any]]]:
        """Type annotation and field of each option that has an effect and a flag."""
        hints = get_type_hints(self.method.kind, include_extras=True) if self.method.options else {}
        return {n: (hints[n], each) for n, each in self.method.options.items() if each.metadata.get("flag", True)}


def list_methods() -> list[dict[str, Any]]:
    """All recipes and detectors: title, paper, cost and what each needs."""
    every = [(registry, name) for registry in _REGISTRIES for name in registry.names()]
    return [MethodFacts(registry.word, registry.find(name)).to_dict() for registry, name in every]


def find_methods(name: str) -> list[MethodFacts]:
    """The recipe and the detector called ``name``, those that exist.

    >>> [(found.kind, list(found.options())) for found in find_methods("knn")]
    [('detector', ['k', 'share', 'seed'])]
    """
    found = [MethodFacts(registry.word, registry.find(name)) for registry in _REGISTRIES if name in registry]
    if not found:
        known = {*RECIPES.names(), *DETECTORS.names()}
        raise UsageError(f"unknown method '{name}': {suggest(name, known)}")
    return found
