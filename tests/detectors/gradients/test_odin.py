"""ODIN against pytorch-ood, and its derivative against autograd."""

from __future__ import annotations

import copy
import warnings
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from torch import nn

from gradient_images import STD, normalised, tensor_of
from maple.detectors.gradients.odin import _EPSILONS, OdinDetector, log_odds_gradient
from maple.detectors.registry import create_detector
from maple.errors import UsageError
from maple.networks import embed
from maple.networks._torchvision import import_torchvision
from maple.stats.metrics import auroc


@pytest.fixture(scope="module")
def pytorch_ood() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import_torchvision()
        except UsageError as error:
            pytest.skip(str(error))
        return pytest.importorskip("pytorch_ood.detector")


@pytest.mark.parametrize(("temperature", "epsilon"), [(1000.0, 0.0014), (1.0, 0.01), (10.0, 0.0)])
def test_odin_is_that_of_pytorch_ood(pytorch_ood, backbone, train, test, ood, temperature, epsilon):
    network = nn.Sequential(backbone.body, backbone.head).eval()
    theirs = pytorch_ood.ODIN(network, eps=epsilon, temperature=temperature, norm_std=list(STD))
    ours = OdinDetector(temperature=temperature, epsilon=epsilon).fit_images(backbone, train)
    found, expected = [], []
    for images in (test, ood):
        z = normalised(tensor_of(images)).float()
        expected.append(theirs.predict(z).numpy().astype(np.float64))
        found.append(ours.score_images(backbone, images))
        np.testing.assert_allclose(found[-1] - 1, expected[-1], rtol=2e-5)
    assert abs(auroc(*found) - auroc(*expected)) < 1e-3


def test_odin_scores_do_not_tie(backbone, train, test):
    scores = OdinDetector(temperature=1e7).fit_images(backbone, train).score_images(backbone, test)
    assert len(np.unique(scores)) == len(scores)
    single = (1 - scores).astype(np.float32)
    assert len(np.unique(single)) < len(scores) / 2  # as the maximal probability in float32 would


def test_odin_without_a_step_at_temperature_1_is_softmax(backbone, train, test):
    scores = OdinDetector(temperature=1.0, epsilon=0.0).fit_images(backbone, train).score_images(backbone, test)
    outputs = embed(backbone, test)
    np.testing.assert_allclose(scores, create_detector("softmax").fit(outputs).score(outputs), rtol=1e-6)


def test_splitting_a_class_leaves_odin_as_it_is(backbone, train, test):
    shares, cluster_to_class = torch.tensor([1.0, 0.3, 1.0, 0.7]), np.array([0, 1, 2, 1])
    split = copy.deepcopy(backbone)
    split.head = nn.Linear(24, 4)
    with torch.no_grad():
        split.head.weight.copy_(backbone.head.weight[cluster_to_class])
        split.head.bias.copy_(backbone.head.bias[cluster_to_class] + shares.log())
    expected = OdinDetector(epsilon=0.01).fit_images(backbone, train).score_images(backbone, test)
    detector = OdinDetector(epsilon=0.01).fit_images(split, train, cluster_to_class=cluster_to_class)
    np.testing.assert_allclose(detector.score_images(split, test), expected, rtol=1e-6)


def test_auto_takes_the_step_that_makes_validation_images_most_confident(backbone, train, validation):
    detector = OdinDetector(epsilon="auto", temperature=5.0).fit_images(backbone, train, validation)
    confidence = {}
    for epsilon in _EPSILONS:
        fixed = OdinDetector(epsilon=epsilon, temperature=5.0).fit_images(backbone, train)
        confidence[epsilon] = (1 - fixed.score_images(backbone, validation)).mean()
    assert detector.epsilon_ == max(confidence, key=lambda epsilon: confidence[epsilon])
    assert detector.epsilon_ > 0 and confidence[0.0025] > confidence[0.0]


@pytest.mark.parametrize("temperature", [1.0, 7.0])
def test_derivative_of_the_log_odds(rng, temperature):
    cluster_to_class = np.array([0, 2, 1, 0, 2, 2])
    logits = rng.normal(size=(5, 6)) * 2

    def probability(values: np.ndarray) -> np.ndarray:
        of_class = np.stack([logsumexp(values[:, cluster_to_class == c], axis=1) for c in range(3)], axis=1)
        return softmax(of_class / temperature, axis=1).max(axis=1)

    found = log_odds_gradient(logits, cluster_to_class, temperature)
    sure = probability(logits)
    for m in range(6):
        nudge = 1e-5 * np.eye(6)[m]
        above, below = probability(logits + nudge), probability(logits - nudge)
        log_odds = (np.log(above / (1 - above)) - np.log(below / (1 - below))) / 2e-5
        np.testing.assert_allclose(found[:, m], log_odds, atol=1e-8)
        np.testing.assert_allclose(found[:, m] * (1 - sure), (np.log(above) - np.log(below)) / 2e-5, atol=1e-8)
