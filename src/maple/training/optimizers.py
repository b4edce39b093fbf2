"""Optimisers and learning-rate schedules by name: two small tables of functions.

To add one, add an entry here and its name to the option ``optimizer`` or ``schedule``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

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


def _triangular(progress: float) -> float:
    """Rise from a tenth of the peak over the first quarter of all steps, then fall to zero."""
    rise = 0.25
    return 0.1 + 0.9 * progress / rise if progress < rise else (1 - progress) / (1 - rise)


def _cosine(progress: float) -> float:
    """Fall from the peak to zero along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * progress))


OPTIMIZERS: dict[str, Callable[[nn.Module, TrainOptions], torch.optim.Optimizer]] = {"sgd": _sgd, "adam": _adam}
SCHEDULES: dict[str, Callable[[float], float]] = {  # share of the steps done to share of the peak learning rate
    "triangular": _triangular,
    "cosine": _cosine,
    "constant": lambda progress: 1.0,
}


def make_optimizer(module: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """The optimiser that ``options`` name, for all parameters of ``module``."""
    return OPTIMIZERS[options.optimizer](module, options)


def learning_rate_at(progress: float, options: TrainOptions) -> float:
    """The learning rate when the share ``progress`` of all steps is done.

    >>> [round(learning_rate_at(p, TrainOptions(learning_rate=1.0)), 3) for p in (0, 0.25, 0.625, 1)]
    [0.1, 1.0, 0.5, 0.0]
    """
    return options.learning_rate * SCHEDULES[options.schedule](progress)
