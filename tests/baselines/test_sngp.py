"""The Gaussian process of random features against exact ones; its precision against a loop."""

from __future__ import annotations

import dataclasses
import math

import gpytorch
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from maple.baselines.sngp import RandomFeatureHead, SngpOptions, SngpRecipe, mean_field_logits
from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.errors import TrainError
from maple.networks import Backbone, create_backbone
from maple.training.loop import train_backbone
from maple.training.recipe import Step, create_recipe


def make_head(embedding_size=4, n_outputs=3, **settings):
    torch.manual_seed(0)
    return RandomFeatureHead(embedding_size, n_outputs, SngpOptions(**{"features": 32, "amplitude": 1.0, **settings}))


def batch(n=50, size=4, n_outputs=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, size, generator=generator), 2 * torch.randn(n, n_outputs, generator=generator)


def weights(logits, likelihood):
    """What an image counts in the precision matrix: 1 in the authors' code, p (1 - p) in their paper."""
    if likelihood == "gaussian":
        return torch.ones(len(logits)).double()
    top = logits.double().softmax(1).max(1).values
    return top * (1 - top)


BOTH = pytest.mark.parametrize("likelihood", ["gaussian", "multinomial"])


# --- features --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "amplitude"), [(1.0, 1.0), (2.5, 3.0)])
def test_features_have_the_kernel_as_inner_product(scale, amplitude):
    """A mean of R terms of at most 2 a^2, so the deviation is below 2 a^2 / sqrt(R); four of them are allowed."""
    n_features = 40_000
    head = make_head(features=8, space="raw", amplitude=amplitude)
    head.frequencies = torch.randn(n_features, 4) / scale
    head.phases = 2 * math.pi * torch.rand(n_features)
    x, _ = batch(20)
    kernel = amplitude**2 * (-torch.cdist(x, x).square() / (2 * scale**2)).exp()
    features = head.features(x)
    assert (features @ features.T - kernel).abs().max() < 4 * 2 * amplitude**2 / math.sqrt(n_features)


def test_frequencies_have_the_length_scale():
    head = make_head(embedding_size=64, features=256, kernel_scale=5.0)
    assert head.frequencies.std().item() == pytest.approx(0.2, rel=0.02)
    assert 0 <= head.phases.min() < 0.2 and 6.1 < head.phases.max() <= 2 * math.pi


def test_normalised_space_sees_neither_scale_nor_offset():
    x, _ = batch()
    head = make_head(space="normalised", kernel_scale=1.0)
    torch.testing.assert_close(head.features(10 * x + 3), head.features(x), atol=1e-4, rtol=0)
    raw = make_head(kernel_scale=1.0)
    assert (raw.features(2 * x) - raw.features(x)).abs().max() > 0.1


def test_normalised_embeddings_have_length_one():
    """With frequencies that are the axes and no phase, features are cosines of the coordinates."""
    head = make_head(features=8, amplitude=2.0, space="normalised")
    head.frequencies, head.phases = torch.eye(4).repeat(2, 1), torch.zeros(8)
    x, _ = batch()
    coordinates = x - x.mean(1, keepdim=True)
    coordinates = coordinates / coordinates.norm(dim=1, keepdim=True)
    torch.testing.assert_close(head.features(x)[:, :4], 2.0 * 0.5 * coordinates.cos(), atol=1e-3, rtol=0)


# --- posterior -------------------------------------------------------------------------------------------------------


@BOTH
def test_precision_and_variance_equal_a_loop(likelihood):
    head = make_head(ridge=0.3, amplitude=2.0, likelihood=likelihood)
    parts = [batch(seed=seed) for seed in range(3)]
    for embeddings, logits in parts:
        head.accumulate(embeddings, logits)
    precision = np.zeros((32, 32))
    for embeddings, logits in parts:
        for phi, w in zip(head.features(embeddings).double().numpy(), weights(logits, likelihood).numpy()):
            precision += w * np.outer(phi, phi)
    np.testing.assert_allclose(head.precision.numpy(), precision, rtol=1e-4, atol=1e-5)
    assert head.n_images == 150
    covariance = np.linalg.inv(precision + 0.3 * np.eye(32))
    phi = head.features(parts[0][0]).double().numpy()
    variance = np.einsum("nr,rs,ns->n", phi, covariance, phi)
    np.testing.assert_allclose(head.variance(parts[0][0]).numpy(), variance, rtol=1e-4)


