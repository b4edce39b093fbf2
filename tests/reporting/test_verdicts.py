"""Verdicts: noise decides, all rivals count, and results without noise are compared by the digits shown."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from maple.evaluation.results import Gain, Results
from maple.reporting.record import read_run
from maple.reporting.verdicts import compare_figures, describe_comparison, judge_gain


@pytest.fixture
def results(run: Path) -> Results:
    found = read_run(run).results
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("value", "error", "verdict"),
    [
        (0.021, 0.01, "ahead"),
        (0.019, 0.01, "equal"),
        (-0.019, 0.01, "equal"),
        (-0.021, 0.01, "behind"),
        (0.0, 0.0, "equal"),
        (0.01, math.nan, "equal"),  # of a single image
        (math.inf, math.nan, "ahead"),
        (math.nan, math.nan, None),
    ],
)
def test_two_standard_errors_decide(value: float, error: float, verdict: str | None) -> None:
    assert judge_gain(Gain(value, error)) == verdict


def test_the_least_favourable_rival_decides(results: Results) -> None:
    methods = results.methods | {"softmax-scaled": results.methods["softmax"]}
    gains = {"softmax": {"nll": Gain(0.1, 0.01)}, "softmax-scaled": {"nll": Gain(-0.1, 0.01)}}
    nll = compare_figures(replace(results, methods=methods, gains=gains))[2]
    assert nll.verdict == "behind" and nll.words == "behind scaled softmax, ahead of softmax"
    assert nll.others.startswith("softmax ") and "scaled" not in nll.others  # equal figures are shown once


def test_results_of_earlier_versions_are_compared_by_the_digits_shown(results: Results) -> None:
    found = compare_figures(replace(results, gains={}))
    for each in found:
        gain = round(each.value, 3) - round(each.rivals["softmax"], 3)
        gain = gain if each.figure.higher else -gain
        assert each.verdict == ("ahead" if gain > 0 else "behind" if gain < 0 else "equal")
    assert len({each.verdict for each in found}) > 1


def test_without_another_method_there_is_no_verdict(results: Results) -> None:
    alone = replace(results, methods={name: m for name, m in results.methods.items() if name != "softmax"}, gains={})
    compared = compare_figures(alone)
    assert [each.words for each in compared] == [""] * 5 and list(describe_comparison(compared)) == []
