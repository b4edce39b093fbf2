"""A backbone and a fitted detector: from images to predictions in one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from maple import notebook
from maple.data.decode import Fit
from maple.data.image_set import ImageSet
from maple.data.sources import holds_pictures, is_torch_data, open_images, open_like
from maple.decisions.calibration import Calibration
from maple.decisions.options import DecisionOptions
from maple.decisions.probability import Probability
from maple.decisions.sets import true_class_scores
from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.errors import UsageError
from maple.files import without_paths
from maple.networks import Backbone, embed, embed_batches
from maple.prediction.base import BasePredictor
from maple.stats._blas import one_thread
from maple.text import shorten, shorten_list
from maple.types import Outputs, Prediction


class Predictor(BasePredictor):
    """Class, probability, uncertainty and in/out decision for images, from one forward pass.

    ``probability``, fitted on validation images, turns distances and logits into class probabilities. ``calibration``
    holds the scores of calibration images, ``decision`` the thresholds and p-values that follow from them at the level
    of ``options``. Without ``class_names``, classes are numbered; ``size`` defaults to that of the backbone.
    """

    runtime = "torch"

    def __init__(
        self,
        backbone: Backbone,
        detector: MapleDetector,
        class_names: Sequence[str] | None = None,
        *,
        size: int | None = None,
        fit: Fit = "pad",
        probability: Probability | None = None,
        calibration: Calibration | None = None,
        options: DecisionOptions | None = None,
    ) -> None:
        if class_names is None:
            class_names = [str(i) for i in range(detector.cluster_to_class_.max() + 1)]
        if (side := size or backbone.size) is None:
            raise UsageError("the backbone has no image size: give Predictor size=, in pixels")
        self.backbone, self.detector = backbone, detector
        self.probability = probability or Probability()
        super().__init__(class_names, size=side, fit=fit, calibration=calibration, options=options)

    @property
    def network(self) -> str:
        origin = self.backbone.origin
        described = {"backbone": self.backbone.name, "origin": None if origin is None else origin.to_dict()}
        return without_paths(described)["backbone"]

    @property
    def score_name(self) -> str:
        return self.detector.score_

    @property
    def cluster_to_class(self) -> np.ndarray:
        return self.detector.cluster_to_class_

    @property
    def map_centroids(self) -> np.ndarray:
        return self.detector.gaussians_.on_map(self.detector.gaussians_.centroids)

    @property
    def map_radius(self) -> float | None:
        return 1.0 if self.detector.gaussians_.whitenings is None else None

    def __repr__(self) -> str:
        return f"Predictor({self.network!r}, {self._summary()})"

    def _repr_html_(self) -> str:
        about = notebook.summary(classes=len(self.class_names), clusters=len(self.cluster_to_class))
        names = [shorten(name, notebook.MAX_CHARACTERS) for name in self.class_names]
        values = {
            "network": self.network,
            "images": f"{self.size} x {self.size} pixels",
            "classes": shorten_list(names, notebook.MAX_ROWS),
            "score": self.score_name,
            "temperature": self.probability.temperature,
            "weight of the Gaussians": self.probability.gaussian_weight,
            "weight of the network": self.probability.network_weight,
            "weight of class frequencies": self.probability.prior_weight,
            "exponent of the odds": self.probability.odds_exponent,
            "decision": self.decision.sentence(),
        }
        return notebook.card("Predictor", about, notebook.facts(values))

    def __call__(self, images: Any) -> Prediction:
        """Predict images: anything that ``embed`` takes; or what is resized to ``size`` pixels first, that is paths of
        images and folders, and torch data sets of Pillow's pictures.
        """
        is_list = isinstance(images, list | tuple) and images and all(map(is_path, images))
        if is_path(images) or is_list or holds_pictures(images):
            images = open_images(images, size=self.size, fit=self.fit, labelled=False)
        return self.predict_outputs(embed(self.backbone, images, cluster_to_class=self.cluster_to_class))

    def predict_pixels(self, pixels: np.ndarray) -> Prediction:
        outputs = embed(self.backbone, pixels, cluster_to_class=self.cluster_to_class)
        with self._computing(len(outputs)):
            found = self.detector.describe(outputs)
            return replace(self.predict_described(found), position=found.position)

    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        batch_size = max(1, len(pixels))
        outputs = embed(
            self.backbone, pixels, batch_size=batch_size, cluster_to_class=self.cluster_to_class, finite=False
        )
        usable = np.isfinite(outputs.embeddings).all(axis=1)  # (N,)
        with self._computing(len(outputs)):
            found = self.detector.describe(outputs[usable])
            if np.isnan(found.score).any():
                usable[usable] = ~np.isnan(found.score)
                found = self.detector.describe(outputs[usable])
            return self.predict_described(found), usable

    def _predict_rows(self, images: ImageSet, batch_size: int, indices: Any, workers: int) -> Iterator[Prediction]:
        read = {"batch_size": batch_size, "indices": indices, "workers": workers}
        batches = embed_batches(self.backbone, images, cluster_to_class=self.cluster_to_class, **read)
        return map(self.predict_outputs, batches)

    def predict_outputs(self, outputs: Outputs) -> Prediction:
        """Predict from outputs of the backbone."""
        with self._computing(len(outputs)):
            return self.predict_described(self.detector.describe(outputs))

    def _computing(self, n: int) -> AbstractContextManager[Any]:
        """Threads of BLAS for the distances of ``n`` images: of a batch, one, since the others wait in a loop after."""
        gaussians = self.detector.gaussians_
        return one_thread(n * gaussians.n_components * (gaussians.dim + gaussians.n_clusters))

    def predict_described(self, found: Description) -> Prediction:
        """Predict from the description of the detector."""
        logs = self.log_probabilities(found)  # (N, C)
        class_id = logs.argmax(1)
        has_head = found.logits is not None
        return self._decided(
            class_id=class_id,
            probability=np.exp(logs[np.arange(len(class_id)), class_id]),
            typicality=found.typicality,
            uncertainty=found.uncertainty,
            score=found.score,
            cluster=found.cluster,
            md_class_id=found.md_class_id,
            softmax_class_id=self.probability.network_probabilities(found).argmax(1) if has_head else found.md_class_id,
            log_probabilities=logs,
            squared_distance=found.squared_distance,
        )

    def log_probabilities(self, found: Description) -> np.ndarray:
        """Calibrated log class probabilities (N, C) of described images."""
        return self.probability.log_probabilities(found)

    def calibrate(self, images: Any, **options: Any) -> Self:
        """Fit thresholds, p-values and prediction sets to calibration images, which must not be used for anything else.

        ``images`` are anything that ``embed`` takes, outputs, a torch data set, or the path of labelled images;
        ``options`` as for :meth:`decide`. Only prediction sets need labels.
        """
        self._changed(options)  # a wrong option leaves the predictor as it is
        outputs = self.labelled_outputs(images)
        found = self.detector.describe(outputs)
        logs = self.log_probabilities(found)  # (N, C)
        labels = np.full(len(outputs), -1) if outputs.labels is None else outputs.labels
        known = true_class_scores(logs, labels)
        self.calibration = Calibration(found.score, logs.argmax(1), len(self.class_names), known)
        return self.decide(**options)

    def labelled_outputs(self, images: Any) -> Outputs:
        """Outputs of the backbone, with labels of the predictor's classes: paths and torch data are opened for it."""
        if isinstance(images, Outputs):
            return images
        return embed(self.backbone, open_like(images, self.class_names, size=self.size, fit=self.fit))

    def outputs(self, images: Any) -> Outputs:
        """Outputs of the backbone, without labels: paths and torch data are opened for it."""
        if isinstance(images, Outputs):
            return images
        if is_path(images) or is_torch_data(images):
            images = open_images(images, size=self.size, fit=self.fit, labelled=False)
        return embed(self.backbone, images)

    def save(self, folder: str | Path) -> None:
        """Write weights and detector into a run folder: see :func:`maple.prediction.store.save_predictor`."""
        from maple.prediction.store import save_predictor

        save_predictor(Path(folder), self)


def is_path(source: Any) -> bool:
    return isinstance(source, str | Path)
