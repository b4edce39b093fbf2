"""A backbone and a fitted detector: image to prediction in one forward pass; saved to and loaded from a run folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from maple.backbone import Backbone, create_backbone, embed, embed_batches
from maple.calibrate import conformal_p_values, conformal_threshold, fit_temperature
from maple.checkpoint import load_arrays, save_arrays
from maple.decode import Fit
from maple.detector import MapleDetector
from maple.errors import DataError, RunError, UsageError
from maple.gaussian import Moments
from maple.images import ImageSet
from maple.relabel import ClassRule, class_probabilities
from maple.types import Outputs, Prediction, Relabelling

WEIGHTS = "weights.safetensors"
DETECTOR = "detector.safetensors"
STATISTICS_IMAGES = 5000


class Predictor:
    """Class, probability, uncertainty and in/out decision for images, from one forward pass.

    ``temperature`` softens the class posterior and is fitted on validation images; ``calibration_scores`` are the
    sorted scores of calibration images, from which p-values and the threshold for ``false_alarm`` follow.
    """

    def __init__(
        self,
        backbone: Backbone,
        detector: MapleDetector,
        class_names: tuple[str, ...],
        *,
        size: int,
        fit: Fit = "pad",
        temperature: float = 1.0,
        calibration_scores: np.ndarray | None = None,
        false_alarm: float = 0.05,
        class_rule: ClassRule = "sum",
    ) -> None:
        self.backbone, self.detector, self.class_names = backbone, detector, tuple(class_names)
        self.size, self.fit = size, fit
        self.temperature = temperature
        self.calibration_scores = np.empty(0) if calibration_scores is None else np.sort(calibration_scores)
        self.false_alarm = false_alarm
        self.class_rule: ClassRule = class_rule  # how ``softmax_class_id`` reads the clusters of a class

    @property
    def cluster_to_class(self) -> np.ndarray:
        return self.detector.cluster_to_class_

    @property
    def threshold(self) -> float:
        """The score above which an image is called out-of-distribution; infinite without enough calibration images."""
        return conformal_threshold(self.calibration_scores, self.false_alarm)

    def __call__(self, images: Any) -> Prediction:
        """Predict a batch of images: tensor or array with values in [0, 1] or uint8, or an ``ImageSet``."""
        return self.predict_outputs(embed(self.backbone, images, cluster_to_class=self.cluster_to_class))

    def predict_outputs(self, outputs: Outputs) -> Prediction:
        """Predict from what the backbone said."""
        found = self.detector.describe(outputs)
        probabilities = found.posterior(self.temperature)  # (N, C)
        class_id = probabilities.argmax(1)
        score = found.squared_distance
        if outputs.logits is None:
            softmax_class_id = found.md_class_id
        else:
            softmax_class_id = class_probabilities(outputs.logits, self.cluster_to_class, self.class_rule).argmax(1)
        return Prediction(
            class_id=class_id,
            probability=probabilities[np.arange(len(class_id)), class_id],
            typicality=found.typicality,
            uncertainty=found.uncertainty,
            score=score,
            p_value=self._p_values(score),
            is_ood=score > self.threshold,
            cluster=found.cluster,
            md_class_id=found.md_class_id,
            softmax_class_id=softmax_class_id,
            probabilities=probabilities,
            squared_distance=found.squared_distance,
            class_names=self.class_names,
        )

    def _p_values(self, score: np.ndarray) -> np.ndarray:
        if len(self.calibration_scores) == 0:
            return np.full(len(score), np.nan)
        return conformal_p_values(score, self.calibration_scores)

    def calibrate(self, images: Any, *, false_alarm: float | None = None) -> Predictor:
        """Learn p-values and threshold from calibration images that have chosen nothing else."""
        if false_alarm is not None:
            if not 0 < false_alarm < 1:
                raise UsageError(f"false_alarm is {false_alarm}: give a share between 0 and 1, such as 0.05")
            self.false_alarm = false_alarm
        outputs = images if isinstance(images, Outputs) else embed(self.backbone, images)
        self.calibration_scores = np.sort(self.detector.score(outputs))
        return self

    def save(self, folder: str | Path) -> None:
        """Write weights and detector into a run folder."""
        folder = Path(folder)
        save_backbone(folder / WEIGHTS, self.backbone)
        arrays, metadata = self.detector.get_state()
        save_arrays(
            folder / DETECTOR,
            {**arrays, "calibration_scores": self.calibration_scores},
            {
                "detector": metadata,
                "class_names": list(self.class_names),
                "size": self.size,
                "fit": self.fit,
                "temperature": self.temperature,
                "false_alarm": self.false_alarm,
                "class_rule": self.class_rule,
            },
        )


def load_predictor(folder: str | Path) -> Predictor:
    """The predictor of a finished run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"'{folder}' is not a run folder: train one with maple train DATA --out '{folder}'")
    arrays, metadata = load_arrays(folder / DETECTOR)
    scores = arrays.pop("calibration_scores")
    return Predictor(
        load_backbone(folder / WEIGHTS),
        MapleDetector.from_state(arrays, metadata["detector"]),
        tuple(metadata["class_names"]),
        size=metadata["size"],
        fit=metadata["fit"],
        temperature=metadata["temperature"],
        calibration_scores=scores,
        false_alarm=metadata["false_alarm"],
        class_rule=metadata["class_rule"],
    )


