"""Optimisers and learning-rate schedules by name.

To add one, add an entry to ``OPTIMIZERS`` or ``SCHEDULES`` and its name to the option ``optimizer`` or ``schedule``.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises the momentum of matrices before
each step. A convolution is a matrix (out, in x height x width); torch's own Muon takes only parameters with two
dimensions. Biases and the head are trained by SGD with Nesterov momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from maple.errors import UsageError
from maple.training.options import TrainOptions

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, for the steepest slope at zero
ITERATIONS = 3
SGD_MOMENTUM = 0.85
SMALLEST_SIZE = 0.1  # lower bound of the root mean square of a parameter: biases start at zero
HEAD_RATE = 2000.0  # learning rate of the head: this factor over the square of the embedding size
BIAS_RATE = 6.0  # learning rate of biases: this factor; airbench's 150 diverges with metric losses


def orthogonalise(matrix: Tensor, iterations: int = ITERATIONS) -> Tensor:
    r"""Push all singular values of a matrix (R, C) towards 1 by Newton-Schulz iterations, without an SVD.

    .. math:: X \leftarrow a X + b (X X^\top) X + c (X X^\top)^2 X

    The coefficients favour speed: after a few iterations singular values that were not tiny lie between about 0.7 and
    1.2, which is enough for the optimiser.

    >>> values = torch.linalg.svdvals(orthogonalise(torch.diag(torch.tensor([1.0, 0.5])), 5))
    >>> bool((values - 1).abs().max() < 0.35)
    True
    """
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide is matrix else x.T


class Muon(torch.optim.Optimizer):
    """Muon for groups with ``orthogonal=True``, SGD with Nesterov momentum for the others.

    Filters (four dimensions) are scaled to the norm sqrt(out) before each step: batch normalisation after them makes
    their length irrelevant, and the learning rate is then the relative size of a step. ``weight_decay`` is for the SGD
    groups: the share by which they shrink in a step at the full learning rate. A step of an SGD group is never larger,
    relative to the parameter, than one of the filters: losses that divide by small logits have huge gradients.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        defaults = {"lr": lr, "momentum": SGD_MOMENTUM, "weight_decay": 0.0, "orthogonal": False, "rate_factor": 1.0}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        update = gradient.add(buffer, alpha=group["momentum"])  # Nesterov
        if group["orthogonal"]:
            if parameter.ndim > 2:
                parameter.mul_(len(parameter) ** 0.5 / parameter.norm().clamp_min(1e-12))
            update = orthogonalise(update.reshape(len(update), -1)).reshape(update.shape)
            parameter.add_(update, alpha=-group["lr"])
        else:
            size = parameter.norm().clamp_min(SMALLEST_SIZE * parameter.numel() ** 0.5)
            most = group["lr"] / group["rate_factor"]  # relative size of a step of the filters
            rate = (most * size / update.norm().clamp_min(1e-30)).clamp_max(group["lr"])
            parameter.sub_(rate * update)


def make_muon(module: nn.Module, options: TrainOptions) -> Muon:
    """An optimiser of all parameters: Muon for trainable matrices and filters outside the head, SGD for the rest.

    The option ``momentum`` is Muon's; that of SGD is 0.85. ``weight_decay`` is for the parameters that SGD trains. The
    learning rate of the head is airbench's, for a mean loss and a head whose output is not divided by the embedding
    size.

    >>> network = nn.ModuleDict({"body": nn.Conv2d(3, 8, 3), "head": nn.Linear(8, 2)})
    >>> [len(group["params"]) for group in make_muon(network, TrainOptions()).param_groups]
    [1, 2, 1]
    """
    matrices, head, others = _sort_parameters(module)
    if not matrices:
        raise UsageError("optimizer 'muon' finds no filter or matrix to train before the head: use --optimizer sgd")
    groups: list[dict[str, Any]] = [{"params": matrices, "orthogonal": True, "momentum": options.momentum}]
    size = max((parameter.shape[-1] for parameter in head if parameter.ndim == 2), default=256)
    for parameters, factor in ((head, min(1.0, HEAD_RATE / size**2)), (others, BIAS_RATE)):
        if parameters:
            decay = options.weight_decay / (factor * options.learning_rate)
            groups.append({"params": parameters, "rate_factor": factor, "weight_decay": decay})
    return Muon(groups, options.learning_rate)


def _sort_parameters(module: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Trainable matrices and filters outside the heads, parameters of the heads, and all others."""
    matrices: list[Tensor] = []
    head: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in module.named_parameters():
        is_matrix = parameter.ndim >= 2 and parameter.requires_grad
        (head if name.startswith(("head.", "rotation_head.")) else matrices if is_matrix else others).append(parameter)
    return matrices, head, others


# --- by name ---------------------------------------------------------------------------------------------------------


def _sgd(module: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        module.parameters(),
        lr=options.learning_rate,
        momentum=options.momentum,
        nesterov=options.nesterov and options.momentum > 0,
        weight_decay=options.weight_decay,
    )


def _adam(module: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)


def _triangular(progress: float, options: TrainOptions) -> float:
    """Rise from a tenth of the peak over the first quarter of all steps, then fall to zero."""
    rise = 0.25
    return 0.1 + 0.9 * progress / rise if progress < rise else (1 - progress) / (1 - rise)


def _cosine(progress: float, options: TrainOptions) -> float:
    """Fall from the peak to zero along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def _step(progress: float, options: TrainOptions) -> float:
    """Multiply by ``step_factor`` after each of the ``milestones``."""
    passed = sum(progress * options.epochs > milestone - 1e-6 for milestone in options.milestones)
    return options.step_factor**passed


OPTIMIZERS: dict[str, Callable[[nn.Module, TrainOptions], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "muon": make_muon,
}
SCHEDULES: dict[str, Callable[[float, TrainOptions], float]] = {  # share of the steps done to share of the peak rate
    "triangular": _triangular,
    "linear": lambda progress, options: 1 - progress,
    "cosine": _cosine,
    "step": _step,
    "constant": lambda progress, options: 1.0,
}


def make_optimizer(module: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """The optimiser that ``options`` name, for all parameters of ``module``."""
    return OPTIMIZERS[options.optimizer](module, options)


def learning_rate_at(progress: float, options: TrainOptions) -> float:
    """The learning rate when the share ``progress`` of all steps is done.

    >>> [round(learning_rate_at(p, TrainOptions(learning_rate=1.0)), 3) for p in (0, 0.25, 0.625, 1)]
    [0.1, 1.0, 0.5, 0.0]
    """
    return options.learning_rate * SCHEDULES[options.schedule](progress, options)


def check_schedule(options: TrainOptions) -> None:
    """Raise ``UsageError`` for milestones that the training never reaches, or that the schedule does not use."""
    milestones = options.milestones
    if options.schedule != "step":
        if milestones:
            raise UsageError(f"--milestones are for --schedule step, not {options.schedule}: leave them out")
        return
    if not milestones:
        raise UsageError("--schedule step needs --milestones, the epochs after which the learning rate falls")
    if list(milestones) != sorted(set(milestones)):
        raise UsageError(f"--milestones {','.join(map(str, milestones))}: give increasing numbers of epochs")
    if milestones[-1] >= options.epochs:
        raise UsageError(
            f"--milestones {milestones[-1]} is not below --epochs {options.epochs}: lower it or raise --epochs"
        )
