"""Optimisers and learning-rate schedules by name: two small tables of functions.

To add one, add an entry here and its name to the option ``optimizer`` or ``schedule``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from maple.errors import UsageError
from maple.training.muon import make_muon
from maple.training.options import TrainOptions


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


def _muon(module: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    return make_muon(module, options.learning_rate, options.momentum, options.weight_decay)


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
    "muon": _muon,
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
            f"--milestones {milestones[-1]} is not within the {options.epochs} epochs of the training: give smaller "
            "milestones or more --epochs"
        )