def save_backbone(path: Path, backbone: Backbone) -> None:
    """Write the weights with what is needed to build the network again."""
    asked = None if isinstance(backbone.embedding_layer, nn.Identity) else backbone.embedding_size
    n_outputs = backbone.head.out_features if isinstance(backbone.head, nn.Linear) else 0
    metadata = {"backbone": backbone.name, "n_outputs": n_outputs, "embedding_size": asked}
    state = backbone.state_dict()
    if not _can_rebuild(state, metadata):
        raise RunError(
            f"a run can hold only networks made by create_backbone, not '{backbone.name}': keep your module's own "
            "weights, and call fit_predictor again after loading them"
        )
    save_arrays(path, {name: tensor.detach().cpu().numpy() for name, tensor in state.items()}, metadata)


def _can_rebuild(state: dict[str, torch.Tensor], metadata: dict[str, Any]) -> bool:
    """Whether a network made anew from ``metadata`` has the same tensors."""
    try:
        with torch.random.fork_rng(devices=[]):
            again = _new_backbone(metadata).state_dict()
    except UsageError:
        return False
    return {name: tensor.shape for name, tensor in state.items()} == {n: t.shape for n, t in again.items()}


def _new_backbone(metadata: dict[str, Any]) -> Backbone:
    return create_backbone(metadata["backbone"], metadata["n_outputs"], embedding_size=metadata["embedding_size"])


def load_backbone(path: Path) -> Backbone:
    """The network that :func:`save_backbone` wrote."""
    arrays, metadata = load_arrays(path)
    backbone = _new_backbone(metadata)
    try:
        backbone.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    except RuntimeError as error:
        raise RunError(f"'{path}' does not fit the backbone '{metadata['backbone']}': {error}") from None
    return backbone.eval()


# --- fitting ---------------------------------------------------------------------------------------------------------


def fit_predictor(
    backbone: Backbone,
    train: ImageSet,
    validation: ImageSet,
    calibration: ImageSet | None = None,
    *,
    relabelling: Relabelling | None = None,
    detector: MapleDetector | None = None,
    fit: Fit = "pad",
    false_alarm: float = 0.05,
    class_rule: ClassRule = "sum",
    fabric: Any = None,
    workers: int = 0,
) -> Predictor:
    """Fit the Gaussians on the training images, the temperature on validation, the threshold on calibration images.

    Embeddings are taken without augmentation, batch by batch, so that memory does not grow with the number of images.
    With a ``fabric`` of several processes each embeds its share, and the moments are summed over all of them.
    """
    detector = detector or MapleDetector()
    relabelling = relabelling or Relabelling.initial(train.labels, len(train.class_names))
    rank, world_size = (fabric.global_rank, fabric.world_size) if fabric else (0, 1)
    embed_share = partial(
        embed_batches,
        backbone,
        train,
        cluster_ids=relabelling.cluster_ids,
        cluster_to_class=relabelling.cluster_to_class,
        workers=workers,
    )
    if world_size == 1 or detector.covariance == "full":  # 'full' needs every image in every process
        detector.fit(embed_share)
    else:
        moments = Moments(relabelling.n_clusters, backbone.embedding_size, norm_exponent=detector.norm_exponent)
        for outputs in embed_share(indices=np.arange(rank, len(train), world_size)):
            moments.update(outputs.embeddings, outputs.cluster_ids)
        detector.fit_moments(moments.merge(_all_reduce(fabric)), relabelling.cluster_to_class)
    predictor = Predictor(
        backbone,
        detector,
        train.class_names,
        size=train.size,
        fit=fit,
        false_alarm=false_alarm,
        class_rule=class_rule,
    )
    found = detector.describe(embed(backbone, validation, workers=workers))
    predictor.temperature = fit_temperature(
        found.squared_distances, validation.labels, found.log_weights, found.cluster_to_class
    )
    if calibration is not None and len(calibration):
        predictor.calibrate(embed(backbone, calibration, workers=workers))
    return predictor


def _all_reduce(fabric: Any) -> Callable[[np.ndarray], np.ndarray]:
    """A function that sums an array over all processes; on their devices, since NCCL knows no other memory."""

    def sum_over_ranks(array: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(fabric.device)
        return fabric.all_reduce(tensor, reduce_op="sum").cpu().numpy()

    return sum_over_ranks


def channel_statistics(images: ImageSet) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel in [0, 1], over at most 5,000 images evenly spread, without augmentation."""
    rows = np.linspace(0, len(images) - 1, min(len(images), STATISTICS_IMAGES)).astype(int)
    sums, squares, n = np.zeros(3), np.zeros(3), 0
    for row in rows:
        pixels = images.read(int(row)).reshape(-1, 3).astype(np.float64) / 255
        sums += pixels.sum(0)
        squares += (pixels**2).sum(0)
        n += len(pixels)
    mean = sums / n
    std = np.sqrt(np.maximum(squares / n - mean**2, 0))
    if std.max() < 1e-6:
        raise DataError(f"all images of '{images.name}' are of one colour: check the files")
    return mean.tolist(), np.maximum(std, 1e-3).tolist()
