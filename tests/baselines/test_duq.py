"""DUQ against explicit loops and finite differences; certain only near the data."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from sklearn.datasets import make_moons
from torch import nn
from torch.nn import functional as F

from maple.baselines.duq import DuqHead, DuqRecipe, gradient_penalty, log_complement, one_against_rest
from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.detectors.registry import create_detector
from maple.networks import Backbone, create_backbone, normalise_images
from maple.training.loop import train_backbone
from maple.training.loss import weighted_sum
from maple.training.recipe import Step, create_recipe
from maple.types import Outputs

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def make_head(n_classes=3, seed=0, length_scale=0.7):
    torch.manual_seed(seed)
    return DuqHead(embedding_size=5, n_classes=n_classes, centroid_size=4, length_scale=length_scale)


def make_backbone(seed=0):
    """Smooth, so that finite differences tell; images of 2 x 2 pixels."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5))
    return Backbone(body, make_head(seed=seed), embedding_size=5, mean=MEAN, std=STD)


def make_step(backbone, images, targets, gradients=True):
    images = images.clone().requires_grad_(gradients)
    return Step(images, *backbone(images), targets, progress=0.5, backbone=backbone)


# --- kernel and centroids --------------------------------------------------------------------------------------------


def test_kernel_formula():
    head = make_head()
    embeddings = torch.randn(6, 5)
    with torch.no_grad():
        kernels = head(embeddings).exp()
    for n in range(6):
        for c in range(3):
            difference = head.weight[c].detach() @ embeddings[n] - head.centroids[c]
            expected = np.exp(-float(difference @ difference) / 4 / (2 * 0.7**2))
            assert float(kernels[n, c]) == pytest.approx(expected, rel=1e-5)


def test_probabilities_are_kernels_over_their_sum():
    """They say nothing about how near the nearest class is, which is what the method ranks by."""
    kernels = np.array([[0.9, 0.3, 0.1], [0.09, 0.03, 0.01]])
    outputs = Outputs(np.zeros((2, 4)), np.log(kernels), cluster_to_class=np.arange(3))
    expected = kernels / kernels.sum(1, keepdims=True)
    np.testing.assert_allclose(DuqRecipe().class_probabilities(outputs), expected)
    np.testing.assert_allclose(expected[0], expected[1])
    detector = create_detector(DuqRecipe.own_detector)
    detector.fit(outputs)
    np.testing.assert_allclose(np.exp(-detector.score(outputs)), kernels.max(1))


def test_first_centroids_and_weights_are_those_of_the_published_code():
    torch.manual_seed(0)
    head = DuqHead(embedding_size=128, n_classes=10, centroid_size=64, length_scale=0.1)
    assert float(head.centroids.std()) == pytest.approx(0.05, rel=0.1)
    assert head.counts.tolist() == [13.0] * 10
    assert float(head.weight.detach().std()) == pytest.approx(np.sqrt(2 / 1280), rel=0.02)


def test_centroids_are_quotients_of_moving_averages():
    head, momentum = make_head(), 0.8
    counts = head.counts.tolist()
    sums = [counts[c] * head.centroids[c].clone() for c in range(3)]
    for batch in range(4):
        embeddings, targets = torch.randn(7, 5), torch.randint(0, 2 if batch < 3 else 3, (7,))  # class 2 comes late
        head.update(embeddings, targets, momentum)
        for c in range(3):
            own = [head.weight[c].detach() @ embeddings[n] for n in range(7) if targets[n] == c]
            counts[c] = momentum * counts[c] + (1 - momentum) * len(own)
            sums[c] = momentum * sums[c] + (1 - momentum) * sum(own, torch.zeros(4))
            torch.testing.assert_close(head.centroids[c], sums[c] / counts[c])
        torch.testing.assert_close(head.counts, torch.tensor(counts))


def test_a_class_without_images_keeps_its_centroid():
    head = make_head()
    before = head.centroids[2].clone()
    for momentum in [0.5] * 300 + [0.0]:  # its count runs to zero
        head.update(torch.randn(4, 5), torch.tensor([0, 0, 1, 1]), momentum)
    assert torch.equal(head.centroids[2], before)
    assert head.centroids.isfinite().all()
    embeddings = torch.randn(2, 5)
    head.update(embeddings, torch.tensor([2, 2]), 0.5)
    torch.testing.assert_close(head.centroids[2], (embeddings @ head.weight[2].T).mean(0).detach())


