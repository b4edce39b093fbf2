"""What the report draws and no other file of the run holds: thumbnails and 2-D projections.

The report runs no model and may be written long after the images were moved, so whoever has images and outputs at
hand (training, evaluation) stores a few of them in the run's ``gallery/`` folder:

- ``clusters.json``: exemplars of each cluster, nearest to its mean first
- ``components.json``: the images at both ends of each component of a squared distance (see ``explain``)
- ``projection-<name>.safetensors``: embeddings on their two main axes, at most 2,000 of them
- ``examples-<kind>-<source>.json``: the images worth a look, such as the most uncertain ones

Thumbnails lie beside the JSON in one PNG sheet, which any image viewer opens. The sheet is written first, under a name
that contains its digest, and the JSON, written last, names it: captions and thumbnails always belong together.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from scipy.linalg import eigh

from maple.errors import DataError, RunError, UsageError, suggest
from maple.files import load_arrays, load_json, save_arrays, save_json, write_atomic
from maple.types import Outputs, Prediction

if TYPE_CHECKING:
    from maple.data.image_set import ImageSet

EXEMPLARS_PER_CLUSTER = 12
EXEMPLARS_PER_END = 4
MAX_EXEMPLARS = 6_000  # in all: with very many clusters or components each shows fewer
MAX_POINTS = 2_000
EXAMPLES = 24
CLUSTER_THUMBNAIL = 64  # pixels a side; smaller images keep their size
EXAMPLE_THUMBNAIL = 96


# ---------------------------------------------------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ClusterExemplars:
    """The images of one cluster that lie nearest to its mean."""

    cluster: int
    class_name: str
    count: int  # training images in the cluster
    share: float  # of the images of its class
    files: tuple[str, ...]
    thumbnails: np.ndarray  # (n, S, S, 3) uint8


@dataclass(frozen=True, eq=False)
class ComponentEnd:
    """The training images that lie furthest up or down one component, the furthest first."""

    coordinates: tuple[float, ...]
    class_names: tuple[str, ...]
    files: tuple[str, ...]
    thumbnails: np.ndarray  # (n, S, S, 3) uint8


@dataclass(frozen=True, eq=False)
class ComponentExemplars:
    """Both ends of one component."""

    spread: float  # standard deviation of the centroids along it: by this a component is known again
    low: ComponentEnd
    high: ComponentEnd


@dataclass(frozen=True, eq=False)
class Projection:
    """Embeddings of a sample of images on their two main axes."""

    name: str
    points: np.ndarray  # (n, 2) float32
    class_ids: np.ndarray  # (n,) int64; -1 where unknown
    cluster_ids: np.ndarray  # (n,) int64; the class ids where there are no clusters
    class_names: tuple[str, ...]
    explained: tuple[float, float]  # share of the variance along either axis
    n_images: int  # before sampling


@dataclass(frozen=True, eq=False)
class Example:
    """One image and what was said about it."""

    file: str
    label: str | None  # what the data say, where they say something
    class_name: str
    probability: float
    uncertainty: float
    score: float
    is_ood: bool
    thumbnail: np.ndarray  # (S, S, 3) uint8


@dataclass(frozen=True, eq=False)
class Examples:
    """Images of one source chosen for one reason, the most striking first."""

    kind: str
    source: str
    images: tuple[Example, ...]


@dataclass(frozen=True, eq=False)
class Gallery:
    """Everything in a ``gallery/`` folder; parts that were not written are empty."""

    clusters: tuple[ClusterExemplars, ...] = ()
    components: tuple[ComponentExemplars, ...] = ()
    projections: Mapping[str, Projection] = field(default_factory=dict)
    examples: tuple[Examples, ...] = ()


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def write_gallery(
    folder: Path,
    *,
    train: tuple[ImageSet, Outputs] | None = None,
    squared_distance: np.ndarray | None = None,
    cluster_sizes: np.ndarray | None = None,
    components: tuple[np.ndarray, np.ndarray] | None = None,
    snapshots: Mapping[str, Outputs] | None = None,
    class_names: Sequence[str] = (),
    test: tuple[ImageSet, Prediction] | None = None,
    ood: Mapping[str, tuple[ImageSet, Prediction]] | None = None,
) -> None:
    """Write the parts for which there is material; parts written earlier stay.

    Training hands over ``train``, the ``components`` of its images (``component_coordinates`` of ``explain``) and
    ``snapshots`` (``{"before": ..., "after": ...}``, with labels), evaluation hands over ``test`` and ``ood``. The
    examples of an earlier evaluation are replaced.
    """
    if train is not None:
        write_cluster_gallery(folder, *train, squared_distance=squared_distance, cluster_sizes=cluster_sizes)
        if components is not None:
            write_component_gallery(folder, train[0], *components)
    for name, outputs in (snapshots or {}).items():
        write_projection(folder, name, outputs, class_names or (train[0].class_names if train else ()))
    if test is not None or ood:
        remove_examples(folder)
    if test is not None:
        write_examples(folder, "uncertain", *test)
        write_examples(folder, "mistakes", *test)
    for name, (images, prediction) in (ood or {}).items():
        write_examples(folder, "caught", images, prediction, source=name)
        write_examples(folder, "missed", images, prediction, source=name)


def write_cluster_gallery(
    folder: Path,
    images: ImageSet,
    outputs: Outputs,
    *,
    squared_distance: np.ndarray | None = None,
    cluster_sizes: np.ndarray | None = None,
    per_cluster: int = EXEMPLARS_PER_CLUSTER,
) -> None:
    """Store thumbnails of the images nearest to each cluster mean.

    ``outputs`` are those of ``images``, row by row, with cluster ids (without them, clusters are classes). Nearest is
    by ``squared_distance`` (N,) of each image to its own cluster, or else by Euclidean distance between embeddings.
    ``cluster_sizes`` (M,) are given where ``images`` are only a sample of each cluster.
    """
    cluster_ids, cluster_to_class = _clusters(outputs, len(images.class_names))
    _check_rows(images, len(outputs), "outputs")
    if cluster_sizes is None:
        cluster_sizes = np.bincount(cluster_ids, minlength=len(cluster_to_class))  # (M,)
    class_sizes = np.bincount(cluster_to_class, cluster_sizes, minlength=len(images.class_names))  # (C,)
    shown = max(1, min(per_cluster, MAX_EXEMPLARS // len(cluster_to_class)))
    records: list[dict[str, Any]] = []
    chosen: list[int] = []
    for cluster, members in enumerate(_members(cluster_ids, len(cluster_to_class))):
        class_id = int(cluster_to_class[cluster])
        if squared_distance is None:
            distance = _distance_to_mean(outputs.embeddings[members])
        else:
            distance = squared_distance[members]
        nearest = members[np.argsort(distance, kind="stable")[:shown]]
        records.append(
            {
                "cluster": cluster,
                "class": images.class_names[class_id],
                "count": int(cluster_sizes[cluster]),
                "share": float(cluster_sizes[cluster] / max(1, class_sizes[class_id])),
                "files": [images.files[i] for i in nearest],
            }
        )
        chosen.extend(nearest.tolist())
    thumbnails = [thumbnail(images.read(i), CLUSTER_THUMBNAIL) for i in chosen]
    _save_sheet(folder, "clusters", {"clusters": records}, thumbnails)


def write_component_gallery(
    folder: Path,
    images: ImageSet,
    coordinates: np.ndarray,  # (N, K)
    spreads: np.ndarray,  # (K,)
    *,
    per_end: int = EXEMPLARS_PER_END,
) -> None:
    """Store thumbnails of the images at both ends of each component, from their ``coordinates``, row by row."""
    _check_rows(images, len(coordinates), "coordinates")
    shown = max(1, min(per_end, MAX_EXEMPLARS // (2 * len(spreads)), len(coordinates) // 2))
    records: list[dict[str, Any]] = []
    chosen: list[int] = []
    for along, spread in zip(coordinates.T, spreads):
        order = np.argsort(along, kind="stable")
        record: dict[str, Any] = {"spread": float(spread)}
        for end, rows in (("low", order[:shown]), ("high", order[::-1][:shown])):
            record[end] = [
                {
                    "coordinate": float(along[i]),
                    "class": images.class_names[images.labels[i]],
                    "file": images.files[i],
                }
                for i in rows
            ]
            chosen.extend(rows.tolist())
        records.append(record)
    thumbnails = [thumbnail(images.read(i), CLUSTER_THUMBNAIL) for i in chosen]
    _save_sheet(folder, "components", {"components": records}, thumbnails)


def write_projection(
    folder: Path,
    name: str,
    outputs: Outputs,
    class_names: Sequence[str] = (),
    *,
    max_points: int = MAX_POINTS,
    seed: int = 0,
) -> None:
    """Store a sample of the embeddings on their two main axes, with class and cluster ids.

    The report draws the projections named ``before`` and ``after`` side by side.
    """
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise UsageError(f"projection name '{name}': use lower-case letters, digits and underscores")
    labels = np.full(len(outputs), -1, dtype=np.int64) if outputs.labels is None else outputs.labels
    cluster_ids = labels if outputs.cluster_ids is None else outputs.cluster_ids
    sample = np.arange(len(outputs))
    if len(outputs) > max_points:
        sample = np.sort(np.random.default_rng(seed).choice(len(outputs), max_points, replace=False))
    points, explained = main_axes(outputs.embeddings[sample])
    save_arrays(
        folder / f"projection-{name}.safetensors",
        {
            "points": points.astype(np.float32),
            "class_ids": labels[sample].astype(np.int64),
            "cluster_ids": cluster_ids[sample].astype(np.int64),
        },
        {"explained": list(explained), "class_names": list(class_names), "n_images": len(outputs)},
    )


def write_examples(
    folder: Path,
    kind: str,
    images: ImageSet,
    prediction: Prediction,
    *,
    source: str | None = None,
    limit: int = EXAMPLES,
) -> None:
    """Store the images of ``source`` that are worth a look for one reason.

    ========== ===================================================================================
    kind       which images, first to last
    ========== ===================================================================================
    uncertain  in-distribution images by decreasing uncertainty
    mistakes   in-distribution images given a wrong class, by decreasing probability of that class
    caught     out-of-distribution images by decreasing score
    missed     out-of-distribution images by increasing score
    ========== ===================================================================================
    """
    if kind not in _ORDERS:
        raise UsageError(f"unknown kind of examples '{kind}': {suggest(kind, _ORDERS)}")
    _check_rows(images, len(prediction), "predictions")
    source = images.name if source is None else source
    names = prediction.class_names or images.class_names
    chosen = _ORDERS[kind](images, prediction)[:limit]
    records = [
        {
            "file": images.files[i],
            "label": images.class_names[images.labels[i]] if images.labels[i] >= 0 else None,
            "class": names[prediction.class_id[i]],
            "probability": float(prediction.probability[i]),
            "uncertainty": float(prediction.uncertainty[i]),
            "score": float(prediction.score[i]),
            "is_ood": bool(prediction.is_ood[i]),
        }
        for i in chosen
    ]
    thumbnails = [thumbnail(images.read(int(i)), EXAMPLE_THUMBNAIL) for i in chosen]
    value = {"kind": kind, "source": source, "images": records}
    _save_sheet(folder, f"examples-{kind}-{_slug(source)}", value, thumbnails)


def remove_examples(folder: Path) -> None:
    """Forget the examples of an earlier evaluation, whose sources may not come back."""
    for path in folder.glob("examples-*"):
        path.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def read_gallery(folder: Path) -> Gallery:
    """Read whatever parts the folder holds; a folder that does not exist is an empty gallery."""
    clusters = _read_clusters(folder) if (folder / "clusters.json").is_file() else ()
    components = _read_components(folder) if (folder / "components.json").is_file() else ()
    projections = [_read_projection(path) for path in sorted(folder.glob("projection-*.safetensors"))]
    examples = tuple(_read_examples(path) for path in sorted(folder.glob("examples-*.json")))
    return Gallery(clusters, components, {projection.name: projection for projection in projections}, examples)


def _read_clusters(folder: Path) -> tuple[ClusterExemplars, ...]:
    value, thumbnails = _load_sheet(folder / "clusters.json")
    clusters = []
    for record in value["clusters"]:
        files = tuple(record["files"])
        own, thumbnails = thumbnails[: len(files)], thumbnails[len(files) :]
        clusters.append(
            ClusterExemplars(record["cluster"], record["class"], record["count"], record["share"], files, own)
        )
    return tuple(clusters)


def _read_components(folder: Path) -> tuple[ComponentExemplars, ...]:
    value, thumbnails = _load_sheet(folder / "components.json")
    start = 0

    def read_end(images: list[dict[str, Any]]) -> ComponentEnd:
        nonlocal start
        own, start = thumbnails[start : start + len(images)], start + len(images)
        coordinates, names, files = (tuple(image[key] for image in images) for key in ("coordinate", "class", "file"))
        return ComponentEnd(coordinates, names, files, own)

    return tuple(
        ComponentExemplars(record["spread"], read_end(record["low"]), read_end(record["high"]))
        for record in value["components"]
    )


def _read_projection(path: Path) -> Projection:
    arrays, metadata = load_arrays(path)
    first, second = metadata["explained"]
    return Projection(
        name=path.stem.removeprefix("projection-"),
        points=arrays["points"],
        class_ids=arrays["class_ids"],
        cluster_ids=arrays["cluster_ids"],
        class_names=tuple(metadata["class_names"]),
        explained=(first, second),
        n_images=metadata["n_images"],
    )


def _read_examples(path: Path) -> Examples:
    value, thumbnails = _load_sheet(path)
    images = tuple(
        Example(
            file=record["file"],
            label=record["label"],
            class_name=record["class"],
            probability=_number(record["probability"]),
            uncertainty=_number(record["uncertainty"]),
            score=_number(record["score"]),
            is_ood=record["is_ood"],
            thumbnail=own,
        )
        for record, own in zip(value["images"], thumbnails)
    )
    return Examples(value["kind"], value["source"], images)


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON has no NaN


# ---------------------------------------------------------------------------------------------------------------------
# Thumbnails and their sheets
# ---------------------------------------------------------------------------------------------------------------------


def thumbnail(image: np.ndarray, side: int) -> np.ndarray:
    """A square image, made smaller where it is larger than ``side``.

    >>> thumbnail(np.zeros((200, 200, 3), np.uint8), 64).shape
    (64, 64, 3)
    >>> thumbnail(np.zeros((32, 32, 3), np.uint8), 64).shape
    (32, 32, 3)
    """
    if image.shape[0] <= side:
        return image
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS))


def to_sheet(thumbnails: np.ndarray) -> np.ndarray:
    """Thumbnails (n, S, S, 3) side by side in an almost square picture.

    >>> to_sheet(np.zeros((5, 8, 8, 3), np.uint8)).shape
    (16, 24, 3)
    """
    n, side = thumbnails.shape[:2]
    columns = math.isqrt(n - 1) + 1
    rows = -(-n // columns)
    cells = np.zeros((rows * columns, side, side, 3), dtype=np.uint8)
    cells[:n] = thumbnails
    return cells.reshape(rows, columns, side, side, 3).swapaxes(1, 2).reshape(rows * side, columns * side, 3)


def from_sheet(sheet: np.ndarray, n: int, side: int) -> np.ndarray:
    """The first ``n`` thumbnails of a sheet: the inverse of :func:`to_sheet`.

    >>> thumbnails = np.arange(5 * 2 * 2 * 3, dtype=np.uint8).reshape(5, 2, 2, 3)
    >>> bool((from_sheet(to_sheet(thumbnails), 5, 2) == thumbnails).all())
    True
    """
    rows, columns = sheet.shape[0] // side, sheet.shape[1] // side
    cells = sheet.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    return cells.reshape(rows * columns, side, side, 3)[:n]


def _save_sheet(folder: Path, stem: str, value: Mapping[str, Any], thumbnails: Sequence[np.ndarray]) -> None:
    sheet, side = None, 0
    if thumbnails:
        side = thumbnails[0].shape[0]
        png = _png(to_sheet(np.stack(thumbnails)))
        sheet = f"{stem}.{hashlib.sha256(png).hexdigest()[:8]}.png"
        write_atomic(folder / sheet, png)
    save_json(folder / f"{stem}.json", {"sheet": sheet, "side": side, "thumbnails": len(thumbnails), **value})
    for old in folder.glob(f"{stem}.*.png"):
        if old.name != sheet:
            old.unlink()


def _load_sheet(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    value = load_json(path)
    n, side = value["thumbnails"], value["side"]
    if value["sheet"] is None:
        return value, np.zeros((0, 0, 0, 3), dtype=np.uint8)
    sheet = path.parent / Path(value["sheet"]).name
    try:
        with Image.open(sheet) as image:
            return value, from_sheet(np.asarray(image.convert("RGB")), n, side)
    except (OSError, ValueError) as error:
        raise RunError(f"'{sheet}' is damaged ({error}): delete '{path}' or evaluate the run again") from None


def _png(image: np.ndarray) -> bytes:
    grey = bool((image == image[..., :1]).all())
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if grey else image).save(buffer, "PNG")
    return buffer.getvalue()


def _slug(name: str) -> str:
    """A file name for a source; the digest keeps apart names that differ only in odd characters."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return f"{plain}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}"


