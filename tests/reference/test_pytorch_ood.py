"""The same embeddings and logits through pytorch-ood 0.4.0 and through ours: AUROC equal to 1e-3.

Where definitions differ, the test says how, and compares what is left once that is accounted for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from sklearn.metrics import roc_auc_score

import maple.detectors.distance
import maple.detectors.heads
import maple.detectors.logits  # noqa: F401
from maple.detectors.registry import create_detector
from maple.types import LinearHead, Outputs

torch = pytest.importorskip("torch")
N, TESTED, D, C = 3000, 1000, 32, 6


@dataclass(frozen=True)
class Data:
    """Outputs of an imagined network: classes are Gaussian before a ReLU; unknown images are of classes in between."""

    train: Outputs
    ind: Outputs
    ood: Outputs
    head: LinearHead

    def auroc(self, ind: np.ndarray, ood: np.ndarray) -> float:
        labels = np.repeat([0, 1], [len(ind), len(ood)])
        return float(roc_auc_score(labels, np.concatenate([np.asarray(ind), np.asarray(ood)])))

    def ours(self, name: str, **options) -> tuple[np.ndarray, np.ndarray]:
        detector = create_detector(name, **options).fit(self.train, head=self.head)
        return detector.score(self.ind), detector.score(self.ood)

    def assert_same(self, ours: tuple[np.ndarray, np.ndarray], theirs: tuple) -> None:
        found = self.auroc(*ours)
        assert 0.6 < found < 0.99  # else equality says nothing
        assert found == pytest.approx(self.auroc(*theirs), abs=1e-3)


@pytest.fixture(scope="module")
def data() -> Data:
    rng = np.random.default_rng(0)
    means = rng.normal(size=(2 * C, D))
    mixing = np.eye(D) + 0.3 * rng.normal(size=(D, D))

    def draw(n: int, classes: range) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.integers(classes.start, classes.stop, size=n)
        raw = 0.8 * rng.normal(size=(n, D)) @ mixing + means[labels] + 0.5
        return np.maximum(raw, 0).astype(np.float32), labels

    embeddings, labels = draw(N, range(C))
    with_bias = np.c_[embeddings, np.ones(N)]
    solution = np.linalg.lstsq(with_bias, 8 * np.eye(C)[labels], rcond=None)[0]  # least squares is a fair head
    head = LinearHead(solution[:-1].T.astype(np.float32), solution[-1].astype(np.float32))

    def outputs(embeddings: np.ndarray, labels: np.ndarray | None = None) -> Outputs:
        return Outputs(embeddings, embeddings @ head.weight.T + head.bias, labels)

    ind, ood = draw(TESTED, range(C))[0], draw(TESTED, range(C, 2 * C))[0]
    return Data(outputs(embeddings, labels), outputs(ind), outputs(ood), head)


def tensors(data: Data) -> tuple:
    """Embeddings and labels of the training images, embeddings of known and unknown ones."""
    arrays = (data.train.embeddings, data.train.labels, data.ind.embeddings, data.ood.embeddings)
    return tuple(torch.from_numpy(array) for array in arrays)


def predict_logits(detector, data: Data) -> tuple[np.ndarray, np.ndarray]:
    found = (detector.predict_logits(torch.from_numpy(part.logits)) for part in (data.ind, data.ood))
    return tuple(scores.numpy() for scores in found)


def predict_features(detector, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Fit and score their detectors of embeddings."""
    train, labels, ind, ood = tensors(data)
    detector.fit_features(train, labels)
    return tuple(detector.predict_features(part).numpy() for part in (ind, ood))


# -------------------------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize(("name", "their_name"), [("energy", "EnergyBased"), ("max-logit", "MaxLogit")])
def test_scores_of_the_logits(theirs, data, name, their_name):
    found, expected = data.ours(name), predict_logits(getattr(theirs, their_name)(None), data)
    data.assert_same(found, expected)
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), rtol=1e-5, atol=1e-5)


def test_softmax(theirs, data):
    """Theirs is - max p, ours 1 - max p."""
    found, expected = data.ours("softmax"), predict_logits(theirs.MaxSoftmax(None), data)
    data.assert_same(found, expected)
    np.testing.assert_allclose(np.concatenate(found), 1 + np.concatenate(expected), atol=1e-6)


def test_entropy(theirs, data):
    """Theirs takes probabilities below 1e-7 for 1e-7, which adds up to 1.6e-6 per class."""
    found, expected = data.ours("entropy"), predict_logits(theirs.Entropy(None), data)
    data.assert_same(found, expected)
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=C * 2e-6)


