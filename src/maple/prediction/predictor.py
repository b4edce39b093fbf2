"""A backbone and a fitted detector: image to prediction in one forward pass; saved to and loaded from a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from maple import notebook
from maple.data.decode import Fit
from maple.data.image_set import ImageSet, Progress
from maple.data.sources import open_images
from maple.decisions.calibration import Calibration
from maple.decisions.options import DecisionOptions
from maple.decisions.probability import ClassRule, Probability
from maple.decisions.sets import true_class_scores
from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.errors import RunError, UsageError
from maple.files import RunFile, load_arrays, save_arrays, write_atomic
from maple.networks import Backbone, MadeBy, Origin, create_backbone, embed, embed_batches, rebuild_model
from maple.options import as_dict, build_options
from maple.prediction.base import BasePredictor
from maple.text import shorten, shorten_list
from maple.training.distributed import together
from maple.training.recipe import create_recipe
from maple.types import Outputs, Prediction, Relabelling

CALIBRATION = "calibration."  # of the names of arrays


class Predictor(BasePredictor):
    """Class, probability, uncertainty and in/out decision for images, from one forward pass.

    ``probability`` turns distances and logits into class probabilities and is fitted on validation images.
    ``calibration`` holds the scores of calibration images, ``decision`` the threshold and p-values that follow from
    them at the level of ``options``. Classes are numbered where they have no names; ``size`` defaults to that of the
    backbone.
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
            raise UsageError("the backbone does not know how large its images are: give the predictor size=, in pixels")
        self.backbone, self.detector = backbone, detector
        self.probability = probability or Probability()
        super().__init__(class_names, size=side, fit=fit, calibration=calibration, options=options)

    @property
    def network(self) -> str:
        return self.backbone.name

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
        known = f"n_classes={len(self.class_names)}, n_clusters={len(self.cluster_to_class)}"
        calibrated = f"n_calibration={len(self.calibration)}" if len(self.calibration) else "not calibrated"
        return f"Predictor({self.backbone.name!r}, size={self.size}, {known}, {calibrated})"

    def _repr_html_(self) -> str:
        about = notebook.summary(classes=len(self.class_names), clusters=len(self.cluster_to_class))
        values = {
            "network": self.backbone.name,
            "images": f"{self.size} x {self.size} pixels",
            "classes": shorten_list(
                [shorten(name, notebook.MAX_CHARACTERS) for name in self.class_names], notebook.MAX_ROWS
            ),
            "score": self.detector.score_,
            "temperature": self.probability.temperature,
            "weight of the network": self.probability.network_weight,
            "exponent of the odds": self.probability.odds_exponent,
            "decision": self.decision.sentence(),
        }
        return notebook.card("Predictor", about, notebook.facts(values))

    def __call__(self, images: Any) -> Prediction:
        """Predict images: whatever ``embed`` takes, or paths of images and folders, which become ``size`` pixels."""
        if is_path(images) or (isinstance(images, list | tuple) and images and all(map(is_path, images))):
            images = open_images(images, size=self.size, fit=self.fit, labelled=False)
        return self.predict_outputs(embed(self.backbone, images, cluster_to_class=self.cluster_to_class))

    def predict_pixels(self, pixels: np.ndarray) -> Prediction:
        outputs = embed(self.backbone, pixels, cluster_to_class=self.cluster_to_class)
        found = self.detector.describe(outputs)
        return replace(self.predict_described(found), position=found.position)

    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        batch_size = max(1, len(pixels))
        outputs = embed(self.backbone, pixels, batch_size=batch_size, cluster_to_class=self.cluster_to_class)
        usable = np.isfinite(outputs.embeddings).all(axis=1)  # (N,)
        found = self.detector.describe(outputs[usable])
        if np.isnan(found.score).any():
            usable[usable] = ~np.isnan(found.score)
            found = self.detector.describe(outputs[usable])
        return self.predict_described(found), usable

    def predict_batches(
        self,
        images: ImageSet,
        *,
        batch_size: int = 256,
        indices: Any = None,
        workers: int = 0,
        progress: Progress | None = None,
    ) -> Iterator[Prediction]:
        batches = embed_batches(
            self.backbone,
            images,
            batch_size=batch_size,
            indices=indices,
            cluster_to_class=self.cluster_to_class,
            workers=workers,
            progress=progress,
        )
        yield from map(self.predict_outputs, batches)

    def predict_outputs(self, outputs: Outputs) -> Prediction:
        """Predict from what the backbone said."""
        return self.predict_described(self.detector.describe(outputs))

    def predict_described(self, found: Description) -> Prediction:
        """Predict from what the detector said of it."""
        logs = self.log_probabilities(found)  # (N, C)
        class_id = logs.argmax(1)
        if found.logits is None:
            softmax_class_id = found.md_class_id
        else:
            softmax_class_id = self.probability.network_probabilities(found).argmax(1)
        return Prediction(
            class_id=class_id,
            probability=np.exp(logs[np.arange(len(class_id)), class_id]),
            typicality=found.typicality,
            uncertainty=found.uncertainty,
            score=found.score,
            p_value=self.decision.p_values(found.score, class_id),
            is_ood=self.decision.is_ood(found.score, class_id),
            cluster=found.cluster,
            md_class_id=found.md_class_id,
            softmax_class_id=softmax_class_id,
            log_probabilities=logs,
            squared_distance=found.squared_distance,
            class_names=self.class_names,
        )

    def log_probabilities(self, found: Description) -> np.ndarray:
        """Calibrated log class probabilities (N, C) of described images."""
        return self.probability.log_probabilities(found)

    def calibrate(self, images: Any, **options: Any) -> Self:
        """Learn p-values, threshold and prediction sets from calibration images that have chosen nothing else.

        ``images`` are whatever ``embed`` takes, its outputs, or the path of a folder or file of labelled images;
        ``options`` as for :meth:`decide`. Only prediction sets need labels.
        """
        self._changed(options)  # a wrong option leaves the predictor as it is
        if is_path(images):
            images = open_images(images, size=self.size, fit=self.fit).with_class_names(self.class_names)
        outputs = images if isinstance(images, Outputs) else embed(self.backbone, images)
        found = self.detector.describe(outputs)
        logs = self.log_probabilities(found)  # (N, C)
        labels = np.full(len(outputs), -1) if outputs.labels is None else outputs.labels
        self.calibration = Calibration(
            found.score, logs.argmax(1), len(self.class_names), true_class_scores(logs, labels)
        )
        return self.decide(**options)

    def save(self, folder: str | Path) -> None:
        """Write weights and detector into a run folder."""
        folder = Path(folder)
        save_backbone(folder / RunFile.WEIGHTS, self.backbone)
        arrays, metadata = self.detector.get_state()
        save_arrays(
            folder / RunFile.DETECTOR,
            {**arrays, **{CALIBRATION + name: array for name, array in self.calibration.to_arrays().items()}},
            {
                "detector": metadata,
                "class_names": list(self.class_names),
                "size": self.size,
                "fit": self.fit,
                **self.probability.to_dict(),
                "options": as_dict(self.options),
                "decision": self.decision.describe(),
            },
        )


