r"""DUE: spectral normalisation, also of batch normalisation, and a sparse variational Gaussian process as head.

van Amersfoort et al. 2021, https://arxiv.org/abs/2102.11409. Each class c has a Gaussian process :math:`f_c` over
embeddings, with its own mean, amplitude and length scale, represented by its values u at P inducing points shared by
all classes. Their posterior is approximated by :math:`q(u) = N(m, S)`, so that of :math:`f(x)` is a Gaussian whose
variance approaches that of the prior away from the inducing points. All parameters are learned together with the
network, by the evidence lower bound over N training images (Hensman et al. 2015, https://arxiv.org/abs/1411.2005),

.. math:: \frac{1}{B} \sum_b E_q \log \mathrm{softmax}_{y_b}\, f(x_b) - \frac{1}{N} \mathrm{KL}(q(u) \Vert p(u)).

Kernels and variational inference are those of GPyTorch. Defaults are those of the authors' CIFAR-10 experiment,
``train_due.py`` in https://github.com/y0ast/DUE: layers bounded by 3, an RBF kernel, ten samples per image in training.
Differences:

- At least 20 inducing points, which costs little with few classes; the authors take one per class.
- No dropout; the authors drop a share of 0.3 in every block of the network in training.
- The mean of q(u) is stored in units of 10, so it learns a hundred times as fast (see :class:`Scaled`); inducing
  points and length scales are stored in units of the mean distance between two embeddings.
- In evaluation the samples are the same for all images, so equal images get equal results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from maple.baselines.base import average_logits
from maple.baselines.spectral import BoundedBatchNorm2d, BoundedRecipe
from maple.errors import DataError, TrainError, naming_extras
from maple.networks import Backbone, listening
from maple.options import AboveZero, Positive, Range, option
from maple.training.loss import LossTerm
from maple.training.recipe import EmbedRows, Step, register_recipe
from maple.types import About

KERNELS: dict[str, tuple[str, dict[str, float]]] = {  # GPyTorch's name and settings
    "rbf": ("RBFKernel", {}),
    "matern12": ("MaternKernel", {"nu": 0.5}),
    "matern32": ("MaternKernel", {"nu": 1.5}),
    "matern52": ("MaternKernel", {"nu": 2.5}),
}
TRAINING_SAMPLES = 10  # of the Gaussian process per image and step, as GPyTorch draws by default
SAMPLES = 64  # per image in evaluation mode
MEAN_UNIT = 10.0  # unit of the mean of q(u), see :class:`Scaled`
FIRST_IMAGES = 1000  # at least, for the initial inducing points and length scale
FEWEST_POINTS, MOST_POINTS = 20, 1000  # inducing points by default


def import_gpytorch() -> ModuleType:
    """Import GPyTorch; raise ``UsageError`` if it is not installed."""
    with naming_extras():
        return import_module("gpytorch")


# --- the head --------------------------------------------------------------------------------------------------------


class Prior(nn.Module):
    """One Gaussian process per class, independent of each other: a constant mean and a scaled kernel."""

    def __init__(self, n_classes: int, kernel: str) -> None:
        super().__init__()
        gpytorch = import_gpytorch()
        name, settings = KERNELS[kernel]
        shape = torch.Size([n_classes])
        base = getattr(gpytorch.kernels, name)(batch_shape=shape, **settings)
        self.mean = gpytorch.means.ConstantMean(batch_shape=shape)
        self.kernel = gpytorch.kernels.ScaleKernel(base, batch_shape=shape)

    def forward(self, points: Tensor) -> Any:
        """The joint distribution of the values at points (C, n, D)."""
        return import_gpytorch().distributions.MultivariateNormal(self.mean(points), self.kernel(points))


class Scaled(nn.Module):
    r"""Parametrisation of a tensor as a multiple of the learned one.

    Gradients move the tensor faster by the square of ``factor``; nothing else changes. The mean of q(u) is in standard
    deviations of the prior and must grow to about ten of them to separate the classes, but at the learning rate of a
    network it moves by hundredths. The authors train for 200 epochs; in few epochs the network learns only with this
    scaling.

    >>> Scaled(10.0)(torch.tensor([0.5]))
    tensor([5.])
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / self.factor