def test_generalised_entropy(theirs, data):
    """Theirs is a mean over the classes, ours, as in the paper, a sum."""
    found, expected = data.ours("gen"), predict_logits(theirs.GEN(None), data)
    data.assert_same(found, expected)
    np.testing.assert_allclose(np.concatenate(found), C * np.concatenate(expected), rtol=1e-4)
    found, expected = data.ours("gen", top=3), predict_logits(theirs.GEN(None, M=3), data)
    data.assert_same(found, expected)


def test_generalised_entropy_of_confident_networks(theirs, data):
    """Theirs takes probabilities for at least 1e-7 (to the power 0.1, a fifth of 1), ours for what they are.

    With logits four times as large that is no longer a detail. Clamped alike, in float64, both agree again.
    """
    tested = data.ind, data.ood
    large = Outputs(*(np.concatenate([getattr(part, name) for part in tested]) for name in ("embeddings", "logits")))
    large = replace(large, logits=4 * large.logits)
    ours = create_detector("gen").fit(large).score(large)
    expected = C * theirs.GEN(None).predict_logits(torch.from_numpy(large.logits)).numpy()
    p = np.clip(softmax(large.logits.astype(float), axis=1), 1e-7, 1 - 1e-7)
    clamped = ((p * (1 - p)) ** 0.1).sum(axis=1)
    np.testing.assert_allclose(expected, clamped, rtol=2e-2)  # 1 - 1e-7 has but one digit in float32
    log_p = log_softmax(large.logits.astype(float), axis=1)
    sure = log_p.max(axis=1) < np.log(1 - 1e-4)  # where no probability is clamped from above
    unclamped = ((np.exp(log_p) * (1 - np.exp(log_p))) ** 0.1).sum(axis=1)
    np.testing.assert_allclose(ours[sure], unclamped[sure], rtol=1e-9)
    assert abs(ours - expected).max() > 0.1


# ---------------------------------------------------------------------------------------------------- embeddings


def test_mahalanobis(theirs, data):
    """Theirs is half the distance under the scatter, which is N times the covariance: ours over 2 N. Its ridge of 1e-6
    on a scatter of thousands changes nothing."""
    found, expected = data.ours("md"), predict_features(theirs.Mahalanobis(None), data)
    data.assert_same(found, expected)
    np.testing.assert_allclose(np.concatenate(found), 2 * N * np.concatenate(expected), rtol=1e-3)


def test_relative_mahalanobis(theirs, data):
    """Theirs leaves both scatters undivided, so that it is ours over N: the same ranking."""
    found, expected = data.ours("rmd"), predict_features(theirs.RMD(None), data)
    data.assert_same(found, expected)
    np.testing.assert_allclose(np.concatenate(found), N * np.concatenate(expected), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("k", [1, 50])
def test_nearest_neighbours(theirs, data, k):
    found, expected = data.ours("knn", k=k), predict_features(theirs.KNN(None, k=k), data)
    data.assert_same(found, expected)
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), rtol=1e-4)


# ------------------------------------------------------------------------------------------- embeddings and head


def their_head(data: Data):
    """The head on feature maps of one pixel."""
    weight, bias = (torch.from_numpy(array) for array in data.head)
    return lambda maps: maps.flatten(1) @ weight.T + bias


def predict_maps(detector, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings as feature maps of one pixel."""
    train, labels, ind, ood = tensors(data)
    if detector.requires_fit:
        detector.fit_feature_maps(train[:, :, None, None], labels)
    return tuple(detector.predict_feature_maps(part[:, :, None, None]).numpy() for part in (ind, ood))


@pytest.mark.parametrize("components", [4, 16])
def test_virtual_logits(theirs, data, components):
    weight, bias = (torch.from_numpy(array) for array in data.head)
    found = data.ours("vim", components=components)
    expected = predict_features(theirs.ViM(None, components, weight, bias), data)
    data.assert_same(found, expected)
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantile", [0.7, 0.9])
def test_clipped_activations(theirs, data, quantile):
    """Their threshold is the quantile of all values, ours of values to 11 bits."""
    found = data.ours("react", quantile=quantile)
    expected = predict_maps(theirs.ReAct(None, their_head(data), percentile=quantile), data)
    data.assert_same(found, expected)
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pruned", [0.4, 0.65])
def test_shaped_activations(theirs, data, pruned):
    """Theirs shapes feature maps; on maps of one pixel, which are embeddings, it is ours."""
    found = data.ours("ash", pruned=pruned)
    expected = predict_maps(theirs.ASH(None, their_head(data), percentile=pruned), data)
    data.assert_same(found, expected)
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), rtol=1e-4, atol=1e-3)
