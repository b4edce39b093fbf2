"""Paired differences: values against the metrics, errors against the spread over many samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from maple.errors import UsageError
from maple.stats import metrics
from maple.stats.paired import _placements, auroc_difference, calibration_difference, mean_difference

SAMPLES = 150


def spread_and_error(draw) -> tuple[float, float]:
    """The deviation of the differences over samples, and the mean of their errors."""
    found = [draw(np.random.default_rng(seed)) for seed in range(SAMPLES)]
    return float(np.std([each.value for each in found])), float(np.mean([each.error for each in found]))


def draw_scores(rng: np.random.Generator):
    """Scores of two methods that share half of their noise; unknown images score higher."""
    first, second = [], []
    for n, shift in ((300, 0.0), (200, 1.0)):
        common = rng.normal(shift, 1, n)
        first.append(common + rng.normal(size=n))
        second.append(common + rng.normal(size=n))
    return tuple(first), tuple(second)


def draw_confidences(rng: np.random.Generator, factor: float = 1.0):
    """Confidences of the same correct or wrong images: calibrated ones, and others whose log-odds are multiplied."""
    odds = rng.normal(1.5, 1.5, 600)
    confidence = 1 / (1 + np.exp(-odds))
    correct = rng.random(600) < confidence
    other = 1 / (1 + np.exp(-factor * (odds + 0.2 * rng.normal(size=600))))
    return (confidence, correct), (other, correct)


def test_values_are_the_differences_of_the_metrics() -> None:
    first, second = draw_scores(np.random.default_rng(0))
    assert auroc_difference(first, second).value == pytest.approx(metrics.auroc(*first) - metrics.auroc(*second))
    first, second = draw_confidences(np.random.default_rng(0), 1.5)
    expected = metrics.expected_calibration_error(*first) - metrics.expected_calibration_error(*second)
    assert calibration_difference(first, second).value == pytest.approx(expected)


def test_errors_are_the_spread_over_samples() -> None:
    spread, error = spread_and_error(lambda rng: auroc_difference(*draw_scores(rng)))
    assert error == pytest.approx(spread, rel=0.2)
    spread, error = spread_and_error(lambda rng: mean_difference(*(m[1] for m in draw_scores(rng))))
    assert error == pytest.approx(spread, rel=0.2)


@pytest.mark.parametrize("factor", [1.0, 2.0])  # two calibrated methods, and one that is not
def test_the_error_of_calibration_differences_is_the_spread_over_samples(factor: float) -> None:
    spread, error = spread_and_error(lambda rng: calibration_difference(*draw_confidences(rng, factor)))
    assert 0.8 * spread < error < 1.4 * spread


def test_pairing_removes_what_both_methods_share() -> None:
    first, second = draw_scores(np.random.default_rng(0))
    assert auroc_difference(first, first) == (0, 0)
    mixed = tuple(np.random.default_rng(1).permutation(scores) for scores in second)
    assert auroc_difference(first, second).error < 0.9 * auroc_difference(first, mixed).error


def test_extreme_input() -> None:
    assert math.isnan(mean_difference([1], [0]).error)
    assert mean_difference([1, 0], [0, 0]) == pytest.approx((0.5, 0.5))
    assert mean_difference([-math.inf, 0], [-1, 0]).value == -math.inf
    with pytest.raises(UsageError):
        mean_difference([1, 0], [1])
    with pytest.raises(UsageError, match="first"):
        calibration_difference(([0.5, 0.6], [1, 0]), ([0.5], [1]))
    for correct in ([1], [1, 0, 1]):
        with pytest.raises(UsageError, match="correct"):
            calibration_difference(([0.5, 0.6], correct), ([0.5, 0.6], [1, 0]))
    for first, second in ((([0, 1], [2]), ([0], [2])), (([0], [2, 3]), ([0], [2]))):
        with pytest.raises(UsageError, match="first"):
            auroc_difference(first, second)


def test_placements_equal_loops(rng: np.random.Generator) -> None:
    ind, ood = rng.integers(0, 5, 9), rng.integers(2, 7, 7)
    above, below = _placements(ind, ood)
    np.testing.assert_allclose(above, [np.mean([(o > i) + 0.5 * (o == i) for o in ood]) for i in ind])
    np.testing.assert_allclose(below, [np.mean([(i < o) + 0.5 * (i == o) for i in ind]) for o in ood])


def test_the_error_of_calibration_is_that_of_a_bootstrap_of_all_images() -> None:
    first, second = draw_confidences(np.random.default_rng(3), 1.5)
    first, second = [(confidence[:12], correct[:12]) for confidence, correct in (first, second)]
    rng, drawn = np.random.default_rng(5), []
    for _ in range(4):
        rows = rng.integers(0, 12, 12)
        errors = [metrics.expected_calibration_error(p[rows], right[rows]) for p, right in (first, second)]
        drawn.append(errors[0] - errors[1])
    found = calibration_difference(first, second, draws=4, seed=5)
    assert found.error == pytest.approx(np.std(drawn, ddof=1))
