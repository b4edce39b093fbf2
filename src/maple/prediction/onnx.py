"""Predictor of an exported graph, without torch: needs the base install and onnxruntime.

A file of :mod:`maple.deploy.export` holds a graph from images to all columns of a prediction. The key ``maple`` of its
metadata is a JSON text (:class:`GraphMetadata`): names of classes and clusters, calibration scores (so that decisions
can be made at any level), the map of the clusters, and some images of each.

Files may come from untrusted sources. Opening one runs no code and reads no other file; metadata are checked against
limits and against the graph before they are used.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError, model_validator

from maple import __version__
from maple.data.decode import MAX_SIZE, Fit
from maple.data.image_set import ImageSet, read_pixels
from maple.data.sources import open_images
from maple.decisions.calibration import Calibration
from maple.decisions.options import DecisionOptions
from maple.errors import MapleError, RunError, UsageError, is_out_of_memory, naming_extras
from maple.files import expand_home
from maple.options import as_dict
from maple.prediction.base import BasePredictor, check_scores
from maple.types import Prediction

if TYPE_CHECKING:
    import onnxruntime

FORMAT = 1  # of the metadata
METADATA = "maple"  # key in the file
INPUT = "images"
LEVEL = "false_alarm"  # optional input: the level of the output ``is_ood``, one (1,) or one per image (N,), float64
NEEDED = tuple(field.name for field in fields(Prediction) if field.name != "class_names")  # outputs of the graph
BATCH = 128  # images per run of the graph

MAX_FILE_BYTES = 2**31 - 1  # limit of protobuf
MAX_METADATA = 512 * 2**20  # characters
MAX_CLASSES = 10**5
MAX_CLUSTERS = 10**6
MAX_CALIBRATION = 10**7  # images
MAX_EXEMPLARS = 64  # of a cluster
MAX_EXEMPLAR_SIDE = 512  # pixels

# The folder in which onnxruntime searches for tensors stored in other files: os.devnull, so it finds none.
EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
DECODE_ONCE = "session.disable_quant_qdq"  # 8-bit weights become float32 when the graph is opened, not in each run
DAMAGED = "export the run again, or download the file again"


# -------------------------------------------------------------------------------------------------------- metadata


def _to_text(dtype: str, array: np.ndarray) -> str:
    """An array as base64 of little-endian numbers."""
    return base64.b64encode(array.astype(f"<{dtype}").tobytes()).decode("ascii")


def _from_text(dtype: str, value: Any) -> np.ndarray:
    """The inverse of :func:`_to_text`; an array is returned as it is."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, str) or len(value) > 4 * (8 * MAX_CALIBRATION // 3 + 1):
        raise ValueError(f"not the base64 text of at most {MAX_CALIBRATION} numbers")
    return np.frombuffer(base64.b64decode(value, validate=True), f"<{dtype}").astype(dtype)


Text = Annotated[str, Field(max_length=10_000)]
Floats = Annotated[np.ndarray, PlainValidator(partial(_from_text, "f8")), PlainSerializer(partial(_to_text, "f8"))]
Integers = Annotated[np.ndarray, PlainValidator(partial(_from_text, "i8")), PlainSerializer(partial(_to_text, "i8"))]
Pair = tuple[float, float]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True)


class Strip(_Part):
    """Images of a cluster, side by side in one PNG."""

    n: Annotated[int, Field(ge=1, le=MAX_EXEMPLARS)]
    side: Annotated[int, Field(ge=1, le=MAX_EXEMPLAR_SIDE)]  # pixels
    png: Annotated[str, Field(max_length=8 * MAX_EXEMPLARS * MAX_EXEMPLAR_SIDE**2)]  # base64


class CalibrationArrays(_Part):
    """The arrays of :class:`maple.decisions.calibration.Calibration`."""

    scores: Floats = np.empty(0)
    class_ids: Integers = np.empty(0, dtype=np.int64)
    set_scores: Floats = np.empty(0)


