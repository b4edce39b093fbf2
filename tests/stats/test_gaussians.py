"""Gaussians: distances and posterior against SciPy, scikit-learn and explicit loops."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy.linalg import eigh
from scipy.spatial.distance import mahalanobis
from sklearn.covariance import oas
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.preprocessing import StandardScaler

from clusters import moments_of, within_covariance
from maple.errors import DataError, FitError, UsageError
from maple.stats.background import fit_background
from maple.stats.covariance import oas_covariance
from maple.stats.gaussians import (
    Gaussians,
    _full_squared_distances,
    add_scatter,
    class_logsumexp,
    class_maximum,
    feature_scale,
    fit_gaussians,
    fit_ridged_gaussians,
    float32_suffices,
    log_posterior,
    squared_distances,
    with_full_covariances,
)
from maple.stats.moments import Moments


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_distances_survive_large_offsets_in_float32(rng, offset):
    labels = np.arange(1000) % 2
    embeddings = (rng.normal(size=(1000, 20)) + labels[:, None] + offset).astype(np.float32)
    exact = embeddings.astype(np.float64) - offset
    fitted = fit_gaussians(moments_of(embeddings, labels), pca=False)
    expected = fit_gaussians(moments_of(exact, labels), pca=False).squared_distances(exact)
    assert fitted.float32 == (offset == 0)
    np.testing.assert_allclose(fitted.squared_distances(embeddings), expected, rtol=1e-4)


def test_tight_clusters_are_scored_in_float64(rng):
    labels = np.arange(1000) % 2
    embeddings = (1e-5 * rng.normal(size=(1000, 4)) + labels[:, None]).astype(np.float32)
    fitted = fit_gaussians(moments_of(embeddings, labels), pca=False)
    assert not fitted.float32
    own = fitted.squared_distances(embeddings)[np.arange(1000), labels]
    assert own.mean() == pytest.approx(fitted.n_components, rel=1e-3)


@pytest.mark.parametrize(("centre", "deviation"), [(1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.6, 0.8)])
def test_float32_suffices_up_to_a_thousandth_of_rounding(centre, deviation):
    """|e| eps is 1e-3 at a typical |e| of 8,389."""
    for size, suffices in ((8000.0, True), (8800.0, False)):
        x = size * (centre + deviation * np.array([[-1.0], [1.0]]))
        assert float32_suffices(Moments(1, 1).update(x, [0, 0]), np.eye(1)) == suffices
        assert not float32_suffices(Moments(1, 1).update(x, [0, 0]), -1.2 * np.eye(1))


def test_scaled_features_have_the_deviation_one_and_constant_ones_drop_out(blobs):
    embeddings = np.column_stack([blobs[0] * [1, 1e-6, 1e6, 1, 1, 1], np.full(800, 7.0)])
    scale = feature_scale(moments_of(embeddings, blobs[1]))
    np.testing.assert_allclose((embeddings * scale).std(axis=0), [1, 1, 1, 1, 1, 1, 0], atol=1e-12)


def test_projection_keeps_the_stated_variance(rng):
    """The published code kept 16.7 % instead of 95 % (wrong axes), and one component too few."""
    labels = np.arange(5000) % 10
    spectrum = np.exp(-np.arange(64) / 5)
    embeddings = (rng.normal(size=(5000, 64)) * spectrum + 3 * rng.normal(size=(10, 64))[labels] * spectrum) @ eigh(
        within_covariance(rng.normal(size=(200, 64)), np.zeros(200, dtype=int))
    )[1]
    fitted = fit_gaussians(moments_of(embeddings, labels), distance="euclidean")
    standardised = StandardScaler().fit_transform(embeddings)
    kept = fitted.project(embeddings).var(axis=0)
    assert kept.sum() / standardised.var(axis=0).sum() >= 0.95
    assert kept[:-1].sum() / standardised.var(axis=0).sum() < 0.95  # and not one more than needed


@pytest.mark.parametrize("covariance", ["tied", "global"])
@pytest.mark.parametrize("share", [0.8, 1.0])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_distances_equal_the_long_way(blobs, covariance, share, exponent):
    """Standardise, PCA, covariance and Mahalanobis distance, each by another library, image by image."""
    embeddings, labels = blobs
    fitted = fit_gaussians(
        moments_of(embeddings, labels, norm_exponent=exponent), explained_variance=share, covariance=covariance
    )
    scaled = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True) ** exponent
    projection = PCA(n_components=fitted.n_components).fit_transform(StandardScaler().fit_transform(scaled))
    sigma = within_covariance(projection, labels) if covariance == "tied" else np.cov(projection.T, bias=True)
    inverse = np.linalg.inv(np.atleast_2d(sigma))
    means = [projection[labels == c].mean(axis=0) for c in range(4)]
    expected = [[mahalanobis(z, mean, inverse) ** 2 for mean in means] for z in projection[:50]]
    np.testing.assert_allclose(fitted.squared_distances(embeddings[:50]), expected, rtol=1e-7)
    np.testing.assert_allclose(fitted.squared_distances(embeddings[:50].astype(np.float32)), expected, rtol=1e-3)


def test_tied_distance_without_pca_does_not_depend_on_the_units(blobs, rng):
    embeddings, labels = blobs
    inverse = np.linalg.inv(within_covariance(embeddings, labels))
    means = np.stack([embeddings[labels == c].mean(axis=0) for c in range(4)])
    expected = [[mahalanobis(x, mean, inverse) ** 2 for mean in means] for x in embeddings[:50]]
    for mixing in (np.eye(6), rng.normal(size=(6, 6)), np.diag([1e-6, 1, 1e6, 1e3, 1, 1])):
        mixed = embeddings @ mixing
        fitted = fit_gaussians(moments_of(mixed, labels), pca=False)
        np.testing.assert_allclose(fitted.squared_distances(mixed[:50]), expected, rtol=1e-5)


def test_tied_distance_to_the_own_cluster_averages_to_the_components(blobs):
    """The published code's total covariance gives 4.5 at 11 components; here it is K by definition of Sigma."""
    embeddings, labels = blobs
    rows = np.arange(800)
    tied = fit_gaussians(moments_of(embeddings, labels))
    assert tied.squared_distances(embeddings)[rows, labels].mean() == pytest.approx(tied.n_components)
    total = fit_gaussians(moments_of(embeddings, labels), covariance="global")
    assert total.squared_distances(embeddings)[rows, labels].mean() < 0.7 * total.n_components


