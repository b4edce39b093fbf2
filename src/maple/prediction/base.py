"""Contract of predictors: images in, predictions out; classes, calibration and decisions are shared by all runtimes.

:class:`~maple.prediction.predictor.Predictor` computes with torch, :class:`~maple.prediction.onnx.OnnxPredictor` runs
an exported graph without torch. Commands and the server accept either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from maple.data.decode import Fit
from maple.data.image_set import ImageSet, Progress
from maple.decisions.calibration import Calibration, Decision
from maple.decisions.options import DecisionOptions
from maple.decisions.sets import prediction_sets
from maple.errors import DataError
from maple.options import as_dict, build_options
from maple.types import Prediction


def check_scores(scores: np.ndarray, files: Sequence[str]) -> None:
    """Refuse scores (N,) that are NaN, by the name of the first image.

    >>> check_scores(np.array([1.0, np.nan]), ["a.png", "b.png"])
    Traceback (most recent call last):
    ...
    maple.errors.DataError: the network gives no finite score for 'b.png' (1 of 2 images): leave such images out
    """
    broken = np.flatnonzero(np.isnan(scores))
    if len(broken):
        found = f"'{files[broken[0]]}' ({len(broken):,} of {len(scores):,} images)"
        raise DataError(f"the network gives no finite score for {found}: leave such images out")


class BasePredictor(ABC):
    """Class, probability, uncertainty and in/out decision for images.

    ``calibration`` holds the scores of calibration images, ``decision`` the thresholds and p-values that follow from
    them at the level of ``options``.
    """

    decision: Decision
    runtime: ClassVar[str]  # "torch" or "onnxruntime"

    def __init__(
        self,
        class_names: Sequence[str],
        *,
        size: int,
        fit: Fit = "pad",
        calibration: Calibration | None = None,
        options: DecisionOptions | None = None,
    ) -> None:
        self.class_names = tuple(class_names)
        self.size, self.fit = size, fit
        self.calibration = calibration or Calibration.empty(len(self.class_names))
        self.options = options or DecisionOptions()
        self.decide()

    @property
    @abstractmethod
    def network(self) -> str:
        """The name of the backbone, without the folder that it was opened from: graphs and services show it."""

    @property
    @abstractmethod
    def score_name(self) -> str:
        """The name of the OOD score: see :mod:`maple.detectors.scores`."""

    @property
    @abstractmethod
    def cluster_to_class(self) -> np.ndarray:
        """The class of each cluster (M,), int64."""

    @property
    @abstractmethod
    def map_centroids(self) -> np.ndarray:
        """The centroids of the clusters on the map (M, 2): see :attr:`maple.stats.gaussians.Gaussians.map_axes`."""

    @property
    @abstractmethod
    def map_radius(self) -> float | None:
        """One standard deviation of a cluster on the map; None where each has its own covariance."""

    @abstractmethod
    def predict_pixels(self, pixels: np.ndarray) -> Prediction:
        """Predict images (N, S, S, 3) uint8, S being the ``size``; with their ``position`` on the map."""

    @abstractmethod
    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        """Predict the images (N, S, S, 3) that have a finite embedding and a score; also returns a mask of these (N,).

        The network runs once, on all images together.
        """

    def predict_batches(
        self,
        images: ImageSet,
        *,
        batch_size: int = 256,
        indices: Any = None,
        workers: int = 0,
        progress: Progress | None = None,
    ) -> Iterator[Prediction]:
        """Predict images in order, or those at ``indices``, batch by batch.

        ``workers`` processes decode images that are not in memory; ``progress`` gets the number done and in total.
        """
        done, n = 0, len(images if indices is None else indices)
        for part in self._predict_rows(images, batch_size, indices, workers):
            yield part
            done += len(part)
            if progress is not None:
                progress(done, n)

    @abstractmethod
    def _predict_rows(self, images: ImageSet, batch_size: int, indices: Any, workers: int) -> Iterator[Prediction]: ...

    def _decided(self, **columns: np.ndarray) -> Prediction:
        """A prediction of these columns, with p-values and decisions at the level of ``options``."""
        image = columns["score"], columns["class_id"]
        p_value, is_ood = self.decision.p_values(*image), self.decision.is_ood(*image)
        return Prediction(**columns, p_value=p_value, is_ood=is_ood, class_names=self.class_names)

    def _summary(self) -> str:
        known = f"size={self.size}, n_classes={len(self.class_names)}, n_clusters={len(self.cluster_to_class)}"
        return f"{known}, {f'n_calibration={len(self.calibration)}' if len(self.calibration) else 'not calibrated'}"

    @property
    def false_alarm(self) -> float:
        """The largest share of in-distribution images to flag."""
        return self.options.false_alarm

    @property
    def calibration_scores(self) -> np.ndarray:
        """The sorted scores of the calibration images (n,)."""
        return np.sort(self.calibration.scores)

    @property
    def threshold(self) -> float:
        """The score above which an image is flagged; NaN if classes have their own thresholds."""
        thresholds = self.decision.thresholds
        return float(thresholds[0]) if (thresholds == thresholds[0]).all() else float("nan")

    def decide(self, **options: Any) -> Self:
        """Change the level of decisions: ``false_alarm``, ``confidence`` or ``per_class``; other options stay."""
        self.options = self._changed(options)
        self.decision = self.calibration.decide(**as_dict(self.options))
        return self

    def _changed(self, options: dict[str, Any]) -> DecisionOptions:
        return build_options(DecisionOptions, {**as_dict(self.options), **options}, "decision")

    def prediction_sets(self, prediction: Prediction, coverage: float) -> np.ndarray:
        """Prediction sets (N, C), bool: each contains the true class with a probability of at least ``coverage``."""
        return prediction_sets(prediction.log_probabilities, self.calibration.set_scores, coverage)
