"""Moments, PCA, covariances, distances and the tail, against SciPy, scikit-learn, mpmath and explicit loops."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import eigh
from scipy.spatial.distance import mahalanobis
from scipy.stats import chi2
from sklearn.covariance import EmpiricalCovariance, oas
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.preprocessing import StandardScaler, normalize

from maple.errors import DataError, FitError, UsageError
from maple.stats import gaussians as gaussian
from maple.stats.gaussians import (
    Gaussians,
    Moments,
    add_scatter,
    class_logsumexp,
    class_maximum,
    count_components,
    fit_background,
    fit_gaussians,
    full_squared_distances,
    log_chi_square_tail,
    log_posterior,
    normalise,
    oas_covariance,
    principal_axes,
    row_blocks,
    row_norms,
    squared_distances,
    whitening,
    with_full_covariances,
)


@pytest.fixture
def blobs(rng):
    """Four correlated clusters in 6 dimensions with different scales per feature."""
    labels = rng.permutation(np.repeat(np.arange(4), [100, 150, 200, 350]))
    mixing = rng.normal(size=(6, 6)) * np.array([1, 10, 0.1, 3, 1, 5])
    embeddings = (rng.normal(size=(800, 6)) + 2 * rng.normal(size=(4, 6))[labels]) @ mixing + 7
    return embeddings, labels


def moments_of(embeddings, labels, **options) -> Moments:
    return Moments(int(labels.max()) + 1, embeddings.shape[1], **options).update(embeddings, labels)


def within(embeddings, labels):
    centred = embeddings - np.stack([embeddings[labels == c].mean(axis=0) for c in range(labels.max() + 1)])[labels]
    return centred.T @ centred / len(embeddings)


def assert_same(left: Moments, right: Moments, rtol=1e-9) -> None:
    np.testing.assert_array_equal(left.counts, right.counts)
    np.testing.assert_allclose(left.means, right.means, rtol=rtol)
    scale = np.abs(right.total_covariance).max()
    np.testing.assert_allclose(left.total_covariance, right.total_covariance, atol=rtol * scale)
    np.testing.assert_allclose(left.within_covariance, right.within_covariance, atol=rtol * scale)


# --------------------------------------------------------------------------------------------------------- moments


def test_moments_equal_the_definitions(blobs):
    embeddings, labels = blobs
    moments = moments_of(embeddings, labels)
    assert moments.n_images == 800 and moments.dim == 6 and moments.n_clusters == 4
    np.testing.assert_array_equal(moments.counts, np.bincount(labels))
    np.testing.assert_allclose(moments.mean, embeddings.mean(axis=0))
    np.testing.assert_allclose(moments.means, [embeddings[labels == c].mean(axis=0) for c in range(4)])
    np.testing.assert_allclose(moments.deviation, embeddings.std(axis=0))
    np.testing.assert_allclose(moments.total_covariance, EmpiricalCovariance().fit(embeddings).covariance_)
    np.testing.assert_allclose(moments.within_covariance, within(embeddings, labels), atol=1e-9)
    lda = LinearDiscriminantAnalysis(store_covariance=True, solver="lsqr").fit(embeddings, labels)
    np.testing.assert_allclose(moments.within_covariance, lda.covariance_, atol=1e-9)
    np.testing.assert_allclose(moments.second, moments.second.T)


def test_batches_one_pass_and_sums_agree(blobs):
    embeddings, labels = blobs
    whole = moments_of(embeddings, labels)
    batched = Moments(4, 6)
    for start in range(0, 800, 37):
        batched.update(embeddings[start : start + 37], labels[start : start + 37])
    assert_same(batched, whole)
    order = np.argsort(labels)  # sorted by cluster: the two halves see different clusters and have far shifts
    first, second = order[:300], order[300:]
    added = moments_of(embeddings[first], labels[first]) + moments_of(embeddings[second], labels[second])
    assert not np.allclose(added.shift, whole.shift)
    assert_same(added, whole)
    assert_same(sum((moments_of(embeddings[i::3], labels[i::3]) for i in range(3)), Moments(4, 6)), whole)


def test_several_row_blocks_equal_one(blobs, monkeypatch):
    embeddings, labels = np.tile(blobs[0], (3, 1)), np.tile(blobs[1], 3)
    whole = moments_of(embeddings, labels)
    distances = fit_gaussians(whole).squared_distances(embeddings)
    monkeypatch.setattr(gaussian, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(gaussian, "PANEL_ELEMENTS", 1024 * 6)
    assert len(list(row_blocks(*embeddings.shape))) > 3
    assert_same(moments_of(embeddings, labels), whole)
    np.testing.assert_allclose(fit_gaussians(whole).squared_distances(embeddings), distances, rtol=1e-9)


@given(n=st.integers(0, 10_000), d=st.integers(1, 5_000_000))
def test_row_blocks_cover_every_row_once(n, d):
    blocks = list(row_blocks(n, d))
    assert [row for block in blocks for row in (block.start, block.stop)] == sorted(
        [block.start for block in blocks] + [block.stop for block in blocks]
    )
    assert sum(block.stop - block.start for block in blocks) == n
    assert not blocks or (blocks[0].start == 0 and blocks[-1].stop == n)


class AllReduce:
    """Sums arrays over threads that play the processes of a distributed fit."""

    def __init__(self, n_ranks: int) -> None:
        self.barrier = Barrier(n_ranks)
        self.arrays: dict[int, np.ndarray] = {}

    def __call__(self, rank: int, array: np.ndarray) -> np.ndarray:
        self.arrays[rank] = array
        self.barrier.wait(timeout=10)
        total = sum(self.arrays.values())
        self.barrier.wait(timeout=10)
        return total


def test_merge_sums_over_processes_with_different_shifts(blobs):
    embeddings, labels = blobs
    parts = np.array_split(np.argsort(labels), 3)  # sorted by cluster: very different shifts
    ranks = [Moments(4, 6).update(embeddings[rows], labels[rows]) for rows in parts]
    ranks.append(Moments(4, 6))  # a process without images
    all_reduce = AllReduce(4)
    with ThreadPoolExecutor(4) as pool:
        merged = list(pool.map(lambda rank: ranks[rank].merge(partial(all_reduce, rank)), range(4)))
    for moments in merged:
        assert_same(moments, moments_of(embeddings, labels))
        np.testing.assert_array_equal(moments.second, merged[0].second)
    assert Moments(2, 3).merge(lambda array: array).n_images == 0


def test_flat_arrays_with_a_common_shift_add_up(blobs):
    embeddings, labels = blobs
    parts = [moments_of(embeddings[i::2], labels[i::2], shift=np.full(6, 7.0)).to_arrays() for i in range(2)]
    reduced = parts[0] | {name: parts[0][name] + parts[1][name] for name in ("counts", "sums", "second")}
    assert_same(Moments.from_arrays(reduced), moments_of(embeddings, labels))


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e6])
def test_large_offsets_do_not_cancel(rng, offset):
    labels = np.arange(600) % 3
    small = np.round(rng.normal(size=(600, 4)) + labels[:, None], 6)
    moments = moments_of(small + offset, labels)
    tolerance = 1e-9 * max(1, abs(offset) / 1e2)
    np.testing.assert_allclose(moments.within_covariance, within(small, labels), atol=tolerance)
    np.testing.assert_allclose(moments.total_covariance, np.cov(small.T, bias=True), atol=tolerance)


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


def test_any_number_type_and_torch_tensors(blobs):
    embeddings, labels = blobs
    whole = moments_of(embeddings.astype(np.float32), labels)
    assert whole.second.dtype == np.float64
    assert_same(whole, moments_of(embeddings, labels), rtol=1e-6)
    half = embeddings.astype(np.float16)
    assert_same(moments_of(half, labels), moments_of(half.astype(np.float64), labels), rtol=1e-6)
    assert moments_of(np.arange(8).reshape(4, 2), np.array([0, 0, 1, 1])).means.tolist() == [[1, 2], [5, 6]]
    torch = pytest.importorskip("torch")
    tensors = torch.tensor(embeddings, requires_grad=True), torch.tensor(labels)
    assert_same(Moments(4, 6).update(*tensors), moments_of(embeddings, labels))
    rounded = torch.tensor(embeddings).to(torch.bfloat16)
    assert_same(Moments(4, 6).update(rounded, labels), moments_of(rounded.double().numpy(), labels))
    np.testing.assert_allclose(normalise(tensors[0]), normalise(embeddings))


def test_memory_does_not_grow_with_images():
    labels = np.arange(512) % 12
    batch = np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32)

    def peak(n_batches: int) -> int:
        moments = Moments(12, 64)
        tracemalloc.start()
        for _ in range(n_batches):
            moments.update(batch, labels)
        fit_gaussians(moments)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(1)
    assert peak(60) < 1.1 * peak(3)


def test_memory_of_one_large_update_is_a_few_blocks():
    embeddings = np.ones((500_000, 64), dtype=np.float32)
    embeddings[::2] = 0
    tracemalloc.start()
    moments = Moments(1, 64).update(embeddings, np.zeros(500_000, dtype=np.int64))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < embeddings.nbytes / 2
    np.testing.assert_allclose(moments.total_covariance, 0.25)


def test_moments_grow_and_copy(blobs):
    embeddings, labels = blobs
    moments = moments_of(embeddings, labels)
    copied = moments.copy().grow(6)
    copied.update(embeddings + 1, labels + 2)
    assert moments.n_clusters == 4 and copied.n_clusters == 6
    assert copied.counts.sum() == 1600 and moments.counts.sum() == 800
    assert repr(moments) == "Moments(n_clusters=4, dim=6, n_images=800)"
    more = moments + Moments(5, 6).update(embeddings, labels + 1)
    assert more.n_clusters == 5


def test_moments_normalise_on_the_way_in(blobs):
    embeddings, labels = blobs
    assert_same(
        moments_of(embeddings, labels, norm_exponent=0.5), moments_of(normalise(embeddings, 0.5), labels), rtol=1e-12
    )
    with pytest.raises(FitError, match="norm_exponent"):
        moments_of(embeddings, labels, norm_exponent=1) + moments_of(embeddings, labels)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_broken_embeddings_are_counted_and_nothing_is_added(blobs, bad, dtype):
    embeddings, labels = blobs
    moments = moments_of(embeddings, labels)
    before = moments.copy()
    broken = embeddings.astype(dtype)
    broken[[3, 700], 1] = bad
    with pytest.raises(FitError, match=r"^2 of 800 embeddings hold NaN or infinity: .*leave them out$"):
        moments.update(broken, labels)
    assert_same(moments, before, rtol=0)
    with pytest.raises(FitError, match="2 of 800"):
        moments_of(broken, labels, norm_exponent=1.0)


def test_huge_but_finite_embeddings():
    huge = np.array([[1e30, 0], [0, 1e30], [2e30, 1e30], [0, 0]], dtype=np.float32)
    moments = Moments(1, 2).update(huge, [0, 0, 0, 0])
    assert np.isfinite(fit_gaussians(moments).squared_distances(huge)).all()
    with pytest.raises(FitError, match="too large"):
        Moments(1, 2).update(huge.astype(np.float64) * 1e150, [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("embeddings", "ids", "message"),
    [
        (np.zeros((2, 3)), [0, 1], "3 columns where 2"),
        (np.zeros((2, 2)), [0], "2 embeddings need as many"),
        (np.zeros((2, 2)), [0, -1], "1 of 2 images have no label"),
        (np.zeros((2, 2)), [0, 2], "1 of 2 images have no label"),
        (np.zeros((2, 2)), [0.0, 1.0], "integers"),
    ],
)
def test_wrong_batches_fail(embeddings, ids, message):
    with pytest.raises(FitError, match=message):
        Moments(2, 2).update(embeddings, ids)
    with pytest.raises(UsageError, match="shape"):
        Moments(2, 2).update(np.zeros(4), ids)


def test_moments_without_images():
    assert Moments(2, 2).update(np.zeros((0, 2)), np.zeros(0)).n_images == 0
    for moments in (Moments(2, 2), Moments(2, 2, shift=[0, 0])):
        with pytest.raises(FitError, match="no images"):
            _ = moments.mean
        with pytest.raises(FitError, match="no images"):
            fit_gaussians(moments)
    with pytest.raises(FitError, match="do not add up"):
        Moments(2, 2) + Moments(2, 3)


# --------------------------------------------------------------------------------------------- PCA and covariances


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.95, 0.99, 1.0])
def test_components_equal_scikit_learn(blobs, share):
    embeddings, labels = blobs
    standardised = StandardScaler().fit_transform(embeddings)
    pca = PCA(n_components=share if share < 1 else 6).fit(standardised)
    eigenvalues, axes = principal_axes(np.corrcoef(embeddings.T), share)
    assert len(eigenvalues) == pca.n_components_
    np.testing.assert_allclose(eigenvalues * 800 / 799, pca.explained_variance_)
    np.testing.assert_allclose(np.abs(np.sum(axes.T * pca.components_, axis=1)), 1)
    fitted = fit_gaussians(moments_of(embeddings, labels), explained_variance=share, distance="euclidean")
    projection = fitted.project(embeddings)
    np.testing.assert_allclose(np.abs(projection), np.abs(pca.transform(standardised)), atol=1e-9)


def test_projection_keeps_the_stated_variance(rng):
    """The published code kept 16.7 % instead of 95 % (wrong axes), and one component too few."""
    labels = np.arange(5000) % 10
    spectrum = np.exp(-np.arange(64) / 5)
    embeddings = (rng.normal(size=(5000, 64)) * spectrum + 3 * rng.normal(size=(10, 64))[labels] * spectrum) @ eigh(
        within(rng.normal(size=(200, 64)), np.zeros(200, dtype=int))
    )[1]
    fitted = fit_gaussians(moments_of(embeddings, labels), distance="euclidean")
    standardised = StandardScaler().fit_transform(embeddings)
    kept = fitted.project(embeddings).var(axis=0)
    assert kept.sum() / standardised.var(axis=0).sum() >= 0.95
    assert kept[:-1].sum() / standardised.var(axis=0).sum() < 0.95  # and not one more than needed


@pytest.mark.parametrize(
    ("eigenvalues", "share", "expected"),
    [
        ([99, 1], 0.95, 1),  # the published code: 0 components
        ([0.6, 0.3, 0.1], 0.9, 2),  # 0.6 + 0.3 rounds below 0.9
        ([0.6, 0.3, 0.1], 0.9001, 3),
        ([1, 1, 1, 1], 1.0, 4),
        ([1, 0, 0], 1.0, 1),
        ([5], 0.01, 1),
        ([0.5, 0.5], 1e-9, 1),
    ],
)
def test_component_count_is_exact(eigenvalues, share, expected):
    assert count_components(np.array(eigenvalues, dtype=float), share) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0.001, 1))
def test_component_count_reaches_the_share_and_no_more(values, share):
    eigenvalues = np.sort(np.array(values) + 1e-3)[::-1]
    count = count_components(eigenvalues, share)
    assert 1 <= count <= len(eigenvalues)
    assert eigenvalues[:count].sum() >= share * eigenvalues.sum() * (1 - 1e-9)
    assert count == 1 or eigenvalues[: count - 1].sum() < share * eigenvalues.sum() * (1 + 1e-9)


@pytest.mark.parametrize("n", [5, 30, 1000])
def test_oas_equals_scikit_learn(rng, n):
    samples = rng.normal(size=(n, 8)) @ rng.normal(size=(8, 8))
    expected, _ = oas(samples)
    np.testing.assert_allclose(oas_covariance(EmpiricalCovariance().fit(samples).covariance_, n), expected)


def test_oas_of_a_sphere_and_of_one_dimension():
    np.testing.assert_allclose(oas_covariance(np.eye(3) * 2, 10), np.eye(3) * 2)
    np.testing.assert_allclose(oas_covariance(np.array([[4.0]]), 10), [[4.0]])


def test_whitening_whitens_and_floors():
    covariance = np.array([[2.0, 1.0], [1.0, 3.0]])
    matrix, log_determinant = whitening(covariance, 1e-10)
    np.testing.assert_allclose(matrix.T @ covariance @ matrix, np.eye(2), atol=1e-12)
    assert log_determinant == pytest.approx(np.log(5))
    rotated = np.array([[0.8, -0.6], [0.6, 0.8]])
    singular = rotated @ np.diag([4.0, 0.0]) @ rotated.T
    matrix, log_determinant = whitening(singular, 0.01)
    np.testing.assert_allclose(matrix @ matrix.T, rotated @ np.diag([0.25, 100]) @ rotated.T)
    assert log_determinant == pytest.approx(np.log(4 * 0.01))
    matrix, _ = whitening(singular - 1e-17 * np.eye(2), 0.01)  # a tiny negative eigenvalue by rounding
    assert np.isfinite(matrix).all()


# ------------------------------------------------------------------------------------------------ fitted Gaussians


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
    sigma = within(projection, labels) if covariance == "tied" else np.cov(projection.T, bias=True)
    inverse = np.linalg.inv(np.atleast_2d(sigma))
    means = [projection[labels == c].mean(axis=0) for c in range(4)]
    expected = [[mahalanobis(z, mean, inverse) ** 2 for mean in means] for z in projection[:50]]
    np.testing.assert_allclose(fitted.squared_distances(embeddings[:50]), expected, rtol=1e-7)
    np.testing.assert_allclose(fitted.squared_distances(embeddings[:50].astype(np.float32)), expected, rtol=1e-3)


def test_tied_distance_without_pca_does_not_depend_on_the_units(blobs, rng):
    embeddings, labels = blobs
    inverse = np.linalg.inv(within(embeddings, labels))
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
    shrunk = oas_covariance(within(projection, labels), 40 - 4)
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
        (np.ones((6, 3)) * 0.1, [0, 0, 0, 1, 1, 1], {}, "all 6 embeddings are equal"),
        (np.arange(12.0).reshape(6, 2), [0, 0, 0, 2, 2, 2], {}, r"1 of 3 clusters have no images \(cluster 1\)"),
        (np.arange(6.0).reshape(3, 2), [0, 1, 2], {}, "3 images in 3 clusters"),
        (np.repeat([[1.0, 2], [3, 5]], 3, axis=0), [0, 0, 0, 1, 1, 1], {}, "equal, so that there is no covariance"),
    ],
)
def test_what_cannot_be_fitted_says_why(embeddings, labels, options, message):
    with pytest.raises(FitError, match=message):
        fit_gaussians(moments_of(embeddings, np.array(labels)), **options)


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
    with pytest.raises(UsageError, match="5 columns, but the detector was fitted on 6"):
        fitted.squared_distances(embeddings[:, :5])
    for bad in (np.nan, np.inf):
        broken = embeddings.copy()
        broken[7, 0] = bad
        with pytest.raises(DataError, match="1 of 800 embeddings"):
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


def test_full_needs_images_in_every_cluster(blobs):
    embeddings, labels = blobs
    tied = fit_gaussians(moments_of(embeddings, labels))
    covariances = np.stack([np.eye(tied.n_components)] * 4)
    with pytest.raises(FitError, match=r"cluster 2 has 3 images, too few .* covariance='tied'"):
        with_full_covariances(tied, covariances, np.array([9, 9, 3, 9]))
    covariances[1] = 0
    with pytest.raises(FitError, match="cluster 1"):
        with_full_covariances(tied, covariances, np.array([9, 9, 9, 9]))


# -------------------------------------------------------------------------------------------------------- distances


def test_squared_distances_equal_loops(rng):
    points, centroids = rng.normal(size=(40, 7)), rng.normal(size=(5, 7))
    expected = [[sum((a - b) ** 2 for a, b in zip(p, c)) for c in centroids] for p in points]
    np.testing.assert_allclose(squared_distances(points, centroids), expected)
    whitenings = rng.normal(size=(5, 7, 7))
    expected = [[np.sum(((p - c) @ w) ** 2) for c, w in zip(centroids, whitenings)] for p in points]
    np.testing.assert_allclose(full_squared_distances(points, centroids, whitenings), expected)


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


def test_normalise_equals_scikit_learn(rng):
    embeddings = rng.normal(size=(30, 5)) * 10.0 ** rng.integers(-5, 5, size=(30, 1))
    np.testing.assert_allclose(normalise(embeddings), normalize(embeddings))
    np.testing.assert_allclose(np.linalg.norm(normalise(embeddings, 0.3), axis=1), row_norms(embeddings) ** 0.7)
    assert normalise(embeddings, 0) is embeddings
    assert normalise(embeddings.astype(np.float32)).dtype == np.float32
    np.testing.assert_array_equal(normalise(np.zeros((2, 3))), 0)
    tiny = np.full((1, 4), 1e-25, dtype=np.float32)  # its square underflows in float32
    np.testing.assert_allclose(normalise(tiny), 0.5)
    np.testing.assert_allclose(normalise(tiny * 1e25 * np.float32(1e30)), 0.5)  # its square overflows


# ------------------------------------------------------------------------------------------------------------- tail


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
        with pytest.raises(UsageError, match="degrees of freedom"):
            log_chi_square_tail(1.0, wrong)


# -------------------------------------------------------------------------------------------------------- posterior


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


def test_background_of_few_images_does_not_overfit():
    """With hardly more images than components an unshrunk covariance calls every new image far away."""
    rng = np.random.default_rng(0)
    n_components = 60
    known, new = rng.normal(size=(80, n_components)), rng.normal(size=(500, n_components))
    background = fit_background(Moments(1, n_components).update(known, np.zeros(80, int)), explained_variance=1.0)
    unshrunk = np.einsum("nd,de,ne->n", new, np.linalg.inv(np.cov(known.T)), new).mean()
    assert unshrunk > 3 * n_components
    assert background.squared_distances(new).mean() < 1.3 * n_components


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