def load_predictor(folder: str | Path, *, trust: bool = False) -> Predictor:
    """The predictor of a finished run.

    ``trust`` allows a network that runs code: see :mod:`maple.networks.hub`.
    """
    folder = Path(folder)
    if folder.is_file():
        raise RunError(f"'{folder}' is a file, and not a run: give the folder of a run, or a graph exported as .onnx")
    if not folder.is_dir():
        raise RunError(f"'{folder}' is not a run folder: train one with maple train DATA --out '{folder}'")
    arrays, metadata = load_arrays(folder / RunFile.DETECTOR)
    calibration = {
        name.removeprefix(CALIBRATION): arrays.pop(name) for name in list(arrays) if name.startswith(CALIBRATION)
    }
    return Predictor(
        load_backbone(folder / RunFile.WEIGHTS, trust=trust),
        MapleDetector.from_state(arrays, metadata["detector"]),
        tuple(metadata["class_names"]),
        size=metadata["size"],
        fit=metadata["fit"],
        probability=Probability.from_dict(metadata),
        calibration=Calibration.from_arrays(calibration),
        options=build_options(DecisionOptions, metadata["options"], f"'{folder / RunFile.DETECTOR}'"),
    )


def save_backbone(path: Path, backbone: Backbone) -> None:
    """Write the weights with what is needed to build the network again; a network that is a file is copied beside."""
    asked = None if isinstance(backbone.embedding_layer, nn.Identity) else backbone.embedding_size
    n_outputs = backbone.head.out_features if isinstance(backbone.head, nn.Linear) else 0
    metadata: dict[str, Any] = {
        "backbone": backbone.name,
        "n_outputs": n_outputs,
        "embedding_size": asked,
        "made_by": None if backbone.made_by is None else backbone.made_by.to_dict(),
        "origin": None if backbone.origin is None else backbone.origin.to_dict(),
    }
    state = backbone.state_dict()
    if not _can_rebuild(state, metadata):
        raise RunError(
            f"a run can hold only networks made by create_backbone or open_model, not '{backbone.name}': open your "
            "module by python:package.module:function, or keep its own weights and call fit_predictor again after "
            "loading them"
        )
    if backbone.origin is not None and backbone.origin.file is not None:
        metadata["origin"]["file"] = _copy_network(Path(backbone.origin.file), path.parent)
    save_arrays(path, {name: tensor.detach().cpu().numpy() for name, tensor in state.items()}, metadata)


def _copy_network(file: Path, folder: Path) -> str:
    """Copy a network that is a file, and the tensors that ONNX may keep beside it, into a run; the name of the file."""
    for source in (file, file.with_name(f"{file.name}.data")):
        target = folder / RunFile.NETWORK / source.name
        if source.is_file() and source != target.resolve():
            write_atomic(target, source.read_bytes())
    return file.name


