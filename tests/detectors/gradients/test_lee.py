"""Mahalanobis distances of several layers, against scikit-learn, explicit loops and the papers' definitions."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional as F

from gradient_images import in_float64, make_body, make_images, normalised, tensor_of
from maple.data.image_set import ImageSet
from maple.detectors.gradients._layers import average_layers
from maple.detectors.gradients.lee import (
    _ATTACK,
    _MAGNITUDES,
    _TUNING_IMAGES,
    LeeDetector,
    LeeOodDetector,
    choose_magnitude,
    distance_gradient,
    weigh_layers,
)
from maple.errors import UsageError
from maple.networks import Backbone
from maple.stats.gaussians import Gaussians, fit_gaussians
from maple.stats.metrics import auroc
from maple.stats.moments import Moments


def explicit_distances(
    backbone: Backbone, train: ImageSet, images: ImageSet, layer: str, magnitude: float
) -> np.ndarray:
    """Lee et al. by the book: means, EmpiricalCovariance of what is left, and a loop over classes, in torch."""

    def features(x: torch.Tensor) -> torch.Tensor:
        return average_layers(backbone, x, [layer])[layer].double()

    with torch.no_grad():
        known = features(tensor_of(train)).numpy()
    means = np.stack([known[train.labels == c].mean(axis=0) for c in range(3)])
    covariance = EmpiricalCovariance().fit(known - means[train.labels])
    precision, centres = torch.from_numpy(covariance.precision_), torch.from_numpy(means)

    def nearest(x: torch.Tensor) -> torch.Tensor:
        centred = features(x)[:, None] - centres  # (N, C, F)
        return torch.einsum("ncf,fg,ncg->nc", centred, precision, centred).min(dim=1).values

    x = tensor_of(images).requires_grad_()
    (gradient,) = torch.autograd.grad(nearest(x).sum(), x)
    with torch.no_grad():
        return nearest(x - magnitude * gradient.sign()).numpy()


@pytest.mark.parametrize("magnitude", [0.0, 0.005])
def test_distances_of_each_layer(backbone, train, test, fitted, magnitude):
    assert fitted.layers_ == ("0", "2", "embedding")  # the average of "1" is that of "2", which pools it
    found = fitted.layer_distances(backbone, tensor_of(test), (magnitude,))
    assert found.shape == (1, 60, 3)
    for i, layer in enumerate(fitted.layers_):
        expected = explicit_distances(backbone, train, test, layer, magnitude)
        shrunk = layer == "embedding"  # 150 images for 24 features: the covariance of the project is shrunk a little
        np.testing.assert_allclose(found[0, :, i], expected, rtol=0.5 if shrunk else 2e-3)
        assert np.corrcoef(found[0, :, i], expected)[0, 1] > (0.95 if shrunk else 1 - 1e-6)


def test_the_step_makes_distances_smaller(backbone, test, fitted):
    still, moved = fitted.layer_distances(backbone, tensor_of(test), (0.0, 0.002))
    assert (moved < still).all(axis=0).min() and (moved > 0.5 * still).mean() > 0.9


def test_the_score_is_the_weighted_sum_of_distances(backbone, test, fitted):
    distances = fitted.layer_distances(backbone, tensor_of(test))[0]
    expected = [sum(w * d for w, d in zip(fitted.weights_, row)) + fitted.intercept_ for row in distances]
    np.testing.assert_allclose(fitted.score_images(backbone, test), expected, rtol=1e-9)


def test_layers_are_weighed_by_logistic_regression(rng):
    ind, ood = rng.normal([10.0, 100.0], [1.0, 20.0], (80, 2)), rng.normal([12.0, 100.0], [1.0, 20.0], (240, 2))
    weights, intercept = weigh_layers(ind, ood)
    log_odds = np.concatenate([ind, ood]) @ weights + intercept
    scaled = (np.concatenate([ind, ood]) - ind.mean(axis=0)) / ind.std(axis=0)
    expected = LogisticRegression(class_weight="balanced", tol=1e-9, max_iter=10_000).fit(scaled, np.arange(320) >= 80)
    np.testing.assert_allclose(log_odds, expected.decision_function(scaled), atol=1e-3)
    assert weights[0] > 0 and abs(weights[1]) * 20 < 0.3 * weights[0]  # the second layer tells nothing
    assert log_odds[:80].mean() < 0 < log_odds[80:].mean()  # whatever the numbers of images


def test_layers_are_weighed_though_some_distances_are_enormous(rng):
    ind, ood = rng.normal(10, 1, (50, 2)), rng.normal(14, 1, (50, 2))
    ood[:5] = 1e12
    weights, intercept = weigh_layers(ind, ood)
    assert ((ind @ weights + intercept) < 0).mean() > 0.9 and ((ood @ weights + intercept) > 0).mean() > 0.9


def test_the_magnitude_is_judged_on_images_that_weighed_nothing(rng):
    """With as many layers as images the first step fits noise perfectly; the second one tells something."""
    noise = rng.normal(size=(2, 60, 40))
    signal = rng.normal(size=(2, 60, 40)) + 0.7 * np.arange(2)[:, None, None]
    ind, ood = np.stack([noise[0], signal[0]]), np.stack([noise[1], signal[1]])
    assert choose_magnitude(ind, ood) == 1
    separations = []
    for known, unknown in zip(ind, ood):
        weights, _ = weigh_layers(known[::2], unknown[::2])
        separations.append(auroc(known[1::2] @ weights, unknown[1::2] @ weights))
    assert np.argmax(separations) == 1
    assert choose_magnitude(np.stack([signal[0]] * 3), np.stack([signal[1]] * 3)) == 0  # the smallest of equals


def test_magnitude_auto_is_what_the_validation_images_say(backbone, train, validation, ood):
    detector = LeeOodDetector().fit_images(backbone, train, validation, ood=ood)
    order = [np.random.default_rng(0).permutation(len(images)) for images in (validation, ood)]
    known, unknown = (
        detector.layer_distances(backbone, tensor_of(images)[rows], _MAGNITUDES)
        for images, rows in zip((validation, ood), order)
    )
    best = choose_magnitude(known, unknown)
    assert detector.magnitude_ == _MAGNITUDES[best]
    weights, intercept = weigh_layers(known[best], unknown[best])
    np.testing.assert_allclose(detector.weights_, weights, rtol=1e-4)
    np.testing.assert_allclose(detector.intercept_, intercept, rtol=1e-4)


def test_both_versions_find_unknown_images(backbone, train, validation, test, ood, fitted):
    tuned = LeeOodDetector(magnitude=0.002).fit_images(backbone, train, validation, ood=ood.subset(range(30)))
    unseen = ood.subset(range(30, 60))
    scores = {d: (d.score_images(backbone, test), d.score_images(backbone, unseen)) for d in (fitted, tuned)}
    assert auroc(*scores[tuned]) > 0.95 and auroc(*scores[fitted]) > 0.8
    assert (scores[tuned][0] < 0).mean() > 0.8 and (scores[tuned][1] > 0).mean() > 0.8  # log odds


def test_only_the_version_that_says_so_looks_at_unknown_images(backbone, train, validation, ood, fitted):
    told = LeeDetector(magnitude=0.002).fit_images(backbone, train, validation, ood=ood)
    np.testing.assert_array_equal(told.weights_, fitted.weights_)
    assert "out-of-distribution" in LeeOodDetector.about.needs and "out-of-distribution" in LeeOodDetector.about.title
    assert "in-distribution images only" in LeeDetector.about.title and "ood" not in LeeDetector.about.needs


def test_the_attack_is_fgsm(backbone, train, validation, fitted):
    x = tensor_of(validation)
    adversarial, fooled = fitted._attack(backbone, x, validation.labels)
    assert adversarial.min() >= 0 and adversarial.max() <= 1
    steps = (adversarial - x).abs()
    inside = (x > _ATTACK) & (x < 1 - _ATTACK)
    assert ((steps[inside] - _ATTACK).abs() < 1e-6).double().mean() > 0.99
    z = normalised(x).requires_grad_()
    logits = in_float64(backbone, z)
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1), reduction="sum"), z)
    assert ((adversarial - x).sign()[inside] == gradient.sign()[inside]).double().mean() > 0.99
    with torch.no_grad():
        before, after = (backbone(images)[1].argmax(1).numpy() for images in (x, adversarial))
    np.testing.assert_array_equal(fooled, (before == validation.labels) & (after != before))
    assert 20 <= fooled.sum() < len(x)
    unknown = np.full(len(x), -1)
    np.testing.assert_array_equal(fitted._attack(backbone, x, unknown)[1], after != before)


def test_weights_come_from_the_images_that_the_attack_fools(backbone, train, validation, fitted):
    rows = np.random.default_rng(0).permutation(len(validation))
    x = tensor_of(validation)[rows]
    adversarial, fooled = fitted._attack(backbone, x, validation.labels[rows])
    clean, attacked = (fitted.layer_distances(backbone, images, (0.002,))[0] for images in (x, adversarial))
    weights, _ = weigh_layers(clean[fooled], attacked[fooled])
    np.testing.assert_allclose(fitted.weights_, weights, rtol=1e-4)


def test_all_images_count_where_the_attack_fools_few(backbone, train, validation):
    steady = copy.deepcopy(backbone)
    with torch.no_grad():
        steady.head.weight.zero_()
        steady.head.weight[:, 0] = 1e-6  # logits that hardly depend on the image, in one order
        steady.head.bias.copy_(torch.tensor([0.0, 1.0, 2.0]))
    detector = LeeDetector(magnitude=0.0).fit_images(steady, train, validation)
    assert np.isfinite(detector.weights_).all() and detector.weights_.any()


def test_tuning_takes_so_many_images_and_no_more(backbone, train, monkeypatch):
    monkeypatch.setattr("maple.detectors.gradients.lee._TUNING_IMAGES", 40)
    seen: list[tuple[int, int]] = []
    detector = LeeDetector(magnitude=0.0, layers=("1",))
    detector.fit_images(backbone, train, make_images(120, 5), progress=lambda *done: seen.append(done))
    assert _TUNING_IMAGES == 1000 and seen[-1] == (190, 190)


def test_layers_can_be_named_and_classes_may_be_missing(backbone, train, validation, test):
    some = train.subset(train.labels != 1)
    detector = LeeDetector(layers=("embedding", "0"), magnitude=0.0).fit_images(backbone, some, validation)
    assert detector.layers_ == ("embedding", "0") and detector.gaussians_["0"].n_clusters == 2
    assert detector.score_images(backbone, test).shape == (60,)


def test_gaussians_are_those_of_the_project(backbone, train, fitted):
    assert all(isinstance(each, Gaussians) for each in fitted.gaussians_.values())
    with torch.no_grad():
        features = average_layers(backbone, tensor_of(train), fitted.layers_)
    for layer, values in features.items():
        expected = fit_gaussians(Moments(3, values.shape[1]).update(values, train.labels), pca=False)
        np.testing.assert_allclose(
            fitted.gaussians_[layer].squared_distances(values), expected.squared_distances(values), rtol=1e-3, atol=1e-3
        )


def test_derivative_of_the_distance(rng):
    labels = np.arange(200) % 2
    gaussians = fit_gaussians(Moments(2, 4).update(rng.normal(size=(200, 4)) @ rng.normal(size=(4, 4)), labels))
    features = rng.normal(size=(6, 4)) * 3
    expected = np.empty((6, 4))
    for d in range(4):
        nudge = 1e-5 * np.eye(4)[d]
        above, below = (gaussians.squared_distances(features + s * nudge).min(axis=1) for s in (1, -1))
        expected[:, d] = (above - below) / 2e-5
    np.testing.assert_allclose(distance_gradient(gaussians, features), expected, rtol=1e-5, atol=1e-6)


def test_wrong_layers_are_errors(backbone, train, validation):
    with pytest.raises(UsageError, match="'embeddin'"):
        LeeDetector(layers=("embeddin",)).fit_images(backbone, train, validation)
    with pytest.raises(UsageError, match="'0'"):
        body = nn.Sequential(nn.Flatten(2), nn.Flatten(), nn.Linear(192, 4))
        average_layers(Backbone(body, nn.Linear(4, 2), embedding_size=4), torch.rand(2, 3, 8, 8), ["0"])
    idle = Backbone(make_body(), nn.Linear(24, 3), embedding_size=24)
    idle.body.unused = nn.Identity()
    idle.body.forward = lambda x: nn.Sequential(*list(idle.body)[:4])(x)
    with pytest.raises(UsageError, match="'unused'"):
        average_layers(idle, torch.rand(2, 3, 8, 8), ["unused"])
