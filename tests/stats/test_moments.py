"""Moments against their definitions, scikit-learn, and every way to cut a data set into parts."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import numpy as np
import pytest
from sklearn.covariance import EmpiricalCovariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from clusters import moments_of, within_covariance
from maple.errors import FitError, UsageError
from maple.stats.arrays import normalise, row_blocks
from maple.stats.gaussians import fit_gaussians
from maple.stats.moments import Moments


def assert_same(left: Moments, right: Moments, rtol=1e-9) -> None:
    np.testing.assert_array_equal(left.counts, right.counts)
    np.testing.assert_allclose(left.means, right.means, rtol=rtol)
    np.testing.assert_allclose(left.deviation, right.deviation, rtol=rtol)
    scale = np.abs(right.total_covariance).max()
    np.testing.assert_allclose(left.total_covariance, right.total_covariance, atol=rtol * scale)
    np.testing.assert_allclose(left.within_covariance, right.within_covariance, atol=rtol * scale)


def test_moments_equal_the_definitions(blobs):
    embeddings, labels = blobs
    moments = moments_of(embeddings, labels)
    assert moments.n_images == 800 and moments.dim == 6 and moments.n_clusters == 4
    np.testing.assert_array_equal(moments.counts, np.bincount(labels))
    np.testing.assert_allclose(moments.mean, embeddings.mean(axis=0))
    np.testing.assert_allclose(moments.means, [embeddings[labels == c].mean(axis=0) for c in range(4)])
    np.testing.assert_allclose(moments.deviation, embeddings.std(axis=0))
    np.testing.assert_allclose(moments.total_covariance, EmpiricalCovariance().fit(embeddings).covariance_)
    np.testing.assert_allclose(moments.within_covariance, within_covariance(embeddings, labels), atol=1e-9)
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
    monkeypatch.setattr("maple.stats.arrays.BLOCK_ELEMENTS", 1)
    monkeypatch.setattr("maple.stats.moments._PANEL_ELEMENTS", 1024 * 6)
    assert len(list(row_blocks(*embeddings.shape))) > 3
    assert_same(moments_of(embeddings, labels), whole)
    np.testing.assert_allclose(fit_gaussians(whole).squared_distances(embeddings), distances, rtol=1e-9)


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


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_features_that_are_zero_merge_like_others(dim):
    """The common shift is then zero in them, which must not be taken for no shift at all."""
    points = np.zeros((6, dim))
    points[:, -1] = [-3.0, -1.0, 0.0, 1.0, 1.0, 2.0]
    ranks = [Moments(1, dim).update(part, [0, 0]) for part in np.split(points, 3)]
    all_reduce = AllReduce(3)
    with ThreadPoolExecutor(3) as pool:
        merged = list(pool.map(lambda rank: ranks[rank].merge(partial(all_reduce, rank)), range(3)))
    for moments in merged:
        assert moments.n_images == 6
        np.testing.assert_allclose(moments.total_covariance, np.cov(points.T, bias=True).reshape(dim, dim), atol=1e-15)


def test_merging_far_from_zero_does_not_cancel(rng):
    """The common shift lies among the images of all processes: around any other, digits are lost."""
    x, ids = rng.normal(size=(400, 3)), np.arange(400) % 2
    ranks = [Moments(2, 3).update(x[i::2] + 1e7, ids[i::2]) for i in range(2)] + [Moments(2, 3)]
    all_reduce = AllReduce(3)
    with ThreadPoolExecutor(3) as pool:
        merged, *_ = pool.map(lambda rank: ranks[rank].merge(partial(all_reduce, rank)), range(3))
    np.testing.assert_allclose(merged.total_covariance, np.cov((x + 1e7 - 1e7).T, bias=True), rtol=1e-6, atol=1e-7)
    assert np.abs(merged.shift - 1e7).max() < 10


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e6])
def test_constant_features_have_no_deviation(rng, constant):
    x = np.column_stack([rng.normal(size=50), np.full(50, constant)])
    found = moments_of(x, np.arange(50) % 2).deviation
    assert found[1] == 0 and found[0] == pytest.approx(x[:, 0].std())


@pytest.mark.parametrize("cut", [0, 1, 200, 600])
def test_moments_absorb_others_around_their_means(cut):
    """Sorted by class and far from zero; one part may be empty, or know fewer clusters."""
    rng = np.random.default_rng(0)
    x, ids = rng.normal(size=(600, 7)) + 1e6 + 50 * np.arange(600)[:, None] // 200, np.arange(600) // 200
    known = np.cov(x.T, bias=True)
    parts = [
        Moments(int(ids[rows].max(initial=-1)) + 1, 7).update(x[rows], ids[rows])
        for rows in (slice(cut), slice(cut, None))
    ]
    for left, right in ((0, 1), (1, 0)):
        merged = parts[left].copy().absorb(parts[right].copy())
        assert merged.counts.tolist() == [200, 200, 200]
        np.testing.assert_allclose(merged.total_covariance, known, rtol=1e-9)
        np.testing.assert_allclose(merged.means, [x[ids == i].mean(0) for i in range(3)], rtol=1e-14)
        np.testing.assert_allclose(merged.mean, x.mean(0), rtol=1e-14)
    with pytest.raises(FitError, match="exponent"):
        parts[0].absorb(Moments(1, 7, norm_exponent=1))


def test_centred_moments_are_the_same_around_the_mean(blobs):
    moments = moments_of(*blobs[:2], shift=np.arange(6.0))  # far from the mean
    centred = moments.copy().centre()
    np.testing.assert_allclose(centred.shift, moments.mean)
    np.testing.assert_allclose(centred.within_covariance, moments.within_covariance, rtol=1e-9, atol=1e-12)
    assert np.abs(centred.sums.sum(0)).max() < 1e-9 * len(blobs[0]) and Moments(1, 2).centre().shift is None


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
    np.testing.assert_allclose(moments.within_covariance, within_covariance(small, labels), atol=tolerance)
    np.testing.assert_allclose(moments.total_covariance, np.cov(small.T, bias=True), atol=tolerance)


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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda moments: pickle.loads(pickle.dumps(moments))])  # noqa: S301
def test_copies_keep_what_is_added_before_they_grow_again(copied, blobs):
    embeddings, labels = blobs
    half = len(labels) // 2
    grown = Moments(1, embeddings.shape[1]).grow(labels.max() + 1).update(embeddings[:half], labels[:half])
    again = copied(grown).update(embeddings[half:], labels[half:]).grow(labels.max() + 2)
    assert_same(again, moments_of(embeddings, labels).grow(labels.max() + 2), rtol=1e-10)


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


def test_clusters_appended_one_by_one_are_seldom_copied(blobs):
    """As they come when images are sorted by class."""
    embeddings, labels = blobs
    moments, places = Moments(0, 6), [0]
    for n in range(1, 1001):
        own = labels == n - 1
        moments.grow(n).update(embeddings[own], labels[own])
        places += [place] if (place := moments.sums.ctypes.data) != places[-1] else []
    assert len(places) <= 12
    assert_same(moments, moments_of(embeddings, labels).grow(1000), rtol=1e-12)
    moments.counts, moments.sums = moments.counts[:2], moments.sums[:2]
    assert moments.grow(3).counts[2] == 0 and not moments.sums[2].any()  # nothing that was there before


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
    with pytest.raises(FitError, match="2 of 800"):
        moments.update(broken, labels)
    assert_same(moments, before, rtol=0)
    with pytest.raises(FitError, match="2 of 800"):
        moments_of(broken, labels, norm_exponent=1.0)


def test_huge_but_finite_embeddings():
    huge = np.array([[1e30, 0], [0, 1e30], [2e30, 1e30], [0, 0]], dtype=np.float32)
    moments = Moments(1, 2).update(huge, [0, 0, 0, 0])
    assert np.isfinite(fit_gaussians(moments).squared_distances(huge)).all()
    with pytest.raises(FitError, match="embeddings"):
        Moments(1, 2).update(huge.astype(np.float64) * 1e150, [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("embeddings", "ids", "message"),
    [
        (np.zeros((2, 3)), [0, 1], "3 columns"),
        (np.zeros((2, 2)), [0], "cluster_ids"),
        (np.zeros((2, 2)), [0, -1], "1 of 2"),
        (np.zeros((2, 2)), [0, 2], "1 of 2"),
        (np.zeros((5, 2)), [0, -1, 2, 1, -7], "3 of 5"),
        (np.zeros((2, 2)), [0.0, 1.0], "cluster_ids"),
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
    with pytest.raises(FitError, match="dimensions"):
        Moments(2, 2) + Moments(2, 3)


def test_moments_of_nothing_add_nothing(blobs):
    embeddings, labels = blobs
    whole = moments_of(embeddings, labels)
    for total in (whole + Moments(5, 6), Moments(5, 6) + whole):
        assert total.n_clusters == 5 and total.n_images == 800
        np.testing.assert_array_equal(total.second, whole.second)
    (whole + Moments(4, 6)).update(embeddings, labels)  # a copy: the operands stay as they are
    assert whole.n_images == 800
    with pytest.raises(TypeError):
        whole + 1
