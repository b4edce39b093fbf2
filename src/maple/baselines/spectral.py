r"""Spectral normalisation with a bound: no layer stretches a difference of its inputs by more than c.

A layer with weight W is a linear operator A, and the largest factor by which it stretches anything is its largest
singular value :math:`\sigma(A)`. If that exceeds the bound, the weight is scaled down to it; it is never scaled up:

.. math:: \bar W = W \min(1,\; c / \sigma(A)).

In a residual network this preserves distances between images in their embeddings, which Gaussian processes over
embeddings rely on (SNGP: Liu et al. 2020, https://arxiv.org/abs/2006.10108; DUE: van Amersfoort et al. 2021,
https://arxiv.org/abs/2102.11409).

For a convolution, A is the operator on whole images of the layer's input size, with its stride and padding; the norm of
the kernel reshaped into a matrix is a different one (Gouk et al. 2018, https://arxiv.org/abs/1804.04368). The singular
value is found by power iteration: one iteration per forward pass in training, where weights change little from step to
step, none in evaluation.

The bound holds for single layers. Batch normalisation between them divides by deviations that may be small and so
stretches again, unless it is bounded as well, as in DUE; SNGP, like its authors' code, does not bound it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from maple.errors import UsageError
from maple.networks import Backbone, evaluating, listening
from maple.training.recipe import Recipe

FIRST_ITERATIONS = 30  # of the power method, from a random direction
EXAMPLE_SIZE = 32  # side of the images if backbone.size is not set

Operator = Callable[[Tensor, Tensor], Tensor]  # from input and weight to output; linear in both
Shape = tuple[int, ...]


# --- a weight --------------------------------------------------------------------------------------------------------


def power_iteration(operator: Operator, weight: Tensor, direction: Tensor, n_iterations: int) -> Tensor:
    r"""The unit input that the operator stretches most, by iterations that start from ``direction`` (1, ...).

    One iteration is :math:`v \leftarrow A^\top\! A v / \lVert A^\top\! A v \rVert`. Since :math:`A^\top\! A v` is the
    gradient of :math:`\lVert A v \rVert^2 / 2`, no transposed operator has to be written.

    >>> weight = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> power_iteration(F.linear, weight, torch.tensor([[0.6, 0.8]]), n_iterations=20).round()
    tensor([[0., 1.]])
    """
    weight = weight.detach()
    for _ in range(n_iterations):
        with torch.enable_grad():
            v = direction.detach().requires_grad_()
            (found,) = torch.autograd.grad(operator(v, weight).square().sum() / 2, v)
        length = torch.linalg.vector_norm(found)
        direction = torch.where(length > 0, found / length, direction)  # unchanged for a weight of zeros
    return direction.detach()


class SpectralBound(nn.Module):
    """Parametrisation of a weight: the weight itself, scaled down where it stretches by more than ``bound``.

    ``shape`` (1, ...) is that of one input of ``operator``. The direction that is stretched most is a buffer, so a
    resumed training continues with it. Gradients flow through the scale as well.

    >>> weight = 2 * torch.eye(3)
    >>> SpectralBound(F.linear, weight, shape=(1, 3), bound=0.5)(weight).diagonal()
    tensor([0.5000, 0.5000, 0.5000])
    """

    direction: Tensor  # (1, ...), of length 1

    def __init__(self, operator: Operator, weight: Tensor, shape: Shape, bound: float, n_iterations: int = 1) -> None:
        super().__init__()
        self.operator, self.bound, self.n_iterations = operator, bound, n_iterations
        start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(weight)
        start /= torch.linalg.vector_norm(start)
        self.register_buffer("direction", power_iteration(operator, weight, start, FIRST_ITERATIONS))

    def norm(self, weight: Tensor) -> Tensor:
        """The largest singular value () found so far: a lower bound of the true one."""
        direction = self.direction.clone()  # the buffer may change before gradients are computed
        return torch.linalg.vector_norm(self.operator(direction, weight))

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            if self.training:
                self.direction.copy_(power_iteration(self.operator, weight, self.direction, self.n_iterations))
            return weight / (self.norm(weight) / self.bound).clamp_min(1)


# --- batch normalisation ---------------------------------------------------------------------------------------------


class BoundedBatchNorm2d(nn.BatchNorm2d):
    r"""Batch normalisation that stretches no channel by more than ``bound``.

    Its largest singular value is :math:`\max_k |\gamma_k| / \sqrt{v_k + \epsilon}`, with the running variances
    :math:`v_k`; where that exceeds the bound, all scales :math:`\gamma_k` shrink by one factor. Parameters and buffers
    are those of the layer it is made from, under the same names.

    >>> bounded = BoundedBatchNorm2d(nn.BatchNorm2d(2), bound=0.5).eval()
    >>> bounded(torch.ones(1, 2, 1, 1)).detach().flatten()
    tensor([0.5000, 0.5000])
    """

    running_var: Tensor

    def __init__(self, layer: nn.BatchNorm2d, bound: float) -> None:
        if not layer.affine or not layer.track_running_stats:
            raise UsageError("batch normalisation cannot be bounded without affine and track_running_stats: set both")
        super().__init__(layer.num_features, layer.eps, layer.momentum)
        self.bound = bound
        _share_state(layer, self)

    def norm(self) -> Tensor:
        """The largest singular value () without the bound."""
        return (self.weight * (self.running_var + self.eps).rsqrt()).abs().amax()

    def bounded_weight(self) -> Tensor:
        """The scales of the channels (F,) within the bound."""
        return self.weight / (self.norm() / self.bound).clamp_min(1)

    def forward(self, x: Tensor) -> Tensor:
        weight, momentum = self.bounded_weight(), self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if momentum is None else momentum
        return F.batch_norm(
            x, self.running_mean, self.running_var, weight, self.bias, self.training, momentum or 0.0, self.eps
        )

    def fold(self) -> nn.BatchNorm2d:
        """A plain layer with these parameters and buffers, and equal outputs in evaluation mode."""
        with torch.no_grad():
            self.weight.copy_(self.bounded_weight())
        plain = nn.BatchNorm2d(self.num_features, self.eps, self.momentum)
        _share_state(self, plain)
        return plain


def _share_state(source: nn.BatchNorm2d, target: nn.BatchNorm2d) -> None:
    """Give ``target`` the parameters, buffers and mode of ``source``."""
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(target, name, getattr(source, name))
    target.train(source.training)


# --- all layers of a backbone ----------------------------------------------------------------------------------------


def bound_layers(backbone: Backbone, bound: float, n_iterations: int = 1, batch_norm: bool = False) -> None:
    """Bound all convolutions and linear layers between image and embedding, in place; optionally ``BatchNorm2d`` too.

    Input sizes of convolutions are found by one pass over an image of ``backbone.size`` pixels, 32 if that is not set.
    Layers that are not part of that pass, such as the head, are not changed.

    >>> layer = nn.Linear(3, 2, bias=False)
    >>> backbone = Backbone(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), layer), None, embedding_size=2)
    >>> bound_layers(backbone, bound=0.1)
    >>> torch.linalg.matrix_norm(layer.weight.detach(), ord=2)
    tensor(0.1000)
    """
    for layer, shape in _input_shapes(backbone).items():
        bounded = SpectralBound(_operator(layer), layer.weight, shape, bound, n_iterations)
        parametrize.register_parametrization(layer, "weight", bounded)
    if batch_norm:
        _replace(backbone, nn.BatchNorm2d, partial(BoundedBatchNorm2d, bound=bound))


def fold(backbone: Backbone) -> None:
    """Replace bounded layers by plain ones with the bounded weights, in place; outputs in evaluation mode are equal."""
    for layer in list(backbone.modules()):
        if parametrize.is_parametrized(layer, "weight"):
            layer.get_submodule("parametrizations").eval()  # no further iteration
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    _replace(backbone, BoundedBatchNorm2d, BoundedBatchNorm2d.fold)


class BoundedRecipe(Recipe):
    """A recipe that trains with bounded layers, which are folded away afterwards; its subclass has the options."""

    spectral_bound: float
    power_iterations: int
    bounds_batch_norm: ClassVar[bool] = False

    def prepare(self, backbone: Backbone) -> None:
        bound_layers(backbone, self.spectral_bound, self.power_iterations, self.bounds_batch_norm)

    def finish(self, backbone: Backbone) -> Backbone:
        fold(backbone)
        return backbone


def _operator(layer: nn.Conv2d | nn.Linear) -> Operator:
    """The layer without its bias, as a function of input and weight."""
    if isinstance(layer, nn.Linear):
        return F.linear
    if layer.padding_mode != "zeros":
        raise UsageError(f"spectral normalisation does not support padding mode '{layer.padding_mode}': pad with zeros")
    settings = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "groups": layer.groups}
    return partial(F.conv2d, **settings)


def _input_shapes(backbone: Backbone) -> dict[nn.Conv2d | nn.Linear, Shape]:
    """Shape (1, ...) of one input of each convolution and linear layer of the embedding; the largest if it varies."""
    shapes: dict[nn.Conv2d | nn.Linear, Shape] = {}

    def record(key: int, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        size = inputs[0].shape
        shape = (1, *(size[1:] if isinstance(layer, nn.Conv2d) else size[-1:]))
        shapes[layer] = max(shape, shapes.get(layer, shape))

    layers = [layer for layer in backbone.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    side = backbone.size or EXAMPLE_SIZE
    with evaluating(backbone), listening(dict(enumerate(layers)), record):
        backbone.embed(torch.zeros(1, 3, side, side, device=backbone.mean.device))
    return shapes


def _replace(backbone: Backbone, kind: type[nn.Module], make: Callable[[Any], nn.Module]) -> None:
    """Replace every layer of exactly this kind by ``make(layer)``."""
    for name, layer in list(backbone.named_modules()):
        if type(layer) is kind:
            backbone.set_submodule(name, make(layer))
