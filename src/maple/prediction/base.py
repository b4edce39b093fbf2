"""What every predictor has, whichever runtime computes: classes, calibration and decisions; images in, answers out.

:class:`~maple.prediction.predictor.Predictor` computes with torch, :class:`~maple.prediction.onnx.OnnxPredictor`
runs an exported
graph where torch is not installed. Whatever predicts, in files, over HTTP or in a stream, takes either.
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
from maple.options import as_dict, build_options
from maple.types import Prediction


class BasePredictor(ABC):
    """Class, probability, uncertainty and in/out decision for images.

    ``calibration`` is what calibration images taught, ``decision`` the threshold and p-values that follow from it at
    the level of ``options``.
    """

    decision: Decision
    runtime: ClassVar[str]  # what computes: "torch" or "onnxruntime"

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
        """The name of the backbone."""

    @property
    @abstractmethod
    def score_name(self) -> str:
        """The score that images are ranked by: see :mod:`maple.detectors.scores`."""

    @property
    @abstractmethod
    def cluster_to_class(self) -> np.ndarray:
        """The class of each cluster (M,), int64."""

    @property
    @abstractmethod
    def map_centroids(self) -> np.ndarray:
        """The clusters on their map (M, 2): see :attr:`maple.stats.gaussians.Gaussians.map_axes`."""

    @property
    @abstractmethod
    def map_radius(self) -> float | None:
        """One standard deviation of a cluster on the map; None where each has its own covariance."""

    @abstractmethod
    def predict_pixels(self, pixels: np.ndarray) -> Prediction:
        """Predict images as they are, (N, S, S, 3) uint8, S the ``size``; with their ``position`` on the map."""

    @abstractmethod
    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        """Predict those of the images (N, S, S, 3) that have a finite embedding and a score, and which these are (N,).

        The network runs once, on all images together.
        """

    @abstractmethod
    def predict_batches(
        self,
        images: ImageSet,
        *,
        batch_size: int = 256,
        indices: Any = None,
        workers: int = 0,
        progress: Progress | None = None,
    ) -> Iterator[Prediction]:
        """Predict images in order, or those at ``indices``, batch by batch; ``progress`` counts them."""

    @property
    def false_alarm(self) -> float:
        """The share of in-distribution images that may be flagged."""
        return self.options.false_alarm

    @property
    def calibration_scores(self) -> np.ndarray:
        """The sorted scores of the calibration images (n,)."""
        return np.sort(self.calibration.scores)

    @property
    def threshold(self) -> float:
        """The score above which an image is flagged; NaN where the classes have thresholds of their own."""
        thresholds = self.decision.thresholds
        return float(thresholds[0]) if (thresholds == thresholds[0]).all() else float("nan")

    def decide(self, **options: Any) -> Self:
        """Decide at another level from now on: ``false_alarm``, ``confidence``, ``per_class``; the rest stays."""
        self.options = self._changed(options)
        self.decision = self.calibration.decide(**as_dict(self.options))
        return self

    def _changed(self, options: dict[str, Any]) -> DecisionOptions:
        return build_options(DecisionOptions, {**as_dict(self.options), **options}, "decision")

    def prediction_sets(self, prediction: Prediction, coverage: float) -> np.ndarray:
        """Which classes each image may belong to (N, C): the true one is among them with this probability at least."""
        return prediction_sets(prediction.log_probabilities, self.calibration.set_scores, coverage)
