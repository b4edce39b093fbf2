"""In or out of distribution: :class:`Calibration` holds the calibration scores, :class:`Decision` decides with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, isfinite, log10
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from maple.decisions.conformal import (
    conformal_threshold,
    false_alarm_interval,
    min_calibration_images,
    p_values_of,
    sort_scores,
)
from maple.decisions.options import DecisionOptions
from maple.errors import DataError, UsageError
from maple.options import list_options
from maple.stats.arrays import ArrayRecord, as_array, list_rows
from maple.text import percent

# A predicted class with fewer calibration images has no threshold of its own: at 100, a false-alarm rate of 5 % varies
# between 2 and 9 % from one calibration set to the next.
MIN_CLASS_IMAGES = 100


@dataclass(frozen=True, eq=False)
class Calibration(ArrayRecord):
    """Scores of the calibration images, from which :meth:`decide` makes decisions at any level.

    ``set_scores`` come from the labelled ones (:func:`~maple.decisions.sets.true_class_scores`); nothing else needs
    labels.

    >>> calibration = Calibration(np.arange(1000.0), np.zeros(1000, dtype=int), n_classes=2)
    >>> decision = calibration.decide(false_alarm=0.05)
    >>> decision.is_ood([949.5, 950.5], [0, 1])
    array([False,  True])
    >>> print(decision.sentence())
    flags at most 5 % of in-distribution images on average over calibration sets (1,000 calibration images; 90 % of such
    sets flag 3.9 to 6.2 %)
    """

    scores: np.ndarray  # (n,)
    class_ids: np.ndarray  # (n,) int64: the *predicted* class of each calibration image
    n_classes: int
    set_scores: np.ndarray = field(default_factory=lambda: np.empty(0))  # (n_labelled,)

    def __post_init__(self) -> None:
        _check_images(self.scores, self.class_ids, self.n_classes)

    @staticmethod
    def empty(n_classes: int) -> Calibration:
        """No calibration images: p-values are NaN, and nothing is flagged."""
        return Calibration(np.empty(0), np.empty(0, dtype=np.int64), n_classes)

    def __len__(self) -> int:
        return len(self.scores)

    def decide(self, false_alarm: float = 0.05, confidence: float | None = None, per_class: bool = False) -> Decision:
        """The decision for a false-alarm rate; ``confidence`` as for :func:`conformal_threshold`.

        With ``per_class`` the guarantee holds for each *predicted* class (Mondrian conformal prediction), not only for
        all images together, where one class may be flagged far more often than others. A class with at least
        ``MIN_CLASS_IMAGES`` and :func:`min_calibration_images` calibration images has its own threshold and p-values.
        All other classes share one group: their guarantee holds on average over these classes, in the proportions of
        the calibration images. If that group is too small to flag anything, all calibration images are used, and these
        classes have no guarantee beyond that of ``per_class=False``.
        """
        needed = min_calibration_images(false_alarm, confidence)
        scores, class_ids = as_array(self.scores), as_array(self.class_ids).astype(np.int64)
        counts = np.bincount(class_ids, minlength=self.n_classes)  # (C,)
        own = (counts >= max(needed, MIN_CLASS_IMAGES)) & per_class
        shared = scores[~own[class_ids]] if counts[~own].sum() >= needed else scores
        by_class = np.split(scores[np.argsort(class_ids, kind="stable")], np.cumsum(counts)[:-1])
        groups = tuple(sort_scores(s) for s in (shared, *(by_class[c] for c in np.flatnonzero(own))))
        thresholds = np.array([conformal_threshold(group, false_alarm, confidence) for group in groups])
        group_of_class = np.where(own, np.cumsum(own), 0)
        return Decision(
            false_alarm=false_alarm,
            confidence=confidence,
            per_class=per_class,
            n_images=len(self),
            thresholds=thresholds[group_of_class],
            group_of_class=group_of_class,
            group_scores=groups,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision(DecisionOptions):
    """In or out of distribution at one level, with its guarantee; made by :meth:`Calibration.decide`.

    Each predicted class belongs to a group of calibration images: group 0 is shared, any other belongs to one class.
    Threshold and p-value of an image come from the same group: without ``confidence``, an image is flagged exactly
    where its p-value is at most ``false_alarm``. Without calibration images p-values are NaN; with too few, thresholds
    are infinite and nothing is flagged.
    """

    n_images: int  # calibration images
    thresholds: np.ndarray  # (C,) score above which an image predicted as this class is flagged
    group_of_class: np.ndarray  # (C,) int64
    group_scores: tuple[np.ndarray, ...]  # calibration scores of each group, sorted

    @property
    def kind(self) -> str:
        """'marginal' or 'confidence', each possibly 'per class'."""
        kind = "marginal" if self.confidence is None else "confidence"
        return f"{kind} per class" if self.per_class else kind

    @property
    def min_images(self) -> int:
        """The least number of calibration images with which an image can be flagged at this level."""
        return min_calibration_images(self.false_alarm, self.confidence)

    @property
    def can_flag_any(self) -> bool:
        """Whether there are enough calibration images to flag any image."""
        return self.n_images >= self.min_images

    @property
    def n_own_thresholds(self) -> int:
        """How many classes have their own threshold."""
        return int((self.group_of_class > 0).sum())

    @property
    def _is_pooled(self) -> bool:
        """Whether the classes without their own threshold share a group of calibration images."""
        return len(self.group_scores[0]) < self.n_images

    def p_values(self, scores: ArrayLike, class_ids: ArrayLike) -> np.ndarray:
        """The conformal p-value of each image (N,), given its score and predicted class; NaN without calibration."""
        scores, class_ids = _check_images(scores, class_ids, len(self.thresholds))
        p = np.full(len(scores), np.nan)
        groups = self.group_of_class[class_ids]  # (N,)
        order = np.argsort(groups, kind="stable")
        ends = np.cumsum(np.bincount(groups, minlength=len(self.group_scores)))
        for rows, ordered in zip(np.split(order, ends[:-1]), self.group_scores, strict=True):
            if len(rows) and len(ordered):
                p[rows] = p_values_of(scores[rows], ordered)
        return p

    def is_ood(self, scores: ArrayLike, class_ids: ArrayLike) -> np.ndarray:
        """Whether each image is flagged as out-of-distribution (N,), given its score and predicted class."""
        scores, class_ids = _check_images(scores, class_ids, len(self.thresholds))
        return scores > self.thresholds[class_ids]

    def known_images(self, class_names: Sequence[str]) -> list[str]:
        """The calibration images behind the p-values of each predicted class (C,), in words."""
        others = "known images of the classes without a threshold of their own" if self._is_pooled else "known images"
        return [f"known images called {name}" if own else others for name, own in zip(class_names, self.group_of_class)]

    def describe(self) -> dict[str, Any]:
        """Level, kind and thresholds as plain values, for files; an infinite threshold is None."""
        thresholds = [float(t) if isfinite(t) else None for t in self.thresholds]
        level = {name: getattr(self, name) for name in list_options(DecisionOptions)}
        counts = {"n_calibration": self.n_images, "n_own_thresholds": self.n_own_thresholds}
        limits = {"thresholds": thresholds} if self.per_class else {"threshold": thresholds[0]}
        return {"kind": self.kind, **level, **counts, **limits}

    def sentence(self) -> str:
        """The guarantee in one sentence, without its full stop."""
        if not self.can_flag_any:
            found = f"there are {self.n_images:,}" if self.n_images else "there are none"
            needed = f"at least {self.min_images:,} calibration images"
            return f"flags nothing: this false-alarm rate takes {needed}, and {found}"
        of = "in-distribution images of each predicted class" if self.n_own_thresholds else "in-distribution images"
        how = "on average over calibration sets"
        if self.confidence is not None:
            how = f"with {percent(self.confidence, exact=True)} confidence in this calibration set"
        promise = f"flags at most {percent(self.false_alarm, exact=True)} of {of} {how}"
        return f"{promise} ({self.n_images:,} calibration images; {self._detail()})"

    def _detail(self) -> str:
        own, n_classes = self.n_own_thresholds, len(self.thresholds)
        if own == n_classes:
            return "every class has its own threshold"
        if own:
            alone = "have too few images and use that of all, without a promise of their own"
            others = "share one" if self._is_pooled else alone
            return f"own thresholds for {own} of {n_classes} classes, the others {others}"
        low, high = false_alarm_interval(self.n_images, self.false_alarm, self.confidence, share=0.9)
        digits = max(0, 1 - floor(log10(100 * (high - low))))
        spread = f"90 % of such sets flag {100 * low:.{digits}f} to {100 * high:.{digits}f} %"
        return f"{spread}; no class has enough images for its own threshold" if self.per_class else spread


def _check_images(scores: ArrayLike, class_ids: ArrayLike, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores (N,) and predicted classes (N,) as arrays, or an error."""
    scores, class_ids = as_array(scores), as_array(class_ids)
    if scores.shape != class_ids.shape or scores.ndim != 1:
        shapes = f"scores have shape {scores.shape}, class ids {class_ids.shape}"
        raise UsageError(f"{shapes}: give one score and one class id per image")
    if len(missing := np.flatnonzero(np.isnan(scores))):
        where = list_rows(missing)
        raise DataError(f"{len(missing)} of {len(scores)} scores are NaN ({where}): leave those images out")
    if len(class_ids) and not (class_ids.min() >= 0 and class_ids.max() < n_classes):
        raise UsageError(f"class ids must lie between 0 and {n_classes - 1}: give the predicted class of each image")
    return scores, class_ids.astype(np.int64)
