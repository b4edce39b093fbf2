"""G-Means: the Anderson-Darling test against its definition and published tables, and data with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from sklearn.metrics import adjusted_rand_score

from clusters import spherical_blobs
from maple.errors import UsageError
from maple.stats.clustering._means import cluster_means
from maple.stats.clustering._starts import bisect_points
from maple.stats.clustering.gmeans import GMeans, anderson_darling, anderson_darling_critical_value


def test_anderson_darling_equals_the_definition(rng):
    sample = rng.exponential(size=25)
    y = sorted((sample - sample.mean()) / sample.std(ddof=1))
    total = 0.0
    for i in range(1, 26):
        total += (2 * i - 1) * (stats.norm.logcdf(y[i - 1]) + stats.norm.logsf(y[25 - i]))
    by_hand = (-25 - total / 25) * (1 + 0.75 / 25 + 2.25 / 25**2)
    assert_allclose(anderson_darling(sample), by_hand, rtol=1e-12)


def test_points_without_spread_between_the_centres_are_no_evidence(rng):
    fitted = np.repeat([[0.0, 0.0], [9.0, 0.0]], 20, axis=0)
    tested = np.column_stack([np.full(40, 3.0), rng.exponential(size=40)])  # spread across, none along
    assert GMeans()._statistic(fitted, tested, np.random.RandomState(0)) == 0
    assert GMeans()._statistic(fitted, tested[:, ::-1], np.random.RandomState(0)) > 0


def test_anderson_darling_ignores_shift_and_scale_and_survives_outliers(rng):
    sample = rng.standard_normal(100)
    assert_allclose(anderson_darling(1e4 - 3 * sample), anderson_darling(-sample), rtol=1e-9)
    assert math.isfinite(anderson_darling(np.append(np.zeros(10_000), 1e12)))


@pytest.mark.parametrize(("significance", "published"), [(0.1, 0.631), (0.05, 0.752), (0.025, 0.873), (0.01, 1.035)])
def test_critical_values_of_the_published_table(significance, published):
    assert_allclose(anderson_darling_critical_value(significance), published, atol=0.005)


@pytest.mark.parametrize("n", [10, 200])
def test_anderson_darling_keeps_its_level(n, rng):
    statistics = np.array([anderson_darling(sample) for sample in rng.standard_normal((4_000, n))])
    for significance in (0.05, 0.01):
        rejected = int((statistics > anderson_darling_critical_value(significance)).sum())
        assert stats.binomtest(rejected, len(statistics), significance).pvalue > 1e-3


def test_g_means_keeps_its_level_where_there_are_about_as_many_dimensions_as_points(rng):
    """Along the vector between two centres found on the same points, these look bimodal."""
    points = rng.standard_normal((300, 200)).astype(np.float32)
    sides = bisect_points(points, random_state=0)
    first, second = cluster_means(points, sides)
    assert anderson_darling(points @ (second - first)) > anderson_darling_critical_value(1e-4)
    assert GMeans(random_state=0).fit(points).n_clusters_ == 1


def test_g_means_finds_clusters_in_many_dimensions(rng):
    points, origins = spherical_blobs(rng.standard_normal((3, 200)), [100, 100, 100], rng)
    assert adjusted_rand_score(origins, GMeans(random_state=0).fit(points).labels_) == 1


@pytest.mark.parametrize("value", [0, 0.2, "low"])
def test_wrong_significance(value):
    with pytest.raises(UsageError, match="significance"):
        GMeans(significance=value).fit(np.eye(5))


@pytest.mark.parametrize(("n", "clusters"), [(15, 1), (16, 2)])
def test_fewer_than_16_points_are_too_few_for_a_test(n, clusters):
    """However far the two halves are apart, and at the largest significance."""
    points = np.where(np.arange(n) % 2 == 0, 1e3, -1e3)[:, None] + np.linspace(0, 1, n)[:, None]
    found = {GMeans(2, significance=0.1, random_state=seed).fit(points).n_clusters_ for seed in range(20)}
    assert max(found) == clusters
