"""Detectors of image gradients, against finite differences, pytorch-ood, scikit-learn and loops."""

from __future__ import annotations

import copy
import json
import warnings
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from sklearn.covariance import EmpiricalCovariance
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from maple.baselines.sampling import join_members
from maple.data.image_set import ImageSet
from maple.detectors.gradient import (
    EPSILONS,
    ImageDetector,
    OdinDetector,
    gradient_sign,
    image_gradients,
    log_odds_gradient,
    move_images,
)
from maple.detectors.lee import (
    ATTACK,
    MAGNITUDES,
    TUNING_IMAGES,
    LeeDetector,
    LeeOodDetector,
    average_layers,
    choose_magnitude,
    distance_gradient,
    find_layers,
    weigh_layers,
)
from maple.detectors.registry import create_detector, restore_detector
from maple.errors import ConfigError, DataError, FitError, NotFittedError, UsageError
from maple.networks import Backbone, create_backbone, embed, normalise_images, wrap_backbone
from maple.networks._torchvision import import_torchvision
from maple.stats.gaussians import Gaussians, fit_gaussians
from maple.stats.metrics import auroc
from maple.stats.moments import Moments
from maple.types import Outputs

MEAN, STD = (0.4, 0.5, 0.6), (0.1, 0.2, 0.4)
COLOURS = np.array([[0.3, 0.5, 0.5], [0.5, 0.3, 0.6], [0.6, 0.6, 0.4]])


# ------------------------------------------------------------------------------------------------ what tests run on


def make_body(seed: int = 0) -> nn.Sequential:
    """Smooth (tanh), two sizes, batch normalisation with statistics of its own, no average that is the embedding."""
    torch.manual_seed(seed)
    body = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh()),
        nn.Sequential(nn.Conv2d(8, 6, 3, stride=2, padding=1), nn.Tanh()),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    body[0][1].running_mean.normal_(0, 0.1)
    body[0][1].running_var.uniform_(0.5, 1.5)
    return body


def make_images(n: int, seed: int, colours: np.ndarray = COLOURS) -> ImageSet:
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % len(colours)
    pixels = colours[labels][:, None, None] + 0.15 * rng.normal(size=(n, 8, 8, 3))
    return ImageSet.from_arrays(pixels.clip(0, 1), labels)


@pytest.fixture(scope="module")
def train() -> ImageSet:
    return make_images(150, 0)


@pytest.fixture(scope="module")
def validation() -> ImageSet:
    return make_images(90, 1)


@pytest.fixture(scope="module")
def test() -> ImageSet:
    return make_images(60, 2)


@pytest.fixture(scope="module")
def ood() -> ImageSet:
    """Other colours, other texture."""
    rng = np.random.default_rng(3)
    return ImageSet.from_arrays((np.array([0.35, 0.6, 0.75]) + 0.2 * rng.normal(size=(60, 8, 8, 3))).clip(0, 1))


@pytest.fixture(scope="module")
def backbone(train) -> Backbone:
    """A linear head fitted to the embeddings of a random body: right most of the time, not always."""
    found = Backbone(make_body(), nn.Linear(24, 3), embedding_size=24, mean=MEAN, std=STD)
    embeddings = embed(found, train).embeddings
    solution, *_ = np.linalg.lstsq(np.c_[embeddings, np.ones(150)], 12 * np.eye(3)[train.labels], rcond=None)
    with torch.no_grad():
        found.head.weight.copy_(torch.from_numpy(solution[:-1].T))
        found.head.bias.copy_(torch.from_numpy(solution[-1]))
    return found.eval()


def tensor_of(images: ImageSet) -> torch.Tensor:
    return torch.from_numpy(images.pixels).permute(0, 3, 1, 2).float() / 255


def in_float64(backbone: Backbone, z: torch.Tensor) -> torch.Tensor:
    """Logits from normalised images, all in float64, by a copy of the network."""
    body, head = copy.deepcopy(backbone.body).double().eval(), copy.deepcopy(backbone.head).double()
    return head(body(z.double()))


