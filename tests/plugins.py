"""The plug-ins of docs/howto/extend.md, and registries that forget them afterwards."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maple.data.catalogue.table import CATALOGUE
from maple.detectors.registry import DETECTORS
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.suites import SUITES
from maple.training.recipe import RECIPES

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "extend.md"


def write_plugins(folder: Path) -> None:
    """Write ``my_detector.py``, ``my_recipe.py`` and ``lab.toml`` as the page has them."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r'^```(?:python|toml) title="(\w+\.\w+)"\n(.*?)^```$', text, re.M | re.S)
    for name, text in found:
        (folder / name).write_text(text, encoding="utf-8")


@contextmanager
def forgetting_plugins() -> Iterator[None]:
    """Within it, plug-ins may be loaded; afterwards registries, modules and paths are as before."""
    RECIPES.names(), DETECTORS.names()  # all methods of the package
    methods = [dict(registry._methods) for registry in (RECIPES, DETECTORS)]
    modules, path = set(sys.modules), list(sys.path)
    tables: list[dict[str, Any]] = [CATALOGUE, SUITES, *(profile.protocols for profile in PROFILES.values())]
    entries = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, former in zip(tables, entries):
            table.clear()
            table.update(former)
        for registry, before in zip((RECIPES, DETECTORS), methods):
            registry._methods.clear()
            registry._methods.update(before)
        for name in [name for name in set(sys.modules) - modules if "plugin" in name or name.startswith("my_")]:
            del sys.modules[name]
        sys.path[:] = path
