"""The chi-square tail, its quantiles and the test of the fit, against SciPy and mpmath."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import chi2

from maple.errors import DataError, UsageError
from maple.stats.chi_square import chi_square_quantiles, gaussian_test, log_chi_square_tail, qq_points


@pytest.mark.parametrize("k", [1, 2, 3, 4, 10, 11, 22, 23, 100, 101, 640])
def test_tail_equals_scipy_where_scipy_is_finite(k):
    d2 = np.concatenate([[0.0, 1e-12, 1e-3], np.linspace(0.01, 3 * k + 50, 300), [k, k + 1e-9, np.nextafter(k, 0)]])
    ours = log_chi_square_tail(d2, k)
    expected = chi2.logsf(d2, k)
    finite = np.isfinite(expected) & (expected > -600)
    assert finite.all()
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("k", [1, 2, 3, 11, 22, 23, 301])
@pytest.mark.parametrize("d2", [0.5, 30.0, 700.0, 5e3, 1e5, 1e8])
def test_tail_equals_mpmath_far_out(k, d2):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        expected = float(
            mpmath.log(mpmath.gammainc(mpmath.mpf(k) / 2, mpmath.mpf(d2) / 2, mpmath.inf, regularized=True))
        )
    assert log_chi_square_tail(d2, k) == pytest.approx(expected, rel=1e-11, abs=1e-15)


@settings(max_examples=200)
@given(k=st.integers(1, 700), d2=st.floats(0, 1e300))
def test_tail_is_finite_and_at_most_zero(k, d2):
    value = float(log_chi_square_tail(d2, k))
    assert np.isfinite(value) and value <= 0


@pytest.mark.parametrize("k", [1, 2, 11, 22, 301])
def test_far_images_do_not_tie(k):
    """1 - cdf is exactly 0 from about d² = 100 at 11 degrees of freedom, and SciPy's logsf is -inf from about 1,500."""
    d2 = np.geomspace(k, 1e12, 2000)
    assert (np.diff(log_chi_square_tail(d2, k)) < 0).all()


def test_tail_shapes_and_errors():
    assert log_chi_square_tail(np.ones((2, 3)) * 50, 4).shape == (2, 3)
    assert log_chi_square_tail(1e4, 4).shape == ()
    assert float(log_chi_square_tail(0.0, 5)) == 0
    assert np.isfinite(log_chi_square_tail(np.inf, 7))
    for wrong in (0, 2.5, -1):
        with pytest.raises(UsageError, match="degrees_of_freedom"):
            log_chi_square_tail(1.0, wrong)


def test_chi_square_quantiles_equal_scipy():
    for degrees in (1, 2, 11, 22, 640):
        expected = stats.chi2.ppf((np.arange(1, 1001) - 0.5) / 1000, degrees)
        np.testing.assert_allclose(chi_square_quantiles(1000, degrees), expected, rtol=1e-9)


def test_gaussian_test_equals_the_loop(rng):
    d2 = rng.chisquare(5, 300)
    quantiles = [stats.chi2.ppf((i - 0.5) / 300, 5) for i in range(1, 301)]
    expected = np.mean([abs(a - b) for a, b in zip(sorted(d2), quantiles, strict=True)])
    assert gaussian_test(d2, 5) == pytest.approx(expected)


def test_gaussian_test_falls_as_gaussian_samples_grow(rng):
    errors = [gaussian_test(rng.chisquare(12, n), 12) for n in (100, 10_000, 1_000_000)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.02
    assert gaussian_test(rng.chisquare(12, 10_000) * 2, 12) > 10  # twice as far: about 12 apart


def test_quantiles_themselves_have_no_error():
    assert gaussian_test(chi_square_quantiles(50, 7), 7) == 0.0


def test_qq_points_are_few_and_keep_both_ends(rng):
    d2 = rng.chisquare(10, 5000)
    theoretical, observed = qq_points(d2, 10, points=200)
    assert 50 < len(theoretical) == len(observed) <= 200
    assert (observed[0], observed[-1]) == (d2.min(), d2.max())
    assert (np.diff(theoretical) > 0).all()
    full = dict(zip(chi_square_quantiles(5000, 10), np.sort(d2), strict=True))
    assert all(full[t] == o for t, o in zip(theoretical, observed, strict=True))
    # The upper half of the axis is not left to a handful of points, as thinning by rank would.
    assert (theoretical > theoretical[-1] / 2).sum() > 40


def test_qq_points_of_few_images_are_all_of_them():
    theoretical, observed = qq_points([3.0, 1.0], 2)
    np.testing.assert_array_equal(observed, [1.0, 3.0])
    np.testing.assert_allclose(theoretical, stats.chi2.ppf([0.25, 0.75], 2))


@pytest.mark.parametrize("call", [gaussian_test, qq_points])
def test_distances_that_cannot_be_sorted_are_refused(call):
    for bad in ([], [1.0, np.nan], [1.0, np.inf]):
        with pytest.raises(DataError, match="squared_distances"):
            call(bad, 3)
    with pytest.raises(UsageError, match="degrees_of_freedom"):
        call([1.0], 0)


def test_a_plot_needs_two_points():
    with pytest.raises(UsageError, match="points"):
        qq_points([1.0, 2.0], 3, points=1)