def test_euclidean_distance_is_in_standardised_components(blobs):
    embeddings, labels = blobs
    fitted = fit_gaussians(moments_of(embeddings, labels), distance="euclidean", pca=False)
    standardised = StandardScaler().fit_transform(embeddings)
    means = np.stack([standardised[labels == c].mean(axis=0) for c in range(4)])
    expected = ((standardised[:, None] - means) ** 2).sum(axis=2)
    np.testing.assert_allclose(fitted.squared_distances(embeddings), expected)


def test_constant_and_repeated_features_drop_out(blobs):
    embeddings, labels = blobs
    plain = fit_gaussians(moments_of(embeddings, labels), pca=False)
    padded = np.column_stack([embeddings, np.full(800, 0.1), np.zeros(800), embeddings[:, 0] * 3 + 1])
    for dtype, rtol in ((np.float64, 1e-6), (np.float32, 1e-2)):
        moments = moments_of(padded.astype(dtype), labels)
        assert (moments.deviation[6:8] == 0).all()
        fitted = fit_gaussians(moments, pca=False)
        assert fitted.n_components == plain.n_components == 6  # the degrees of freedom do not count null directions
        assert (fitted.matrix[6:8] == 0).all()
        if dtype == np.float64:
            expected = plain.squared_distances(embeddings)
            np.testing.assert_allclose(fitted.squared_distances(padded), expected, rtol=rtol)


def test_log_priors_and_weights(blobs):
    fitted = fit_gaussians(moments_of(*blobs))
    np.testing.assert_allclose(np.exp(fitted.log_priors), [100 / 800, 150 / 800, 200 / 800, 350 / 800])
    np.testing.assert_array_equal(fitted.log_weights, fitted.log_priors)


