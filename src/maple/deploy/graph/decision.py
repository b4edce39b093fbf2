"""Conformal p-values and the decision, by comparisons with sorted tables, since ONNX cannot bisect."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maple.decisions.calibration import Decision
from maple.decisions.conformal import count_allowed, flagging_levels
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
    """Conformal p-value and decision (N,) from score (N, 1) and class (N,), at any false-alarm level.

    An image is flagged if the level is at least its p-value, or with ``confidence`` at least the rate that
    :func:`maple.decisions.conformal.flagging_levels` gives for its p-value. At the level of the :class:`Decision` that
    is the decision itself.
    """

    false_alarm: Tensor  # (1,) level of the decision
    groups: Tensor  # (C,) of calibration images
    sizes: Tensor  # (G,) images of each group, and one
    levels: Tensor  # (G, n + 1) from which an image is flagged, by the number of calibration scores at or above its own

    def __init__(self, decision: Decision) -> None:
        super().__init__()
        groups = decision.group_scores
        self.is_calibrated, self.per_class = decision.n_images > 0, len(groups) > 1
        self.has_confidence = self.is_calibrated and decision.confidence is not None
        self.p_values = PValues(groups)
        self.register_buffer("false_alarm", constant([decision.false_alarm]))
        self.register_buffer("groups", constant(decision.group_of_class, torch.int64))
        if self.has_confidence:
            self.register_buffer("sizes", constant([len(group) + 1 for group in groups]))
            self.register_buffer("levels", constant(_confident_levels(decision)))

    def forward(self, score: Tensor, class_id: Tensor, false_alarm: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """At the ``false_alarm`` level (1,), one for each image (N,), or that of the decision."""
        if not self.is_calibrated:
            p_value = torch.full_like(score.squeeze(1), math.nan)
            return p_value, p_value <= (self.false_alarm if false_alarm is None else false_alarm)
        group = self.groups.index_select(0, class_id) if self.per_class else None
        p_value = self.p_values(score, group)
        needed = self._confident_level(p_value, group) if self.has_confidence else p_value
        return p_value, needed <= (self.false_alarm if false_alarm is None else false_alarm)

    def _confident_level(self, p_value: Tensor, group: Tensor | None) -> Tensor:
        """The level (N,) from which an image of this p-value is flagged."""
        size = self.sizes if group is None else self.sizes.index_select(0, group)
        n_above = (p_value * size).round().long() - 1
        place = n_above if group is None else group * self.levels.shape[1] + n_above
        return self.levels.reshape(-1).index_select(0, place)


def _confident_levels(decision: Decision) -> np.ndarray:
    """The levels (G, n + 1), with the level of the decision on its side of each whatever the rounding."""
    level, confidence = decision.false_alarm, decision.confidence
    assert confidence is not None
    table = np.full((len(decision.group_scores), max(map(len, decision.group_scores)) + 1), np.inf)
    for row, group in zip(table, decision.group_scores, strict=True):
        n_flagged = count_allowed(len(group), level, confidence) + 1
        row[: len(group) + 1] = flagging_levels(len(group), confidence)
        row[:n_flagged] = np.minimum(row[:n_flagged], level)
        row[n_flagged:] = np.maximum(row[n_flagged:], np.nextafter(level, 1))
    return table