class GraphMetadata(_Part):
    """Description of a graph; unknown keys are ignored, since later versions may add some."""

    format: Annotated[int, Field(le=FORMAT)]  # first: another format may have other values in any key
    version: Text  # of maple
    network: Text
    class_names: Annotated[list[Text], Field(min_length=1, max_length=MAX_CLASSES)]
    size: Annotated[int, Field(ge=1, le=MAX_SIZE)]
    fit: Fit
    preprocess: bool  # whether the graph takes (N, S, S, 3) uint8, instead of (N, 3, S, S) float32 in [0, 1]
    cluster_to_class: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_CLUSTERS)]
    score: Text
    decision: dict[str, Any]  # for readers of the file: it follows from options and calibration
    options: DecisionOptions
    calibration: CalibrationArrays = CalibrationArrays()
    map_centroids: Annotated[list[Pair], Field(max_length=MAX_CLUSTERS)]
    map_radius: float | None
    quantised: bool = False
    exemplars: Annotated[dict[Annotated[int, Field(ge=0)], Strip], Field(max_length=MAX_CLUSTERS)] = {}

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        n_clusters = len(self.cluster_to_class)
        if max(self.cluster_to_class) >= len(self.class_names):
            raise ValueError("cluster_to_class names a class that is not in class_names")
        if len(self.map_centroids) != n_clusters:
            raise ValueError(f"map_centroids has {len(self.map_centroids)} entries for {n_clusters} clusters")
        if self.exemplars and max(self.exemplars) >= n_clusters:
            raise ValueError(f"exemplars of cluster {max(self.exemplars)}, but there are {n_clusters} clusters")
        return self


def write_metadata(
    predictor: BasePredictor,
    *,
    preprocess: bool,
    exemplars: Mapping[int, np.ndarray] | None = None,
    quantised: bool = False,
) -> str:
    """The metadata of an exported predictor as one text; ``exemplars`` are images (n, s, s, 3) uint8 by cluster."""
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
        calibration=CalibrationArrays.model_validate(predictor.calibration, from_attributes=True),
        map_centroids=predictor.map_centroids.tolist(),
        map_radius=predictor.map_radius,
        quantised=quantised,
        exemplars={cluster: _to_strip(images) for cluster, images in (exemplars or {}).items() if len(images)},
    )
    return metadata.model_dump_json()


def read_metadata(text: str, source: str) -> GraphMetadata:
    """The inverse of :func:`write_metadata`, for untrusted texts."""
    if len(text) > MAX_METADATA:
        raise RunError(f"the metadata of '{source}' are larger than {MAX_METADATA // 2**20} MB: {DAMAGED}")
    try:
        return GraphMetadata.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]  # they are in the order of the fields
        if first["loc"] == ("format",) and first["type"] == "less_than_equal":
            newer = f"'{source}' has format {first['input']}, this maple reads up to {FORMAT}"
            raise RunError(f"{newer}: upgrade with pip install --upgrade maple-uncertainty") from None
        where = ".".join(map(str, first["loc"])) or "JSON"
        raise RunError(f"the metadata of '{source}' are damaged ({where}: {first['msg'].lower()}): {DAMAGED}") from None


def _to_strip(images: np.ndarray) -> Strip:
    """Images (n, s, s, 3) uint8 as one picture."""
    n, side = images.shape[:2]
    return Strip(n=n, side=side, png=base64.b64encode(draw_strip(images)).decode("ascii"))


def draw_strip(images: np.ndarray) -> bytes:
    """Images (n, s, s, 3) uint8 side by side, as a PNG file.

    >>> Image.open(io.BytesIO(draw_strip(np.zeros((3, 8, 8, 3), np.uint8)))).size
    (24, 8)
    """
    file = io.BytesIO()
    Image.fromarray(np.concatenate(list(images), axis=1)).save(file, "PNG")
    return file.getvalue()


