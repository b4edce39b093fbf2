"""The records of a gallery and the files that hold them.

- ``clusters.json``: exemplars of each cluster
- ``components.json``: images at both ends of each component of a squared distance
- ``projection-<name>.safetensors``: embeddings on their two main axes
- ``examples-<kind>-<source>.json``: selected images, such as those to look at first
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from maple.files import load_arrays, naming_damage, save_arrays
from maple.reporting.gallery._sheet import load_sheet, save_sheet

MAX_EXEMPLARS = 6_000  # in all: with very many clusters or components each shows fewer
Part = TypeVar("Part")
_ARRAYS = ("points", "class_ids", "cluster_ids")  # of a projection


@dataclass(frozen=True, eq=False)
class ClusterExemplars:
    """The images of one cluster that lie nearest to its mean, nearest first."""

    cluster: int
    class_name: str
    count: int  # training images in the cluster
    share: float  # of the images of its class
    files: tuple[str, ...]
    thumbnails: np.ndarray  # (n, S, S, 3) uint8


@dataclass(frozen=True, eq=False)
class ComponentEnd:
    """The training images at one end of a component, outermost first."""

    coordinates: tuple[float, ...]
    class_names: tuple[str, ...]
    files: tuple[str, ...]
    thumbnails: np.ndarray  # (n, S, S, 3) uint8


@dataclass(frozen=True, eq=False)
class ComponentExemplars:
    """Both ends of one component of the squared distance."""

    spread: float  # standard deviation of the centroids along it; identifies the component
    low: ComponentEnd
    high: ComponentEnd


@dataclass(frozen=True, eq=False)
class Projection:
    """Embeddings of a sample of images on their two main axes."""

    name: str
    points: np.ndarray  # (n, 2) float32
    class_ids: np.ndarray  # (n,) int64; -1 if unknown
    cluster_ids: np.ndarray  # (n,) int64; the class ids if there are no clusters
    class_names: tuple[str, ...]
    explained: tuple[float, float]  # share of the variance along each axis
    n_images: int  # before sampling


@dataclass(frozen=True, eq=False)
class Example:
    """One image and its prediction."""

    file: str
    label: str | None  # None if the image has no label
    class_name: str
    probability: float
    uncertainty: float
    score: float
    is_ood: bool
    thumbnail: np.ndarray  # (S, S, 3) uint8
    p_value: float = math.nan  # without calibration images, and in galleries of earlier versions


@dataclass(frozen=True, eq=False)
class Examples:
    """Images of one source selected by one criterion, most extreme first."""

    kind: str
    source: str
    images: tuple[Example, ...]


@dataclass(frozen=True, eq=False)
class Gallery:
    """The content of a ``gallery/`` folder; parts that are not there are empty."""

    clusters: tuple[ClusterExemplars, ...] = ()
    components: tuple[ComponentExemplars, ...] = ()
    projections: Mapping[str, Projection] = field(default_factory=dict)
    examples: tuple[Examples, ...] = ()


def read_gallery(folder: Path) -> Gallery:
    """Read the parts that the folder holds; a missing folder is an empty gallery."""
    clusters = [_whole(_load_clusters, path) for path in folder.glob("clusters.json")]
    components = [_whole(_load_components, path) for path in folder.glob("components.json")]
    projections = [_whole(_load_projection, path) for path in sorted(folder.glob("projection-*.safetensors"))]
    examples = [_whole(_load_examples, path) for path in sorted(folder.glob("examples-*.json"))]
    named = {projection.name: projection for projection in projections}
    return Gallery(
        clusters=clusters[0] if clusters else (),
        components=components[0] if components else (),
        projections=named,
        examples=tuple(examples),
    )


def _whole(load: Callable[[Path], Part], path: Path) -> Part:
    with naming_damage(path, "delete its folder and evaluate the run again"):
        return load(path)


def remove_examples(folder: Path) -> None:
    """Delete the examples of an earlier evaluation; the next one may have other sources."""
    for path in folder.glob("examples-*"):
        path.unlink()


def remove_components(folder: Path) -> None:
    """Delete the images of components, which are void once the Gaussians are fitted again."""
    for path in folder.glob("components.*"):
        path.unlink()


def save_clusters(folder: Path, clusters: Sequence[ClusterExemplars]) -> None:
    """Write the exemplars of all clusters; with very many clusters each keeps only its first ones."""
    shown = max(1, MAX_EXEMPLARS // max(1, len(clusters)))
    kept = [replace(each, files=each.files[:shown], thumbnails=each.thumbnails[:shown]) for each in clusters]
    thumbnails = [image for each in kept for image in each.thumbnails]
    save_sheet(folder, "clusters", {"clusters": [_to_json(each, "thumbnails") for each in kept]}, thumbnails)


def _load_clusters(path: Path) -> tuple[ClusterExemplars, ...]:
    value, thumbnails = load_sheet(path)
    records = value["clusters"]
    parts = _split(thumbnails, [len(record["files"]) for record in records])
    return tuple(
        ClusterExemplars(**_from_json(record) | {"files": tuple(record["files"])}, thumbnails=own)
        for record, own in zip(records, parts)
    )


def save_components(folder: Path, components: Sequence[ComponentExemplars]) -> None:
    """Write the images at both ends of all components."""
    records = [
        {"spread": each.spread, "low": _end_records(each.low), "high": _end_records(each.high)} for each in components
    ]
    thumbnails = [image for each in components for end in (each.low, each.high) for image in end.thumbnails]
    save_sheet(folder, "components", {"components": records}, thumbnails)


def _end_records(end: ComponentEnd) -> list[dict[str, Any]]:
    values = zip(end.coordinates, end.class_names, end.files)
    return [{"coordinate": coordinate, "class": name, "file": file} for coordinate, name, file in values]


def _load_components(path: Path) -> tuple[ComponentExemplars, ...]:
    value, thumbnails = load_sheet(path)
    ends = [record[end] for record in value["components"] for end in ("low", "high")]
    loaded = [_load_end(end, own) for end, own in zip(ends, _split(thumbnails, [len(end) for end in ends]))]
    spreads = [record["spread"] for record in value["components"]]
    return tuple(ComponentExemplars(*each) for each in zip(spreads, loaded[::2], loaded[1::2]))


def _load_end(images: Sequence[Mapping[str, Any]], thumbnails: np.ndarray) -> ComponentEnd:
    coordinates, names, files = (tuple(image[key] for image in images) for key in ("coordinate", "class", "file"))
    return ComponentEnd(coordinates, names, files, thumbnails)


def save_projection(folder: Path, projection: Projection) -> None:
    """Write one projection."""
    arrays = {name: getattr(projection, name) for name in _ARRAYS}
    save_arrays(folder / f"projection-{projection.name}.safetensors", arrays, _to_json(projection, "name", *_ARRAYS))


def _load_projection(path: Path) -> Projection:
    arrays, metadata = load_arrays(path)
    first, second = metadata["explained"]
    names, n_images = tuple(metadata["class_names"]), metadata["n_images"]
    name = path.stem.removeprefix("projection-")
    return Projection(name, **arrays, class_names=names, explained=(first, second), n_images=n_images)


def save_examples(folder: Path, examples: Examples) -> None:
    """Write the examples of one kind and source."""
    records = [_to_json(image, "thumbnail") for image in examples.images]
    value = {"kind": examples.kind, "source": examples.source, "images": records}
    thumbnails = [image.thumbnail for image in examples.images]
    save_sheet(folder, f"examples-{examples.kind}-{_slug(examples.source)}", value, thumbnails)


def _load_examples(path: Path) -> Examples:
    value, thumbnails = load_sheet(path)
    missing = dict.fromkeys(("probability", "uncertainty", "score", "p_value"), math.nan)  # JSON has no NaN
    images = []
    for record, own in zip(value["images"], thumbnails):
        known = {name: each for name, each in record.items() if each is not None or name not in missing}
        images.append(Example(**_from_json(missing | known), thumbnail=own))
    return Examples(value["kind"], value["source"], tuple(images))


def _to_json(record: Any, *without: str) -> dict[str, Any]:
    """The fields of a record; the files call ``class_name`` ``class``."""
    values = {each.name: getattr(record, each.name) for each in fields(record) if each.name not in without}
    return {"class" if name == "class_name" else name: value for name, value in values.items()}


def _from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`_to_json`."""
    return {"class_name" if name == "class" else name: value for name, value in values.items()}


def _split(thumbnails: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Consecutive thumbnails, as many as each record counts."""
    return np.split(thumbnails, np.cumsum(counts)[:-1]) if counts else []


def _slug(name: str) -> str:
    """A file name for a source; the digest separates names that differ only in special characters."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return f"{plain}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}"