def normalised(x: torch.Tensor) -> torch.Tensor:
    return normalise_images(x.double(), torch.tensor(MEAN, dtype=torch.float64), torch.tensor(STD, dtype=torch.float64))


def odin_step(backbone: Backbone, x: torch.Tensor, temperature: float = 1000.0) -> torch.Tensor:
    with image_gradients(backbone):
        x = x.clone().requires_grad_()
        logits = backbone(x)[1]
        derivative = log_odds_gradient(logits.detach().double().numpy(), np.arange(logits.shape[1]), temperature)
        return gradient_sign(logits, x, derivative)


# ------------------------------------------------------------------------------------------------------- the step


def test_the_step_has_the_sign_of_finite_differences(backbone, test):
    x = tensor_of(test)[:2]
    step = odin_step(backbone, x).numpy()
    labels = in_float64(backbone, normalised(x)).argmax(1)

    def log_probability(moved: torch.Tensor) -> torch.Tensor:
        logits = in_float64(backbone, normalised(moved)) / 1000
        return logits.log_softmax(1)[torch.arange(len(moved)), labels.repeat(len(moved) // 2)]

    flat = torch.eye(3 * 8 * 8, dtype=torch.float64).reshape(-1, 1, 3, 8, 8) * 1e-4
    with torch.no_grad():
        above, below = (log_probability((x.double() + sign * flat).reshape(-1, 3, 8, 8)) for sign in (1, -1))
    slope = ((above - below) / 2e-4).reshape(3, 8, 8, 2).permute(3, 0, 1, 2).numpy()
    clear = np.abs(slope) > 1e-3 * np.abs(slope).max()
    assert clear.mean() > 0.95
    np.testing.assert_array_equal(step[clear], np.sign(slope)[clear])


def test_a_step_on_the_image_is_the_papers_step_on_the_normalised_image(backbone, test):
    x, epsilon = tensor_of(test), 0.0014
    z = normalised(x).requires_grad_()
    logits = in_float64(backbone, z) / 1000
    loss = F.cross_entropy(logits, logits.argmax(1), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, z)
    std = torch.tensor(STD, dtype=torch.float64)[:, None, None]
    theirs = z.detach() - epsilon * gradient.sign() / std
    ours = normalised(x.double() + epsilon * odin_step(backbone, x).double())
    assert (torch.abs(theirs - ours) < 1e-9).double().mean() > 0.999  # but for gradients that float32 rounds across 0
    torch.testing.assert_close(ours.var(), theirs.var(), rtol=1e-4, atol=0)


def test_the_direction_survives_probabilities_that_round_to_1(train):
    torch.manual_seed(0)
    sure = Backbone(make_body(), nn.Linear(24, 2), embedding_size=24, mean=MEAN, std=STD).eval()
    with torch.no_grad():
        sure.head.weight *= 2e4
    x = tensor_of(train)[:20]
    z = normalised(x).requires_grad_()
    logits = in_float64(sure, z)
    assert (logits.softmax(1).min(1).values == 0).double().mean() > 0.5  # what a softmax would have to work with
    apart = (logits[:, 0] - logits[:, 1]).abs().sum()
    (expected,) = torch.autograd.grad(apart, z)
    agree = odin_step(sure, x, temperature=1.0).double() == expected.sign()
    assert agree.double().mean() > 0.99


def test_steps_go_down_and_nothing_moves_without_one():
    x = torch.tensor([[1.0, -3.0, 0.0]], requires_grad=True)
    moved = list(move_images(x, x**2, np.ones((1, 3)), (0.0, 0.5)))
    torch.testing.assert_close(moved[0], x.detach())
    torch.testing.assert_close(moved[1], torch.tensor([[0.5, -2.5, 0.0]]))
    assert not moved[1].requires_grad


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


# ----------------------------------------------------------------------------------------------------------- ODIN


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
    for epsilon in EPSILONS:
        fixed = OdinDetector(epsilon=epsilon, temperature=5.0).fit_images(backbone, train)
        confidence[epsilon] = (1 - fixed.score_images(backbone, validation)).mean()
    assert detector.epsilon_ == max(confidence, key=lambda epsilon: confidence[epsilon])
    assert detector.epsilon_ > 0 and confidence[0.0025] > confidence[0.0]


# --------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("resnet9", 32, ("blocks.0", "blocks.2", "blocks.3", "blocks", "embedding")),  # pools by maximum
        ("resnet9", 8, ("blocks.0", "blocks.2", "blocks.3", "embedding")),  # the last stage is one pixel
        ("resnet20", 32, ("layer1", "layer2", "embedding")),  # the average of layer3 is the embedding
        ("wrn-16-1", 16, ("blocks.1", "blocks.3", "blocks", "embedding")),
    ],
)
def test_one_layer_per_stage_and_the_embedding(name, size, expected):
    backbone = create_backbone(name, n_classes=3)
    assert find_layers(backbone, torch.rand(2, 3, size, size)) == expected


