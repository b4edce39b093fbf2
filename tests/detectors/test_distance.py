"""Distances to classes, to all images and to the nearest images, against explicit loops and scikit-learn."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from sklearn.covariance import EmpiricalCovariance
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

from maple.detectors import distance
from maple.detectors.distance import (
    KnnDetector,
    MahalanobisDetector,
    MahalanobisPlusPlusDetector,
    MarginalMahalanobisDetector,
    PartialMahalanobisDetector,
    PcaEuclideanDetector,
    PcaMahalanobisDetector,
    RelativeMahalanobisDetector,
    kth_neighbour_distances,
)
from maple.detectors.maple import MapleDetector
from maple.detectors.registry import create_detector, restore_detector
from maple.errors import ConfigError, DataError, FitError
from maple.stats.arrays import normalise
from maple.types import Outputs

N, D, C = 900, 12, 3


@pytest.fixture
def train(rng) -> Outputs:
    """Three classes with one covariance, far from round; half of the directions hardly vary."""
    labels = rng.integers(0, C, size=N)
    mixing = rng.normal(size=(D, D)) * np.geomspace(1, 0.05, D)[:, None]
    embeddings = rng.normal(size=(N, D)) @ mixing + 3 * rng.normal(size=(C, D))[labels] + 2
    return Outputs(embeddings, labels=labels)


@pytest.fixture
def new(train, rng) -> Outputs:
    return Outputs(train.embeddings[:200] + rng.normal(size=(200, D)))


def class_distances(train: Outputs, x: np.ndarray) -> np.ndarray:
    """Squared Mahalanobis distances (N, C) to the class means, written out in the original space."""
    means = np.stack([train.embeddings[train.labels == c].mean(axis=0) for c in range(C)])
    centred = train.embeddings - means[train.labels]
    inverse = np.linalg.inv(centred.T @ centred / N)
    return np.array([[(e - m) @ inverse @ (e - m) for m in means] for e in x])


def marginal_distances(train: Outputs, x: np.ndarray) -> np.ndarray:
    return EmpiricalCovariance().fit(train.embeddings).mahalanobis(x)


# ------------------------------------------------------------------------------------------------- to the classes


def test_mahalanobis_written_out(train, new):
    found = MahalanobisDetector().fit(train).score(new)
    np.testing.assert_allclose(found, class_distances(train, new.embeddings).min(axis=1), rtol=1e-6)


def test_ridge_is_added_to_the_covariance_of_raw_embeddings(train, new):
    """Written out with an inverse; the second feature is constant, as that of a dead unit."""
    x, other = train.embeddings.copy(), new.embeddings.copy()
    x[:, 1], other[:, 1] = 2.0, 2.0
    other[0, 1] = 2.5
    means = np.stack([x[train.labels == c].mean(axis=0) for c in range(C)])
    centred = x - means[train.labels]
    inverse = np.linalg.inv(centred.T @ centred / N + 1e-3 * np.eye(D))
    deviations = other[:, None] - means  # (N, C, D)
    expected = np.einsum("ncd,de,nce->nc", deviations, inverse, deviations).min(axis=1)
    detector = MahalanobisDetector(ridge=1e-3).fit(Outputs(x, labels=train.labels))
    np.testing.assert_allclose(detector.score(Outputs(other)), expected, rtol=1e-6)
    again = restore_detector(*detector.get_state())
    np.testing.assert_array_equal(again.score(Outputs(other)), detector.score(Outputs(other)))


def test_the_ridge_of_the_paper_makes_a_new_feature_infinitely_unlikely(train, new):
    """Without the ridge a feature that is constant among training images has no effect."""
    x, other = train.embeddings.copy(), new.embeddings.copy()
    x[:, 1], other[:, 1] = 0.0, 0.0
    other[0, 1] = 1e-3
    fitted = [MahalanobisDetector(ridge=ridge).fit(Outputs(x, labels=train.labels)) for ridge in (0.0, 1e-20)]
    dropped, ridged = (detector.score(Outputs(other)) for detector in fitted)
    assert ridged[0] == pytest.approx(1e-6 / 1e-20, rel=1e-6)
    np.testing.assert_allclose(ridged[1:], dropped[1:], rtol=1e-6)
    assert dropped[0] < 1e6


def test_relative_distances_subtract_a_background_that_is_normalised_alike(train, new):
    found = RelativeMahalanobisDetector().fit(train).score(new)
    expected = class_distances(train, new.embeddings).min(axis=1) - marginal_distances(train, new.embeddings)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    # Both distances of the training images average to D, by definition of the two covariances.
    own = class_distances(train, train.embeddings)[np.arange(N), train.labels]
    background = MarginalMahalanobisDetector().fit(train).score(train)
    assert own.mean() == pytest.approx(D) and background.mean() == pytest.approx(D)


@pytest.mark.parametrize(
    ("detector", "options"),
    [
        (MahalanobisDetector(), {"pca": False, "norm_exponent": 0, "score_by": "distance"}),
        (PcaMahalanobisDetector(), {"norm_exponent": 0, "score_by": "distance"}),
        (PcaMahalanobisDetector(explained_variance=0.6), {"explained_variance": 0.6, "norm_exponent": 0}),
        (PcaEuclideanDetector(), {"distance": "euclidean", "norm_exponent": 0, "score_by": "distance"}),
        (RelativeMahalanobisDetector(), {"pca": False, "norm_exponent": 0, "score_by": "relative"}),
        (MahalanobisPlusPlusDetector(), {"pca": False, "norm_exponent": 1, "score_by": "normalised"}),
    ],
)
def test_relatives_of_maple_are_maple_with_other_options(train, new, detector, options):
    expected = MapleDetector(**options).fit(train).score(new)
    np.testing.assert_array_equal(detector.fit(train).score(new), expected)


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_distances_in_the_leading_components(train, new, share):
    mean, deviation = train.embeddings.mean(axis=0), train.embeddings.std(axis=0)
    pca = PCA(share, svd_solver="full").fit((train.embeddings - mean) / deviation)
    z = Outputs(pca.transform((train.embeddings - mean) / deviation), labels=train.labels)
    p = pca.transform((new.embeddings - mean) / deviation)
    centres = np.stack([z.embeddings[z.labels == c].mean(axis=0) for c in range(C)])
    found = PcaEuclideanDetector(explained_variance=share).fit(train).score(new)
    np.testing.assert_allclose(found, ((p[:, None] - centres) ** 2).sum(axis=2).min(axis=1), rtol=1e-6)
    found = PcaMahalanobisDetector(explained_variance=share).fit(train).score(new)
    np.testing.assert_allclose(found, class_distances(z, p).min(axis=1), rtol=1e-6)


def test_unit_norms_before_the_covariance(train, new):
    on_sphere = Outputs(normalise(train.embeddings), labels=train.labels)
    expected = class_distances(on_sphere, normalise(new.embeddings)).min(axis=1)
    np.testing.assert_allclose(MahalanobisPlusPlusDetector().fit(train).score(new), expected, rtol=1e-6)


def test_split_classes_count_as_their_clusters(train, new):
    ids = 2 * train.labels + (train.embeddings[:, 0] > 2)
    split = Outputs(train.embeddings, None, train.labels, ids, np.repeat(np.arange(C), 2))
    assert MahalanobisDetector().fit(split).maple_.gaussians_.n_clusters == 2 * C
    assert (MahalanobisDetector().fit(split).score(new) != MahalanobisDetector().fit(train).score(new)).all()


# ------------------------------------------------------------------------------------------------- to all images


def test_marginal_distance_is_that_of_one_gaussian(train, new):
    found = MarginalMahalanobisDetector().fit(train).score(new)
    np.testing.assert_allclose(found, marginal_distances(train, new.embeddings), rtol=1e-6)


@pytest.mark.parametrize("name", ["marginal-md", "partial-md", "knn"])
def test_labels_play_no_part(train, new, name):
    unlabelled = create_detector(name).fit(Outputs(train.embeddings)).score(new)
    np.testing.assert_array_equal(unlabelled, create_detector(name).fit(train).score(new))


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_partial_distances_are_sums_over_components(train, new, share):
    mean, deviation = train.embeddings.mean(axis=0), train.embeddings.std(axis=0)
    variances, axes = np.linalg.eigh(np.corrcoef(train.embeddings.T))
    variances, axes = variances[::-1], axes[:, ::-1]
    n_leading = next(k for k in range(1, D + 1) if variances[:k].sum() >= share * D)
    terms = ((new.embeddings - mean) / deviation @ axes) ** 2 / variances  # (N, D)
    leading = PartialMahalanobisDetector(components="leading", explained_variance=share).fit(train).score(new)
    trailing = PartialMahalanobisDetector(components="trailing", explained_variance=share).fit(train).score(new)
    np.testing.assert_allclose(leading, terms[:, :n_leading].sum(axis=1), rtol=1e-6)
    np.testing.assert_allclose(trailing, terms[:, n_leading:].sum(axis=1), rtol=1e-6)
    np.testing.assert_allclose(leading + trailing, MarginalMahalanobisDetector().fit(train).score(new), rtol=1e-6)


def test_at_least_one_trailing_component(train):
    detector = PartialMahalanobisDetector(explained_variance=1.0).fit(train)
    assert len(detector.background_.variances) == 1
    assert PartialMahalanobisDetector().fit(Outputs(np.array([[0.0], [2.0]]))).score(Outputs(np.array([[3.0]]))) == 4


def test_null_directions_drop_out(train, new):
    """A dead feature and a repeated one make the covariance singular and change no distance."""
    wider = Outputs(np.c_[train.embeddings, np.full(N, 7.0), train.embeddings[:, 0]], labels=train.labels)
    wider_new = Outputs(np.c_[new.embeddings, np.full(200, 7.0), new.embeddings[:, 0]])
    for name in ("md", "rmd", "marginal-md"):
        expected = create_detector(name).fit(train).score(new)
        np.testing.assert_allclose(create_detector(name).fit(wider).score(wider_new), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "wrong"),
    [
        ("pca-md", {"explained_variance": 0}, "explained_variance"),
        ("partial-md", {"components": "middle"}, "components"),
        ("knn", {"k": 0}, "k"),
        ("knn", {"share": 1.5}, "share"),
    ],
)
def test_wrong_options_are_named(train, name, options, wrong):
    with pytest.raises(ConfigError, match=f"'{wrong}'"):
        create_detector(name, **options).fit(train)


# ------------------------------------------------------------------------------------------------- to the nearest


@pytest.mark.parametrize("k", [1, 7, 50])
def test_neighbours_of_scikit_learn(train, new, k, monkeypatch):
    neighbours = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(normalise(train.embeddings))
    expected = neighbours.kneighbors(normalise(new.embeddings))[0][:, -1]
    np.testing.assert_allclose(KnnDetector(k=k).fit(train).score(new), expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(distance, "_QUERIES", 32)  # several blocks of both, the last ones cut short
    monkeypatch.setattr(distance, "BLOCK_ELEMENTS", 32)
    monkeypatch.setattr(distance, "row_blocks", lambda n, *_, **__: (slice(i, min(i + 37, n)) for i in range(0, n, 37)))
    np.testing.assert_allclose(KnnDetector(k=k).fit(train).score(new), expected, rtol=1e-4, atol=1e-5)


def test_neighbours_of_zero_and_of_itself(train):
    detector = KnnDetector(k=1).fit(train)
    np.testing.assert_allclose(detector.score(train), 0, atol=2e-3)  # to the root of float32's rounding
    assert detector.score(Outputs(np.zeros((1, D)))) == pytest.approx(1)  # a dead embedding stays at the centre


def test_memory_of_the_neighbours_is_bounded(rng):
    bank, queries = rng.normal(size=(30_000, 4)).astype(np.float32), rng.normal(size=(600, 4)).astype(np.float32)
    tracemalloc.start()
    kth_neighbour_distances(queries, bank, k=10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 600 * 30_000 * 4 / 3  # all distances at once would take 72 MB


def test_a_share_of_the_images_is_the_same_for_all_batches(train, new):
    whole = KnnDetector(k=5, share=0.3).fit(train)
    assert 0.2 * N < len(whole.neighbours_) < 0.4 * N
    cut = KnnDetector(k=5, share=0.3).fit([train[:100], train[100:101], train[101:]])
    np.testing.assert_array_equal(cut.neighbours_, whole.neighbours_)
    other = KnnDetector(k=5, share=0.3, seed=1).fit(train)
    assert not np.array_equal(other.neighbours_, whole.neighbours_)
    restored = restore_detector(*whole.get_state())
    assert restored.share == 0.3 and restored.k == 5
    np.testing.assert_array_equal(restored.score(new), whole.score(new))


def test_too_few_or_broken_images_are_errors(train):
    with pytest.raises(FitError, match="k is 50"):
        KnnDetector().fit(train[:20])
    broken = train.embeddings.copy()
    broken[3, 2] = np.nan
    with pytest.raises(DataError, match="1 of 900"):
        KnnDetector().fit(Outputs(broken))
    with pytest.raises(DataError, match="1 of 900"):
        KnnDetector().fit(train).score(Outputs(broken))
    with pytest.raises(FitError, match="cluster ids"):
        MahalanobisDetector().fit(Outputs(train.embeddings))
