"""Options of the decision: defaults, limits, and 'none' as text; declared without heavy imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from maple.decisions.calibration import Calibration
from maple.decisions.options import DecisionOptions
from maple.errors import ConfigError
from maple.options import as_dict, build_options


def test_defaults_are_those_of_the_decision():
    decision = Calibration.empty(2).decide(**as_dict(DecisionOptions()))
    same = Calibration.empty(2).decide()
    assert decision.describe() == same.describe()


@pytest.mark.parametrize("text", ["none", None])
def test_no_confidence_by_name(text):
    assert build_options(DecisionOptions, {"confidence": text}).confidence is None


def test_text_is_converted():
    built = build_options(DecisionOptions, {"false_alarm": "0.2", "confidence": "0.95", "per_class": "true"})
    assert built == DecisionOptions(false_alarm=0.2, confidence=0.95, per_class=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("false_alarm", 0), ("false_alarm", 1), ("confidence", 0), ("confidence", 1), ("confidence", "much")],
)
def test_values_outside_the_limits_name_the_option(name, value):
    with pytest.raises(ConfigError, match=f"'{name}'"):
        build_options(DecisionOptions, {name: value})


def test_the_command_line_reads_them_without_scipy():
    code = "import maple.decisions.options, sys; assert not {'scipy', 'torch', 'pydantic'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
