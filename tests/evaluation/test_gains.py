"""Gains: the signed differences of the figures that the results show."""

from __future__ import annotations

import pytest

from blobs import blobs, make_predictor, unknown
from maple.evaluation.cases import evaluate
from maple.evaluation.results import Results


@pytest.fixture(scope="module")
def results() -> Results:
    return evaluate(make_predictor(), blobs(2), {"far": unknown(3, 4.0)})


def test_gains_are_differences_of_the_figures(results: Results) -> None:
    rows = {row["method"]: row for row in results.rows()}
    assert list(results.gains) == ["softmax", "softmax-scaled"]
    for rival, gains in results.gains.items():
        assert list(gains) == ["accuracy", "ece", "nll", "brier", "auroc/far"]
        for name, gain in gains.items():
            sign = -1 if name in ("ece", "nll", "brier") else 1  # lower is better
            assert gain.value == pytest.approx(sign * (rows["maple"][name] - rows[rival][name]), abs=1e-9)
            assert gain.error >= 0


def test_gains_survive_the_file(results: Results) -> None:
    assert Results.from_json(results.to_json()).gains == results.gains
