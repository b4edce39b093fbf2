"""What a MAPLE detector learns: moments that agree, state that survives a file, and classes added later."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp, softmax

from maple.decisions.pool_fit import fit_softmax_temperature, fit_temperature, losses
from maple.decisions.probability import Probability
from maple.detectors.learned import nearest_of_class
from maple.detectors.maple import MapleDetector
from maple.detectors.registry import restore_detector
from maple.detectors.scores import energy_score
from maple.errors import DataError, FitError, UsageError
from maple.options import as_dict
from maple.stats.gaussians import log_posterior
from maple.types import Outputs
from split_classes import CLUSTER_TO_CLASS

DIM = 12
GROWING = np.array([0, 0, 1, 2, 3, 4])  # class of each cluster: 0 is split, 4 comes later


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


# ------------------------------------------------------------------------------------------------------ new classes


@pytest.fixture
def outputs(rng) -> Outputs:
    """Five classes, one of two clusters, all in float64; the head knows the first four classes."""
    ids = rng.permutation(np.repeat(np.arange(6), [60, 80, 100, 70, 90, 100]))
    centres = rng.normal(size=(6, DIM)) * 2.5
    embeddings = rng.normal(size=(500, DIM)) @ rng.normal(size=(DIM, DIM)) + 3 * centres[ids] + 20
    logits = 3.0 * np.eye(6)[ids][:, :5] + rng.normal(size=(500, 5))
    shallow = rng.normal(size=(500, 3)) + ids[:, None]
    return Outputs(embeddings, logits, GROWING[ids], ids, GROWING, shallow)


def parts(outputs: Outputs) -> tuple[Outputs, Outputs]:
    """What a run knows, with its clusters, and images of the class that it does not."""
    old = outputs.labels < 4
    known = replace(outputs[old], cluster_to_class=GROWING[:5])
    return known, replace(outputs[~old], cluster_ids=None, cluster_to_class=None)


def assert_same(one: MapleDetector, other: MapleDetector, outputs: Outputs, rtol: float = 1e-8) -> None:
    """All that follows from the moments is equal."""
    found, expected = one.describe(outputs), other.describe(outputs)
    np.testing.assert_allclose(found.squared_distances, expected.squared_distances, rtol=rtol)
    np.testing.assert_allclose(found.log_posterior(2.0), expected.log_posterior(2.0), rtol=rtol, atol=1e-12)
    np.testing.assert_array_equal(one.cluster_to_class_, other.cluster_to_class_)
    for name in ("distance", "residual", "spread", "shallow"):
        np.testing.assert_allclose(found.score_named(name), expected.score_named(name), rtol=10 * rtol, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"norm_exponent": 0.0},
        {"norm_exponent": 1.0, "explained_variance": 0.8},
        {"norm_exponent": 0.5, "covariance": "global"},
        {"norm_exponent": 0.0, "distance": "euclidean", "pca": False},
    ],
)
def test_a_class_added_equals_a_fit_on_all(outputs, options):
    known, new = parts(outputs)
    whole = MapleDetector(**options).fit(outputs)
    grown = MapleDetector(**options).fit(known).extend(new)
    assert_same(grown, whole, outputs)
    assert grown.learned_.appended == 1 and grown.learned_.head_classes.tolist() == [True] * 4 + [False]
    assert whole.learned_.appended == 0 and whole.learned_.head_classes.all()


def test_a_new_class_of_few_images_counts_as_an_average_class(outputs):
    known, new = parts(outputs)  # 400 images of four classes: 100 on average
    fitted = MapleDetector(norm_exponent=0.0).fit(known)
    for n, counted in ((5, 100), (100, 100)):
        grown = copy.deepcopy(fitted).extend(new[:n])
        np.testing.assert_allclose(
            np.exp(grown.gaussians_.log_priors) * (400 + counted), [60, 80, 100, 70, 90, counted]
        )
        restored = MapleDetector.from_state(*grown.get_state())
        np.testing.assert_array_equal(restored.gaussians_.log_priors, grown.gaussians_.log_priors)
    twice = (
        MapleDetector(norm_exponent=0.0).fit(known).extend(new).extend(new)
    )  # 200 images: more than an average class
    assert np.exp(twice.gaussians_.log_priors[-1]) == pytest.approx(200 / 600)


def test_images_of_a_new_class_of_few_images_are_recognised_more_often(rng):
    """Against its share of the images as prior, which a new class of six among 3,000 does not overcome."""
    labels = np.arange(3000) % 3
    centres = 2.5 * np.eye(4, 8)
    known = Outputs(rng.normal(size=(3000, 8)) + centres[labels], labels=labels)
    new, test = (rng.normal(size=(n, 8)) + centres[3] for n in (6, 1000))
    grown = MapleDetector(norm_exponent=0.0).fit(known).extend(Outputs(new, labels=np.full(6, 3)))
    shares = np.log(grown.learned_.cluster_sizes / 3006)

    def recall(log_priors: np.ndarray) -> tuple[float, float]:
        fresh, own = rng.normal(size=(3000, 8)) + centres[labels], labels
        chosen = [
            log_posterior(grown.squared_distances(x), log_priors, np.arange(4)).argmax(axis=1) for x in (test, fresh)
        ]
        return (chosen[0] == 3).mean(), (chosen[1] == own).mean()

    before, after = recall(shares), recall(grown.gaussians_.log_priors)
    assert after[0] > before[0] + 0.3 and after[1] > before[1] - 0.05


def test_parts_orders_and_pauses_make_no_difference(outputs, rng):
    """Also for a class whose clusters overlap, and with the state on disk in between."""
    start = outputs[np.flatnonzero(outputs.labels < 4)[:150]]
    side = (start.embeddings[:, 0] > np.median(outputs.embeddings[outputs.labels == 0, 0])).astype(np.int64)
    ids = np.where(start.labels == 0, side, start.cluster_ids)
    start = replace(start, cluster_ids=ids, cluster_to_class=GROWING[:5])
    more = replace(outputs, cluster_ids=None, cluster_to_class=None)
    fitted = MapleDetector(norm_exponent=0.0).fit(start)
    at_once = copy.deepcopy(fitted).extend(more)
    in_parts = fitted
    for rows in np.array_split(rng.permutation(len(more)), 4):
        arrays, metadata = in_parts.extend(more[rows]).get_state()
        in_parts = restore_detector(copy.deepcopy(arrays), json.loads(json.dumps(metadata)))
    assert_same(in_parts, at_once, outputs)
    np.testing.assert_array_equal(in_parts.learned_.cluster_sizes, at_once.learned_.cluster_sizes)
    assert in_parts.learned_.appended == at_once.learned_.appended == 1


def test_images_go_to_the_nearest_cluster_of_their_class(outputs):
    known, _ = parts(outputs)
    detector = MapleDetector(norm_exponent=0.0).fit(known)
    own = nearest_of_class(detector.gaussians_, outputs.embeddings, outputs.labels, GROWING)
    distances = detector.squared_distances(outputs)
    for i, label in enumerate(outputs.labels):
        mine = [5] if label == 4 else [c for c in range(5) if GROWING[c] == label]
        assert own[i] == mine[0] if len(mine) == 1 else own[i] == mine[np.argmin(distances[i, mine])]
    before = detector.learned_.cluster_sizes.copy()
    detector.extend(replace(known, cluster_ids=None, cluster_to_class=None))
    np.testing.assert_array_equal(
        detector.learned_.cluster_sizes - before, np.bincount(own[outputs.labels < 4], minlength=5)
    )
    assert detector.learned_.appended == 0


def test_nothing_added_changes_nothing(outputs):
    known, new = parts(outputs)
    detector = MapleDetector().fit(known, known)
    before = copy.deepcopy(detector.get_state())
    for nothing in ([], new[:0], (batch for batch in [new[:0]])):
        arrays, metadata = detector.extend(nothing).get_state()
        assert metadata == before[1] and arrays.keys() == before[0].keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, before[0][name], err_msg=name)


def test_exponent_and_score_stay_until_validation_images_teach_them(outputs):
    known, new = parts(outputs)
    detector = MapleDetector().fit(known, known)
    surprises, exponent = detector.learned_.surprises, detector.exponent_
    detector.extend(new)
    assert detector.score_ == "fused" and detector.learned_.surprises is surprises and detector.exponent_ == exponent
    detector.learn_score(outputs[:49])  # too few
    assert detector.learned_.surprises is surprises
    detector.learn_score(replace(outputs, logits=None))
    assert detector.learned_.surprises is surprises
    detector.learn_score(outputs)
    fresh = detector.describe(outputs)
    assert detector.learned_.surprises.keys() == surprises.keys()
    top = np.sort(fresh.spread)[-50]  # a tenth of the images lies above
    assert detector.learned_.surprises["spread"](np.array([top]))[0] == pytest.approx(-np.log(0.1), abs=0.05)


def test_what_cannot_be_added_says_why(outputs):
    known, new = parts(outputs)
    detector = MapleDetector().fit(known)
    with pytest.raises(FitError, match="neither labels"):
        detector.extend(replace(new, labels=None))
    with pytest.raises(FitError, match="no label"):
        detector.extend(replace(new, labels=np.full(len(new), -1)))
    with pytest.raises(DataError, match="NaN"):
        detector.extend(replace(new, embeddings=np.full_like(new.embeddings, np.nan)))
    assert detector.describe(known).posterior().shape[1] == 4  # as it was
    with pytest.raises(UsageError, match="covariance='tied'"):
        MapleDetector(covariance="full").fit(known).extend(new)


@pytest.fixture
def grown(outputs) -> MapleDetector:
    known, new = parts(outputs)
    return MapleDetector(norm_exponent=0.0).fit(known, known).extend(new)


def test_the_network_gives_a_new_class_no_probability(outputs, grown):
    found = grown.describe(outputs)
    p = softmax(outputs.logits, axis=1)
    expected = np.stack([p[:, 0] + p[:, 1], p[:, 2], p[:, 3], p[:, 4], np.zeros(500)], axis=1)
    np.testing.assert_allclose(np.exp(found.log_softmax), expected, rtol=1e-12)
    complete = grown.complete(outputs)
    assert complete.logits.shape == (500, 6) and np.isneginf(complete.logits[:, 5]).all()
    np.testing.assert_array_equal(grown.describe(complete).log_softmax, found.log_softmax)
    with pytest.raises(UsageError, match="3 columns"):
        grown.describe(replace(outputs, logits=outputs.logits[:, :3]))


@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 0.0), (3.0, 0.4), (20.0, 1.5)])
def test_probabilities_obey_the_law_of_total_probability(outputs, grown, temperature, weight):
    found = grown.describe(outputs)
    together = np.exp(Probability(temperature, weight).log_probabilities(found))
    alone = found.posterior(temperature)
    network = np.exp(found.log_softmax)
    for i in range(0, 500, 25):
        inside = alone[i, :4].sum()
        pooled = alone[i, :4] * network[i, :4] ** weight
        np.testing.assert_allclose(together[i, :4], inside * pooled / pooled.sum(), rtol=1e-9, atol=1e-300)
        assert together[i, 4] == pytest.approx(alone[i, 4], rel=1e-12)
    np.testing.assert_allclose(together.sum(axis=1), 1)


def test_energy_is_that_of_a_head_with_the_logits_that_it_lacks(outputs, grown):
    found, known = grown.describe(outputs), outputs.labels < 4
    posterior = found.log_posterior()
    near = posterior[:, 4] > np.log(1e-6)  # elsewhere the missing logit is lost in rounding
    inside = logsumexp(posterior[:, :4], axis=1)
    missing = logsumexp(outputs.logits, axis=1) + posterior[:, 4] - inside  # (N,)
    full = np.hstack([outputs.logits, missing[:, None]])
    np.testing.assert_allclose(found.energy, energy_score(full), rtol=1e-9)
    np.testing.assert_allclose(softmax(full, axis=1)[near, 5], np.exp(posterior[near, 4]), rtol=1e-6)
    np.testing.assert_allclose(found.energy[known & ~near], energy_score(outputs.logits)[known & ~near], atol=1e-5)


def test_probability_is_fitted_to_a_grown_detector(outputs, grown):
    """The Gaussians to all images, the network to those of its classes, where the pool is as likely as softmax."""
    found, known = grown.describe(outputs), outputs.labels < 4
    fitted = Probability().fit(found, outputs.labels)
    distances = (found.squared_distances, outputs.labels, found.log_weights, found.cluster_to_class)
    assert fitted.temperature == fit_temperature(*distances)
    network = found.log_softmax[known][:, :4]
    assert fitted.softmax_temperature == fit_softmax_temperature(network, outputs.labels[known])
    scaled = log_softmax(network / fitted.softmax_temperature, axis=1)
    pooled = log_softmax(fitted.log_pooled(found)[known][:, :4], axis=1)  # given that the class is one of these
    assert losses(pooled, outputs.labels[known]).sum() <= losses(scaled, outputs.labels[known]).sum() + 1e-9
