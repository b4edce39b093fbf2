"""The sparse Gaussian process against exact inference and GPyTorch's own bound; what it says away from the data."""

from __future__ import annotations

import dataclasses
import math
import sys

import gpytorch
import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import nn
from torch.nn import functional as F

from maple.baselines import due
from maple.baselines.due import DueRecipe, SparseGPHead, batch_statistics
from maple.baselines.spectral import BoundedBatchNorm2d, bound_layers
from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.errors import ConfigError, DataError, TrainError, UsageError
from maple.networks import Backbone, create_backbone
from maple.training.loop import train_backbone
from maple.training.recipe import Step, create_recipe


def blobs(n=60, seed=0):
    """Three blobs in the plane, as far from each other as from the origin, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    angles = 2 * math.pi * torch.arange(3) / 3
    centres = 4 * torch.stack([angles.cos(), angles.sin()], 1)
    labels = torch.arange(3).repeat_interleave(n)
    return centres[labels] + 0.5 * torch.randn(3 * n, 2, generator=generator), labels


def make_head(x=None, n_inducing=9, kernel="rbf"):
    head = SparseGPHead(2, 3, n_inducing, kernel)
    x = blobs()[0] if x is None else x
    head.initialise(x.numpy(), n_images=len(x), seed=0)
    return head


def make_step(head, x, y):
    backbone = Backbone(nn.Identity(), head, embedding_size=x.shape[1])
    return Step(torch.zeros(len(x), 3, 1, 1), x, head(x), y, 0.0, backbone)


def total(terms):
    return sum(term.weight * term.value for term in terms.values())


@pytest.fixture(scope="module")
def learned():
    """A head that has learned three blobs, and the loss of each step."""
    torch.manual_seed(0)
    x, y = blobs()
    head, losses = make_head(x), []
    optimiser = torch.optim.Adam(head.parameters(), 0.03)
    for _ in range(80):
        optimiser.zero_grad()
        loss = total(DueRecipe().loss(make_step(head, x, y)))
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return head.eval(), losses


# --- posterior and bound ---------------------------------------------------------------------------------------------


class ExactGP(gpytorch.models.ExactGP):
    def __init__(self, points, values, likelihood, prior):
        super().__init__(points, values, likelihood)
        self.prior = prior

    def forward(self, x):
        return self.prior(x)


@pytest.mark.parametrize("kernel", ["rbf", "matern12", "matern32", "matern52"])
def test_posterior_is_the_exact_one_where_inducing_points_are_the_data(kernel):
    """Regression of one value per class; the best q(u) is then the exact posterior, whitened by the root of K.

    Exact up to the 1e-6 that both add to diagonals.
    """
    torch.manual_seed(0)
    noise, n = 0.1, 12
    x = torch.randn(n, 2).double()
    y = torch.stack([x[:, 0].sin(), x[:, 1], x.prod(1)])  # (C, n)
    head = SparseGPHead(2, 3, n_inducing=n, kernel=kernel).double().eval()
    head.prior.kernel.base_kernel.lengthscale = torch.tensor([0.7, 1.0, 1.5]).reshape(3, 1, 1)
    head.prior.kernel.outputscale = torch.tensor([1.0, 2.0, 3.0])
    head.prior.mean.constant.data.copy_(torch.tensor([0.0, 0.5, -0.5]))
    with torch.no_grad():
        covariance = head.prior.kernel(x.expand(3, n, 2)).to_dense()
        mean = head.prior.mean(x.expand(3, n, 2))
        root = torch.linalg.cholesky(covariance + 1e-6 * torch.eye(n))
        gain = torch.linalg.solve(covariance + noise * torch.eye(n), covariance).mT  # K (K + noise I)^-1
        values = (gain @ (y - mean)[..., None]).squeeze(-1)
        spread = covariance - gain @ covariance
        head.posterior.inducing_points.copy_(x)
        q = head.posterior._variational_distribution
        q.variational_mean = torch.linalg.solve(root, values)
        whitened = torch.linalg.solve(root, torch.linalg.solve(root, spread).mT)
        q.chol_variational_covar.copy_(torch.linalg.cholesky((whitened + whitened.mT) / 2 + 1e-9 * torch.eye(n)))

        likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=torch.Size([3])).double()
        likelihood.noise = noise
        exact = ExactGP(x.expand(3, n, 2), y, likelihood, head.prior).eval()
        points = torch.cat([x[:3], torch.randn(10, 2).double(), torch.full((1, 2), 8.0).double()])
        expected = exact(points.expand(3, 14, 2))
        found_mean, found_variance = head.latent(points)
    torch.testing.assert_close(found_mean, expected.mean.T, atol=1e-3, rtol=0)
    torch.testing.assert_close(found_variance, expected.variance.T, atol=1e-3, rtol=0)


def test_loss_is_the_evidence_lower_bound(learned, monkeypatch):
    """The same as GPyTorch's, from 4000 samples each."""
    head = learned[0].train()
    x, y = blobs(seed=1)
    monkeypatch.setattr(due, "TRAINING_SAMPLES", 4000)
    torch.manual_seed(0)
    with torch.no_grad():
        terms = DueRecipe().loss(make_step(head, x, y))
        likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
        values = gpytorch.distributions.MultitaskMultivariateNormal.from_batch_mvn(head.posterior(x / head.unit))
        with gpytorch.settings.num_likelihood_samples(4000):
            expected = likelihood.expected_log_prob(y, values).mean()
        kl = sum(
            torch.distributions.kl_divergence(
                torch.distributions.MultivariateNormal(mean, scale_tril=lower.tril()),
                torch.distributions.MultivariateNormal(torch.zeros(9), torch.eye(9)),
            )
            for mean, lower in zip(
                head.posterior._variational_distribution.variational_mean,
                _positive_diagonal(head.posterior._variational_distribution.chol_variational_covar),
            )
        )
    head.eval()
    assert -terms["expected_loss"].value.item() == pytest.approx(expected.item(), abs=0.01)
    assert terms["kl_divergence"].value.item() == pytest.approx(kl.item(), rel=1e-4)
    assert terms["kl_divergence"].weight == 1 / 180  # images in the training set