def _can_rebuild(state: dict[str, torch.Tensor], metadata: dict[str, Any]) -> bool:
    """Whether a network made anew from ``metadata`` has the same tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    try:
        with torch.random.fork_rng(devices=[]):
            again = _new_backbone(metadata, shapes, trust=True).state_dict()  # it was opened here already
    except UsageError:
        return False
    return shapes == {name: tuple(tensor.shape) for name, tensor in again.items()}


def _new_backbone(metadata: dict[str, Any], shapes: Mapping[str, Sequence[int]], trust: bool) -> Backbone:
    """A network of the same layers, with random weights; ``shapes`` are those of its tensors."""
    maker = MadeBy.from_dict(metadata["made_by"]) if metadata.get("made_by") else None
    n_outputs, embedding_size = metadata["n_outputs"], metadata["embedding_size"]
    if maker is not None:
        n_outputs, embedding_size = maker.n_outputs, maker.embedding_size or embedding_size
    if metadata.get("origin"):
        backbone = rebuild_model(Origin.from_dict(metadata["origin"]), shapes, trust=trust)
    else:
        has_head = any(name.startswith("head.") for name in shapes)
        backbone = create_backbone(metadata["backbone"], n_outputs if has_head else 1, embedding_size=embedding_size)
        backbone.head = backbone.head if has_head else None
    if maker is None:
        return backbone
    recipe = create_recipe(maker.recipe, **maker.options)
    if recipe.own_head or getattr(backbone.head, "out_features", None) != n_outputs:
        backbone.head = recipe.build_head(backbone.embedding_size, n_outputs)
    backbone.made_by = maker
    return recipe.rebuild(backbone)


def load_backbone(path: Path, *, trust: bool = False) -> Backbone:
    """The network that :func:`save_backbone` wrote; ``trust`` as for :func:`load_predictor`."""
    arrays, metadata = load_arrays(path)
    origin = metadata.get("origin") or {}
    if "file" in origin:
        origin["file"] = str((path.parent / RunFile.NETWORK / Path(origin["file"]).name).resolve())
    backbone = _new_backbone(metadata, {name: array.shape for name, array in arrays.items()}, trust)
    try:
        backbone.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    except RuntimeError as error:
        raise RunError(f"'{path}' does not fit the backbone '{metadata['backbone']}': {error}") from None
    return backbone.eval()


# --- fitting ---------------------------------------------------------------------------------------------------------


def is_path(source: Any) -> bool:
    return isinstance(source, str | Path)


def fit_predictor(
    backbone: Backbone,
    train: ImageSet | str | Path,
    validation: ImageSet | Outputs | str | Path,
    calibration: ImageSet | Outputs | str | Path | None = None,
    *,
    relabelling: Relabelling | None = None,
    detector: MapleDetector | None = None,
    fit: Fit = "pad",
    options: DecisionOptions | None = None,
    class_rule: ClassRule = "sum",
    fabric: Any = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> Predictor:
    """Fit the Gaussians on training images, temperature and score on validation, thresholds on calibration images.

    Embeddings are taken without augmentation, batch by batch, so that memory does not grow with the number of images;
    of validation and calibration images, outputs of the backbone will do. Paths are opened as by ``open_images``, in
    the size of the backbone where it knows it. With a ``fabric`` of several processes each embeds its share, and the
    moments are summed over all of them. ``progress`` counts the training images.
    """
    if isinstance(train, str | Path):
        train = open_images(train, size=backbone.size or "auto", fit=fit)
    if isinstance(validation, str | Path):
        validation = open_images(validation, size=train.size, fit=fit).with_class_names(train.class_names)
    if isinstance(calibration, str | Path):
        calibration = open_images(calibration, size=train.size, fit=fit).with_class_names(train.class_names)
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
        logits=False,
        progress=progress,
    )
    unseen = validation if isinstance(validation, Outputs) else embed(backbone, validation, workers=workers)
    labels = unseen.labels
    if labels is None:
        raise UsageError("the validation outputs have no labels: embed labelled images")
    if world_size == 1:
        detector.fit(embed_share, unseen)
    else:
        mine = partial(embed_share, indices=np.arange(rank, len(train), world_size))
        detector.fit(_in_step(fabric, mine), unseen, sum_over_ranks=_all_reduce(fabric))
    found = detector.describe(unseen)
    predictor = Predictor(
        backbone,
        detector,
        train.class_names,
        size=train.size,
        fit=fit,
        probability=Probability(class_rule=class_rule).fit(found, labels),
        options=options,
    )
    if calibration is not None and len(calibration):
        known = calibration if isinstance(calibration, Outputs) else embed(backbone, calibration, workers=workers)
        predictor.calibrate(known)
    return predictor


def _in_step(fabric: Any, start: Callable[[], Iterator[Outputs]]) -> Callable[[], Iterator[Outputs]]:
    """The same batches; an image that one process cannot read is an error in all of them before they sum anything."""

    def batches() -> Iterator[Outputs]:
        with together(fabric):
            yield from start()

    return batches


def _all_reduce(fabric: Any) -> Callable[[np.ndarray], np.ndarray]:
    """A function that sums an array over all processes; on their devices, since NCCL knows no other memory."""

    def sum_over_ranks(array: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(fabric.device)
        return fabric.all_reduce(tensor, reduce_op="sum").cpu().numpy()

    return sum_over_ranks