def test_fewer_images_than_dimensions_are_shrunk(rng):
    labels = np.arange(40) % 4
    embeddings = rng.normal(size=(40, 200)) + 2 * rng.normal(size=(4, 200))[labels]
    fitted = fit_gaussians(moments_of(embeddings, labels), pca=False)
    assert fitted.n_components == 39
    distances = fitted.squared_distances(embeddings)
    assert np.isfinite(distances).all() and (distances.argmin(axis=1) == labels).mean() > 0.95
    projection = PCA(n_components=39).fit_transform(StandardScaler().fit_transform(embeddings))
    shrunk = oas_covariance(within_covariance(projection, labels), 40 - 4)
    means = [projection[labels == c].mean(axis=0) for c in range(4)]
    expected = [[mahalanobis(z, mean, np.linalg.inv(shrunk)) ** 2 for mean in means] for z in projection]
    np.testing.assert_allclose(distances, expected, rtol=1e-6)


def test_shrinkage_stops_where_images_are_many(rng):
    embeddings = rng.normal(size=(1000, 5)) * np.array([1, 1, 1, 1, 0.01])
    embeddings[:, 4] += embeddings[:, 0]  # a nearly null direction, which any shrinkage would inflate
    labels = np.arange(1000) % 2
    many = fit_gaussians(moments_of(embeddings, labels), pca=False)
    assert many.squared_distances(embeddings)[np.arange(1000), labels].mean() == pytest.approx(5)
    few = fit_gaussians(moments_of(embeddings[:40], labels[:40]), pca=False)
    assert few.squared_distances(embeddings[:40])[np.arange(40), labels[:40]].mean() < 4.9


@pytest.mark.parametrize(
    ("embeddings", "labels", "options", "message"),
    [
        (np.ones((6, 3)) * 0.1, [0, 0, 0, 1, 1, 1], {}, "6 embeddings"),
        (np.arange(12.0).reshape(6, 2), [0, 0, 0, 2, 2, 2], {}, "cluster 1"),
        (np.arange(6.0).reshape(3, 2), [0, 1, 2], {}, "3 images in 3 clusters"),
        (np.repeat([[1.0, 2], [3, 5]], 3, axis=0), [0, 0, 0, 1, 1, 1], {}, "covariance"),
    ],
)
def test_what_cannot_be_fitted_says_why(embeddings, labels, options, message):
    with pytest.raises(FitError, match=message):
        fit_gaussians(moments_of(embeddings, np.array(labels)), **options)


@pytest.mark.parametrize(("labels", "message"), [([0, 0, 2], "cluster 1"), ([0, 1, 2], "3 images in 3 clusters")])
def test_a_ridge_does_not_replace_images(labels, message):
    with pytest.raises(FitError, match=message):
        fit_ridged_gaussians(moments_of(np.arange(6.0).reshape(3, 2), np.array(labels)), ridge=0.1)


def test_one_image_per_cluster_is_enough_without_covariance():
    moments = Moments(3, 2).update([[0.0, 1.0], [2.0, 5.0], [4.0, 4.0]], [0, 1, 2])
    for options in ({"covariance": "global"}, {"distance": "euclidean"}):
        distances = fit_gaussians(moments, **options).squared_distances([[0.0, 1.0], [2.0, 5.0]])
        assert distances.argmin(axis=1).tolist() == [0, 1]


def test_one_image_in_one_of_the_clusters_is_fine(blobs):
    embeddings, labels = blobs
    labels = np.where(np.arange(800) == 5, 4, labels)
    assert fit_gaussians(moments_of(embeddings, labels)).squared_distances(embeddings)[5].argmin() == 4