def test_training_moves_centroids_but_not_by_gradients():
    backbone, recipe = make_backbone(), DuqRecipe(centroid_momentum=0.9)
    assert [name for name, _ in backbone.head.named_parameters()] == ["weight"]
    step = make_step(backbone, torch.rand(8, 3, 2, 2), torch.arange(8) % 3)
    alone = copy.deepcopy(backbone.head)
    recipe.after_step(step.detached())
    alone.update(step.embeddings, step.targets, 0.9)
    assert torch.equal(backbone.head.centroids, alone.centroids)
    assert not backbone.head.centroids.requires_grad


# --- loss ------------------------------------------------------------------------------------------------------------


def test_loss_against_a_loop():
    kernels, targets = torch.rand(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1, 0])
    terms = [
        -np.log(float(kernels[n, c])) if targets[n] == c else -np.log(1 - float(kernels[n, c]))
        for n in range(6)
        for c in range(3)
    ]
    assert float(one_against_rest(kernels.log(), targets)) == pytest.approx(sum(terms) / 18)
    expected = F.binary_cross_entropy(kernels, F.one_hot(targets, 3).double())
    torch.testing.assert_close(one_against_rest(kernels.log(), targets), expected)


def test_complement_is_exact_at_both_ends():
    a = torch.tensor([-1e-6, -1e-3, -0.69, -0.70, -5.0, -30.0])
    expected = np.log1p(-np.exp(a.double().numpy()))
    np.testing.assert_allclose(log_complement(a).numpy(), expected, rtol=2e-6)
    gradient = torch.autograd.functional.jacobian(lambda x: log_complement(x).sum(), a)
    np.testing.assert_allclose(gradient.numpy(), -1 / np.expm1(-a.double().numpy()), rtol=2e-6)


def test_loss_is_finite_where_kernels_are_not():
    """A kernel of 1 for a wrong class, and kernels that underflow to 0, which still have to be drawn near."""
    log_kernels = torch.tensor([[-1e4, 0.0], [-1e-30, -1e4]], requires_grad=True)
    loss = one_against_rest(log_kernels, torch.tensor([0, 0]))
    loss.backward()
    assert loss.isfinite() and log_kernels.grad.isfinite().all()
    assert float(log_kernels.grad[0, 0]) == -1 / 4
    assert float(log_kernels.grad[1, 1]) == 0


# --- gradient penalty ------------------------------------------------------------------------------------------------


def double_penalty(backbone, images):
    """The penalty in double precision, by central differences with respect to the normalised image."""

    def total(x):  # (3, 2, 2) normalised
        return float(backbone.head(backbone.body(x[None])).exp().sum())

    penalties = []
    with torch.no_grad():
        for image in images:
            x, gradient = normalise_images(image[None], backbone.mean, backbone.std)[0], []
            for i in range(x.numel()):
                shift = torch.zeros(x.numel(), dtype=torch.float64).index_fill_(0, torch.tensor(i), 1e-5).view_as(x)
                gradient.append((total(x + shift) - total(x - shift)) / 2e-5)
            penalties.append((np.linalg.norm(gradient) - 1) ** 2)
    return np.mean(penalties)


def penalty(backbone, images):
    images = images.clone().requires_grad_()
    logits = backbone.head(backbone.body(normalise_images(images, backbone.mean, backbone.std)))
    return gradient_penalty(logits, images, backbone.std)


def test_penalty_against_finite_differences():
    backbone = make_backbone().double()
    images = torch.rand(4, 3, 2, 2, dtype=torch.float64)
    value = penalty(backbone, images)
    assert value.item() == pytest.approx(double_penalty(backbone, images), rel=1e-6)
    value.backward()
    for parameter in (backbone.body[1].weight, backbone.body[3].bias, backbone.head.weight):
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in (0, len(flat) // 2, len(flat) - 1):
            there = []
            for shift in (1e-5, -2e-5):
                flat[i] += shift
                there.append(penalty(backbone, images).item())
            flat[i] += 1e-5
            assert float(gradient[i]) == pytest.approx((there[0] - there[1]) / 2e-5, rel=1e-4, abs=1e-7)


def test_penalty_does_not_depend_on_who_normalises():
    """The same network that is given normalised images has the same penalty."""
    backbone = make_backbone()
    other = Backbone(backbone.body, backbone.head, embedding_size=5, mean=(0, 0, 0), std=(1, 1, 1))
    images, targets = torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])
    recipe = DuqRecipe()
    inside = recipe.loss(make_step(backbone, images, targets))["gradient_penalty"]
    normalised = normalise_images(images, backbone.mean, backbone.std)
    outside = recipe.loss(make_step(other, normalised, targets))["gradient_penalty"]
    assert inside.weight == recipe.gradient_penalty
    torch.testing.assert_close(inside.value, outside.value)
    assert inside.value.item() == pytest.approx(penalty(backbone, images).item(), rel=1e-5)


