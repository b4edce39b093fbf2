"""MapleDetector and the detectors of the logits."""

from __future__ import annotations

import copy
import json
import tracemalloc
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import chi2

from maple.detectors.base import Detector
from maple.detectors.description import Description
from maple.detectors.logits import EnergyDetector, SoftmaxDetector
from maple.detectors.maple import MapleDetector
from maple.detectors.options import DetectorOptions
from maple.detectors.registry import create_detector, list_detectors, register_detector, restore_detector
from maple.errors import ConfigError, FitError, NotFittedError, UsageError
from maple.options import as_dict
from maple.stats.arrays import normalise
from maple.stats.gaussians import fit_gaussians
from maple.stats.moments import Moments
from maple.types import Outputs
from ranks import in_two_ranks

CENTRES = np.array([[6, 0, 0, 0], [-6, 0, 0, 0], [0, 8, 0, 0], [0, 0, 7, 0], [0, 0, -7, 5]], dtype=float)
CLUSTER_TO_CLASS = np.array([0, 0, 1, 2, 2])  # classes 0 and 2 have two clusters each


@pytest.fixture
def split(rng) -> Outputs:
    """Three classes, two of them split in two clusters on opposite sides."""
    cluster_ids = rng.permutation(np.repeat(np.arange(5), [60, 80, 100, 70, 90]))
    embeddings = (rng.normal(size=(400, 4)) + CENTRES[cluster_ids]) @ rng.normal(size=(4, 6))
    return Outputs(
        embeddings=embeddings.astype(np.float32),
        labels=CLUSTER_TO_CLASS[cluster_ids],
        cluster_ids=cluster_ids,
        cluster_to_class=CLUSTER_TO_CLASS,
    )


@pytest.fixture
def plain(split) -> Outputs:
    """The same images, no class split."""
    return Outputs(embeddings=split.embeddings, labels=split.labels)


def in_batches(outputs: Outputs, size: int = 64):
    return (outputs[start : start + size] for start in range(0, len(outputs), size))


# ------------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_every_quantity_follows_from_the_distances(split, exponent):
    detector = MapleDetector(norm_exponent=exponent).fit(split)
    d2 = detector.squared_distances(split)
    k = detector.gaussians_.n_components
    assert d2.shape == (400, 5)
    np.testing.assert_array_equal(detector.score(split), d2.min(axis=1))
    np.testing.assert_array_equal(detector.cluster(split), d2.argmin(axis=1))
    np.testing.assert_array_equal(detector.md_class(split), CLUSTER_TO_CLASS[d2.argmin(axis=1)])
    np.testing.assert_allclose(detector.log_typicality(split), chi2.logsf(d2.min(axis=1), k), rtol=1e-9)
    nearest = np.stack([d2[:, c == CLUSTER_TO_CLASS].min(axis=1) for c in range(3)], axis=1)
    np.testing.assert_allclose(detector.typicality_per_class(split), chi2.sf(nearest, k), rtol=1e-7)
    np.testing.assert_allclose(detector.log_typicality_per_class(split), chi2.logsf(nearest, k), rtol=1e-7)
    shares = np.bincount(split.cluster_ids) / 400
    joint = softmax(np.log(shares) - d2 / 6, axis=1)
    posterior = np.stack([joint[:, c == CLUSTER_TO_CLASS].sum(axis=1) for c in range(3)], axis=1)
    np.testing.assert_allclose(detector.posterior(split, temperature=3.0), posterior, rtol=1e-7)
    np.testing.assert_allclose(detector.log_posterior(split, temperature=3.0), np.log(posterior), rtol=1e-7, atol=1e-14)


def test_description_computes_distances_once(split, monkeypatch):
    detector = MapleDetector().fit(split)
    described = detector.describe(split)
    assert isinstance(described, Description) and len(described) == 400
    monkeypatch.setattr(type(detector.gaussians_), "squared_distances", None)  # any further call fails
    assert described.cluster_to_class[described.cluster].tolist() == described.md_class_id.tolist()
    np.testing.assert_allclose(described.typicality, np.exp(described.log_typicality))
    np.testing.assert_allclose(described.uncertainty, 1 - described.typicality, atol=1e-15)
    np.testing.assert_allclose(described.posterior(2.0).sum(axis=1), 1)
    assert described.log_typicality_per_class.max(axis=1) == pytest.approx(described.log_typicality)


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


def test_far_images_do_not_tie(plain):
    detector = MapleDetector(norm_exponent=0).fit(plain)
    far = Outputs(plain.embeddings[:1] * np.geomspace(10, 1e6, 50)[:, None])
    assert (np.diff(detector.score(far)) > 0).all()
    assert (np.diff(detector.log_typicality(far)) < 0).all()


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


# --------------------------------------------------------------------------------------------------------- how it fits


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
        (Outputs(np.eye(4)), "neither labels nor cluster ids"),
        (Outputs(np.eye(4), labels=np.array([0, 0, -1, 1])), "1 of 4 training images have no label"),
        (Outputs(np.ones((4, 2)), labels=np.array([0, 0, 1, 1])), "collapsed"),
        (Outputs(np.eye(4), labels=np.array([0, 0, 2, 2])), "cluster 1"),
        (Outputs(np.eye(4), labels=np.array([0, 1, 2, 3])), "4 images in 4 clusters"),
        (Outputs(np.eye(4), labels=np.array([0, 0, 1, 1]), cluster_ids=np.array([0, 1, 2, 2])), "cluster_to_class"),
        ([], "no outputs"),
    ],
)
def test_what_cannot_be_fitted_says_why(outputs, message):
    with pytest.raises(FitError, match=message):
        MapleDetector(norm_exponent=0).fit(outputs)


