"""Entropy, largest logit and generalised entropy, against the formulas written out."""

from __future__ import annotations

from decimal import Decimal, getcontext

import numpy as np
import pytest
from scipy.special import softmax

from maple.detectors.logits import (
    EnergyDetector,
    EntropyDetector,
    GenDetector,
    MaxLogitDetector,
    SoftmaxDetector,
    log_probabilities,
)
from maple.detectors.registry import create_detector
from maple.errors import ConfigError, FitError, UsageError
from maple.types import Outputs

CLUSTER_TO_CLASS = np.array([0, 1, 1, 2, 0])


def outputs_of(logits: np.ndarray, cluster_to_class: np.ndarray | None = None) -> Outputs:
    return Outputs(np.zeros((len(logits), 2)), logits, cluster_to_class=cluster_to_class)


def score(detector, logits: np.ndarray, cluster_to_class: np.ndarray | None = None) -> np.ndarray:
    outputs = outputs_of(logits, cluster_to_class)
    return detector.fit(outputs).score(outputs)


def class_probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax, then one sum per class, by a loop."""
    p = softmax(logits, axis=1)
    return np.stack([sum(p[:, m] for m in range(5) if CLUSTER_TO_CLASS[m] == c) for c in range(3)], axis=1)


@pytest.fixture
def logits(rng) -> np.ndarray:
    return 3 * rng.normal(size=(50, 5))


def test_entropy_of_the_classes(logits):
    p = class_probabilities(logits)
    expected = [-sum(q * np.log(q) for q in row) for row in p]
    np.testing.assert_allclose(score(EntropyDetector(), logits, CLUSTER_TO_CLASS), expected, rtol=1e-10)


def test_largest_logit_of_the_classes(logits):
    sums = [[sum(np.exp(row[m]) for m in range(5) if CLUSTER_TO_CLASS[m] == c) for c in range(3)] for row in logits]
    expected = [-np.log(max(row)) for row in sums]
    np.testing.assert_allclose(score(MaxLogitDetector(), logits, CLUSTER_TO_CLASS), expected, rtol=1e-10)
    np.testing.assert_allclose(score(MaxLogitDetector(), logits), -logits.max(axis=1))


@pytest.mark.parametrize(("gamma", "top"), [(0.1, 100), (0.1, 2), (0.5, 1), (2.0, 3)])
def test_generalised_entropy_of_the_most_probable_classes(logits, gamma, top):
    p = class_probabilities(logits)
    expected = [sum((q * (1 - q)) ** gamma for q in sorted(row, reverse=True)[:top]) for row in p]
    found = score(GenDetector(gamma=gamma, top=top), logits, CLUSTER_TO_CLASS)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["entropy", "gen"])
def test_splitting_a_class_evenly_changes_nothing(logits, name):
    twice = np.concatenate([logits, logits], axis=1) - np.log(2)
    found = score(create_detector(name), twice, np.tile(np.arange(5), 2))
    np.testing.assert_allclose(found, score(create_detector(name), logits), rtol=1e-10)


@pytest.mark.parametrize("name", ["entropy", "gen", "max-logit"])
def test_confident_images_do_not_tie(name):
    gaps = np.linspace(20, 600, 100)
    logits = np.stack([gaps, np.zeros(100), np.zeros(100)], axis=1)
    assert (np.diff(score(create_detector(name), logits)) < 0).all()


def test_confident_entropy_to_the_last_digits():
    getcontext().prec = 80
    p = [Decimal(1) / (1 + Decimal(-60).exp()), Decimal(-60).exp() / (1 + Decimal(-60).exp())]
    expected = float(-sum(q * q.ln() for q in p))
    assert score(EntropyDetector(), np.array([[60.0, 0.0]])) == pytest.approx(expected, rel=1e-12, abs=0)


def test_probabilities_and_their_complements_sum_to_one(rng):
    for scale in (0.01, 1.0, 30.0):
        log_p, log_rest = log_probabilities(scale * rng.normal(size=(200, 7)))
        np.testing.assert_allclose(np.exp(log_p) + np.exp(log_rest), 1, rtol=1e-12)
        np.testing.assert_allclose(np.exp(log_p).sum(axis=1), 1, rtol=1e-12)


def test_logits_far_below_zero_and_empty_classes():
    """Log kernels go down to minus thousands, and a class may have no cluster (its log probability is -inf)."""
    logits = np.array([[-5000.0, -9000.0], [-8000.0, -8000.0]])
    skipped = np.array([0, 2])  # no column for class 1
    for detector in (EntropyDetector(), GenDetector(), MaxLogitDetector()):
        confident, torn = score(detector, logits, skipped)
        assert np.isfinite([confident, torn]).all() and torn > confident
    assert score(EntropyDetector(), logits, skipped)[1] == pytest.approx(np.log(2))
    assert score(EntropyDetector(), np.array([[3.0]])) == 0  # one class: nothing to be torn between


def test_wrong_options_and_missing_logits_are_errors(logits):
    with pytest.raises(ConfigError, match="'gamma'"):
        GenDetector(gamma=0).fit(outputs_of(logits))
    with pytest.raises(ConfigError, match="'top'"):
        GenDetector(top=0).fit(outputs_of(logits))
    with pytest.raises(UsageError, match=r"'gama'.*'gen'.*'gamma'"):
        create_detector("gen", gama=1)
    with pytest.raises(UsageError, match=r"'entropy'.*logits"):
        EntropyDetector().fit(Outputs(np.zeros((2, 2))))


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