class ExactGP(gpytorch.models.ExactGP):
    def __init__(self, points, values, likelihood, scale, amplitude):
        super().__init__(points, values, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.covar_module.outputscale, self.covar_module.base_kernel.lengthscale = amplitude**2, scale

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@BOTH
@pytest.mark.parametrize(("scale", "amplitude", "ridge"), [(1.0, 1.0, 1.0), (1.5, 2.0, 0.5)])
def test_variance_is_that_of_exact_inference(likelihood, scale, amplitude, ridge):
    """The Laplace approximation is regression with noise 1, or 1 / p(1 - p), and the prior a^2 / ridge.

    With R features kernel values deviate by about the prior's variance a^2 / ridge over sqrt(R); the posterior's
    variance is a contraction of them, and three deviations are allowed.
    """
    n_features = 1600
    kernel = {"space": "raw", "kernel_scale": scale, "amplitude": amplitude}
    head = make_head(features=n_features, likelihood=likelihood, ridge=ridge, **kernel)
    x, logits = batch(40)
    head.accumulate(x, logits)
    noise = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise=1 / weights(logits, likelihood))
    exact = ExactGP(x.double(), torch.zeros(40).double(), noise, scale, amplitude / math.sqrt(ridge)).double()
    points = torch.cat([x[:10], batch(20, seed=1)[0], 6 + batch(10, seed=2)[0]])
    with torch.no_grad():
        expected = exact.eval()(points.double()).variance.float()
    prior = amplitude**2 / ridge
    assert expected.max() > 0.99 * prior > 1.5 * expected.min()
    assert (head.variance(points) - expected).abs().max() < 3 * prior / math.sqrt(n_features)


def test_many_images_leave_the_precision_positive_definite():
    """With all images alike and a ridge of 1e-7 of what they add up to."""
    head = make_head(features=128, amplitude=30.0)
    x, logits = batch(512)
    for _ in range(100):
        head.accumulate(0.01 * x + torch.arange(4.0), 0 * logits)
    assert head.variance(x).isfinite().all()


def test_mean_field_formula():
    logits, variance = torch.tensor([[1.0, -3.0], [2.0, 0.5]]), torch.tensor([0.0, 8.0])
    expected = [[1.0, -3.0], [2.0 / math.sqrt(1 + math.pi), 0.5 / math.sqrt(1 + math.pi)]]
    torch.testing.assert_close(mean_field_logits(logits, variance, math.pi / 8), torch.tensor(expected))


def test_evaluation_scales_what_training_gives():
    head = make_head(mean_field=2.0)
    x, logits = batch()
    mean = head(x)
    torch.testing.assert_close(mean, head.features(x) @ head.output.weight.T)
    head.accumulate(x, logits)
    head.eval()
    torch.testing.assert_close(head(x), mean / (1 + 2.0 * head.variance(x)).sqrt()[:, None])
    assert torch.equal(head(x), head(x))


def test_sure_images_count_in_full_unless_weighed():
    """Where p (1 - p) vanishes the paper's precision stays that of the prior, the authors' does not."""
    x, logits = batch()
    plain, weighed = make_head(), make_head(likelihood="multinomial")
    for head in (plain, weighed):
        head.accumulate(x, 100 * F.one_hot(logits.argmax(1), 3).float())
    assert weighed.precision.abs().max() < 1e-6 < 1 < plain.precision.diagonal().sum()
    torch.testing.assert_close(weighed.variance(x), weighed.features(x).square().sum(1))
    assert (plain.variance(x) < 0.5 * weighed.variance(x)).all()


def test_defaults_are_those_of_the_authors_code():
    """google/uncertainty-baselines at d72a5a9: likelihood, ridge, factor, bound, features, kernel, no bias.

    Its frequencies have standard deviation 0.05, and its features are cosines without a factor.
    """
    recipe = SngpRecipe()
    head = recipe.build_head(128, 10)
    assert (head.options.likelihood, head.options.ridge, head.options.mean_field) == ("gaussian", 1.0, 20.0)
    assert (recipe.spectral_bound, recipe.power_iterations) == (6.0, 1)
    assert (len(head.phases), head.options.space, head.output.bias) == (1024, "raw", None)
    assert head.frequencies.std().item() == pytest.approx(0.05, rel=0.01)
    x = batch(size=128)[0]
    torch.testing.assert_close(head.features(x), (x @ head.frequencies.T + head.phases).cos(), rtol=1e-4, atol=1e-4)
    given = SngpRecipe(likelihood="multinomial", mean_field=0.5, features=8).build_head(4, 3)
    assert (given.options.likelihood, given.options.mean_field) == ("multinomial", 0.5)


def test_evaluation_amid_training_uses_the_precision_so_far():
    head = make_head().eval()
    x, logits = batch()
    head.accumulate(x, logits)
    once = head(x)
    head.accumulate(x, logits)
    twice = head(x)
    assert (twice.abs() > once.abs()).all()  # more images, less variance


