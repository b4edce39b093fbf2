"""Prediction sets equal their definition."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maple.decisions.sets import min_labelled_images, prediction_sets, true_class_scores
from maple.errors import DataError, UsageError


def log_probabilities(rng: np.random.Generator, n: int, n_classes: int = 4) -> np.ndarray:
    return np.log(rng.dirichlet(np.full(n_classes, 0.5), size=n))


@given(n=st.integers(1, 150), percent=st.integers(1, 99), seed=st.integers(0, 9))
def test_sets_equal_their_definition(n, percent, seed):
    rng, coverage = np.random.default_rng(seed), percent / 100
    learned, new = np.sort(rng.exponential(size=n)), log_probabilities(rng, 50)
    rank = ceil((n + 1) * Fraction(percent, 100))
    limit = learned[rank - 1] if rank <= n else np.inf
    sets = prediction_sets(new, rng.permutation(learned), coverage)
    for row, found in zip(new, sets, strict=True):
        expected = [-value <= limit for value in row]
        expected[int(np.argmax(row))] = True
        assert found.tolist() == expected


@given(seed=st.integers(0, 99), coverages=st.tuples(st.floats(0.01, 0.99), st.floats(0.01, 0.99)))
def test_sets_grow_with_coverage_and_are_never_empty(seed, coverages):
    rng = np.random.default_rng(seed)
    new, learned = log_probabilities(rng, 20), rng.exponential(size=30)
    small, large = (prediction_sets(new, learned, coverage) for coverage in sorted(coverages))
    assert (small <= large).all()
    assert small[np.arange(20), new.argmax(axis=1)].all()


def test_sets_hold_all_classes_where_calibration_images_are_too_few(rng):
    new = np.vstack([log_probabilities(rng, 5), [[0.0, -np.inf, -np.inf, -np.inf]]])
    assert prediction_sets(new, rng.exponential(size=8), 0.9).all()
    assert not prediction_sets(new, rng.exponential(size=9), 0.9).all()
    for coverage in (0.05, 0.5, 2 / 3, 0.9, 0.95, 0.99, 0.999, 0.7 + 0.1):
        least = min_labelled_images(coverage)
        assert not prediction_sets(new, np.zeros(least), coverage).all()
        assert least == 1 or prediction_sets(new, np.zeros(least - 1), coverage).all()
    assert prediction_sets(new[:0], [1.0], 0.9).shape == (0, 4)
    with pytest.raises(DataError, match="labels"):
        prediction_sets(new, [], 0.9)


def test_true_class_scores_leave_out_unknown_classes(rng):
    torch = pytest.importorskip("torch")
    logs, labels = log_probabilities(rng, 6), np.array([3, -1, 0, 4, 1, 1])
    expected = [-logs[0, 3], -logs[2, 0], -logs[4, 1], -logs[5, 1]]
    np.testing.assert_array_equal(true_class_scores(logs, labels), expected)
    np.testing.assert_array_equal(true_class_scores(torch.tensor(logs), torch.tensor(labels)), expected)
    assert not np.signbit(true_class_scores([[0.0, -np.inf]], [0]))[0]
    assert true_class_scores([[0.0, -np.inf]], [1])[0] == np.inf
    assert true_class_scores(logs, np.full(6, -1)).shape == (0,)


@pytest.mark.parametrize("coverage", [0, 1, -0.1, 1.5, float("nan")])
def test_bad_coverage(coverage):
    for ask in (lambda: prediction_sets(np.zeros((1, 2)), [0.5], coverage), lambda: min_labelled_images(coverage)):
        with pytest.raises(UsageError, match="coverage"):
            ask()


@given(percent=st.integers(1, 99))
def test_the_least_number_of_labelled_images_is_exact(percent):
    """A set can leave a class out from n with n / (n + 1) >= coverage, in whole numbers."""
    n = min_labelled_images(percent / 100)
    assert 100 * n >= percent * (n + 1) and (n == 1 or 100 * (n - 1) < percent * n)
    logs, scores = np.log([[0.99, 0.01]]), np.linspace(0, 1, n)
    assert not prediction_sets(logs, scores, percent / 100).all()
    if n > 1:
        assert prediction_sets(logs, scores[1:], percent / 100).all()
