"""VMDLS-like against torch.distributions; samples in training, means in evaluation; far between classes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.distributions import kl_divergence as reference_divergence

from maple.baselines.vmdls import VmdlsHead, VmdlsRecipe, kl_divergence, sample_gaussian
from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.errors import UsageError
from maple.networks import Backbone, MadeBy, create_backbone
from maple.prediction.store import load_backbone, save_backbone
from maple.runs.setup.config import resolve_config
from maple.training.loop import train_backbone
from maple.training.loss import weighted_sum
from maple.training.recipe import Step, create_recipe
from maple.training.resume import Checkpoint
from maple.types import Relabelling


def make_head(n_classes=3, latent_size=6, prior_scale=0.4, seed=0):
    """A head whose posteriors differ from image to image in their widths, too."""
    torch.manual_seed(seed)
    head = VmdlsHead(embedding_size=5, n_classes=n_classes, latent_size=latent_size, prior_scale=prior_scale)
    nn.init.normal_(head.narrowing.weight)
    return head


# --- latent space ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_classes", "latent_size"), [(3, 6), (6, 6), (40, 16)])
def test_class_means_are_far_apart_and_from_the_origin(n_classes, latent_size):
    means = make_head(n_classes, latent_size).class_means
    torch.testing.assert_close(means.norm(dim=1), torch.ones(n_classes))
    distances = torch.pdist(means)
    if n_classes <= latent_size:
        torch.testing.assert_close(distances, torch.full_like(distances, math.sqrt(2)))
    assert distances.min() > 0.5


def test_logits_are_distances_of_the_mean():
    head = make_head().eval()
    embeddings = torch.randn(4, 5)
    with torch.no_grad():
        logits, (mean, _) = head(embeddings), head.posterior(embeddings)
    for n in range(4):
        for c in range(3):
            squared = sum((float(mean[n, j]) - float(head.class_means[c, j])) ** 2 for j in range(6))
            assert float(logits[n, c]) == pytest.approx(-squared / (2 * 0.4**2), rel=1e-5)
    prior = Normal(head.class_means, 0.4)
    densities = prior.log_prob(mean[:, None]).sum(2)
    torch.testing.assert_close(logits.log_softmax(1), densities.log_softmax(1))


@pytest.mark.parametrize("prior_scale", [0.1, 0.5])
def test_logits_are_as_steep_as_those_of_a_linear_head(prior_scale):
    """Differences of logits do not depend on the width of the prior."""
    head = make_head(prior_scale=prior_scale).eval()
    embeddings = torch.randn(4, 5)
    with torch.no_grad():
        linear = head.mean(embeddings) @ head.class_means.T
        torch.testing.assert_close(head(embeddings).log_softmax(1), linear.log_softmax(1), rtol=1e-4, atol=1e-4)


def test_posteriors_start_at_the_width_of_the_prior_and_are_never_wider():
    fresh = VmdlsHead(embedding_size=5, n_classes=3, latent_size=6, prior_scale=0.4)
    width = (fresh.posterior(torch.randn(4, 5))[1] / 2).exp()
    assert width.min() > 0.9 * 0.4
    extreme = (make_head().posterior(1e4 * torch.randn(4, 5))[1] / 2).exp()
    assert extreme.max() <= 0.4 and extreme.isfinite().all()


# --- sampling --------------------------------------------------------------------------------------------------------


def test_samples_have_mean_and_variance():
    torch.manual_seed(0)
    mean, log_variance = torch.tensor([[0.5, -2.0]]), torch.tensor([[0.0, -3.0]])
    samples = sample_gaussian(mean.expand(100_000, 2), log_variance.expand(100_000, 2))
    torch.testing.assert_close(samples.mean(0), mean[0], atol=0.02, rtol=0)
    torch.testing.assert_close(samples.var(0), log_variance.exp()[0], rtol=0.02, atol=0)


def test_samples_have_gradients():
    mean, log_variance = torch.zeros(3, 2, requires_grad=True), torch.full((3, 2), -2.0, requires_grad=True)
    z = sample_gaussian(mean, log_variance)
    z.sum().backward()
    torch.testing.assert_close(mean.grad, torch.ones(3, 2))
    torch.testing.assert_close(log_variance.grad, z.detach() / 2)  # dz / d log s² = (z - m) / 2


def test_training_samples_and_evaluation_does_not():
    head, embeddings = make_head(), torch.randn(4, 5)
    with torch.no_grad():
        first, second = head(embeddings), head(embeddings)
        assert (first != second).all()
        head.eval()
        assert torch.equal(head(embeddings), head(embeddings))
        one_by_one = torch.cat([head(row[None]) for row in embeddings])
        torch.testing.assert_close(head(embeddings), one_by_one)
        head.train()
        drawn = torch.stack([head(embeddings) for _ in range(2000)])
        mean, log_variance = head.posterior(embeddings)
        squared = (mean[:, None] - head.class_means).square().sum(2) + log_variance.exp().sum(1, keepdim=True)
    torch.testing.assert_close(drawn.mean(0), -squared / (2 * 0.4**2), rtol=0.05, atol=0.05)


# --- loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior_scale", [0.2, 1.0, 3.0])
def test_divergence_is_that_of_torch(prior_scale):
    torch.manual_seed(0)
    mean, log_variance, prior_mean = (torch.randn(7, 4, dtype=torch.float64) for _ in range(3))
    posterior, prior = Normal(mean, (log_variance / 2).exp()), Normal(prior_mean, prior_scale)
    expected = reference_divergence(posterior, prior).sum(1)
    torch.testing.assert_close(kl_divergence(mean, log_variance, prior_mean, prior_scale), expected)


def test_divergence_vanishes_at_the_prior():
    mean = torch.randn(3, 4)
    log_variance = torch.full((3, 4), 2 * math.log(0.3))
    torch.testing.assert_close(kl_divergence(mean, log_variance, mean, 0.3), torch.zeros(3))


def test_loss_is_cross_entropy_and_divergence_from_the_own_class():
    head = make_head()
    backbone = Backbone(nn.Flatten(), head, embedding_size=5)
    embeddings, targets = torch.randn(4, 5), torch.tensor([2, 0, 1, 2])
    logits = head(embeddings)
    terms = VmdlsRecipe(kl_weight=0.3).loss(Step(embeddings, embeddings, logits, targets, 0.5, backbone))
    probabilities = logits.detach().softmax(1)
    assert terms["cross_entropy"].value.item() == pytest.approx(
        np.mean([-math.log(float(probabilities[n, targets[n]])) for n in range(4)]), rel=1e-4
    )
    mean, log_variance = head.posterior(embeddings)
    posterior, prior = Normal(mean, (log_variance / 2).exp()), Normal(head.class_means[targets], 0.4)
    torch.testing.assert_close(terms["kl_divergence"].value, reference_divergence(posterior, prior).sum(1).mean())
    assert terms["kl_divergence"].weight == 0.3


# --- the whole -------------------------------------------------------------------------------------------------------


def train_on_blobs(kl_weight, spread=0.04):
    """Three blobs in the plane, as images of one pixel whose blue channel is always 0, and a small network."""
    torch.manual_seed(0)
    centres = torch.tensor([[0.3, 0.3], [0.7, 0.3], [0.5, 0.7]])
    targets = torch.arange(300) % 3
    points = centres[targets] + spread * torch.randn(300, 2)
    images = torch.cat([points, torch.zeros(300, 1)], dim=1)[:, :, None, None]
    body = nn.Sequential(nn.Flatten(), nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    backbone = Backbone(body, None, embedding_size=64, mean=(0.5, 0.5, 0.0), std=(0.2, 0.2, 0.2))
    recipe = create_recipe("vmdls-like", latent_size=16, kl_weight=kl_weight, prior_scale=0.2)
    backbone.head = recipe.build_head(64, 3)
    optimiser = torch.optim.SGD(backbone.parameters(), 0.05, momentum=0.9)
    for _ in range(300):
        rows = torch.randint(0, 300, (64,))
        step = Step(images[rows], *backbone(images[rows]), targets[rows], 0.5, backbone)
        optimiser.zero_grad()
        weighted_sum(recipe.loss(step)).backward()
        optimiser.step()
    return backbone.eval(), images, targets


def test_each_class_becomes_the_gaussian_of_its_prior():
    backbone, images, targets = train_on_blobs(kl_weight=0.1)
    with torch.no_grad():
        embeddings, logits = backbone(images)
        mean, log_variance = backbone.head.posterior(embeddings)
        assert (logits.argmax(1) == targets).float().mean() > 0.99
        own = backbone.head.class_means[targets]
        assert (mean - own).norm(dim=1).mean() < 0.2  # within one standard deviation of the prior
        assert 0.8 * 0.2 < (log_variance / 2).exp().mean() <= 0.2
        between = torch.tensor([[0.5, 0.43, 0.0]])[:, :, None, None]  # the middle of the three blobs
        assert backbone(between)[1].amax() < logits.amax(1).quantile(0.01)


def test_the_divergence_keeps_posteriors_wide():
    """Where classes overlap, cross-entropy alone makes the samples ever less random."""
    widths = {}
    for kl_weight in (0.0, 0.1):
        backbone, images, _ = train_on_blobs(kl_weight, spread=0.15)
        with torch.no_grad():
            log_variance = backbone.head.posterior(backbone.embed(images))[1]
        relative = (log_variance / 2).exp() / 0.2
        widths[kl_weight] = float(relative.mean())
    assert widths[0.0] < 0.6 < 0.8 < widths[0.1]


def test_state_round_trip():
    recipe = create_recipe("vmdls-like", latent_size=6)
    torch.manual_seed(0)
    head, other = recipe.build_head(5, 3).eval(), recipe.build_head(5, 3).eval()
    embeddings = torch.randn(6, 5)
    with torch.no_grad():
        assert not torch.equal(other(embeddings), head(embeddings))
        other.load_state_dict(head.state_dict())
        assert torch.equal(other(embeddings), head(embeddings))
    assert "class_means" in head.state_dict()
    assert "class_means" not in dict(head.named_parameters())


def test_says_that_it_is_not_the_original():
    assert VmdlsRecipe.about.title.startswith("VMDLS-like") and "no metric losses" in VmdlsRecipe.about.title


def test_trains_in_the_loop():
    splits = load_splits("digits", DataOptions())
    few = dataclasses.replace(splits, train=splits.train.subset(np.arange(512)))
    torch.manual_seed(0)
    settings = {"epochs": 6, "batch_size": 64, "precision": "32-true", "show_progress": False}
    recipe = create_recipe("vmdls-like")
    run = train_backbone(create_backbone("resnet9", 10), recipe, few.train, few.validation, **settings)
    first, *_, last = run.history
    assert last["cross_entropy"] < first["cross_entropy"]
    assert last["kl_divergence"] < first["kl_divergence"]
    assert last["validation_accuracy"] > 0.7


# --- its former name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "file"),
    [
        ({"recipe": "vmdls", "vmdls.latent_size": "16"}, {}),
        ({"recipe": "vmdls-like", "vmdls.latent_size": "16"}, {}),
        ({}, {"model": {"recipe": "vmdls"}, "vmdls": {"latent_size": 16}}),
        ({}, {"model": {"recipe": "vmdls-like"}, "vmdls_like": {"vmdls_latent_size": 16}}),
    ],
)
def test_settings_of_the_former_name_are_read(flags, file):
    config = resolve_config(flags, file)
    assert config.recipe == VmdlsRecipe(latent_size=16)
    assert config.sections()["model"]["recipe"] == "vmdls-like" and "vmdls_like" in config.sections()


def test_weights_and_checkpoints_of_the_former_name_are_read(tmp_path):
    recipe = VmdlsRecipe(latent_size=16)
    backbone = create_backbone("resnet9", 3)
    backbone.head = recipe.build_head(128, 3)
    backbone.made_by = MadeBy("vmdls", {"latent_size": 16}, 3)
    save_backbone(tmp_path / "weights.safetensors", backbone)
    loaded = load_backbone(tmp_path / "weights.safetensors")
    images = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(loaded(images)[1], backbone.eval()(images)[1])
    split = Relabelling.initial(np.array([0, 1, 2]), 3)
    found = Checkpoint(
        [],
        {},
        {},
        relabelling=split,
        weights={},
        optimizer={},
        options={"recipe": "vmdls", "latent_size": 16},
        data="same",
    )
    found.check(recipe.options(), "same", tmp_path)
    with pytest.raises(UsageError, match="--latent-size"):
        found.check(VmdlsRecipe(latent_size=8).options(), "same", tmp_path)