def test_scoring_checks_its_input(blobs):
    embeddings, labels = blobs
    fitted = fit_gaussians(moments_of(embeddings, labels))
    with pytest.raises(UsageError, match="5 columns"):
        fitted.squared_distances(embeddings[:, :5])
    for bad in (np.nan, np.inf):
        broken = embeddings.copy()
        broken[7, 0] = bad
        with pytest.raises(DataError, match="1 of 800"):
            fitted.squared_distances(broken)
    assert fitted.squared_distances(np.zeros((0, 6))).shape == (0, 4)


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_extreme_embeddings_get_finite_distances(blobs, exponent):
    embeddings, labels = blobs
    fitted = fit_gaussians(moments_of(embeddings, labels, norm_exponent=exponent))
    extreme = np.array([1e38, 1e20, 1e-30, 0, -1e38])[:, None] * np.ones((5, 6))
    distances = fitted.squared_distances(extreme.astype(np.float32))
    assert np.isfinite(distances).all()
    np.testing.assert_allclose(distances, fitted.squared_distances(extreme.astype(np.float32).astype(float)), rtol=1e-4)
    if exponent == 0:
        assert (distances[0] > 1e60).all()
        assert np.isfinite(fitted.squared_distances(extreme * 1e200)).all()
    else:
        np.testing.assert_allclose(distances[0], distances[2], rtol=1e-4)  # the same direction


def test_full_covariances_equal_the_long_way(blobs):
    embeddings, labels = blobs
    embeddings = embeddings * (1 + labels[:, None])
    tied = fit_gaussians(moments_of(embeddings, labels))
    projection, k = tied.project(embeddings), tied.n_components
    scatter = np.zeros((4, k, k))
    for rows in np.array_split(np.arange(800), 7):
        add_scatter(scatter, projection[rows], labels[rows], tied.centroids)
    counts = np.bincount(labels)
    full = with_full_covariances(tied, scatter / counts[:, None, None], counts)
    distances = full.squared_distances(embeddings)
    densities = np.empty((800, 4))
    for c in range(4):
        own = projection[labels == c]
        sigma, _ = oas(own)
        mean, inverse = own.mean(axis=0), np.linalg.inv(sigma)
        expected = [mahalanobis(z, mean, inverse) ** 2 for z in projection]
        np.testing.assert_allclose(distances[:, c], expected, rtol=1e-8)
        densities[:, c] = np.log(len(own) / 800) - np.linalg.slogdet(sigma)[1] / 2 - np.array(expected) / 2
    posterior = np.exp(densities - np.logaddexp.reduce(densities, axis=1, keepdims=True))
    ours = log_posterior(distances, full.log_weights, np.arange(4))
    np.testing.assert_allclose(np.exp(ours), posterior, atol=1e-9)


@pytest.mark.parametrize("covariance", ["tied", "full"])
def test_the_nearest_cluster_is_that_of_all_distances(blobs, rng, covariance):
    embeddings, labels = blobs
    gaussians = fit_gaussians(moments_of(embeddings, labels))
    if covariance == "full":
        scatter = rng.normal(size=(4, gaussians.n_components, 20))
        gaussians = with_full_covariances(gaussians, scatter @ scatter.swapaxes(1, 2), np.full(4, 20))
    found, table = gaussians.nearest(embeddings), gaussians.squared_distances(embeddings)
    np.testing.assert_array_equal(found.cluster, table.argmin(axis=1))
    np.testing.assert_allclose(found.squared_distance, table.min(axis=1), rtol=1e-8)
    np.testing.assert_allclose(found.mean, table.mean(axis=1), rtol=1e-8)


def test_full_needs_images_in_every_cluster(blobs):
    embeddings, labels = blobs
    tied = fit_gaussians(moments_of(embeddings, labels))
    covariances = np.stack([np.eye(tied.n_components)] * 4)
    with pytest.raises(FitError, match="cluster 2"):
        with_full_covariances(tied, covariances, np.array([9, 9, 3, 9]))
    assert with_full_covariances(tied, covariances, np.full(4, 4)).whitenings is not None
    covariances[1] = 0
    with pytest.raises(FitError, match="cluster 1"):
        with_full_covariances(tied, covariances, np.array([9, 9, 9, 9]))


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1.0, 1e6])
def test_a_cluster_with_its_own_covariance_is_measured_in_its_own_units(blobs, scale):
    """s^2 times the covariance: 1 / s^2 times the squared distance, and 2 K log s more of log determinant."""
    embeddings, labels = blobs
    tied = fit_gaussians(moments_of(embeddings, labels))
    covariances = np.stack([np.diag(np.arange(1.0, tied.n_components + 1))] * 4)
    counts = np.full(4, 200)
    one, other = (with_full_covariances(tied, factor * covariances, counts) for factor in (1.0, scale))
    distances = one.squared_distances(embeddings) / scale
    np.testing.assert_allclose(other.squared_distances(embeddings), distances, rtol=1e-8)
    change = other.log_determinants - one.log_determinants
    np.testing.assert_allclose(change, tied.n_components * np.log(scale), atol=1e-8)


