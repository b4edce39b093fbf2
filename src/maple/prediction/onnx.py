"""An exported graph as a predictor, without torch: the base install and onnxruntime suffice.

A file of :mod:`maple.deploy.export` holds a graph, from images to all that a prediction says, and under the key
``maple`` of
its metadata one JSON text (:class:`GraphMetadata`) with what people and decisions need: names of classes and clusters,
calibration scores, so that another level can be chosen anywhere, the map of the clusters, and some of their images.

Such a file may come from anywhere. Opening it runs no code; it is read from this one file alone, and whatever its
metadata say is checked against limits and against the graph before it is used.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from maple import __version__
from maple.data.decode import MAX_SIZE, Fit
from maple.data.image_set import ImageSet, Progress, read_pixels
from maple.data.sources import open_images
from maple.decisions.calibration import Calibration
from maple.decisions.options import DecisionOptions
from maple.errors import MapleError, RunError, UsageError, naming_extras
from maple.options import as_dict
from maple.prediction.base import BasePredictor
from maple.types import Prediction

if TYPE_CHECKING:
    import onnxruntime

FORMAT = 1  # of the metadata
METADATA = "maple"  # their key in the file
INPUT = "images"
NEEDED = tuple(field.name for field in fields(Prediction) if field.name != "class_names")  # of the outputs
BATCH = 128  # images per run of the graph, where nobody says

MAX_FILE_BYTES = 2**31 - 1  # what protobuf, and hence ONNX, can hold
MAX_METADATA = 512 * 2**20  # characters
MAX_CLASSES = 10**5
MAX_CLUSTERS = 10**6
MAX_CALIBRATION = 10**7  # images
MAX_EXEMPLARS = 64  # of a cluster
MAX_EXEMPLAR_SIDE = 512  # pixels

# Where onnxruntime seeks tensors that are said to lie in other files: in no folder at all.
EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
DAMAGED = "export the run again, or get the file from where it was made"


# -------------------------------------------------------------------------------------------------------- metadata

Text = Annotated[str, Field(max_length=10_000)]
Numbers = Annotated[str, Field(max_length=4 * (8 * MAX_CALIBRATION // 3 + 1))]  # base64 of little-endian numbers
Pair = tuple[float, float]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True)


class Strip(_Part):
    """Some images of a cluster, side by side."""

    n: Annotated[int, Field(ge=1, le=MAX_EXEMPLARS)]
    side: Annotated[int, Field(ge=1, le=MAX_EXEMPLAR_SIDE)]  # pixels
    png: Annotated[str, Field(max_length=8 * MAX_EXEMPLARS * MAX_EXEMPLAR_SIDE**2)]  # base64


class CalibrationArrays(_Part):
    """The arrays of :class:`maple.decisions.calibration.Calibration`."""

    scores: Numbers = ""  # float64
    class_ids: Numbers = ""  # int64
    set_scores: Numbers = ""  # float64


class GraphMetadata(_Part):
    """What a file says about its graph; unknown keys are left alone, since later versions may add some."""

    format: int
    version: Text  # of maple
    network: Text
    class_names: Annotated[list[Text], Field(min_length=1, max_length=MAX_CLASSES)]
    size: Annotated[int, Field(ge=1, le=MAX_SIZE)]
    fit: Fit
    preprocess: bool  # whether the graph takes (N, S, S, 3) uint8, instead of (N, 3, S, S) float32 in [0, 1]
    cluster_to_class: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_CLUSTERS)]
    score: Text
    decision: dict[str, Any]  # for people: it follows from options and calibration
    options: DecisionOptions
    calibration: CalibrationArrays = CalibrationArrays()
    map_centroids: Annotated[list[Pair], Field(max_length=MAX_CLUSTERS)]
    map_radius: float | None
    quantised: bool = False
    exemplars: Annotated[dict[Annotated[int, Field(ge=0)], Strip], Field(max_length=MAX_CLUSTERS)] = {}

    def check(self) -> None:
        """What no type tells: :class:`ValueError` where parts do not fit together."""
        n_clusters = len(self.cluster_to_class)
        if max(self.cluster_to_class) >= len(self.class_names):
            raise ValueError("a cluster belongs to a class that has no name")
        if len(self.map_centroids) != n_clusters:
            raise ValueError(f"{n_clusters} clusters, but {len(self.map_centroids)} places on the map")
        if self.exemplars and max(self.exemplars) >= n_clusters:
            raise ValueError("images of a cluster that is not there")


def write_metadata(
    predictor: BasePredictor,
    *,
    preprocess: bool,
    exemplars: Mapping[int, np.ndarray] | None = None,
    quantised: bool = False,
) -> str:
    """The metadata of an exported predictor as one text; ``exemplars`` are images (n, s, s, 3) uint8 by cluster."""
    calibration = predictor.calibration
    metadata = GraphMetadata(
        format=FORMAT,
        version=__version__,
        network=predictor.network,
        class_names=list(predictor.class_names),
        size=predictor.size,
        fit=predictor.fit,
        preprocess=preprocess,
        cluster_to_class=predictor.cluster_to_class.tolist(),
        score=predictor.score_name,
        decision={**predictor.decision.describe(), "sentence": predictor.decision.sentence()},
        options=predictor.options,
        calibration=CalibrationArrays(
            scores=_to_text(calibration.scores, "<f8"),
            class_ids=_to_text(calibration.class_ids, "<i8"),
            set_scores=_to_text(calibration.set_scores, "<f8"),
        ),
        map_centroids=predictor.map_centroids.tolist(),
        map_radius=predictor.map_radius,
        quantised=quantised,
        exemplars={cluster: _to_strip(images) for cluster, images in (exemplars or {}).items() if len(images)},
    )
    return metadata.model_dump_json()


def read_metadata(text: str, source: str) -> GraphMetadata:
    """The inverse of :func:`write_metadata`, for texts of any origin."""
    if len(text) > MAX_METADATA:
        raise RunError(f"the metadata of '{source}' are larger than {MAX_METADATA // 2**20} MB: {DAMAGED}")
    try:
        metadata = GraphMetadata.model_validate_json(text)
        metadata.check()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "JSON"
        raise RunError(f"the metadata of '{source}' are damaged ({where}: {first['msg'].lower()}): {DAMAGED}") from None
    except ValueError as error:
        raise RunError(f"the metadata of '{source}' are damaged ({error}): {DAMAGED}") from None
    if metadata.format > FORMAT:
        raise RunError(
            f"'{source}' has format {metadata.format}, this maple reads up to {FORMAT}: "
            "upgrade with pip install --upgrade maple-uncertainty"
        )
    return metadata


def read_calibration(arrays: CalibrationArrays, n_classes: int, source: str) -> Calibration:
    """The calibration of an exported predictor."""
    try:
        return Calibration(
            _from_text(arrays.scores, "<f8").astype(np.float64),
            _from_text(arrays.class_ids, "<i8").astype(np.int64),
            n_classes,
            _from_text(arrays.set_scores, "<f8").astype(np.float64),
        )
    except (ValueError, MapleError) as error:
        raise RunError(f"the calibration of '{source}' is damaged ({error}): {DAMAGED}") from None


def _to_text(array: np.ndarray, dtype: str) -> str:
    return base64.b64encode(np.asarray(array).astype(dtype).tobytes()).decode("ascii")


def _from_text(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


def _to_strip(images: np.ndarray) -> Strip:
    """Images (n, s, s, 3) uint8 as one picture."""
    n, side = images.shape[:2]
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate(list(images), axis=1)).save(buffer, "PNG")
    return Strip(n=n, side=side, png=base64.b64encode(buffer.getvalue()).decode("ascii"))


def _from_strip(strip: Strip, source: str) -> np.ndarray:
    """The inverse of :func:`_to_strip`; what is not the picture that was announced is an error before it is decoded."""
    try:
        with Image.open(io.BytesIO(base64.b64decode(strip.png, validate=True)), formats=("PNG",)) as picture:
            if picture.size != (strip.n * strip.side, strip.side):
                raise ValueError(f"{picture.size} pixels")
            pixels = np.asarray(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RunError(f"the images of clusters in '{source}' are damaged ({error}): {DAMAGED}") from None
    return np.stack(np.split(pixels, strip.n, axis=1))


# ------------------------------------------------------------------------------------------------------- predictor


class OnnxPredictor(BasePredictor):
    """Class, probability, uncertainty and in/out decision for images, by an exported graph in onnxruntime.

    ``session`` runs the graph; :meth:`open` makes one. Decisions are made here, from the score of the graph and the
    calibration scores in the file, so that :meth:`decide` works at any level; the graph's own outputs ``p_value`` and
    ``is_ood``, for programs that have only the graph, are those of the level at which it was exported.
    """

    runtime = "onnxruntime"

    def __init__(self, session: onnxruntime.InferenceSession, source: str = "the graph") -> None:
        found = session.get_modelmeta().custom_metadata_map
        if METADATA not in found:
            raise UsageError(
                f"'{source}' is a network, not an exported predictor: make a run of it with maple fit '{source}' "
                "--data IMAGES, or export a run with maple export"
            )
        self.session, self.source = session, source
        self._metadata = read_metadata(found[METADATA], source)
        self._check_graph()
        super().__init__(
            self._metadata.class_names,
            size=self._metadata.size,
            fit=self._metadata.fit,
            calibration=read_calibration(self._metadata.calibration, len(self._metadata.class_names), source),
            options=self._metadata.options,
        )

    @classmethod
    def open(cls, source: str | Path | bytes, *, threads: int | None = None) -> OnnxPredictor:
        """The predictor in a file, or in its bytes; ``threads`` is how many compute, by default one per core."""
        if isinstance(source, bytes):
            return cls(start_session(source, "the graph", threads))
        path = Path(source).expanduser()
        if not path.is_file():
            raise UsageError(f"there is no file '{path}': make it with maple export RUN '{path}'")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RunError(f"'{path}' is larger than 2 GB, which no ONNX file can be: {DAMAGED}")
        return cls(start_session(path.read_bytes(), str(path), threads), str(path))

    def _check_graph(self) -> None:
        """Whether the graph is what its metadata say."""
        said, inputs = self._metadata, self.session.get_inputs()
        if len(inputs) != 1:
            raise RunError(f"the graph of '{self.source}' has {len(inputs)} inputs and not one: {DAMAGED}")
        (first,), size = inputs, said.size
        kind, shape = ("uint8", [size, size, 3]) if said.preprocess else ("float", [3, size, size])
        fits = first.name == INPUT and first.type == f"tensor({kind})" and first.shape[1:] == shape
        outputs = {output.name: output.shape for output in self.session.get_outputs()}
        missing = [name for name in NEEDED if name not in outputs]
        if fits and not missing and outputs["log_probabilities"][1:] == [len(said.class_names)]:
            return
        what = f"has no output '{missing[0]}'" if missing else f"takes {first.type} {first.shape}"
        raise RunError(f"the graph of '{self.source}' {what}, not what its metadata say: {DAMAGED}")

    @property
    def network(self) -> str:
        return self._metadata.network

    @property
    def score_name(self) -> str:
        return self._metadata.score

    @property
    def cluster_to_class(self) -> np.ndarray:
        return np.array(self._metadata.cluster_to_class, dtype=np.int64)

    @property
    def map_centroids(self) -> np.ndarray:
        return np.array(self._metadata.map_centroids)

    @property
    def map_radius(self) -> float | None:
        return self._metadata.map_radius

    @property
    def metadata(self) -> dict[str, Any]:
        """What the file says about its graph, but for images and calibration scores."""
        said = self._metadata.model_dump(exclude={"exemplars", "calibration", "options"})
        return {**said, "options": as_dict(self._metadata.options)}

    @cached_property
    def exemplars(self) -> dict[int, np.ndarray]:
        """Some training images of each cluster (n, s, s, 3) uint8, by cluster; empty where the file has none."""
        return {cluster: _from_strip(strip, self.source) for cluster, strip in self._metadata.exemplars.items()}

    def __repr__(self) -> str:
        known = f"n_classes={len(self.class_names)}, n_clusters={len(self._metadata.cluster_to_class)}"
        calibrated = f"n_calibration={len(self.calibration)}" if len(self.calibration) else "not calibrated"
        return f"OnnxPredictor({self.source!r}, {self.network!r}, size={self.size}, {known}, {calibrated})"

    # -- predicting

    def __call__(self, images: str | Path | Sequence[str | Path] | np.ndarray | ImageSet) -> Prediction:
        """Predict images: an array (N, S, S, 3) uint8, an ``ImageSet``, or paths of images and folders."""
        if isinstance(images, np.ndarray):
            return self.predict_pixels(images)
        images = open_images(images, size=self.size, fit=self.fit, labelled=False)
        return self._predict_all(read_pixels(images, _plan(len(images))))

    def predict_pixels(self, pixels: np.ndarray) -> Prediction:
        if pixels.ndim != 4:
            raise UsageError(f"images of shape {pixels.shape}: the graph takes (N, {self.size}, {self.size}, 3) uint8")
        return self._predict_all(pixels[rows] for rows in _plan(len(pixels)))

    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        said = self.run(pixels)
        usable = ~np.isnan(said["score"])  # (N,)
        return self._predict({name: values[usable] for name, values in said.items()}), usable

    def predict_batches(
        self,
        images: ImageSet,
        *,
        batch_size: int = 256,
        indices: Any = None,
        workers: int = 0,
        progress: Progress | None = None,
    ) -> Iterator[Prediction]:
        """Predict images in order, or those at ``indices``; ``workers`` processes decode what is not in memory."""
        plan = _plan(len(images) if indices is None else len(indices), batch_size)
        rows = plan if indices is None else [np.asarray(indices, dtype=np.int64)[batch] for batch in plan]
        done, n = 0, sum(map(len, rows))
        for pixels in read_pixels(images, rows, workers):
            yield self._predict(self.run(pixels))
            done += len(pixels)
            if progress is not None:
                progress(done, n)

    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """All outputs of the graph by name, for images (N, S, S, 3) uint8, as they are."""
        expected = (self.size, self.size, 3)
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1:] != expected:
            raise UsageError(
                f"images of shape {pixels.shape} and type {pixels.dtype}: the graph takes (N, {self.size}, "
                f"{self.size}, 3) uint8"
            )
        if not len(pixels):  # which convolutions refuse
            return {name: output[:0] for name, output in self.run(np.zeros((1, *expected), np.uint8)).items()}
        images = pixels if self._metadata.preprocess else pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, {INPUT: np.ascontiguousarray(images)}), strict=True))

    def _predict_all(self, batches: Iterable[np.ndarray]) -> Prediction:
        parts = [self.run(pixels) for pixels in batches]
        return self._predict(_joined(parts or [self.run(np.empty((0, self.size, self.size, 3), np.uint8))]))

    def _predict(self, said: dict[str, np.ndarray]) -> Prediction:
        """A prediction from what the graph said, decided at the level of ``options``."""
        own = {
            "p_value": self.decision.p_values(said["score"], said["class_id"]),
            "is_ood": self.decision.is_ood(said["score"], said["class_id"]),
        }
        return Prediction(**{name: said[name] for name in NEEDED} | own, class_names=self.class_names)


def start_session(model: bytes, source: str, threads: int | None = None) -> onnxruntime.InferenceSession:
    """A session of onnxruntime on the CPU."""
    with naming_extras():
        import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads or 0, 4  # 0: one per core; 4: errors are raised
    options.add_session_config_entry(EXTERNAL_FOLDER, os.devnull)
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of onnxruntime's own types
        raise RunError(f"cannot read '{source}' ({' '.join(str(error).split())}): {DAMAGED}") from None


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _plan(n: int, batch_size: int = BATCH) -> list[np.ndarray]:
    """Rows of each batch.

    >>> [rows.tolist() for rows in _plan(5, 3)]
    [[0, 1, 2], [3, 4]]
    """
    if batch_size < 1:
        raise UsageError(f"a batch size of {batch_size}: it must be at least 1")
    return [np.arange(start, min(start + batch_size, n)) for start in range(0, n, batch_size)]