def test_layers_of_a_network_of_single_layers():
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU()]
    backbone = wrap_backbone(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2)))
    assert find_layers(backbone, torch.rand(2, 3, 8, 8)) == ("1", "embedding")


def test_layers_that_are_called_twice_or_laid_out_otherwise_are_left_out():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2, self.act = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, 2, 1), nn.Tanh()
            self.last = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.act(self.conv2(self.act(self.conv1(x))))
            return self.last(x.permute(0, 2, 3, 1)).amax(dim=(1, 2))

    backbone = Backbone(Odd(), nn.Linear(5, 2), embedding_size=5)
    assert find_layers(backbone, torch.rand(2, 3, 16, 16)) == ("conv1", "conv2", "embedding")


def test_features_are_averages_over_space(backbone, test):
    x = tensor_of(test)[:4]
    with torch.no_grad():
        found = average_layers(backbone, x, ["1", "embedding", "0"])
        first = backbone.body[0](normalise_images(x, backbone.mean, backbone.std))
        second = backbone.body[1](first)
    assert list(found) == ["1", "embedding", "0"]
    torch.testing.assert_close(found["0"], first.mean(dim=(2, 3)))
    torch.testing.assert_close(found["1"], second.mean(dim=(2, 3)))
    torch.testing.assert_close(found["embedding"], backbone.embed(x))


def test_what_an_in_place_layer_does_afterwards_does_not_matter():
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone = Backbone(body, nn.Linear(4, 2), embedding_size=4)
    x = torch.rand(2, 3, 8, 8, requires_grad=True)
    found = average_layers(backbone, x, ["0"])["0"]
    torch.testing.assert_close(found, body[0](normalise_images(x, backbone.mean, backbone.std)).mean(dim=(2, 3)))
    assert torch.autograd.grad(found.sum(), x)[0].abs().sum() > 0


def test_a_layer_of_an_ensemble_is_that_of_all_members_side_by_side(test):
    members = [Backbone(make_body(seed), nn.Linear(24, 3), embedding_size=24, mean=MEAN, std=STD) for seed in range(3)]
    ensemble, x = join_members(members), tensor_of(test)[:4]
    names = find_layers(ensemble, x)
    assert names == find_layers(members[0], x) == ("0", "2", "embedding")
    with torch.no_grad():
        found = average_layers(ensemble, x, names)
        alone = [average_layers(member, x, names) for member in members]
    for name in names:
        torch.testing.assert_close(found[name], torch.cat([each[name] for each in alone], dim=1))
    with pytest.raises(UsageError, match=r"no layer 'members\.0\.0\.0'"):
        average_layers(ensemble, x, ["members.0.0.0"])


# ------------------------------------------------------------------------------------------------------ Lee et al.


@pytest.fixture(scope="module")
def fitted(backbone, train, validation) -> LeeDetector:
    return LeeDetector(magnitude=0.002).fit_images(backbone, train, validation)


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
        detector.layer_distances(backbone, tensor_of(images)[rows], MAGNITUDES)
        for images, rows in zip((validation, ood), order)
    )
    best = choose_magnitude(known, unknown)
    assert detector.magnitude_ == MAGNITUDES[best]
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
    inside = (x > ATTACK) & (x < 1 - ATTACK)
    assert ((steps[inside] - ATTACK).abs() < 1e-6).double().mean() > 0.99
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
    monkeypatch.setattr("maple.detectors.lee.TUNING_IMAGES", 40)
    seen: list[tuple[int, int]] = []
    detector = LeeDetector(magnitude=0.0, layers=("1",))
    detector.fit_images(backbone, train, make_images(120, 5), progress=lambda *done: seen.append(done))
    assert TUNING_IMAGES == 1000 and seen[-1] == (190, 190)


