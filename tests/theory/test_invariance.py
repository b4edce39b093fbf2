"""What must not change: typicality under affine maps, moments under partitions, scores under units and order.

Whole fits are compared, from embeddings to decisions, over random data that Hypothesis draws.
"""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clusters import moments_of
from maple.detectors.maple import MapleDetector
from maple.stats.chi_square import log_chi_square_tail
from maple.stats.gaussians import fit_gaussians, log_posterior
from maple.stats.moments import Moments
from maple.types import Outputs
from theory_data import SEEDS, draw_clusters


def draw_map(rng: np.random.Generator, dim: int, decades: float) -> np.ndarray:
    """An invertible matrix whose singular values span ``decades`` powers of ten."""
    left, right = (np.linalg.qr(rng.normal(size=(dim, dim)))[0] for _ in range(2))
    return left @ np.diag(10 ** rng.uniform(-decades / 2, decades / 2, dim)) @ right


def log_typicality(embeddings: np.ndarray, labels: np.ndarray, new: np.ndarray, **options: object) -> np.ndarray:
    """Log typicality of ``new`` by cluster, (N, M)."""
    gaussians = fit_gaussians(moments_of(embeddings, labels), **options)
    return log_chi_square_tail(gaussians.squared_distances(new), gaussians.n_components)


@given(SEEDS, st.sampled_from(["tied", "global"]), st.floats(-1e3, 1e3))
def test_typicality_is_invariant_under_affine_maps(seed, covariance, shift):
    embeddings, labels = draw_clusters(seed)
    assume(np.linalg.cond(np.cov(embeddings.T)) < 1e4)  # times 1e6 by the map: beyond, the floor of variances engages
    rng = np.random.default_rng(seed)
    new = embeddings[:40] + rng.normal(size=(40, 5))
    mixing, offset = draw_map(rng, 5, decades=3), shift * rng.normal(size=5)
    before = log_typicality(embeddings, labels, new, pca=False, covariance=covariance)
    after = log_typicality(
        embeddings @ mixing + offset, labels, new @ mixing + offset, pca=False, covariance=covariance
    )
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-7)


@given(SEEDS, st.sampled_from(["tied", "global"]), st.floats(0.5, 1.0))
def test_with_pca_typicality_is_invariant_under_units_order_and_signs_of_features(seed, covariance, share):
    embeddings, labels = draw_clusters(seed)
    rng = np.random.default_rng(seed)
    units = 10 ** rng.uniform(-6, 6, 5) * rng.choice([-1, 1], 5)  # 12 orders of magnitude
    order, offset = rng.permutation(5), 10 * rng.normal(size=5) * units
    options = {"explained_variance": share, "covariance": covariance}
    before = log_typicality(embeddings, labels, embeddings[:40], **options)
    changed = (embeddings * units + offset)[:, order]
    np.testing.assert_allclose(log_typicality(changed, labels, changed[:40], **options), before, rtol=1e-6, atol=1e-9)


@given(SEEDS, st.floats(-12, 12))
def test_normalised_distances_do_not_depend_on_the_length_of_embeddings(seed, power):
    embeddings, labels = draw_clusters(seed)
    gaussians = fit_gaussians(moments_of(embeddings, labels, norm_exponent=1.0))
    lengths = 10**power * np.random.default_rng(seed).uniform(0.5, 2, (300, 1))
    np.testing.assert_allclose(
        gaussians.squared_distances(embeddings * lengths), gaussians.squared_distances(embeddings), rtol=1e-6, atol=1e-9
    )


@given(SEEDS, st.lists(st.integers(0, 300), max_size=6), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_moments_add_up_over_any_partition_in_any_order(seed, cuts, exponent, batchwise):
    embeddings, labels = draw_clusters(seed)
    embeddings = embeddings + 100
    rng = np.random.default_rng(seed)
    rows = np.split(rng.permutation(300), sorted(cuts))  # some parts are empty, some see few clusters
    whole = moments_of(embeddings, labels, norm_exponent=exponent)
    if batchwise:
        parts = Moments(4, 5, norm_exponent=exponent)
        for part in rows:
            parts.update(embeddings[part], labels[part])
    else:
        empty = Moments(4, 5, norm_exponent=exponent)
        each = [Moments(4, 5, norm_exponent=exponent).update(embeddings[part], labels[part]) for part in rows]
        rng.shuffle(each)
        parts = reduce(add, each, empty)
    np.testing.assert_array_equal(parts.counts, whole.counts)
    np.testing.assert_allclose(parts.means, whole.means, rtol=1e-10)
    scale = np.abs(whole.total_covariance).max()
    np.testing.assert_allclose(parts.total_covariance, whole.total_covariance, atol=1e-9 * scale)
    np.testing.assert_allclose(parts.within_covariance, whole.within_covariance, atol=1e-9 * scale)


@given(SEEDS, st.integers(1, 8))
def test_merged_processes_agree_with_one(seed, n_ranks):
    embeddings, labels = draw_clusters(seed)
    ranks = [Moments(4, 5).update(embeddings[i::n_ranks], labels[i::n_ranks]) for i in range(n_ranks)]
    votes = np.mean([rank.shift for rank in ranks], axis=0)
    merged = reduce(add, [rank.moved_to(votes) for rank in ranks])
    whole = fit_gaussians(moments_of(embeddings, labels)).squared_distances(embeddings)
    np.testing.assert_allclose(fit_gaussians(merged).squared_distances(embeddings), whole, rtol=1e-7, atol=1e-9)


@given(SEEDS, st.integers(1, 299))
def test_a_detector_fitted_in_parts_is_that_of_all_images(seed, cut):
    embeddings, labels = draw_clusters(seed)
    outputs = Outputs(embeddings, labels=labels)
    cut = max(cut, 4)  # every class has an image among the first four
    whole = MapleDetector(norm_exponent=0).fit(outputs)
    batches = MapleDetector(norm_exponent=0).fit([outputs[:cut], outputs[cut:]])
    parts = MapleDetector(norm_exponent=0, score_by="normalised").partial_fit(outputs[:cut]).partial_fit(outputs[cut:])
    expected = whole.squared_distances(outputs)
    for other in (batches, parts):
        np.testing.assert_allclose(other.squared_distances(outputs), expected, rtol=1e-7, atol=1e-9)


@given(SEEDS, st.floats(0.05, 20))
def test_posterior_depends_on_differences_of_distances_and_weights_alone(seed, temperature):
    rng = np.random.default_rng(seed)
    d2, weights = rng.uniform(0, 50, (20, 6)), rng.normal(size=6)
    classes = rng.permutation([0, 1, 2, 0, 1, 2])
    before = log_posterior(d2, weights, classes, temperature)
    after = log_posterior(d2 + rng.uniform(0, 1e4, (20, 1)), weights + 3.0, classes, temperature)
    np.testing.assert_allclose(after, before, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(np.exp(before).sum(1), 1)


@pytest.mark.parametrize("order", [np.arange(299, -1, -1), np.argsort(np.sin(np.arange(300)))])
def test_the_order_of_training_images_does_not_matter(order):
    embeddings, labels = draw_clusters(3)
    expected = fit_gaussians(moments_of(embeddings, labels)).squared_distances(embeddings)
    found = fit_gaussians(moments_of(embeddings[order], labels[order])).squared_distances(embeddings)
    np.testing.assert_allclose(found, expected, rtol=1e-8)
