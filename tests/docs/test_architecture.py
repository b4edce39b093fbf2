"""The page on the architecture names modules, functions and classes that exist, in the rows that are enforced."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROUTES = {
    section.partition("\n")[0]: re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", section, flags=re.MULTILINE)
    for section in PAGE.split("\n## ")[1:]
}


@pytest.mark.parametrize("route", ["Train", "Predict", "Serve", "Export"])
def test_a_route_enters_each_module_once(route):
    modules = [module for module, _ in ROUTES[route]]
    assert len(modules) > 8
    assert len(modules) == len(set(modules))


@pytest.mark.parametrize(("module", "entry"), sorted({entry for route in ROUTES.values() for entry in route}))
def test_entries_exist(module, entry):
    tree: ast.AST = ast.parse((ROOT / "src" / "maple" / module).read_text(encoding="utf-8"))
    for name in entry.split("."):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        found = [node for node in ast.iter_child_nodes(tree) if isinstance(node, kinds) and node.name == name]
        assert found, f"{module} has no {entry}"
        tree = found[0]


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_rows_are_those_of_the_contract(page):
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    rows = [set(re.findall(r"\w+", row)) for row in tools["importlinter"]["contracts"][0]["layers"]]
    blocks = re.findall(r"```(?:text)?\n(cli .*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = blocks[0].splitlines()
    drawn = [set(re.findall(r"\w+", re.split(r" {3,}", line)[0])) for line in lines]
    assert drawn == rows
