"""The door with a list on it: what is exported exists, and importing stays light."""

from __future__ import annotations

import subprocess
import sys
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
            "import maple.stats.gaussians, maple.stats.splitting, maple.stats.metrics, maple.decisions.calibration, "
            "maple.detectors.maple",
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