def _from_strip(strip: Strip, source: str) -> np.ndarray:
    """The inverse of :func:`_to_strip`; the size is checked before the picture is decoded."""
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
    """Class, probability, uncertainty and in/out decision for images, from an exported graph in onnxruntime.

    :meth:`open` starts the ``session`` that runs the graph. Decisions follow from the score of the graph and the
    calibration scores in the file, so that :meth:`decide` works at any level. The output ``is_ood`` of the graph, for
    programs that use the graph alone, is that of its optional input ``false_alarm``, by default the level at export.
    """

    runtime = "onnxruntime"

    def __init__(self, session: onnxruntime.InferenceSession, source: str = "the graph") -> None:
        try:
            found = session.get_modelmeta().custom_metadata_map
        except UnicodeDecodeError as error:
            raise RunError(f"the metadata of '{source}' are damaged ({error}): {DAMAGED}") from None
        if METADATA not in found:
            remedy = f"make a run with maple fit '{source}' --data IMAGES, or export a run with maple export"
            raise UsageError(f"'{source}' is a network, not an exported predictor: {remedy}")
        self.session, self.source = session, source
        self._metadata = said = read_metadata(found[METADATA], source)
        self._check_graph()
        held, n_classes = said.calibration, len(said.class_names)
        try:
            calibration = Calibration(held.scores, held.class_ids, n_classes, held.set_scores)
        except MapleError as error:
            raise RunError(f"the calibration of '{source}' is damaged ({error}): {DAMAGED}") from None
        super().__init__(said.class_names, size=said.size, fit=said.fit, calibration=calibration, options=said.options)

    @classmethod
    def open(cls, source: str | Path | bytes, *, threads: int | None = None) -> OnnxPredictor:
        """Open a file, or its bytes; ``threads`` is the number of computing threads, by default one per core."""
        if isinstance(source, bytes):
            return cls(start_session(source, "the graph", threads))
        path = expand_home(source)
        if not path.is_file():
            raise UsageError(f"there is no file '{path}': create it with maple export RUN '{path}'")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RunError(f"'{path}' is larger than 2 GB, the limit of ONNX files: {DAMAGED}")
        return cls(start_session(path.read_bytes(), str(path), threads), str(path))

    def _check_graph(self) -> None:
        """Raise ``RunError`` if the graph does not match its metadata."""
        said, inputs = self._metadata, self.session.get_inputs()
        if len(inputs) != 1:
            raise RunError(f"the graph of '{self.source}' has {len(inputs)} inputs instead of one: {DAMAGED}")
        (first,), size = inputs, said.size
        kind, shape = ("uint8", [size, size, 3]) if said.preprocess else ("float", [3, size, size])
        fits = first.name == INPUT and first.type == f"tensor({kind})" and first.shape[1:] == shape
        outputs = {output.name: output.shape for output in self.session.get_outputs()}
        missing = [name for name in NEEDED if name not in outputs]
        if fits and not missing and outputs["log_probabilities"][1:] == [len(said.class_names)]:
            return
        what = f"has no output '{missing[0]}'" if missing else f"takes {first.type} {first.shape}"
        raise RunError(f"the graph of '{self.source}' {what}, which does not match its metadata: {DAMAGED}")

    @property
    def takes_level(self) -> bool:
        """Whether the graph itself takes another false-alarm level; those of earlier versions do not."""
        return LEVEL in (each.name for each in self.session.get_overridable_initializers())

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
        """The metadata of the file, without images and calibration scores."""
        said = self._metadata.model_dump(exclude={"exemplars", "calibration", "options"})
        return {**said, "options": as_dict(self._metadata.options)}

    @cached_property
    def exemplars(self) -> dict[int, np.ndarray]:
        """Training images (n, s, s, 3) uint8 by cluster; empty if the file has none."""
        return {cluster: _from_strip(strip, self.source) for cluster, strip in self._metadata.exemplars.items()}

    def __repr__(self) -> str:
        return f"OnnxPredictor({self.source!r}, {self.network!r}, {self._summary()})"

    # -- predicting

    def __call__(self, images: str | Path | Sequence[str | Path] | np.ndarray | ImageSet) -> Prediction:
        """Predict images: an array (N, S, S, 3) uint8, an ``ImageSet``, or paths of images and folders."""
        if isinstance(images, np.ndarray):
            return self.predict_pixels(images)
        images = open_images(images, size=self.size, fit=self.fit, labelled=False)
        return self._predict_all(read_pixels(images, _batch_rows(np.arange(len(images)), BATCH)))

    def predict_pixels(self, pixels: np.ndarray) -> Prediction:
        self._check_pixels(pixels)
        return self._predict_all(pixels[rows] for rows in _batch_rows(np.arange(len(pixels)), BATCH))

    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        said = self.run(pixels)
        usable = ~np.isnan(said["score"])  # (N,)
        return self._predict({name: values[usable] for name, values in said.items()}), usable

    def _predict_rows(self, images: ImageSet, batch_size: int, indices: Any, workers: int) -> Iterator[Prediction]:
        rows = np.arange(len(images)) if indices is None else np.asarray(indices, dtype=np.int64)
        plan = _batch_rows(rows, batch_size)
        for batch, pixels in zip(plan, read_pixels(images, plan, workers), strict=True):
            said = self.run(pixels)
            check_scores(said["score"], [images.files[i] for i in batch])
            yield self._predict(said)

    def _check_pixels(self, pixels: np.ndarray) -> None:
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1:] != (self.size, self.size, 3):
            found, size = f"shape {pixels.shape} and type {pixels.dtype}", self.size
            raise UsageError(f"images have {found}: give (N, {size}, {size}, 3) uint8")

    def run(self, pixels: np.ndarray, false_alarm: float | None = None) -> dict[str, np.ndarray]:
        """All outputs of the graph by name, for images (N, S, S, 3) uint8; ``is_ood`` at that level, or the file's."""
        self._check_pixels(pixels)
        if false_alarm is not None and not self.takes_level:
            raise UsageError(f"'{self.source}' takes no false-alarm level: export the run again, or use decide()")
        if not len(pixels):  # convolutions reject empty batches
            one = np.zeros((1, self.size, self.size, 3), np.uint8)
            return {name: output[:0] for name, output in self.run(one).items()}
        images = pixels if self._metadata.preprocess else pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255
        given = {INPUT: np.ascontiguousarray(images)}
        given |= {} if false_alarm is None else {LEVEL: np.array([false_alarm], np.float64)}
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, given), strict=True))

    def _predict_all(self, batches: Iterable[np.ndarray]) -> Prediction:
        parts = [self.run(pixels) for pixels in batches] or [self.run(np.empty((0, self.size, self.size, 3), np.uint8))]
        return self._predict({name: np.concatenate([part[name] for part in parts]) for name in NEEDED})

    def _predict(self, said: dict[str, np.ndarray]) -> Prediction:
        """A prediction from outputs of the graph, decided at the level of ``options``."""
        return self._decided(**{name: said[name] for name in NEEDED if name not in ("p_value", "is_ood")})


def start_session(model: bytes, source: str, threads: int | None = None) -> onnxruntime.InferenceSession:
    """Start onnxruntime with a graph, on the CPU."""
    with naming_extras():
        import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads or 0, 4  # 0: one per core; 4: fatal errors
    options.add_session_config_entry(EXTERNAL_FOLDER, os.devnull)
    options.add_session_config_entry(DECODE_ONCE, "1")
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has its own types
        if is_out_of_memory(error):
            raise
        raise RunError(f"cannot read '{source}' ({' '.join(str(error).split())}): {DAMAGED}") from None


def _batch_rows(rows: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Rows (N,) in batches.

    >>> [batch.tolist() for batch in _batch_rows(np.arange(5), 3)]
    [[0, 1, 2], [3, 4]]
    """
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}: give at least 1")
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
