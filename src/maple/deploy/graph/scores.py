"""Scores that need more than squared distances to clusters: energy, and the fused score."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from maple.deploy.graph._constants import Affine, constant
from maple.deploy.graph.distances import Residual, background_distance, shallow_distance
from maple.detectors.learned import Learned
from maple.detectors.scores import Part, Score, Surprise

ENDLESS = 2.0**300  # a surprise that no score reaches


def score_part(name: Score, learned: Learned) -> nn.Module | None:
    """The module of a score that needs more than squared distances to clusters; None for the others."""
    if name == "relative":
        return background_distance(learned.densities.plain_background)
    if name == "residual":
        return Residual(learned.densities.background)
    if name == "shallow":
        return shallow_distance(learned.densities)
    return Energy(learned) if name == "energy" else None


class Energy(nn.Module):
    """Negative log-sum-exp of the logits (N, 1).

    For classes that the head lacks see :attr:`maple.detectors.description.Description.energy`.
    """

    log_weights: Tensor  # (M,)
    known: Tensor  # clusters of the classes that the head knows

    def __init__(self, learned: Learned) -> None:
        super().__init__()
        self.knows_all = not learned.appended
        self.register_buffer("log_weights", constant(learned.densities.gaussians.log_weights))
        known = np.flatnonzero(learned.head_classes[learned.cluster_to_class])
        self.register_buffer("known", constant(known, torch.int64))

    def forward(self, logits: Tensor, squared_distances: Tensor) -> Tensor:
        inside: Tensor | float = 0.0  # log probability of the classes that the head knows, (N, 1)
        if not self.knows_all:
            logs = self.log_weights - squared_distances / 2  # (N, M)
            inside = logs.index_select(1, self.known).logsumexp(1, keepdim=True) - logs.logsumexp(1, keepdim=True)
        return inside - logits.logsumexp(1, keepdim=True)


class Surprises(nn.Module):
    """The fused score (N, 1) from its parts (N, P); see :class:`maple.detectors.scores.Surprise`.

    The contribution of a score x is linear between knots and never falls: a sum of ramps height clip((x - start) /
    width, 0, 1), one between each two knots. No term is negative, so nothing cancels.
    """

    heights: Tensor  # (T,) of all ramps

    def __init__(self, surprises: Mapping[Score, Surprise], parts: Mapping[Score, Part]) -> None:
        super().__init__()
        ramps = [_ramps(surprise, parts[name]) for name, surprise in surprises.items()]
        owners = np.repeat(np.arange(len(ramps)), [len(starts) for starts, _, _ in ramps])
        starts, widths, heights = (np.concatenate(column) for column in zip(*ramps, strict=True))
        weight = np.zeros((len(ramps), len(owners)))
        weight[owners, np.arange(len(owners))] = 1 / widths
        self.climb = Affine(weight, -starts / widths)
        self.register_buffer("heights", constant(heights))

    def forward(self, scores: Tensor) -> Tensor:
        return (self.climb(scores).clamp(0, 1) * self.heights).sum(1, keepdim=True)


def _ramps(surprise: Surprise, part: Part) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, widths and heights (T,) of the ramps whose sum is the contribution of a score.

    The ramp before the first knot is complete for every score, the one after the last knot for none. Of each ramp, only
    the part above the level ``part.beyond`` counts.
    """
    bottoms = np.r_[0.0, surprise.values]
    starts, heights = np.r_[-ENDLESS, surprise.scores], np.r_[np.diff(bottoms), ENDLESS]
    widths = np.r_[1.0, np.diff(surprise.scores), ENDLESS * surprise.excess]
    below = np.clip(part.beyond - bottoms, 0, heights)
    share = np.divide(below, heights, out=np.ones_like(below), where=heights > 0)
    starts, widths, heights = starts + share * widths, (1 - share) * widths, (1 - share) * heights
    rises = heights > 0
    return starts[rises], widths[rises], part.weight * heights[rises]
