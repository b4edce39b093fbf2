"""MapleDetector: what it learns, from batches in any form."""

from __future__ import annotations

import tracemalloc
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from maple.detectors.maple import MapleDetector
from maple.detectors.options import DetectorOptions
from maple.detectors.registry import create_detector
from maple.errors import ConfigError, FitError, NotFittedError, UsageError
from maple.options import as_dict
from maple.stats.arrays import normalise
from maple.stats.gaussians import fit_gaussians
from maple.stats.moments import Moments
from maple.types import Outputs
from ranks import in_two_ranks
from split_classes import CLUSTER_TO_CLASS, in_batches


def test_split_classes_are_recognised_from_both_sides(split, plain):
    exact = MapleDetector(norm_exponent=0, pca=False)
    detector = exact.fit(split)
    assert (detector.md_class(split) == split.labels).mean() > 0.99
    assert (detector.cluster(split) == split.cluster_ids).mean() > 0.99
    assert (detector.posterior(split).argmax(axis=1) == split.labels).mean() > 0.99
    assert detector.squared_distances(split).shape == (400, 5)
    unsplit = MapleDetector(norm_exponent=0, pca=False).fit(plain)
    assert unsplit.squared_distances(plain).shape == (400, 3)
    own = detector.squared_distances(split)[np.arange(400), split.cluster_ids]
    assert own.mean() == pytest.approx(detector.gaussians_.n_components, rel=1e-3)
    # the sides of a class are one wide cluster for the unsplit detector: the middle between them seems typical
    middle = (split.embeddings[split.cluster_ids == 0].mean(0) + split.embeddings[split.cluster_ids == 1].mean(0)) / 2
    assert detector.score(Outputs(middle[None]))[0] > 3 * unsplit.score(Outputs(middle[None]))[0]


def test_equal_children_do_not_lower_the_probability_of_a_class(rng):
    """The largest pseudo-class mapped back under-counts a split class; the sum does not."""
    labels = np.arange(3000) % 2
    embeddings = rng.normal(size=(3000, 3)) + labels[:, None]
    children = np.where(labels == 0, rng.integers(0, 5, size=3000), 5)  # class 0 cut in five for no reason
    whole = MapleDetector(pca=False, norm_exponent=0).fit(Outputs(embeddings, labels=labels))
    cut = MapleDetector(pca=False, norm_exponent=0).fit(
        Outputs(embeddings, cluster_ids=children, cluster_to_class=np.array([0, 0, 0, 0, 0, 1]))
    )
    assert abs(whole.posterior(embeddings) - cut.posterior(embeddings)).max() < 0.05


def test_full_covariances_tell_a_tight_cluster_from_a_wide_one(rng):
    labels = np.arange(2000) % 2
    embeddings = rng.normal(size=(2000, 4)) * np.where(labels, 10.0, 0.1)[:, None]
    outputs = Outputs(embeddings, labels=labels)
    tied = MapleDetector(norm_exponent=0, pca=False).fit(outputs)
    full = MapleDetector(norm_exponent=0, pca=False, covariance="full").fit(outputs)
    assert (tied.posterior(outputs).argmax(axis=1) == labels).mean() < 0.8
    assert (full.posterior(outputs).argmax(axis=1) == labels).mean() > 0.99
    own = full.squared_distances(outputs)[np.arange(2000), labels]
    for c in range(2):
        assert own[labels == c].mean() == pytest.approx(4, rel=0.02)


def test_options_reach_the_gaussians(plain):
    options = {"explained_variance": 0.6, "covariance": "global", "norm_exponent": 0.5}
    detector = MapleDetector(**options).fit(plain)
    moments = Moments(3, 6).update(normalise(plain.embeddings, 0.5), plain.labels)
    expected = fit_gaussians(moments, explained_variance=0.6, covariance="global")
    np.testing.assert_allclose(
        detector.squared_distances(plain), expected.squared_distances(normalise(plain.embeddings, 0.5)), rtol=1e-3
    )
    euclidean = MapleDetector(distance="euclidean", pca=False, norm_exponent=0).fit(plain)
    assert euclidean.squared_distances(plain).sum(axis=1).mean() > 3
    assert euclidean.gaussians_.n_components == 4  # rank 4 in 6 dimensions


def test_order_of_the_images_does_not_matter(split, rng):
    order = rng.permutation(400)
    shuffled, straight = MapleDetector().fit(split[order]), MapleDetector().fit(split)
    np.testing.assert_allclose(shuffled.score(split), straight.score(split), rtol=1e-6)


@pytest.mark.parametrize("covariance", ["tied", "global", "full"])
def test_batches_in_every_form_give_the_same_fit(split, covariance):
    expected = MapleDetector(covariance=covariance).fit(split).squared_distances(split)
    forms = [list(in_batches(split)), lambda: in_batches(split)]
    if covariance != "full":
        forms.append(in_batches(split))
    for form in forms:
        fitted = MapleDetector(covariance=covariance).fit(form)
        np.testing.assert_allclose(fitted.squared_distances(split), expected, rtol=1e-5)


def test_full_covariance_refuses_a_generator_before_using_it_up(split):
    generator = in_batches(split)
    with pytest.raises(FitError, match="covariance='full'"):
        MapleDetector(covariance="full").fit(generator)
    assert len(next(generator)) == 64
    assert MapleDetector(covariance="full", distance="euclidean").fit(generator).fitted_


