"""Detectors that recompute logits from shaped embeddings; ``fit`` takes the linear head.

=========  ========================================================================================
``react``  energy of the logits of embeddings clipped at a quantile of all training activations
``ash``    energy of the logits of embeddings whose largest activations are kept and scaled up
``vim``    energy, plus a virtual logit: the length of the embedding outside its principal space
=========  ========================================================================================

All take one forward pass. They were designed for embeddings after a ReLU, such as pooled feature maps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from maple.detectors.base import Batches, Detector, finite_embeddings
from maple.detectors.distance import moments_of_all
from maple.detectors.registry import register_detector
from maple.detectors.scores import energy_score
from maple.errors import FitError
from maple.options import Positive, Share, option
from maple.stats.arrays import row_blocks
from maple.stats.background import Background
from maple.stats.covariance import principal_axes
from maple.stats.moments import Moments
from maple.types import About, LinearHead, Outputs

_ABOUT = partial(About, needs="embeddings, a linear head")


class _HeadDetector(Detector):
    """A score of embeddings and the head; the head is part of the state, so a restored detector needs no network."""

    needs_head = True

    def _logits(self, embeddings: np.ndarray) -> np.ndarray:
        """Logits (N, M) of embeddings (N, D)."""
        return embeddings @ self.head_.weight.T + self.head_.bias

    def _blocks(self, outputs: Outputs) -> Iterator[tuple[slice, np.ndarray]]:
        """Row slices and blocks (B, D) of the embeddings, in float64."""
        embeddings = finite_embeddings(outputs, self.head_.weight.shape[1])
        for rows in row_blocks(*embeddings.shape):
            yield rows, embeddings[rows].astype(np.float64)

    def _score(self, outputs: Outputs) -> np.ndarray:
        scores = np.empty(len(outputs))
        for rows, block in self._blocks(outputs):
            scores[rows] = self._score_block(block)
        return scores

    @abstractmethod
    def _score_block(self, embeddings: np.ndarray) -> np.ndarray: ...


# ------------------------------------------------------------------------------------------------------------ ReAct

_DROPPED_BITS = 12  # of a float32: 11 bits of its fraction remain, steps of 1 in 2,000


def count_values(values: np.ndarray) -> np.ndarray:
    """Histogram (2^20,) of float32 values by sign, exponent and leading bits, in ascending order.

    Counts are additive over batches and processes, in memory independent of the number of values.

    >>> int(count_values(np.array([1.0, 1.0001, -2.0], np.float32)).max())
    2
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).ravel().view(np.uint32)
    ascending = np.where(bits >> 31, ~bits, bits | 0x80000000)  # as floats are ordered
    return np.bincount(ascending >> _DROPPED_BITS, minlength=1 << (32 - _DROPPED_BITS))


def quantile_of_counts(counts: np.ndarray, quantile: float) -> float:
    """Quantile of the counted values, interpolated linearly within a bin.

    >>> values = np.random.default_rng(0).exponential(size=10_000).astype(np.float32)
    >>> bool(abs(quantile_of_counts(count_values(values), 0.9) / np.quantile(values, 0.9) - 1) < 1e-4)
    True
    """
    reached = np.cumsum(counts)
    rank = quantile * (reached[-1] - 1)
    step = int(np.searchsorted(reached, rank, side="right"))
    inside = (rank - (reached[step] - counts[step])) / counts[step]
    low, high = _step_edge(step), _step_edge(step + 1)
    return low + inside * (high - low)


def _step_edge(step: int) -> float:
    """The smallest value of a step of :func:`count_values`."""
    ascending = np.uint32(step << _DROPPED_BITS)
    bits = ascending & np.uint32(0x7FFFFFFF) if ascending >> 31 else ~ascending
    return float(bits.view(np.float32))


@dataclass(frozen=True, kw_only=True, eq=False)
class ReactOptions:
    """Options of ReAct."""

    quantile: Share = option(0.9, "quantile of all training activations at which activations are clipped")