def test_a_cluster_whose_images_are_equal_has_no_covariance_of_its_own(blobs):
    embeddings, labels = blobs
    tied = fit_gaussians(moments_of(embeddings, labels))
    k = tied.n_components
    for mean_variance in (0.9e-10, 1.1e-10):  # of the tied covariance, which the projection makes 1
        covariances = np.stack([np.eye(k), mean_variance * np.eye(k), np.eye(k), np.eye(k)])
        if mean_variance > 1e-10:
            assert with_full_covariances(tied, covariances, np.full(4, 200)).whitenings is not None
            continue
        with pytest.raises(FitError, match="cluster 1"):
            with_full_covariances(tied, covariances, np.full(4, 200))


def test_squared_distances_equal_loops(rng):
    points, centroids = rng.normal(size=(40, 7)), rng.normal(size=(5, 7))
    expected = [[sum((a - b) ** 2 for a, b in zip(p, c)) for c in centroids] for p in points]
    np.testing.assert_allclose(squared_distances(points, centroids), expected)
    whitenings = rng.normal(size=(5, 7, 7))
    expected = [[np.sum(((p - c) @ w) ** 2) for c, w in zip(centroids, whitenings)] for p in points]
    np.testing.assert_allclose(_full_squared_distances(points, centroids, whitenings), expected)


def test_squared_distances_are_never_negative_nor_large(rng):
    points = 1e6 + rng.normal(size=(200, 3))
    assert (squared_distances(points, points) >= 0).all()
    n, m, k = 20_000, 50, 64
    points, centroids = rng.normal(size=(n, k)), rng.normal(size=(m, k))
    tracemalloc.start()
    squared_distances(points, centroids)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 3 * n * m * 8 < n * m * k  # neither N x M x K nor N x N


def test_class_reductions_equal_loops(rng):
    values = rng.normal(size=(20, 6)) * 300
    classes = np.array([2, 0, 2, 1, 0, 2])
    for c in range(3):
        members = values[:, classes == c]
        np.testing.assert_allclose(class_maximum(values, classes)[:, c], members.max(axis=1))
        np.testing.assert_allclose(class_logsumexp(values, classes)[:, c], np.logaddexp.reduce(members, axis=1))
    assert (class_logsumexp(values[:, :1], np.array([1]))[:, 0] == -np.inf).all()  # class 0 has no cluster
    assert (class_logsumexp(np.full((2, 2), -np.inf), np.array([0, 0])) == -np.inf).all()


def test_posterior_equals_linear_discriminant_analysis(blobs):
    embeddings, labels = blobs
    lda = LinearDiscriminantAnalysis(solver="lsqr").fit(embeddings, labels)
    fitted = fit_gaussians(moments_of(embeddings, labels), pca=False)
    distances = fitted.squared_distances(embeddings)
    posterior = np.exp(log_posterior(distances, fitted.log_weights, np.arange(4)))
    np.testing.assert_allclose(posterior, lda.predict_proba(embeddings), atol=1e-7)


def test_posterior_sums_over_the_clusters_of_a_class(rng):
    d2, weights = rng.uniform(0, 9, size=(10, 5)), np.log(rng.dirichlet(np.ones(5)))
    clusters = np.exp(log_posterior(d2, weights, np.arange(5), temperature=2.0))
    classes = np.exp(log_posterior(d2, weights, np.array([0, 1, 0, 1, 1]), temperature=2.0))
    np.testing.assert_allclose(classes[:, 0], clusters[:, 0] + clusters[:, 2])
    np.testing.assert_allclose(classes.sum(axis=1), 1)
    joint = np.exp(weights) * np.exp(-d2 / 4)
    np.testing.assert_allclose(clusters, joint / joint.sum(axis=1, keepdims=True))


