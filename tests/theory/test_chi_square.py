"""What theory promises for Gaussian classes: uniform typicality, coverage, and an honest false-alarm rate.

Typicality is uniform for an image's own cluster, on fresh images, with many training images; and only then.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2, kstest

from maple.decisions.conformal import conformal_p_values, conformal_threshold
from maple.detectors.maple import MapleDetector
from maple.stats.chi_square import log_chi_square_tail
from maple.types import Outputs

pytestmark = pytest.mark.slow

N_CLUSTERS, DIM = 6, 24
CLUSTER_TO_CLASS = np.array([0, 0, 1, 2, 2, 2])


class GaussianClasses:
    """Clusters with a common covariance, in a space whose axes are correlated and differently scaled."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        spectrum = 0.8 ** np.arange(DIM)
        rotation = np.linalg.qr(self.rng.normal(size=(DIM, DIM)))[0]
        self.mixing = np.diag(spectrum) @ rotation * self.rng.uniform(0.1, 10, size=DIM)
        self.means = 4 * self.rng.normal(size=(N_CLUSTERS, DIM))

    def draw(self, n: int) -> Outputs:
        ids = self.rng.integers(0, N_CLUSTERS, size=n)
        embeddings = (self.rng.normal(size=(n, DIM)) + self.means[ids]) @ self.mixing + 3
        return Outputs(embeddings, labels=CLUSTER_TO_CLASS[ids], cluster_ids=ids, cluster_to_class=CLUSTER_TO_CLASS)


def own_distances(detector: MapleDetector, outputs: Outputs) -> np.ndarray:
    return detector.squared_distances(outputs)[np.arange(len(outputs)), outputs.cluster_ids]


@pytest.mark.parametrize("options", [{}, {"pca": False}, {"covariance": "full"}])
def test_typicality_of_the_own_cluster_is_uniform_on_fresh_images(options):
    classes = GaussianClasses(seed=1)
    detector = MapleDetector(norm_exponent=0, **options).fit(classes.draw(200_000))
    k = detector.gaussians_.n_components
    d2 = own_distances(detector, classes.draw(40_000))
    assert kstest(np.exp(log_chi_square_tail(d2, k)), "uniform").pvalue > 0.01
    assert abs((d2 <= chi2.ppf(0.95, k)).mean() - 0.95) < 0.005
    assert d2.mean() == pytest.approx(k, rel=0.02)


def test_global_covariance_breaks_uniformity():
    """Guards the test above: the published code's covariance makes typicality far too large."""
    classes = GaussianClasses(seed=1)
    detector = MapleDetector(norm_exponent=0, covariance="global").fit(classes.draw(50_000))
    d2 = own_distances(detector, classes.draw(20_000))
    assert np.exp(log_chi_square_tail(d2, detector.gaussians_.n_components)).mean() > 0.7


def test_gaussian_test_error_falls_with_the_number_of_images():
    """Mean absolute difference between ordered distances and chi-square quantiles, averaged over draws."""
    errors = []
    for n in (300, 3_000, 30_000):
        per_seed = []
        for seed in range(5):
            classes = GaussianClasses(seed)
            detector = MapleDetector(norm_exponent=0).fit(classes.draw(n))
            d2 = np.sort(own_distances(detector, classes.draw(20_000)))
            quantiles = chi2.ppf((np.arange(len(d2)) + 0.5) / len(d2), detector.gaussians_.n_components)
            per_seed.append(np.abs(d2 - quantiles).mean())
        errors.append(np.mean(per_seed))
    assert errors[0] > 2 * errors[1] > 2 * errors[2]


def test_conformal_false_alarm_rate_holds_on_average():
    """For n calibration images and rate a, the expected rate is floor(a (n + 1)) / (n + 1), without any assumption."""
    classes = GaussianClasses(seed=3)
    detector = MapleDetector(explained_variance=0.8).fit(classes.draw(2_000))  # normalised, hence not Gaussian at all
    n, rate, alarms = 99, 0.05, []
    scores = detector.score(classes.draw(400 * (n + 100)))
    for part in scores.reshape(400, n + 100):
        calibration, fresh = part[:n], part[n:]
        flagged = fresh > conformal_threshold(calibration, rate)
        np.testing.assert_array_equal(flagged, conformal_p_values(fresh, calibration) <= rate)
        alarms.append(flagged.mean())
    assert np.mean(alarms) == pytest.approx(0.05, abs=4 * np.std(alarms) / 20)
    assert np.std(alarms) / 20 < 0.003