@register_detector("react")
class ReactDetector(ReactOptions, _HeadDetector):
    """Energy of rectified activations, min(e, c) (Sun et al. 2021); c is a quantile of all training activations.

    OOD images have few, unusually large activations; clipping removes their effect on the logits. The quantile is
    computed from counts of the values to 11 bits, in one pass. The default is that of the authors' code, which prints
    the 90th percentile (https://github.com/deeplearning-wisc/react, compute_threshold.py, there of validation images).

    >>> head = LinearHead(np.eye(2, dtype=np.float32), np.zeros(2, np.float32))
    >>> train = Outputs(np.random.default_rng(0).random((1000, 2), np.float32))
    >>> detector = ReactDetector().fit(train, head=head)
    >>> detector.score(Outputs(np.array([[0.0, 2.0], [0.0, 9.0]]))).round(1)  # both are clipped at 0.9
    array([-1.2, -1.2])
    """

    about = _ABOUT(
        "energy of clipped embeddings", "Sun et al. 2021", "https://arxiv.org/abs/2111.12797", adds="one threshold"
    )
    threshold_: float

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:
        counts = sum(count_values(block) for outputs in batches.start() for _, block in self._blocks(outputs))
        counts = batches.sum_over_ranks(np.asarray(counts))
        if not counts.any():
            raise FitError(f"the '{self.name}' detector got no outputs to learn from: add images")
        self.threshold_ = quantile_of_counts(counts, self.quantile)

    def _score_block(self, embeddings: np.ndarray) -> np.ndarray:
        return energy_score(self._logits(np.minimum(embeddings, self.threshold_)))


# -------------------------------------------------------------------------------------------------------------- ASH


def shape_activations(embeddings: np.ndarray, pruned: float) -> np.ndarray:
    """ASH-S of each row (N, D): its smallest activations become 0, the others are scaled by exp(s / s_kept).

    s and s_kept are the sums of the activations before and after pruning. ``pruned`` is the share that becomes 0.
    Negative activations, which do not occur after a ReLU, become 0 as well.

    >>> shape_activations(np.array([[3.0, 1.0, 0.0, 2.0]]), 0.5).round(2)  # exp(6 / 5) is 3.32
    array([[9.96, 0.  , 0.  , 6.64]])
    """
    activations = np.maximum(embeddings, 0.0)
    n_pruned = round(pruned * activations.shape[1])
    kept = activations.copy()
    if n_pruned:
        smallest = np.argpartition(activations, n_pruned - 1, axis=1)[:, :n_pruned]
        np.put_along_axis(kept, smallest, 0.0, axis=1)
    before, after = activations.sum(axis=1), kept.sum(axis=1)
    ratio = np.divide(before, after, out=np.zeros_like(before), where=after > 0)
    return kept * np.exp(ratio)[:, None]


@dataclass(frozen=True, kw_only=True, eq=False)
class AshOptions:
    """Options of ASH."""

    pruned: Annotated[float, Field(ge=0, lt=1)] = option(0.65, "share of the activations of an image set to 0")


@register_detector("ash")
class AshDetector(AshOptions, _HeadDetector):
    """Energy of shaped activations: ASH-S (Djurisic et al. 2023); see :func:`shape_activations`.

    As in the authors' code (https://github.com/andrijazz/ash), the map is shaped after it is pooled. Nothing is learned
    but the head. The share to prune suits some networks and not others, and the paper chooses one for each: the
    configurations in that code say 0.9 for ResNet-34 on CIFAR-10, 0.9 or 0.95 for DenseNet on CIFAR-100 and 0.9 for
    ResNet-50 on ImageNet, whose embeddings are 342 to 2,048 wide. Of the 128 activations of ``resnet9``, 0.9 leaves 13,
    and the AUROC of CIFAR-10 against CIFAR-100 falls from 0.85 to 0.67. So the default is the one of their function
    ``ash_s``, 0.65; with a wide embedding, take theirs.

    >>> head = LinearHead(np.eye(2, dtype=np.float32), np.zeros(2, np.float32))
    >>> outputs = Outputs(np.array([[3.0, 1.0], [2.0, 2.0]]))
    >>> AshDetector(pruned=0.5).fit(outputs, head=head).score(outputs).round(2)
    array([-11.38, -14.78])
    """

    about = _ABOUT("energy of pruned and scaled embeddings", "Djurisic et al. 2023", "https://arxiv.org/abs/2209.09858")

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:
        next(self._blocks(next(batches.start())), None)  # a head of another network raises an error now

    def _score_block(self, embeddings: np.ndarray) -> np.ndarray:
        return energy_score(self._logits(shape_activations(embeddings, self.pruned)))


# -------------------------------------------------------------------------------------------------------------- ViM


