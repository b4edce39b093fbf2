"""The README's Python runs as it stands, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

from maple.cli.app import COMMANDS
from maple.detectors.registry import DETECTORS
from maple.evaluation.paper.suites import SUITES
from maple.training.recipe import RECIPES

PACKAGE = frozenset(SUITES)  # before any test
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_python_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 (our own file)
    prediction = names["prediction"]
    assert (prediction.class_id == names["splits"].test.labels).mean() > 0.7


def test_commands_exist():
    known = set(COMMANDS)
    used = set(re.findall(r"^maple (\w+)", README, flags=re.MULTILINE))
    assert used <= known
    assert {"train", "predict", "report", "evaluate"} <= used


def test_numbers_of_methods_and_tables_are_right():
    """Those of the package: other tests may have registered methods of their own."""
    assert RECIPES.names() and DETECTORS.names()  # which imports them all
    methods = [[each.kind.__module__ for each in registry.registered()] for registry in (RECIPES, DETECTORS)]
    found = [sum(module.startswith("maple.") for module in modules) for modules in methods]
    said = re.search(r"# (\d+) recipes, (\d+) detectors.*# (\d+) tables and figures", README, re.DOTALL)
    assert [int(number) for number in said.groups()] == [*found, len(PACKAGE)]
