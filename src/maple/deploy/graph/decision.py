"""Conformal p-values and the decision, by comparisons with sorted tables, since ONNX cannot bisect."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maple.decisions.calibration import Decision
from maple.deploy.graph._constants import constant

ONE_STEP = 1024  # table entries compared at once


class PValues(nn.Module):
    """Conformal p-values (N,) of scores (N, 1); see :func:`maple.decisions.conformal.conformal_p_values`.

    The p-value of a score is that of the first calibration score not below it, which is the largest of all not below
    it. Each group ends in infinity. Many calibration scores are split into B blocks, so that a lookup takes two steps
    of √n comparisons: with the last score of each block, then with the scores of one block.

    >>> PValues([np.array([1.0, 2.0, 3.0])])(torch.tensor([[0.5], [2.0], [9.0]]).double())
    tensor([1.0000, 0.7500, 0.2500], dtype=torch.float64)
    """

    scores: Tensor  # (G B, width) sorted calibration scores of each group
    values: Tensor  # (G B, width) their p-values; 0 as padding
    last: Tensor  # (G, B) last score of each block
    first: Tensor  # (G, B) p-value of its first score

    def __init__(self, groups: Sequence[np.ndarray]) -> None:
        super().__init__()
        longest = max(map(len, groups)) + 1
        width = longest if longest <= ONE_STEP else math.isqrt(longest - 1) + 1
        self.n_blocks = -(-longest // width)
        scores = np.full((len(groups), self.n_blocks * width), np.inf)
        values = np.zeros_like(scores)
        for row, own, group in zip(scores, values, groups, strict=True):
            row[: len(group)] = group
            own[: len(group) + 1] = np.arange(len(group) + 1, 0, -1) / (len(group) + 1)
        self.register_buffer("scores", constant(scores.reshape(-1, width)))
        self.register_buffer("values", constant(values.reshape(-1, width)))
        self.register_buffer("last", constant(scores[:, width - 1 :: width]))
        self.register_buffer("first", constant(values[:, ::width]))

    def forward(self, score: Tensor, group: Tensor | None = None) -> Tensor:
        """P-values in the only group, or in the group (N,) of each image."""
        block = group
        if self.n_blocks > 1:
            last, first = _rows(group, self.last, self.first)  # (1, B) or (N, B)
            block = torch.where(last < score, 0.0, first).argmax(1)
            block = block if group is None else group * self.n_blocks + block
        scores, values = _rows(block, self.scores, self.values)  # (1, width) or (N, width)
        return torch.where(scores < score, 0.0, values).amax(1)


def _rows(which: Tensor | None, *tables: Tensor) -> list[Tensor]:
    """Rows ``which`` (N,) of each table; all rows if it is None."""
    return [table if which is None else F.embedding(which, table) for table in tables]


class Decide(nn.Module):
    """Conformal p-value and decision (N,) from score (N, 1) and class (N,); see :class:`Decision`."""

    thresholds: Tensor  # (C,), or (1,) if all classes share it
    groups: Tensor  # (C,) of calibration images

    def __init__(self, decision: Decision) -> None:
        super().__init__()
        groups, thresholds = decision.group_scores, decision.thresholds
        self.is_calibrated, self.per_class = decision.n_images > 0, len(groups) > 1
        self.p_values = PValues(groups)
        self.register_buffer("thresholds", constant(thresholds if self.per_class else thresholds[:1]))
        self.register_buffer("groups", constant(decision.group_of_class, torch.int64))

    def forward(self, score: Tensor, class_id: Tensor) -> tuple[Tensor, Tensor]:
        threshold = self.thresholds.index_select(0, class_id) if self.per_class else self.thresholds
        is_ood = threshold < score.squeeze(1)
        if not self.is_calibrated:
            return torch.full_like(score.squeeze(1), math.nan), is_ood
        return self.p_values(score, self.groups.index_select(0, class_id) if self.per_class else None), is_ood