def test_posterior_is_finite_far_out():
    d2 = np.array([[1e6, 2e6], [0.0, 1e12]])
    posterior = log_posterior(d2, np.log([0.5, 0.5]), np.arange(2))
    assert np.isfinite(posterior).all()
    assert posterior[0, 1] == pytest.approx(-5e5)


def test_gaussians_are_frozen(blobs):
    fitted = fit_gaussians(moments_of(*blobs))
    assert isinstance(fitted, Gaussians) and fitted.dim == 6
    with pytest.raises(AttributeError):
        fitted.offset = 0


def test_the_map_shows_clusters_as_linear_discriminant_analysis_does():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 4000)
    x = rng.normal(size=(4000, 6)) @ rng.normal(size=(6, 6)) + 5 * rng.normal(size=(4, 6))[labels]
    gaussians = fit_gaussians(Moments(4, 6).update(x, labels), explained_variance=1.0)
    seen = gaussians.on_map(gaussians.project(x))  # (N, 2)
    theirs = LinearDiscriminantAnalysis(n_components=2, solver="eigen").fit_transform(x, labels)
    for ours, axis in zip(seen.T, theirs.T):
        assert abs(np.corrcoef(ours, axis)[0, 1]) > 0.9999
    within = seen - gaussians.on_map(gaussians.centroids)[labels]
    np.testing.assert_allclose(within.T @ within / len(x), np.eye(2), atol=1e-6)


def test_the_map_has_two_axes_whatever_the_clusters():
    x = np.random.default_rng(0).normal(size=(50, 1))
    for n_clusters in (1, 2):
        ids = np.arange(50) % n_clusters
        gaussians = fit_gaussians(Moments(n_clusters, 1).update(x, ids))
        seen = gaussians.on_map(gaussians.project(x))
        assert seen.shape == (50, 2) and np.isfinite(seen).all() and (seen[:, 1] == 0).all()


@pytest.mark.parametrize("share", [0.7, 0.95])
def test_without_standardising_components_are_those_of_the_centred_embeddings(blobs, share):
    embeddings, labels = blobs
    pca = PCA(n_components=share).fit(embeddings)
    gaussians = fit_gaussians(
        moments_of(embeddings, labels), explained_variance=share, covariance="global", standardise=False
    )
    projected = pca.transform(embeddings)  # (N, K)
    centroids = np.stack([projected[labels == c].mean(0) for c in range(4)])
    precision = np.linalg.inv(np.cov(projected.T, bias=True).reshape(projected.shape[1], -1))
    expected = [[mahalanobis(row, centroid, precision) ** 2 for centroid in centroids] for row in projected[:20]]
    np.testing.assert_allclose(gaussians.squared_distances(embeddings[:20]), expected, rtol=1e-7)
    background = fit_background(moments_of(embeddings, labels), explained_variance=share, standardise=False)
    left = embeddings - pca.inverse_transform(projected)
    np.testing.assert_allclose(background.residuals(embeddings), (left**2).sum(1), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("ridge", [1e-20, 1e-3, 1.0])
def test_ridged_distances_equal_the_long_way(blobs, ridge):
    embeddings, labels = blobs
    padded = np.column_stack([embeddings, np.full(800, 2.0)])  # a direction without variance
    found = fit_ridged_gaussians(moments_of(padded, labels), ridge)
    inverse = np.linalg.inv(within_covariance(embeddings, labels) + ridge * np.eye(6))
    means = [embeddings[labels == c].mean(axis=0) for c in range(4)]
    expected = np.array([[mahalanobis(x, mean, inverse) ** 2 for mean in means] for x in embeddings[:20]])
    np.testing.assert_allclose(found.squared_distances(padded[:20]), expected, rtol=1e-6)
    left = padded[:20] + 0.1 * np.eye(7)[6]  # leaving it costs its squared length over the ridge
    np.testing.assert_allclose(found.squared_distances(left), expected + 0.01 / ridge, rtol=1e-6)
    np.testing.assert_allclose(np.exp(found.log_priors), np.bincount(labels) / 800)
    assert not found.float32 and found.n_components == 7