@BOTH
def test_uncertain_away_from_two_blobs(likelihood):
    """With the most probable weights under the prior; by p (1 - p), larger ones, sure of everything, would leave it."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(100, 2) - 3, torch.randn(100, 2) + 3])
    y = torch.arange(2).repeat_interleave(100)
    kernel = {"features": 512, "space": "raw", "kernel_scale": 2.0, "amplitude": 10.0}
    factor = {"gaussian": 25.0, "multinomial": math.pi / 8}[likelihood]
    head = RandomFeatureHead(2, 2, SngpOptions(**kernel, likelihood=likelihood, mean_field=factor))
    optimiser = torch.optim.Adam(head.parameters(), 0.05)
    for _ in range(200):
        optimiser.zero_grad()
        logits = head(x)
        penalty = head.options.ridge * head.output.weight.square().sum() / (2 * len(x))
        (nn.functional.cross_entropy(logits, y) + penalty).backward()
        optimiser.step()
    head.accumulate(x, logits.detach())
    head.eval()
    with torch.no_grad():
        assert (head(x).argmax(1) == y).float().mean() > 0.98
        ray = 3 + torch.linspace(0, 6, 5)[:, None] * torch.tensor([1.0, -1.0])  # out of a blob, away from both
        near, along = head.variance(x), head.variance(ray)
        assert (along.diff()[:2] > 0).all()
        assert along[-1] > 0.8 * head.options.amplitude**2 > 2 * near.median()
        confidence = head(x).softmax(1).amax(1)
        away = head(torch.tensor([[20.0, -20.0], [-30.0, 25.0]])).softmax(1).amax(1)
        assert confidence.median() > 0.85
        assert (away < 0.6).all()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_unset_precision_is_an_error():
    head = make_head().eval()
    with pytest.raises(TrainError, match="'sngp'"):
        head(batch()[0])
    head.accumulate(*batch())
    head(batch()[0])
    head.reset()
    with pytest.raises(TrainError, match="'sngp'"):
        head(batch()[0])


@pytest.mark.parametrize("value", [-1e6, math.nan])
def test_indefinite_precision_is_an_error(value):
    head = make_head().eval()
    head.accumulate(*batch())
    head.precision[3, 3] = value
    with pytest.raises(TrainError, match=r"'sngp'.*--learning-rate.*--set sngp\.ridge"):
        head(batch()[0])


def test_remedy_for_a_loss_that_is_no_number_leaves_out_what_it_does_not_depend_on():
    assert "--learning-rate" in SngpRecipe.remedy and "--set sngp.spectral_bound" in SngpRecipe.remedy
    assert "ridge" not in SngpRecipe.remedy


# --- state -----------------------------------------------------------------------------------------------------------


def test_state_round_trip():
    recipe = SngpRecipe(features=32)
    first, second = recipe.build_head(4, 3), recipe.build_head(4, 3)
    first.accumulate(*batch())
    second.accumulate(*batch(seed=1))
    x, _ = batch(seed=2)
    stale = second.eval()(x)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x), first.eval()(x))
    assert not torch.allclose(second(x), stale)


def test_each_epoch_starts_anew():
    recipe = SngpRecipe(features=32)
    backbone = Backbone(nn.Identity(), recipe.build_head(4, 3), embedding_size=4)
    x, logits = batch()

    def run_epoch(epoch, n_steps):
        recipe.begin_epoch(backbone, epoch, 2)
        for _ in range(n_steps):
            recipe.after_step(Step(torch.zeros(50, 3, 1, 1), x, logits, torch.zeros(50).long(), 0.0, backbone))

    run_epoch(1, 3)
    variance = backbone.head.variance(x)
    assert backbone.head.n_images == 150
    run_epoch(2, 1)
    assert backbone.head.n_images == 50
    alone = recipe.build_head(4, 3)
    alone.load_state_dict(backbone.head.state_dict())
    alone.reset()
    alone.accumulate(x, logits)
    torch.testing.assert_close(backbone.head.precision, alone.precision)
    assert (backbone.head.variance(x) > variance).all()


def test_trains_in_the_loop_and_leaves_plain_layers():
    splits = load_splits("digits", DataOptions())
    few = dataclasses.replace(splits, train=splits.train.subset(np.arange(256)))
    torch.manual_seed(0)
    recipe = create_recipe("sngp", features=64)
    settings = {"epochs": 2, "batch_size": 64, "precision": "32-true", "show_progress": False}
    run = train_backbone(create_backbone("resnet9", 10), recipe, few.train, few.validation, **settings)
    head = run.backbone.head
    assert head.n_images == 256
    assert np.isfinite(run.history[-1]["validation_loss"])
    plain = create_backbone("resnet9", 10)
    plain.head = recipe.build_head(plain.embedding_size, 10)
    assert {n: type(m) for n, m in run.backbone.named_modules()} == {n: type(m) for n, m in plain.named_modules()}
    plain.load_state_dict(run.backbone.state_dict())
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(plain.eval()(images)[1], run.backbone(images)[1])