def test_penalty_is_finite_where_the_gradient_vanishes():
    backbone = make_backbone()
    nn.init.zeros_(backbone.body[1].weight)
    value = penalty(backbone, torch.rand(4, 3, 2, 2))
    value.backward()
    assert value.item() == pytest.approx(1, abs=1e-5)
    assert all(parameter.grad.isfinite().all() for parameter in backbone.parameters() if parameter.grad is not None)


def test_no_second_derivatives_without_the_penalty(monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("gradients of the images were asked for")

    step = make_step(make_backbone(), torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 2, 0]), gradients=False)
    monkeypatch.setattr(torch.autograd, "grad", refuse)
    assert list(DuqRecipe(gradient_penalty=0).loss(step)) == ["binary_cross_entropy"]
    with pytest.raises(AssertionError, match="gradients of the images"):
        DuqRecipe(gradient_penalty=0.1).loss(step)


# --- the whole -------------------------------------------------------------------------------------------------------


def test_state_round_trip():
    recipe = create_recipe("duq", centroid_size=4)
    torch.manual_seed(0)
    head, other = recipe.build_head(5, 3), recipe.build_head(5, 3)
    embeddings = torch.randn(6, 5)
    head.update(embeddings, torch.arange(6) % 3, 0.9)
    with torch.no_grad():
        assert not torch.equal(other(embeddings), head(embeddings))
        other.load_state_dict(head.state_dict())
        assert torch.equal(other(embeddings), head(embeddings))
    for each in (head, other):  # and goes on alike
        each.update(embeddings, torch.arange(6) % 3, 0.9)
    assert torch.equal(other.centroids, head.centroids)


class Plane(nn.Module):
    """The first two channels of images of one pixel. A gradient in the third would satisfy the penalty for nothing."""

    def forward(self, x):
        return x[:, :2, 0, 0]


def test_certain_only_near_two_moons():
    points, labels = make_moons(400, noise=0.1, random_state=0)
    low, width = -3.0, 7.0  # of the square of the plane that the images show
    torch.manual_seed(0)
    layers = (nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    mean, std = (-low / width, -low / width, 0), (1 / width,) * 3  # so that the body sees the points as they are
    backbone = Backbone(nn.Sequential(Plane(), *layers), None, embedding_size=128, mean=mean, std=std)
    options = {"length_scale": 0.3, "gradient_penalty": 1.0, "centroid_momentum": 0.99}
    recipe = create_recipe("duq", **options, centroid_size=10)
    backbone.head = recipe.build_head(128, 2)

    def as_images(xy):
        return torch.from_numpy(np.pad((xy - low) / width, ((0, 0), (0, 1)))).float()[:, :, None, None]

    images, targets = as_images(points), torch.from_numpy(labels)
    optimiser = torch.optim.SGD(backbone.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    for _ in range(600):
        rows = torch.randint(0, 400, (64,))
        step = make_step(backbone, images[rows], targets[rows])
        optimiser.zero_grad()
        weighted_sum(recipe.loss(step)).backward()
        optimiser.step()
        recipe.after_step(step.detached())

    angles = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    ring = np.array([0.5, 0.25]) + 3.2 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    with torch.no_grad():
        near, far = backbone(images)[1], backbone(as_images(ring))[1].amax(1)
    assert (near.argmax(1) == targets).float().mean() > 0.97
    assert near.amax(1).exp().median() > 0.8
    assert far.exp().mean() < 0.1
    assert far.median() < near.amax(1).quantile(0.05)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_trains_in_the_loop(precision):
    splits = load_splits("digits", DataOptions())
    few = dataclasses.replace(splits, train=splits.train.subset(np.arange(256)))
    torch.manual_seed(0)
    recipe = create_recipe("duq", centroid_size=16)
    settings = {"epochs": 2, "batch_size": 64, "learning_rate": 0.02, "precision": precision, "show_progress": False}
    run = train_backbone(create_backbone("resnet9", 10), recipe, few.train, few.validation, **settings)
    first, last = run.history
    assert last["binary_cross_entropy"] < first["binary_cross_entropy"]
    assert np.isfinite(last["gradient_penalty"])
    assert run.backbone.head.counts.max() < 13  # some six images of a class in a batch