def test_layers_can_be_named_and_classes_may_be_missing(backbone, train, validation, test):
    some = train.subset(train.labels != 1)
    detector = LeeDetector(layers=("embedding", "0"), magnitude=0.0).fit_images(backbone, some, validation)
    assert detector.layers_ == ("embedding", "0") and detector.gaussians_["0"].n_clusters == 2
    assert detector.score_images(backbone, test).shape == (60,)


# --------------------------------------------------------------------------------------- what every one promises


def each_detector() -> list[ImageDetector]:
    return [OdinDetector(epsilon="auto"), LeeDetector(magnitude=0.001), LeeOodDetector(magnitude=0.001)]


DETECTORS = pytest.mark.parametrize("detector", each_detector(), ids=lambda detector: detector.name)


@DETECTORS
def test_the_backbone_is_left_as_it_was(detector, backbone, train, validation, test, ood):
    used = copy.deepcopy(backbone).train()
    used.body[1].eval()
    used.head.bias.requires_grad_(False)
    used.head.weight.grad = torch.ones_like(used.head.weight)
    state = copy.deepcopy(used.state_dict())
    modes = [layer.training for layer in used.modules()]
    flags = [parameter.requires_grad for parameter in used.parameters()]
    during: list[bool] = []
    scores = detector.fit_images(used, train, validation, ood=ood).score_images(
        used, test, batch_size=25, progress=lambda done, n: during.append(used.training)
    )
    assert during == [True] * 3  # between batches too
    assert [layer.training for layer in used.modules()] == modes
    assert [parameter.requires_grad for parameter in used.parameters()] == flags
    assert all(torch.equal(before, used.state_dict()[name]) for name, before in state.items())
    assert not any(layer._forward_hooks for layer in used.modules())
    torch.testing.assert_close(used.head.weight.grad, torch.ones_like(used.head.weight))
    assert all(p.grad is None for p in used.parameters() if p is not used.head.weight)
    np.testing.assert_allclose(scores, detector.score_images(backbone, test), rtol=1e-3, atol=1e-5)  # evaluation mode


def test_the_backbone_is_left_as_it_was_after_a_failure(backbone):
    used = copy.deepcopy(backbone).train()
    with pytest.raises(ZeroDivisionError), image_gradients(used):
        assert not used.training and not any(p.requires_grad for p in used.parameters()) and torch.is_grad_enabled()
        1 / 0  # noqa: B018
    assert used.training and all(p.requires_grad for p in used.parameters())


@DETECTORS
def test_the_callers_modes_do_not_matter(detector, backbone, train, validation, test, ood):
    expected = detector.fit_images(backbone, train, validation, ood=ood).score_images(backbone, test)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            np.testing.assert_array_equal(detector.score_images(backbone, test), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(detector.score_images(backbone, test), expected)


@DETECTORS
def test_every_form_of_images_scores_the_same_in_order(detector, backbone, train, validation, test, ood):
    test = test.subset(range(20))
    detector.fit_images(backbone, train, validation, ood=ood)
    expected = detector.score_images(backbone, test)
    assert expected.shape == (20,) and expected.dtype == np.float64 and np.isfinite(expected).all()
    x = tensor_of(test)
    loader = DataLoader(TensorDataset(x, torch.from_numpy(test.labels)), batch_size=7)
    for form, size in ((test.pixels, 128), (x, 17), (loader, 128), (test, 1)):
        scores = detector.score_images(backbone, form, batch_size=size)
        np.testing.assert_allclose(scores, expected, rtol=2e-3, atol=1e-6)
    assert detector.score_images(backbone, x[:0]).shape == (0,)
    np.testing.assert_allclose(detector.score_images(backbone, x.flip(0)), expected[::-1], rtol=2e-3, atol=1e-6)


@DETECTORS
def test_state_restores_the_scores(detector, backbone, train, validation, test, ood):
    detector.fit_images(backbone, train, validation, ood=ood)
    arrays, metadata = detector.get_state()
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in arrays.values())
    restored = restore_detector(arrays, json.loads(json.dumps(metadata)))
    assert type(restored) is type(detector) and isinstance(restored, ImageDetector)
    np.testing.assert_array_equal(restored.score_images(backbone, test), detector.score_images(backbone, test))