def principal_space_size(embedding_size: int) -> int:
    """Size of the principal space of ViM: 1,000 of 2,048 or more dimensions, 512 of 768 or more, else half of them.

    The first two are the authors' choices for ImageNet networks.

    >>> principal_space_size(2048), principal_space_size(768), principal_space_size(128)
    (1000, 512, 64)
    """
    if embedding_size >= 2048:
        return 1000
    return 512 if embedding_size >= 768 else embedding_size // 2


def head_origin(head: LinearHead) -> np.ndarray:
    """The shortest embedding (D,) whose logits are nearest to 0: -W^+ b.

    Training leaves the sum of the rows of W near 0. Singular values below float32 rounding count as 0; otherwise this
    direction would move the origin far away.

    >>> head_origin(LinearHead(np.array([[2.0, 0.0], [0.0, 1e-9]], np.float32), np.array([4.0, 1.0], np.float32)))
    array([-2.,  0.])
    """
    rounding = max(head.weight.shape) * float(np.finfo(np.float32).eps)
    return -np.linalg.pinv(head.weight.astype(np.float64), rtol=rounding) @ head.bias


@dataclass(frozen=True, kw_only=True, eq=False)
class VimOptions:
    """Options of ViM."""

    components: Literal["auto"] | Positive = option(
        "auto", "size of the principal space; 'auto' is 1000 of 2048 dimensions, 512 of 768, half of fewer"
    )


@register_detector("vim")
class VimDetector(VimOptions, _HeadDetector):
    """Virtual-logit matching (Wang et al. 2022): alpha r(e) - log sum_c exp(logit_c).

    The origin is u = -W^+ b, where the head W, b gives logits nearest to 0. r(e) is the length of e - u outside the
    leading eigenvectors of the second moment of the training embeddings around u, and alpha scales it to the logits:
    the mean largest logit over the mean of r. The score is the log odds that a softmax over the logits and alpha r
    gives to the virtual class.

    Lengths cannot be computed from moments, so ``fit`` reads the images twice; batches that can be read only once are
    held in memory.

    >>> head = LinearHead(np.eye(2, 4, dtype=np.float32), np.zeros(2, np.float32))
    >>> train = Outputs(np.random.default_rng(0).random((500, 4)) * [9.0, 9.0, 1.0, 1.0])
    >>> detector = VimDetector().fit(train, head=head)
    >>> inside, outside = detector.score(Outputs(np.array([[9.0, 5.0, 0.0, 0.0], [9.0, 5.0, 5.0, 5.0]])))
    >>> bool(outside > inside)
    True
    """

    about = _ABOUT(
        "virtual logit, the length outside the principal space, against the energy",
        "Wang et al. 2022",
        "https://arxiv.org/abs/2203.10807",
        adds="the principal space",
    )
    records = {"space": Background}
    space_: Background  # around the origin; its matrix spans the principal space
    alpha_: float

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:
        batches = batches.held()
        moments = moments_of_all(batches, self.head_.weight.shape[1])
        self.space_ = self._principal_space(moments.moved_to(head_origin(self.head_)))
        self.alpha_ = self._match(batches)

    def _principal_space(self, moments: Moments) -> Background:
        """The leading eigenvectors of the second moment around the origin, where ``moments`` have their shift."""
        assert moments.shift is not None
        variances, axes = principal_axes(moments.second / moments.n_images)  # (R,), (D, R) with R the rank
        size, rank = self.components, len(variances)
        if size == "auto":
            size = wanted if (wanted := principal_space_size(moments.dim)) < rank else rank // 2
        if size >= rank:
            raise FitError(f"components is {size}, but the embeddings span only {rank} dimensions: lower components")
        return Background(moments.shift, np.ones(moments.dim), axes[:, :size], variances[:size])

    def _match(self, batches: Batches) -> float:
        """The factor that scales the mean virtual logit to the mean largest logit."""
        sums = np.zeros(2)
        for outputs in batches.start():
            for _, block in self._blocks(outputs):
                sums += self._logits(block).max(axis=1).sum(), self._lengths_outside(block).sum()
        logits, lengths = batches.sum_over_ranks(sums)
        if logits <= 0:
            raise FitError("the mean largest logit is not above 0, as 'vim' requires: use another detector")
        return float(logits / lengths)

    def _lengths_outside(self, embeddings: np.ndarray) -> np.ndarray:
        """r(e) (N,)."""
        return np.sqrt(self.space_.residuals(embeddings))

    def _score_block(self, embeddings: np.ndarray) -> np.ndarray:
        return self.alpha_ * self._lengths_outside(embeddings) + energy_score(self._logits(embeddings))