# ---------------------------------------------------------------------------------------------------------------------
# Choosing
# ---------------------------------------------------------------------------------------------------------------------


def main_axes(embeddings: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Coordinates (n, 2) on the two main axes, and the share of the variance along either.

    The sign of an axis is arbitrary; here the largest loading is positive, so that equal input gives equal pictures.

    >>> line = np.outer(np.arange(5.0), [3.0, 4.0, 0.0])
    >>> points, explained = main_axes(line)
    >>> np.abs(points[:, 0]).round(6).tolist(), round(explained[0], 6)
    ([10.0, 5.0, 0.0, 5.0, 10.0], 1.0)
    """
    if not np.isfinite(embeddings).all():
        raise DataError("cannot project embeddings that contain NaN or infinity: the training has diverged")
    centred = embeddings.astype(np.float64)  # (n, D)
    centred -= centred.mean(axis=0)
    scatter = centred.T @ centred  # (D, D)
    d, kept = len(scatter), min(2, len(scatter))
    values, vectors = eigh(scatter, subset_by_index=[d - kept, d - 1])  # ascending
    axes = vectors[:, ::-1]  # (D, kept)
    axes = axes * np.where(axes[np.abs(axes).argmax(axis=0), np.arange(kept)] < 0, -1.0, 1.0)
    points = np.zeros((len(centred), 2))
    points[:, :kept] = centred @ axes
    shares = np.zeros(2)
    shares[:kept] = values[::-1].clip(min=0) / max(float(np.trace(scatter)), np.finfo(float).tiny)
    return points, (float(shares[0]), float(shares[1]))


def _by_uncertainty(images: ImageSet, prediction: Prediction) -> np.ndarray:
    return np.lexsort((-prediction.score, -prediction.uncertainty))  # far images tie at 1: the score decides


def _by_confident_mistake(images: ImageSet, prediction: Prediction) -> np.ndarray:
    names = prediction.class_names or images.class_names
    known = {name: i for i, name in enumerate(names)}
    truth = np.array([known.get(name, -1) for name in images.class_names] + [-1])[images.labels]  # -1: unknown
    wrong = np.flatnonzero((truth >= 0) & (truth != prediction.class_id))
    return wrong[np.argsort(-prediction.probability[wrong], kind="stable")]


def _by_score(images: ImageSet, prediction: Prediction) -> np.ndarray:
    return np.argsort(-prediction.score, kind="stable")


def _by_low_score(images: ImageSet, prediction: Prediction) -> np.ndarray:
    return np.argsort(prediction.score, kind="stable")


_ORDERS = {
    "uncertain": _by_uncertainty,
    "mistakes": _by_confident_mistake,
    "caught": _by_score,
    "missed": _by_low_score,
}


def _clusters(outputs: Outputs, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Cluster ids (N,) and the class of each cluster (M,); clusters are classes where nothing was split."""
    if outputs.cluster_ids is not None:
        if outputs.cluster_to_class is None:
            raise DataError("outputs have cluster ids but do not say which class each cluster belongs to")
        return outputs.cluster_ids, outputs.cluster_to_class
    if outputs.labels is None:
        raise DataError("outputs have neither cluster ids nor labels: embed the labelled training images")
    return outputs.labels, np.arange(n_classes)


def _members(cluster_ids: np.ndarray, n_clusters: int) -> Iterator[np.ndarray]:
    """Indices of the images of each cluster, in order."""
    order = np.argsort(cluster_ids, kind="stable")
    return iter(np.split(order, np.searchsorted(cluster_ids[order], np.arange(1, n_clusters))))


def _distance_to_mean(embeddings: np.ndarray) -> np.ndarray:
    """Squared Euclidean distance (n,) of each row to the mean of all."""
    if not len(embeddings):
        return np.zeros(0)
    block = embeddings.astype(np.float64)
    return ((block - block.mean(axis=0)) ** 2).sum(axis=1)


def _check_rows(images: ImageSet, n: int, what: str) -> None:
    if len(images) != n:
        raise DataError(f"{len(images)} images of '{images.name}' but {n} {what}: they must match row by row")