@DETECTORS
def test_outputs_are_refused_with_a_way_out(detector):
    outputs = Outputs(np.zeros((3, 2)), np.zeros((3, 2)))
    with pytest.raises(
        UsageError, match=rf"'{detector.name}' detector needs image gradients.*\(fit_images\).*evaluate"
    ):
        detector.fit(outputs, outputs, head=None)
    with pytest.raises(UsageError, match=rf"'{detector.name}' detector needs image gradients.*\(score_images\)"):
        detector.score(outputs)


def test_they_work_on_wrapped_networks(train, validation, test, ood):
    class Tuple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = make_body(), nn.Linear(24, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return self.fc(self.body(x)), None

    wrapped = wrap_backbone(Tuple(), example=np.zeros((2, 8, 8, 3), np.uint8))
    assert find_layers(wrapped, tensor_of(test)[:2])[0] == "module.body.0"
    for detector in each_detector():
        scores = detector.fit_images(wrapped, train, validation, ood=ood).score_images(wrapped, test)
        assert np.isfinite(scores).all()


def test_they_work_on_ensembles_and_hear_every_member(train, validation, test, ood):
    members = [Backbone(make_body(seed), nn.Linear(24, 3), embedding_size=24, mean=MEAN, std=STD) for seed in range(2)]
    ensemble = join_members(members).eval()
    for detector in each_detector():
        scores = detector.fit_images(ensemble, train, validation, ood=ood).score_images(ensemble, test)
        assert np.isfinite(scores).all()
        for member in range(2):
            other = copy.deepcopy(ensemble)
            with torch.no_grad():
                other.body.members[member][0][0][0].bias += 0.1
            assert np.abs(detector.score_images(other, test) - scores).min() > 0


def test_progress_counts_all_images_once(backbone, train, validation, ood, test):
    seen: list[tuple[int, int]] = []
    LeeOodDetector(magnitude=0.0).fit_images(
        backbone, train, validation, ood=ood, batch_size=100, progress=lambda *done: seen.append(done)
    )
    assert seen == [(100, 300), (150, 300), (240, 300), (300, 300)]
    seen.clear()
    detector = OdinDetector().fit_images(backbone, train)
    scores = detector.score_images(backbone, test, batch_size=40, progress=lambda *done: seen.append(done))
    assert seen == [(40, 60), (60, 60)]
    np.testing.assert_allclose(detector.score_images(backbone, test, workers=1), scores, rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------- errors


def test_unfitted_detectors_say_so(backbone, test):
    for detector in (OdinDetector(), LeeDetector()):
        with pytest.raises(NotFittedError, match="call fit_images first"):
            detector.score_images(backbone, test)
        with pytest.raises(NotFittedError):
            detector.get_state()


def test_a_failed_fit_leaves_nothing_fitted(backbone, train, test):
    detector = OdinDetector(epsilon="auto").fit_images(backbone, train, test)
    with pytest.raises(UsageError):
        detector.fit_images(backbone, train)
    with pytest.raises(NotFittedError):
        detector.score_images(backbone, test)


def test_missing_images_are_errors(backbone, train, validation):
    with pytest.raises(
        UsageError, match=r"'lee-md-ood' detector is tuned on out-of-distribution images.*or use 'lee-md'"
    ):
        LeeOodDetector().fit_images(backbone, train, validation)
    with pytest.raises(UsageError, match=r"epsilon 'auto'.*validation images"):
        OdinDetector(epsilon="auto").fit_images(backbone, train)
    with pytest.raises(UsageError, match="'lee-md' detector weighs layers by validation images"):
        LeeDetector().fit_images(backbone, train)
    with pytest.raises(FitError, match="weighs layers by 10 images, which are too few"):
        LeeDetector(magnitude=0.0).fit_images(backbone, train, validation.subset(range(10)))
    with pytest.raises(FitError, match="no images"):
        OdinDetector().fit_images(backbone, train.subset([]))
    unlabelled = ImageSet.from_arrays(train.pixels)
    with pytest.raises(FitError, match="150 of 150 training images have no label"):
        LeeDetector().fit_images(backbone, unlabelled, validation)


def test_wrong_layers_are_errors(backbone, train, validation):
    with pytest.raises(UsageError, match="no layer 'embeddin': did you mean 'embedding'"):
        LeeDetector(layers=("embeddin",)).fit_images(backbone, train, validation)
    with pytest.raises(UsageError, match="'0' gives neither channels"):
        body = nn.Sequential(nn.Flatten(2), nn.Flatten(), nn.Linear(192, 4))
        average_layers(Backbone(body, nn.Linear(4, 2), embedding_size=4), torch.rand(2, 3, 8, 8), ["0"])
    idle = Backbone(make_body(), nn.Linear(24, 3), embedding_size=24)
    idle.body.unused = nn.Identity()
    idle.body.forward = lambda x: nn.Sequential(*list(idle.body)[:4])(x)
    with pytest.raises(UsageError, match="'unused' takes no part"):
        average_layers(idle, torch.rand(2, 3, 8, 8), ["unused"])


def test_wrong_options_are_errors(backbone, train, validation):
    with pytest.raises(UsageError, match="unknown option 'epsilo' of the detector 'odin'"):
        create_detector("odin", epsilo=1)
    for detector in (OdinDetector(temperature=0.0), OdinDetector(epsilon=-1.0), LeeDetector(layers=())):
        with pytest.raises(ConfigError, match=type(detector).__name__):
            detector.fit_images(backbone, train, validation)
    with pytest.raises(UsageError, match="batch size of 0"):
        OdinDetector().fit_images(backbone, train, batch_size=0)


def test_wrong_backbones_are_errors(backbone, train, test):
    detector = OdinDetector().fit_images(backbone, train)
    other = Backbone(make_body(), nn.Linear(24, 5), embedding_size=24)
    with pytest.raises(UsageError, match=r"5 columns.*fitted on 3"):
        detector.score_images(other, test)
    with pytest.raises(UsageError, match=r"4 clusters have a class.*3 logits"):
        OdinDetector().fit_images(backbone, train, cluster_to_class=np.arange(4))
    with pytest.raises(UsageError, match="at least two classes"):
        OdinDetector(epsilon=0.01).fit_images(backbone, train, cluster_to_class=np.zeros(3)).score_images(
            backbone, test
        )
    with pytest.raises(UsageError, match="no head"):
        OdinDetector().fit_images(Backbone(make_body(), None, embedding_size=24), train)

    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach())

    with pytest.raises(UsageError, match="no gradient with respect to the images"):
        detector.score_images(Backbone(make_body(), Detached(24, 3), embedding_size=24), test)
    broken = copy.deepcopy(backbone)
    with torch.no_grad():
        broken.head.bias[0] = torch.nan
    with pytest.raises(DataError, match="60 of 60 images hold NaN"):
        detector.score_images(broken, test)


def test_gaussians_are_those_of_the_project(backbone, train, fitted):
    assert all(isinstance(each, Gaussians) for each in fitted.gaussians_.values())
    with torch.no_grad():
        features = average_layers(backbone, tensor_of(train), fitted.layers_)
    for layer, values in features.items():
        expected = fit_gaussians(Moments(3, values.shape[1]).update(values, train.labels), pca=False)
        np.testing.assert_allclose(
            fitted.gaussians_[layer].squared_distances(values), expected.squared_distances(values), rtol=1e-3, atol=1e-3
        )