def test_partial_fit_equals_fit(split):
    whole = MapleDetector().fit(split)
    grown = MapleDetector()
    for batch in in_batches(split):
        grown.partial_fit(batch)
    np.testing.assert_allclose(grown.score(split), whole.score(split), rtol=1e-5)
    grown.fit(split)  # starts anew
    assert {moments.n_images for moments in grown.learned_.densities.moments.by_exponent.values()} == {400}
    with pytest.raises(UsageError, match="covariance='full'"):
        MapleDetector(covariance="full").partial_fit(split)


def test_partial_fit_learns_a_new_class(plain):
    detector = MapleDetector(norm_exponent=0).fit(plain)
    new = Outputs(plain.embeddings[:50] + 100, labels=np.full(50, 3))
    before = detector.score(new)
    detector.partial_fit(new)
    assert (detector.md_class(new) == 3).all() and (detector.score(new) < before).all()
    assert detector.posterior(new).shape == (50, 4)


def test_a_broken_batch_leaves_the_detector_as_it_was(plain):
    detector = MapleDetector().fit(plain)
    before = detector.score(plain)
    broken = Outputs(np.full((5, 6), np.nan), labels=np.zeros(5, dtype=np.int64))
    with pytest.raises(FitError, match="5 of 5"):
        detector.partial_fit(broken)
    np.testing.assert_array_equal(detector.score(plain), before)


@pytest.mark.parametrize("covariance", ["tied", "full"])
def test_fit_in_two_processes_is_the_fit_in_one(split, covariance):
    whole = MapleDetector(covariance=covariance).fit(split, split)

    def fit_share(rank, sum_over_ranks):
        return MapleDetector(covariance=covariance).fit(split[rank::2], split, sum_over_ranks)

    for detector in in_two_ranks(fit_share):
        np.testing.assert_allclose(detector.score(split), whole.score(split), rtol=1e-5)
        assert detector.posterior(split).shape == (400, 3)


def test_memory_of_a_generator_fit_does_not_grow(rng):
    embeddings = rng.normal(size=(512, 64)).astype(np.float32)
    labels = np.arange(512) % 12

    def peak(n_batches: int) -> int:
        tracemalloc.start()
        MapleDetector().fit(Outputs(embeddings * 1.0, labels=labels) for _ in range(n_batches))
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(1)
    assert peak(60) < 1.1 * peak(3)


def test_torch_tensors_and_half_precision(split):
    torch = pytest.importorskip("torch")
    expected = MapleDetector().fit(split).score(split)
    tensors = Outputs(
        embeddings=torch.tensor(split.embeddings),
        cluster_ids=torch.tensor(split.cluster_ids),
        cluster_to_class=torch.tensor(CLUSTER_TO_CLASS),
    )
    np.testing.assert_allclose(MapleDetector().fit(tensors).score(tensors), expected, rtol=1e-6)
    half = Outputs(
        split.embeddings.astype(np.float16), cluster_ids=split.cluster_ids, cluster_to_class=CLUSTER_TO_CLASS
    )
    scores = MapleDetector().fit(half).score(half)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, expected, rtol=0.2, atol=0.2)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (Outputs(np.eye(4)), "cluster ids"),
        (Outputs(np.eye(4), labels=np.array([0, 0, -1, 1])), "1 of 4"),
        (Outputs(np.ones((4, 2)), labels=np.array([0, 0, 1, 1])), "embeddings are equal"),
        (Outputs(np.eye(4), labels=np.array([0, 0, 2, 2])), "cluster 1"),
        (Outputs(np.eye(4), labels=np.array([0, 1, 2, 3])), "4 clusters"),
        (Outputs(np.eye(4), labels=np.array([0, 0, 1, 1]), cluster_ids=np.array([0, 1, 2, 2])), "cluster_to_class"),
        ([], "no outputs"),
    ],
)
def test_what_cannot_be_fitted_says_why(outputs, message):
    with pytest.raises(FitError, match=message):
        MapleDetector(norm_exponent=0).fit(outputs)


def test_options_are_those_of_the_configuration():
    assert as_dict(MapleDetector()) == as_dict(DetectorOptions())
    detector = MapleDetector(covariance="global")
    with pytest.raises(FrozenInstanceError):
        detector.covariance = "tied"
    assert detector != MapleDetector(covariance="global") and detector == detector
    assert len({detector, MapleDetector(covariance="global")}) == 2


def test_wrong_options_fail_with_a_hint(plain):
    with pytest.raises(ConfigError, match="covariance"):
        MapleDetector(covariance="tide").fit(plain)
    with pytest.raises(ConfigError, match="explained_variance"):
        MapleDetector(explained_variance=0).fit(plain)
    with pytest.raises(UsageError, match=r"'covarianc'.*'covariance'"):
        create_detector("maple", covarianc="tied")
    with pytest.raises(UsageError, match="'temperature'"):
        create_detector("energy", temperature=2)


def test_unfitted_methods_raise(plain):
    for method in ("describe", "score", "posterior", "md_class", "get_state"):
        with pytest.raises(NotFittedError, match="fit"):
            getattr(MapleDetector(), method)(*([plain] if method != "get_state" else []))
