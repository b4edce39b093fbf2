"""The figures of one method: its classification from confidences and labels, its detection from scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from maple.detectors.description import Description
from maple.evaluation.results import Classification, Detection, Histogram, Method, Reliability
from maple.stats import metrics
from maple.stats.chi_square import gaussian_test

MAX_CURVE_POINTS = 200
_CONFIDENCE_LEVELS = (0.5, 0.8, 0.9)
_HISTOGRAM_BINS = 50
_HISTOGRAM_ROOM = 2  # on both sides of the known images, in widths of their scores


def make_method(
    classification: Classification | None,
    ind_scores: np.ndarray,  # (N,)
    ood_scores: Mapping[str, np.ndarray],
    flagged: Mapping[str, float] | None = None,
    found: Description | None = None,
) -> Method:
    """A row from its parts: detection on every OOD set and one histogram; with ``found``, the Gaussian test of IND."""
    shares = flagged or {}
    detection = {name: _detect(ind_scores, scores, shares.get(name, math.nan)) for name, scores in ood_scores.items()}
    row = Method(classification, detection, _histogram(ind_scores, ood_scores))
    if found is None:
        return row
    degrees = found.degrees_of_freedom
    error = gaussian_test(found.squared_distance, degrees)
    return replace(row, n_components=float(degrees), gaussian_error=error)


# --- classification --------------------------------------------------------------------------------------------------


def judge_as_paper(found: Description, labels: np.ndarray) -> Classification:
    """Gaussians as the paper reads them: P_MD is the probability; it is not normalised and has no Brier score.

    Images are ranked by squared distance, because uncertainty rounds to 1 for every far image.
    """
    return _judge(
        np.exp(found.log_typicality),
        found.md_class_id == labels,
        ranking=-found.squared_distance,
        nll=metrics.negative_log_likelihood(found.log_typicality_per_class, labels, log=True),
    )


def judge_probabilities(log_probabilities: np.ndarray, labels: np.ndarray) -> Classification:
    """The figures of log class probabilities (N, C) that sum to one."""
    probabilities = np.exp(log_probabilities)
    confidence = probabilities.max(axis=1)
    return _judge(
        confidence,
        probabilities.argmax(axis=1) == labels,
        ranking=confidence,
        nll=metrics.negative_log_likelihood(log_probabilities, labels, log=True),
        brier=metrics.brier_score(probabilities, labels),
    )


def _judge(
    confidence: np.ndarray, correct: np.ndarray, *, ranking: np.ndarray, nll: float, brier: float = math.nan
) -> Classification:
    """The figures of confidences (N,), of correct predictions (N,) and of the ranking (N,) for selective accuracy."""
    curve = metrics.reliability_curve(confidence, correct)
    kept, accuracy_kept = metrics.coverage_curve(ranking, correct)
    shown = metrics.spaced_rows(len(kept), MAX_CURVE_POINTS)
    above = {f"{level:g}": metrics.accuracy_above(confidence, correct, level) for level in _CONFIDENCE_LEVELS}
    return Classification(
        accuracy=float(correct.mean()),
        ece=metrics.expected_calibration_error(confidence, correct),
        ece_floor=metrics.calibration_floor(confidence),
        nll=nll,
        brier=brier,
        aurc=metrics.aurc(ranking, correct),
        kept=kept[shown].tolist(),
        accuracy_kept=accuracy_kept[shown].tolist(),
        accuracy_above={level: accuracy for level, (accuracy, _) in above.items()},
        share_above={level: share for level, (_, share) in above.items()},
        reliability=Reliability(
            curve.edges.tolist(), curve.count.tolist(), curve.accuracy.tolist(), curve.confidence.tolist()
        ),
    )


# --- detection -------------------------------------------------------------------------------------------------------


def _detect(ind_scores: np.ndarray, ood_scores: np.ndarray, flagged: float) -> Detection:
    roc_ind, roc_ood = _thin(*metrics.roc_curve(ind_scores, ood_scores)[:2])
    return Detection(
        auroc=metrics.auroc(ind_scores, ood_scores),
        aupr_out=metrics.aupr_out(ind_scores, ood_scores),
        aupr_in=metrics.aupr_in(ind_scores, ood_scores),
        fpr95_ood_positive=metrics.fpr95_ood_positive(ind_scores, ood_scores),
        fpr95_ind_positive=metrics.fpr95_ind_positive(ind_scores, ood_scores),
        flagged=flagged,
        roc_ind=roc_ind.tolist(),
        roc_ood=roc_ood.tolist(),
    )


def _thin(x: np.ndarray, y: np.ndarray, points: int = MAX_CURVE_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most ``points`` of a rising curve from (0, 0) to (1, 1), evenly along it, both ends kept."""
    along = x + y  # rises from 0 to 2
    if len(along) > points:
        kept = np.searchsorted(along, np.linspace(0, along[-1], points))
        kept[-1] = len(along) - 1  # earlier points may have the same rounded sum
        kept = np.unique(kept)
        x, y = x[kept], y[kept]
    return x, y


def _histogram(ind_scores: np.ndarray, ood_scores: Mapping[str, np.ndarray], bins: int = _HISTOGRAM_BINS) -> Histogram:
    """Counts in common bins between the 0.5 % and 99.5 % quantiles of the sets, near the known images.

    Scores beyond join the outer bins; without this a few extreme scores, or a set that lies far out, would squeeze all
    others into one bin.
    """
    finite = [scores[np.isfinite(scores)] for scores in (ind_scores, *ood_scores.values())]
    limits = [np.quantile(scores, (0.005, 0.995)) for scores in finite if len(scores)] or [np.zeros(2)]
    low, high = min(pair[0] for pair in limits), max(pair[1] for pair in limits)
    if len(finite[0]) and limits[0][1] > limits[0][0]:
        room = _HISTOGRAM_ROOM * (limits[0][1] - limits[0][0])
        low, high = max(low, limits[0][0] - room), min(high, limits[0][1] + room)
    edges = np.linspace(low, high if high > low else low + 1, bins + 1)

    def count(scores: np.ndarray) -> list[int]:
        return np.histogram(np.clip(scores, edges[0], edges[-1]), edges)[0].tolist()

    return Histogram(edges.tolist(), count(ind_scores), {name: count(scores) for name, scores in ood_scores.items()})
