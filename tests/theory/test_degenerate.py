"""Training images as they are, not as theory likes them: repeated features, few images, one image, uneven classes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clusters import moments_of
from maple.detectors.maple import MapleDetector
from maple.stats.conditioning import measure_conditioning
from maple.stats.covariance import IMAGES_PER_COMPONENT
from maple.stats.gaussians import fit_gaussians
from maple.types import Outputs
from theory_data import SEEDS, draw_clusters


@given(SEEDS, st.integers(1, 4), st.sampled_from([np.float32, np.float64]))
def test_repeated_and_collinear_features_add_nothing(seed, n_more, dtype):
    """Without PCA distances stay those of the features they are made of, and so do the degrees of freedom."""
    embeddings, labels = draw_clusters(seed)
    embeddings = embeddings.astype(dtype).astype(np.float64)
    rng = np.random.default_rng(seed)
    mixed = embeddings @ rng.normal(size=(5, n_more)) + rng.normal(size=n_more)
    padded = np.column_stack([embeddings, embeddings[:, :n_more], mixed, np.full(300, 7.0)]).astype(dtype)
    plain = fit_gaussians(moments_of(embeddings, labels), pca=False)
    moments = moments_of(padded, labels)
    found = fit_gaussians(moments, pca=False)
    assert found.n_components == plain.n_components == 5
    assert measure_conditioning(moments, found).n_constant == 1
    tolerance = 1e-5 if dtype == np.float64 else 2e-2
    expected = plain.squared_distances(embeddings)
    np.testing.assert_allclose(found.squared_distances(padded), expected, rtol=tolerance, atol=tolerance)


@given(SEEDS, st.integers(6, 60), st.integers(20, 120), st.sampled_from(["tied", "global"]))
def test_more_features_than_images_are_fitted_shrunk_and_classified(seed, n, dim, covariance):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 3
    embeddings = rng.normal(size=(n, dim)) + 8 * np.eye(3, dim)[labels]
    moments = moments_of(embeddings, labels)
    gaussians = fit_gaussians(moments, covariance=covariance)
    assert gaussians.n_components < min(n, dim + 1)
    assert measure_conditioning(moments, gaussians).shrunk == (n - 3 < IMAGES_PER_COMPONENT * gaussians.n_components)
    distances = gaussians.squared_distances(embeddings)
    assert np.isfinite(distances).all() and (distances >= 0).all()
    assert (distances.argmin(1) == labels).mean() > 0.8


@given(SEEDS, st.integers(3, 40))
def test_shrinkage_keeps_fresh_images_of_small_classes_near(seed, n):
    """Few images leave directions without variance; unshrunk, fresh images would be thousands of times as far."""
    rng = np.random.default_rng(seed)
    labels = np.arange(2 * n) % 2
    means = 5 * rng.normal(size=(2, 30))
    train, fresh = (rng.normal(size=(2 * n, 30)) + means[labels] for _ in range(2))
    gaussians = fit_gaussians(moments_of(train, labels), explained_variance=1.0)
    rows = np.arange(2 * n)
    seen, unseen = (gaussians.squared_distances(x)[rows, labels].mean() for x in (train, fresh))
    assert unseen < 40 * seen


@example(147082, 29)  # condition 4e7
@given(SEEDS, st.integers(1, 30))
def test_clusters_of_one_image_among_others(seed, n_single):
    embeddings, labels = draw_clusters(seed)
    rng = np.random.default_rng(seed)
    alone = 20 * rng.normal(size=(n_single, 5))
    all_labels = np.r_[labels, 4 + np.arange(n_single)]
    moments = moments_of(np.r_[embeddings, alone], all_labels)
    gaussians = fit_gaussians(moments, pca=False)
    distances = gaussians.squared_distances(alone)
    assert np.isfinite(distances).all()
    np.testing.assert_array_equal(distances.argmin(1), 4 + np.arange(n_single))
    rounding = 1e-12 * distances.max()  # a thin direction makes distances large: the condition may be 1e7
    np.testing.assert_allclose(distances.min(1), 0, atol=rounding)  # each is its own mean
    assert measure_conditioning(moments, gaussians).smallest_cluster == 1


def test_a_class_of_one_next_to_a_class_of_a_hundred_thousand():
    rng = np.random.default_rng(0)
    many, one = rng.normal(size=(100_000, 4)).astype(np.float32), np.full((1, 4), 9, np.float32)
    outputs = Outputs(np.r_[many, one], labels=np.r_[np.zeros(100_000, int), 1])
    detector = MapleDetector(norm_exponent=0).fit(outputs)
    found = detector.describe(np.r_[one, many[:5]])
    assert found.cluster.tolist() == [1, 0, 0, 0, 0, 0] and np.isfinite(found.score).all()
    np.testing.assert_allclose(np.exp(detector.gaussians_.log_priors), np.array([100_000, 1]) / 100_001)
    posterior = found.posterior()
    assert posterior[0, 1] > 0.99 and (posterior[1:, 0] > 0.99).all()
    assert detector.conditioning_.smallest_cluster == 1


@pytest.mark.parametrize("covariance", ["tied", "global"])
def test_identical_images_in_all_but_one_cluster(covariance):
    """One cluster alone carries the covariance: distances of the others are finite and in order."""
    rng = np.random.default_rng(0)
    embeddings = np.r_[np.zeros((50, 3)), np.full((50, 3), 5.0), rng.normal(size=(100, 3)) - 5]
    labels = np.repeat([0, 1, 2], [50, 50, 100])
    distances = fit_gaussians(moments_of(embeddings, labels), covariance=covariance).squared_distances(embeddings)
    assert np.isfinite(distances).all() and (distances.argmin(1) == labels).all()
