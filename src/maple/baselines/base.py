"""Shared by several baselines: the cross-entropy recipe, and logits of averaged probabilities."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from maple.training.loss import LossTerm
from maple.training.recipe import Recipe, Step


class CrossEntropy(Recipe):
    """A recipe whose loss is the cross-entropy alone."""

    def loss(self, step: Step) -> dict[str, LossTerm]:
        return {"cross_entropy": LossTerm(F.cross_entropy(step.logits, step.targets))}


def average_logits(logits: Tensor) -> Tensor:
    """Logits (N, C) of the average probabilities of S networks, from the logits of each (S, N, C).

    They are log p + F, with the average probability p of a class and the mean log-sum-exp F of the networks: their
    softmax is the average probability, their log-sum-exp the average of those of the networks. Every detector that
    reads logits therefore works on them.

    >>> import torch
    >>> parts = torch.tensor([[[0.8, 0.2]], [[0.4, 0.6]]]).log()
    >>> average_logits(parts).softmax(dim=1)
    tensor([[0.6000, 0.4000]])
    """
    log_mean = logits.log_softmax(dim=2).logsumexp(dim=0) - math.log(len(logits))  # (N, C)
    return log_mean + logits.logsumexp(dim=2).mean(dim=0)[:, None]
