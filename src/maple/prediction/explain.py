"""Explanations of predictions: the nearest cluster, the runner-up, and the parts of distance and score.

:mod:`maple.prediction.components` splits a squared distance into components, :func:`score_parts` the fused score, a
weighted sum of surprises, into its parts. :class:`~maple.prediction.explanation.Explanation` holds both and puts them
into words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.special import chdtri

from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.detectors.scores import Score
from maple.errors import UsageError
from maple.prediction.components import deviations, find_components
from maple.prediction.explanation import USUAL_SHARE, Explanation, Match
from maple.stats.arrays import as_embeddings
from maple.types import Outputs, Prediction


def explain_outputs(
    detector: MapleDetector,
    outputs: Outputs | np.ndarray,
    temperature: float = 1.0,
    *,
    class_names: Sequence[str] = (),
    prediction: Prediction | None = None,
    false_alarm: float = math.nan,
    can_be_flagged: bool = True,
    known_images: Sequence[str] = (),
    usual_distance: float | None = None,
) -> list[Explanation]:
    """One explanation per image.

    Class and probabilities are those of ``prediction``, or the class posterior at ``temperature`` without one; decision
    and p-value are those of ``prediction`` at the rate ``false_alarm``; ``can_be_flagged`` is False if there are too
    few calibration images for that rate. ``known_images`` (C,) describes the population of the p-values of each class.
    ``usual_distance`` is the squared distance to the nearest cluster within which ``USUAL_SHARE`` of known images lie;
    by default the one of the Gaussian model.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(300) % 3
    >>> embeddings = rng.normal(size=(300, 8)) + 6 * np.eye(3, 8)[labels]
    >>> detector = MapleDetector(norm_exponent=0).fit(Outputs(embeddings, labels=labels))
    >>> strange = np.array([[6.0, 0, 0, 0, 0, 0, 0, 9]])
    >>> (found,) = explain_outputs(detector, strange, class_names=("a", "b", "c"), usual_distance=14.0)
    >>> found.nearest.name, found.components.n_separating, found.degrees_of_freedom  # three clusters span a plane
    ('a', 2, 7)
    >>> print(found.sentences()[3])
    100 % of the unusual distance lies in components that do not separate clusters (3 to 7): it would be unusual in
    any of them.
    """
    outputs = _in_float64(outputs)
    found = detector.describe(outputs)
    probabilities = found.posterior(temperature) if prediction is None else prediction.probabilities  # (N, C)
    if len(probabilities) != len(outputs):
        raise UsageError(f"{len(outputs)} outputs but {len(probabilities)} predictions: they must match row by row")
    names = tuple(class_names or (prediction.class_names if prediction else ()))
    batch = _Batch(detector, found, probabilities, names or tuple(map(str, range(probabilities.shape[1]))))
    expected_distance = float(chdtri(detector.gaussians_.n_components, 1 - USUAL_SHARE))
    has_score = detector.score_ in found.available_scores  # plain embeddings have no logits
    parts = score_parts(found) if has_score else {}
    matches = zip(probabilities.argmax(axis=1), batch.nearest(), batch.runner_up())
    return [
        Explanation(
            class_name=batch.class_names[best],
            probability=float(probabilities[i, best]),
            nearest=nearest,
            runner_up=runner_up,
            coordinates=batch.projection[i] @ batch.components.axes,
            components=batch.components,
            cluster_names=batch.cluster_names,
            usual_distance=expected_distance if usual_distance is None else usual_distance,
            is_measured=usual_distance is not None,
            p_value=float(prediction.p_value[i]) if prediction else math.nan,
            is_ood=bool(prediction.is_ood[i]) if prediction else False,
            false_alarm=false_alarm,
            known_images=known_images[int(best)] if known_images else "known images",
            can_be_flagged=can_be_flagged,
            by_distance=prediction is None or np.array_equal(prediction.score, prediction.squared_distance),
            score=float(found.score[i]) if has_score else math.nan,
            score_by=detector.score_,
            parts={name: float(part[i]) for name, part in parts.items()},
            counted=found.learned.parts,
        )
        for i, (best, nearest, runner_up) in enumerate(matches)
    ]


class _Batch:
    """Described images next to the clusters."""

    def __init__(
        self, detector: MapleDetector, found: Description, probabilities: np.ndarray, class_names: tuple[str, ...]
    ) -> None:
        self.gaussians, self.cluster_to_class = detector.gaussians_, detector.cluster_to_class_
        self.found, self.probabilities, self.class_names = found, probabilities, class_names
        self.components = find_components(self.gaussians)
        self.cluster_names = name_clusters(self.cluster_to_class, class_names)
        self.projection = self.gaussians.project(found.embeddings)  # (N, K)

    def nearest(self) -> list[Match]:
        """The nearest cluster of each image."""
        return self._match(self.found.cluster)

    def runner_up(self) -> list[Match | None]:
        """The nearest cluster of another class than that of the nearest; None if there is one class."""
        same_class = self.cluster_to_class == self.cluster_to_class[self.found.cluster, None]  # (N, M)
        second = np.where(same_class, np.inf, self.found.squared_distances).argmin(axis=1)  # (N,)
        return [None if alone else match for alone, match in zip(same_class.all(axis=1), self._match(second))]

    def _match(self, clusters: np.ndarray) -> list[Match]:
        """Each image next to the cluster given for it (N,)."""
        away = deviations(self.gaussians, self.components, self.projection, clusters)  # (N, K)
        return [
            Match(int(c), int(k), self.class_names[k], self.cluster_names[c], float(self.probabilities[i, k]), away[i])
            for i, (c, k) in enumerate(zip(clusters, self.cluster_to_class[clusters]))
        ]


def score_parts(found: Description) -> dict[Score, np.ndarray]:
    """The parts of the fused score (N,), which sum to it; empty for other scores.

    A part is its weight times its surprise, -log of the share of known images that are as unusual in it; ``distance``
    adds only the surprise beyond that of nearly all known images.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(300) % 3
    >>> outputs = Outputs(rng.normal(size=(300, 4)) + 6 * np.eye(3, 4)[labels], 9 * np.eye(3)[labels], labels)
    >>> found = MapleDetector().fit(outputs, outputs).describe(outputs)
    >>> parts = score_parts(found)
    >>> list(parts), bool(np.allclose(sum(parts.values()), found.score))
    (['energy', 'spread', 'distance'], True)
    """
    return found.fused_parts() if found.learned.score == "fused" else {}


def name_clusters(cluster_to_class: np.ndarray, class_names: Sequence[str]) -> tuple[str, ...]:
    """The name of each cluster: its class if that has one cluster, else the number and the class.

    >>> name_clusters(np.array([0, 1, 0]), ["Navicula", "Nitzschia"])
    ('cluster 0 of Navicula', 'Nitzschia', 'cluster 2 of Navicula')
    """
    parts = np.bincount(cluster_to_class)
    return tuple(
        class_names[k] if parts[k] == 1 else f"cluster {cluster} of {class_names[k]}"
        for cluster, k in enumerate(cluster_to_class)
    )


def _in_float64(outputs: Outputs | np.ndarray) -> Outputs:
    """Embeddings in float64, so that parts sum to their distance in batches of any size."""
    if not isinstance(outputs, Outputs):
        outputs = Outputs(as_embeddings(outputs))
    return replace(outputs, embeddings=as_embeddings(outputs.embeddings).astype(np.float64))