def _positive_diagonal(lower):
    """The Cholesky factors of the same covariances, whatever the signs of the diagonals."""
    lower = lower.tril()
    return torch.linalg.cholesky(lower @ lower.mT)


def test_divergence_from_the_prior_is_first_zero():
    head = make_head()
    assert head.kl_divergence().item() == pytest.approx(0, abs=1e-4)
    mean, variance = head.eval().latent(blobs()[0])
    assert mean.abs().max() < 1e-6
    torch.testing.assert_close(variance, torch.full_like(variance, math.log(2)), atol=1e-3, rtol=0)  # the prior's


def test_probabilities_are_averages_over_the_posterior(learned):
    head, _ = learned
    x = torch.cat([blobs(5)[0], torch.tensor([[0.0, 0.0], [10.0, 3.0]])])
    with torch.no_grad():
        mean, variance = head.latent(x)
        samples = mean + variance.sqrt() * torch.randn(20_000, *mean.shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(head(x).softmax(1), samples.softmax(2).mean(0), atol=0.02, rtol=0)


def test_bound_rises_and_classes_are_learned(learned):
    head, losses = learned
    assert np.mean(losses[-10:]) < 0.5 * losses[0]
    assert losses[0] == pytest.approx(math.log(3), abs=0.4)  # nothing known
    x, y = blobs(seed=1)
    with torch.no_grad():
        assert (head(x).argmax(1) == y).float().mean() > 0.98


def test_uncertain_away_from_the_data(learned):
    head, _ = learned
    x, _ = blobs(seed=1)
    with torch.no_grad():
        far = torch.tensor([[30.0, 10.0], [-25.0, 30.0], [5.0, -40.0]])
        near_variance, far_variance = head.latent(x)[1].mean(1), head.latent(far)[1].mean(1)
        assert far_variance.min() > 2 * near_variance.median()
        entropy = [-(p * p.log()).sum(1) for p in (head(x).softmax(1), head(far).softmax(1))]
        assert entropy[0].median() < 0.5 < 0.9 < entropy[1].min()  # log 3 is 1.1


def test_evaluation_is_deterministic_image_by_image(learned):
    head, _ = learned
    x, _ = blobs(seed=1)
    with torch.no_grad():
        whole = head(x)
        assert torch.equal(head(x), whole)
        torch.testing.assert_close(torch.cat([head(x[:7]), head(x[7:])]), whole, atol=1e-4, rtol=0)
        assert head(x[:0]).shape == (0, 3)
    assert not torch.equal(head.train()(x), head(x))
    head.eval()


# --- beginning -------------------------------------------------------------------------------------------------------


def test_first_inducing_points_and_length_scale_come_from_the_data():
    x, _ = blobs()
    head = make_head(x)
    centres = KMeans(9, n_init=1, random_state=0).fit(x.numpy()).cluster_centers_
    np.testing.assert_allclose((head.unit * head.posterior.inducing_points).detach().numpy(), centres, atol=1e-5)
    distances = torch.cdist(x, x)[*np.triu_indices(len(x), k=1)]
    length_scales = (head.unit * head.prior.kernel.base_kernel.lengthscale).detach()
    torch.testing.assert_close(length_scales, distances.mean().expand(3, 1, 1))
    assert head.n_images == 180


def test_the_unit_of_the_embeddings_does_not_matter():
    x, _ = blobs()
    head, other = make_head(x).eval(), make_head(1000 * x).eval()
    with torch.no_grad():
        for q in (h.posterior._variational_distribution for h in (head, other)):
            q.variational_mean = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(other(1000 * x), head(x), atol=1e-3, rtol=0)


def test_start_asks_for_images_of_the_training_set():
    recipe, asked = DueRecipe(inducing_points=4), []
    backbone = Backbone(nn.Identity(), recipe.build_head(2, 3), embedding_size=2)
    x, labels = blobs(1000)

    def embed_rows(rows):
        asked.append(rows)
        return x[torch.from_numpy(rows)].numpy()

    recipe.start(backbone, embed_rows, labels.numpy(), seed=0)
    (rows,) = asked
    assert len(np.unique(rows)) == 1000
    assert (np.bincount(labels[rows]) > 250).all()
    assert backbone.head.n_images == 3000


def test_first_embeddings_are_those_of_training_mode():
    """With the running statistics of a new network they would be anywhere else."""
    torch.manual_seed(0)
    backbone = create_backbone("wrn-10-1", 10)
    bound_layers(backbone, 3.0, batch_norm=True)
    images = torch.rand(32, 3, 32, 32)
    state = {key: value.clone() for key, value in backbone.state_dict().items()}
    with torch.no_grad():
        backbone.eval()
        with batch_statistics(backbone):
            found = backbone.embed(images)
        assert all(torch.equal(value, state[key]) for key, value in backbone.state_dict().items())
        plain = backbone.embed(images)
        for layer in backbone.modules():
            if isinstance(layer, BoundedBatchNorm2d):
                layer.train()
        torch.testing.assert_close(found, backbone.embed(images))
    assert (found - plain).norm() > 0.1 * found.norm()


# --- state -----------------------------------------------------------------------------------------------------------


def test_state_round_trip(learned):
    head, _ = learned
    x, _ = blobs(seed=1)
    other = DueRecipe(inducing_points=9).build_head(2, 3).eval()
    with torch.no_grad():
        before = other(x)
        other.load_state_dict(head.state_dict())
        assert torch.equal(other(x), head(x))
        assert not torch.allclose(other(x), before)
    assert other.n_images == 180


def test_trains_in_the_loop_and_leaves_plain_layers():
    splits = load_splits("digits", DataOptions())
    few = dataclasses.replace(splits, train=splits.train.subset(np.arange(256)))
    torch.manual_seed(0)
    recipe = create_recipe("due", inducing_points=10)
    settings = {"epochs": 2, "batch_size": 64, "precision": "32-true", "show_progress": False}
    run = train_backbone(create_backbone("resnet9", 10), recipe, few.train, few.validation, **settings)
    assert run.history[1]["loss"] < run.history[0]["loss"]
    assert run.backbone.head.posterior.inducing_points.abs().max() > 0
    plain = create_backbone("resnet9", 10)
    plain.head = recipe.build_head(plain.embedding_size, 10)
    layers = ({n: type(m) for n, m in b.body.named_modules()} for b in (run.backbone, plain))
    assert next(layers) == next(layers)
    plain.load_state_dict(run.backbone.state_dict())
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(plain.eval()(images)[1], run.backbone(images)[1])


# --- errors ----------------------------------------------------------------------------------------------------------


def test_without_gpytorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    recipe = create_recipe("due")
    with pytest.raises(UsageError, match=r"pip install 'maple-uncertainty\[due\]'"):
        recipe.build_head(2, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_divergence_names_recipe_and_remedy(value):
    head = make_head()
    with torch.no_grad():
        head.posterior.inducing_points[2, 1] = value
    with pytest.raises(TrainError, match=r"'due'.*--overwrite.*--learning-rate"):
        head(blobs()[0])


def test_diverged_embeddings_reach_the_loss():
    """Where the loop finds them."""
    x, y = blobs()
    x[5, 0] = math.nan
    with torch.no_grad():
        assert not torch.isfinite(total(DueRecipe().loss(make_step(make_head(), x, y))))


def test_too_few_images():
    """Counted before any of them is looked at, and all of them, not those that the points would be found from."""
    recipe = DueRecipe(inducing_points=9)
    backbone = Backbone(nn.Identity(), recipe.build_head(2, 3), embedding_size=2)
    with pytest.raises(DataError, match=r"--set due\.inducing_points"):
        recipe.start(backbone, pytest.fail, blobs(2)[1].numpy(), seed=0)


@pytest.mark.parametrize("n_points", [0, 1001, "many"])
def test_number_of_inducing_points_has_limits(n_points):
    with pytest.raises(ConfigError, match="inducing_points"):
        create_recipe("due", inducing_points=n_points)


@pytest.mark.parametrize(("n_classes", "expected"), [(3, 20), (20, 20), (37, 37)])
def test_inducing_points_follow_the_classes(n_classes, expected):
    assert len(DueRecipe().build_head(2, n_classes).posterior.inducing_points) == expected
    assert len(DueRecipe(inducing_points=7).build_head(2, n_classes).posterior.inducing_points) == 7


def test_many_classes_have_no_more_inducing_points_than_the_option_allows():
    assert DueRecipe()._count_points(5000) == 1000


def test_the_head_is_not_asked_before_it_has_its_inducing_points(monkeypatch):
    """With many inducing points it takes minutes, for logits that nobody reads."""
    asked = []
    monkeypatch.setattr(SparseGPHead, "forward", lambda self, x: asked.append(x) or pytest.fail("the head was asked"))
    splits = load_splits("digits", DataOptions())
    few = splits.train.subset(np.arange(64))

    def stop(*arguments, **keywords):
        raise InterruptedError

    monkeypatch.setattr(SparseGPHead, "initialise", stop)
    with pytest.raises(InterruptedError):
        train_backbone(
            create_backbone("resnet9", 10),
            DueRecipe(),
            few,
            splits.validation,
            precision="32-true",
            show_progress=False,
        )
    assert not asked


def test_embeddings_in_one_place():
    with pytest.raises(TrainError, match="'due'"):
        make_head(torch.ones(50, 2))


def test_training_needs_a_start():
    head = SparseGPHead(2, 3, 5)
    x, y = blobs()
    with pytest.raises(TrainError, match="'due'"):
        DueRecipe().loss(make_step(head, x, y))


def test_kernels_are_distinct():
    x = blobs()[0][:5]
    values = {}
    for kernel in ("rbf", "matern12", "matern32", "matern52"):
        head = make_head(kernel=kernel)
        values[kernel] = head.prior.kernel(x).to_dense()[0, 0, 1].item()
    assert len({round(value, 6) for value in values.values()}) == 4


def test_batch_of_one():
    head = make_head()
    assert F.nll_loss(head(torch.zeros(1, 2)), torch.tensor([0])).isfinite()