def test_batches_must_agree_on_the_clusters(split):
    other = Outputs(split.embeddings, cluster_ids=split.cluster_ids, cluster_to_class=np.array([0, 1, 1, 2, 2]))
    with pytest.raises(FitError, match="class of a cluster"):
        MapleDetector().fit([split, other])
    with pytest.raises(UsageError, match="int"):
        MapleDetector().fit(3)


def test_cluster_without_images_is_named(split):
    longer = Outputs(split.embeddings, cluster_ids=split.cluster_ids, cluster_to_class=np.append(CLUSTER_TO_CLASS, 3))
    with pytest.raises(FitError, match="cluster 5"):
        MapleDetector().fit(longer)


# ---------------------------------------------------------------------------------------------- options and registry


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


def test_registry():
    detector = create_detector("maple", pca=False)
    assert isinstance(detector, MapleDetector) and not detector.pca
    assert create_detector(detector) is detector
    with pytest.raises(UsageError, match="pca"):
        create_detector(detector, pca=True)
    with pytest.raises(UsageError, match=r"'sotfmax'.*'softmax'"):
        create_detector("sotfmax")
    with pytest.raises(UsageError, match="'softmax'"):
        register_detector("softmax")(MapleDetector)
    assert list_detectors() == sorted(list_detectors())
    with pytest.raises(TypeError):
        Detector()


def test_state_continues_a_fit(split):
    first, rest = split[:200], split[200:]
    arrays, metadata = MapleDetector().fit(first).get_state()
    restored = restore_detector(arrays, json.loads(json.dumps(metadata)))
    whole = MapleDetector().fit(split)
    np.testing.assert_allclose(restored.partial_fit(rest).score(split), whole.score(split), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"covariance": "full"}, {"distance": "euclidean"}, {"norm_exponent": 0.3}])
def test_state_keeps_every_quantity(split, options):
    detector = MapleDetector(**options).fit(split)
    arrays, metadata = detector.get_state()
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    restored = MapleDetector.from_state(copy.deepcopy(arrays), json.loads(json.dumps(metadata)))
    assert as_dict(restored) == as_dict(detector)
    np.testing.assert_array_equal(restored.squared_distances(split), detector.squared_distances(split))
    np.testing.assert_array_equal(restored.posterior(split, 2.0), detector.posterior(split, 2.0))


def test_unfitted_methods_raise(plain):
    for method in ("describe", "score", "posterior", "md_class", "get_state"):
        with pytest.raises(NotFittedError, match="fit"):
            getattr(MapleDetector(), method)(*([plain] if method != "get_state" else []))


# -------------------------------------------------------------------------------------------------- logit detectors


def test_softmax_score_sums_the_clusters_of_a_class(rng):
    logits = rng.normal(size=(50, 4)) * 3
    outputs = Outputs(np.zeros((50, 2)), logits, cluster_to_class=np.array([1, 0, 1, 2]))
    p = softmax(logits, axis=1)
    classes = np.stack([p[:, 1], p[:, 0] + p[:, 2], p[:, 3]], axis=1)
    np.testing.assert_allclose(SoftmaxDetector().fit(outputs).score(outputs), 1 - classes.max(axis=1))
    plain = Outputs(np.zeros((50, 2)), logits)
    np.testing.assert_allclose(SoftmaxDetector().fit(plain).score(plain), 1 - p.max(axis=1))


def test_confident_softmax_scores_do_not_tie():
    outputs = Outputs(np.zeros((30, 1)), np.stack([np.linspace(40, 300, 30), np.zeros(30)], axis=1))
    assert (np.diff(SoftmaxDetector().fit(outputs).score(outputs)) < 0).all()


def test_energy_score(rng):
    logits = rng.normal(size=(50, 4)).astype(np.float32) * 300  # exp overflows even in float64
    outputs = Outputs(np.zeros((50, 2)), logits)
    expected = -np.logaddexp.reduce(logits.astype(np.float64), axis=1)
    np.testing.assert_allclose(EnergyDetector().fit(outputs).score(outputs), expected)


@pytest.mark.parametrize("detector", [SoftmaxDetector, EnergyDetector])
def test_logit_detectors_need_the_same_logits(detector):
    with pytest.raises(UsageError, match="logits"):
        detector().fit(Outputs(np.zeros((3, 2))))
    with pytest.raises(FitError, match="no outputs"):
        detector().fit([])
    fitted = detector().fit(Outputs(np.zeros((3, 2)), np.zeros((3, 4))))
    with pytest.raises(UsageError, match="5 columns"):
        fitted.score(Outputs(np.zeros((3, 2)), np.zeros((3, 5))))


def test_one_class_has_softmax_score_zero():
    outputs = Outputs(np.zeros((2, 1)), np.zeros((2, 2)), cluster_to_class=np.array([0, 0]))
    assert SoftmaxDetector().fit(outputs).score(outputs).tolist() == [0, 0]
