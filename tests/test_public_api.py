"""The door with a list on it: what is exported exists, and importing stays light."""

from __future__ import annotations

import doctest
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

import pytest

import maple


@pytest.mark.parametrize("name", maple.__all__)
def test_exported_names_exist(name):
    if name == "MapleCallback" and not any(map(find_spec, ("pytorch_lightning", "lightning"))):
        pytest.skip("Lightning is not installed")
    assert getattr(maple, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = maple.nothing


def test_names_do_not_shadow_modules():
    import importlib.util

    for name in maple.__all__:
        assert importlib.util.find_spec(f"maple.{name}") is None, name


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import maple", ["torch", "scipy", "sklearn", "matplotlib", "pyarrow", "numpy"]),
        ("import maple.cli.app", ["torch", "scipy", "sklearn", "matplotlib", "pyarrow"]),
        (
            "import maple.stats.gaussians, maple.stats.clustering.splitting, maple.stats.metrics, "
            "maple.decisions.calibration, maple.detectors.maple",
            ["torch", "matplotlib"],
        ),
        ("import maple.reporting.report", ["torch"]),
        ("import maple.prediction.callback, maple.prediction.own_loop", ["pytorch_lightning", "lightning"]),
    ],
)
def test_import_weight(statement, heavy):
    code = f"import sys; {statement}; print(*[m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


@pytest.fixture
def package(tmp_path):
    stub = """
from typing import Any
from collections import Counter as Counter, deque as deque

version: str

def feed(pet: str, times: int) -> Any: ...
"""
    (tmp_path / "__init__.pyi").write_text(stub)
    return str(tmp_path / "__init__.py")


def test_the_stub_says_where_names_come_from(package):
    assert doctest.testmod(maple).attempted and doctest.testmod(maple).failed == 0
    assert maple.attach_stub("pets", package)[1] == {"Counter": "collections", "deque": "collections"}


def test_a_name_is_imported_on_first_use(package):
    import_name, _ = maple.attach_stub("pets", package)
    assert import_name("Counter") is Counter


@pytest.mark.parametrize("name", ["version", "feed", "Any"])
def test_a_name_the_stub_does_not_export_is_an_attribute_error_that_names_the_package(package, name):
    import_name, _ = maple.attach_stub("pets", package)
    with pytest.raises(AttributeError, match=rf"'pets'.*'{name}'"):
        import_name(name)