class SparseGPHead(nn.Module):
    r"""From embeddings (N, D) to logits (N, C) through Gaussian processes with P inducing points.

    In training mode the logits are :math:`E_q \log \mathrm{softmax} f`, by ten fresh samples per image: their
    cross-entropy is the first term of the bound. In evaluation mode their softmax is :math:`E_q \mathrm{softmax} f`, by
    samples that are the same for all images and in every call. Before :meth:`initialise` all inducing points are 0.

    >>> head = SparseGPHead(embedding_size=8, n_outputs=3, n_inducing=5)
    >>> head.initialise(np.random.default_rng(0).normal(size=(100, 8)), n_images=100, seed=0)
    >>> head.eval()(torch.zeros(4, 8)).shape
    torch.Size([4, 3])
    """

    unit: Tensor  # (), of length: the mean distance between two embeddings before the training
    n_images: Tensor  # (), in the training set
    draws: Tensor  # (S, C) from standard normal distributions

    def __init__(self, embedding_size: int, n_outputs: int, n_inducing: int = 20, kernel: str = "rbf") -> None:
        super().__init__()
        variational = import_gpytorch().variational
        self.out_features = n_outputs
        self.prior = Prior(n_outputs, kernel)
        values = variational.CholeskyVariationalDistribution(n_inducing, batch_shape=torch.Size([n_outputs]))
        points = torch.zeros(n_inducing, embedding_size)
        self.posterior = variational.VariationalStrategy(self.prior, points, values)
        self.posterior.variational_params_initialized.fill_(1)  # q(u) = p(u), without noise
        parametrize.register_parametrization(values, "variational_mean", Scaled(MEAN_UNIT))
        self.register_buffer("unit", torch.ones(()))
        self.register_buffer("n_images", torch.zeros((), dtype=torch.int64))
        self.register_buffer("draws", normal_draws(SAMPLES, n_outputs), persistent=False)

    @torch.no_grad()
    def initialise(self, embeddings: np.ndarray, n_images: int, seed: int) -> None:
        """Inducing points and length scale from embeddings (n, D) of some of the ``n_images`` training images.

        The points are the centres of k-means, the length scale is the mean distance between two embeddings. That
        distance is also the unit in which both are stored: in raw units, gradients would hardly move them in networks
        with large embeddings.
        """
        from sklearn.cluster import KMeans

        points = self.posterior.inducing_points
        unit = torch.pdist(torch.as_tensor(embeddings)).mean().item()
        if not 0 < unit < np.inf:
            raise TrainError("recipe 'due': all embeddings are equal; start from other weights")
        centres = KMeans(len(points), n_init=1, random_state=seed).fit(embeddings).cluster_centers_
        points.copy_(torch.as_tensor(centres / unit))
        self.prior.kernel.base_kernel.lengthscale = 1.0
        self.unit.fill_(unit)
        self.n_images.fill_(n_images)

    def latent(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance (N, C) of the Gaussian processes at embeddings (N, D)."""
        from linear_operator.utils.errors import NanError, NotPSDError

        self.posterior._clear_cache()  # in evaluation mode it would be stale after changes of the parameters
        try:
            values = self.posterior(embeddings / self.unit)
        except (NanError, NotPSDError):
            raise TrainError(f"recipe 'due' diverged: start again with --overwrite and {DueRecipe.remedy}") from None
        return values.mean.T, values.variance.T

    def kl_divergence(self) -> Tensor:
        """KL(q(u) || p(u)) (), summed over the classes."""
        self.posterior._clear_cache()
        return self.posterior.kl_divergence().sum()

    def forward(self, embeddings: Tensor) -> Tensor:
        with torch.autocast(embeddings.device.type, enabled=False):
            mean, variance = self.latent(embeddings.float())
            if not self.training:
                return average_logits(mean + variance.sqrt() * self.draws[:, None])
            samples = mean + variance.sqrt() * torch.randn(TRAINING_SAMPLES, *mean.shape, device=mean.device)
            return samples.log_softmax(2).mean(0)


def normal_draws(n: int, size: int) -> Tensor:
    """Fixed quasi-random draws (n, size) from standard normal distributions (Sobol sequence).

    >>> draws = normal_draws(64, 10)
    >>> draws.mean().abs().item() < 0.02, (draws.std() - 1).abs().item() < 0.02
    (True, True)
    """
    uniform = torch.quasirandom.SobolEngine(size, scramble=True, seed=0).draw(n, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6)).float()


# --- the recipe ------------------------------------------------------------------------------------------------------


@contextmanager
def batch_statistics(backbone: Backbone) -> Iterator[None]:
    """Inside the block, batch normalisation uses the statistics of each batch in any mode, as in training.

    Running statistics of an untrained network do not describe its later embeddings.
    """

    def by_batch(key: int, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        assert isinstance(layer, nn.BatchNorm2d)
        weight = layer.bounded_weight() if isinstance(layer, BoundedBatchNorm2d) else layer.weight
        return F.batch_norm(inputs[0], None, None, weight, layer.bias, training=True, eps=layer.eps)

    layers = [layer for layer in backbone.modules() if isinstance(layer, nn.BatchNorm2d)]
    with listening(dict(enumerate(layers)), by_batch):
        yield


@register_recipe("due")
@dataclass(frozen=True, kw_only=True)
class DueRecipe(BoundedRecipe):
    """DUE (van Amersfoort et al. 2021): bounded layers, batch normalisation among them, and a sparse variational GP.

    >>> DueRecipe(inducing_points=5).build_head(embedding_size=128, n_outputs=10).eval()(torch.zeros(4, 128)).shape
    torch.Size([4, 10])
    """

    spectral_bound: AboveZero = option(
        3.0,
        "largest factor by which a layer may stretch its input",
        search=Range((0.95, 3.0, 7.0), (0.5, 8.0), log=True),
    )
    power_iterations: Positive = option(1, "power iterations per step")
    inducing_points: Literal["auto"] | Annotated[int, Interval(ge=1, le=1000)] = option(
        "auto", "inducing points of the Gaussian process, at most 1000; 'auto' takes one per class, but at least 20"
    )
    kernel: Literal["rbf", "matern12", "matern32", "matern52"] = option("rbf", "its kernel")

    about: ClassVar[About] = About(
        "DUE: bounded layers, sparse variational Gaussian process",
        "van Amersfoort et al. 2021",
        "https://arxiv.org/abs/2102.11409",
        needs="GPyTorch",
        adds="P inducing points of size D and P + P x P weights per class, P = max(20, C)",
    )
    former_prefix: ClassVar[str] = "due_"
    own_head: ClassVar[bool] = True
    bounds_batch_norm: ClassVar[bool] = True
    own_detector: ClassVar[str] = "entropy"  # of the average probabilities
    remedy: ClassVar[str] = "lower --learning-rate or --set due.inducing_points"

    def build_head(self, embedding_size: int, n_outputs: int) -> SparseGPHead:
        return SparseGPHead(embedding_size, n_outputs, self._count_points(n_outputs), self.kernel)

    def _count_points(self, n_classes: int) -> int:
        by_default = min(max(FEWEST_POINTS, n_classes), MOST_POINTS)
        return by_default if self.inducing_points == "auto" else self.inducing_points

    def start(self, backbone: Backbone, embed_rows: EmbedRows, labels: np.ndarray, seed: int) -> None:
        head = backbone.head
        assert isinstance(head, SparseGPHead)
        n_points = len(head.posterior.inducing_points)
        if n_points > len(labels):
            raise DataError(f"{n_points} inducing points for {len(labels)} images: lower --set due.inducing_points")
        rows = np.random.default_rng(seed).permutation(len(labels))[: max(FIRST_IMAGES, n_points)]
        with batch_statistics(backbone):
            embeddings = embed_rows(rows)
        head.initialise(embeddings, len(labels), seed)

    def loss(self, step: Step) -> dict[str, LossTerm]:
        assert isinstance(step.head, SparseGPHead)
        n_images = step.head.n_images.item()
        if not n_images:
            raise TrainError("recipe 'due' has not been started, its inducing points are not set: call start first")
        return {
            "expected_loss": LossTerm(F.nll_loss(step.logits, step.targets)),
            "kl_divergence": LossTerm(step.head.kl_divergence(), weight=1 / n_images),
        }
