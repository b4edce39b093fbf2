"""The files of a gallery, written and read.

- ``clusters.json``: exemplars of each cluster
- ``components.json``: images at both ends of each component of a squared distance
- ``projection-<name>.safetensors``: embeddings on their two main axes
- ``examples-<kind>-<source>.json``: selected images, such as the most uncertain ones
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maple.files import load_arrays, save_arrays
from maple.reporting.gallery._sheet import load_sheet, save_sheet
from maple.reporting.gallery.records import (
    ClusterExemplars,
    ComponentEnd,
    ComponentExemplars,
    Example,
    Examples,
    Gallery,
    Projection,
)


def read_gallery(folder: Path) -> Gallery:
    """Read the parts that the folder holds; a missing folder is an empty gallery."""
    clusters = _load_clusters(folder) if (folder / "clusters.json").is_file() else ()
    components = _load_components(folder) if (folder / "components.json").is_file() else ()
    projections = [_load_projection(path) for path in sorted(folder.glob("projection-*.safetensors"))]
    examples = tuple(_load_examples(path) for path in sorted(folder.glob("examples-*.json")))
    return Gallery(clusters, components, {projection.name: projection for projection in projections}, examples)


def remove_examples(folder: Path) -> None:
    """Delete the examples of an earlier evaluation; the next one may have other sources."""
    for path in folder.glob("examples-*"):
        path.unlink()


def remove_components(folder: Path) -> None:
    """Delete the images of components, which are void once the Gaussians are fitted again."""
    for path in folder.glob("components.*"):
        path.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# Clusters
# ---------------------------------------------------------------------------------------------------------------------


def save_clusters(folder: Path, clusters: Sequence[ClusterExemplars]) -> None:
    """Write the exemplars of all clusters."""
    records = [
        {
            "cluster": each.cluster,
            "class": each.class_name,
            "count": each.count,
            "share": each.share,
            "files": list(each.files),
        }
        for each in clusters
    ]
    save_sheet(folder, "clusters", {"clusters": records}, [image for each in clusters for image in each.thumbnails])


def _load_clusters(folder: Path) -> tuple[ClusterExemplars, ...]:
    value, thumbnails = load_sheet(folder / "clusters.json")
    clusters = []
    for record in value["clusters"]:
        files = tuple(record["files"])
        own, thumbnails = thumbnails[: len(files)], thumbnails[len(files) :]
        clusters.append(
            ClusterExemplars(record["cluster"], record["class"], record["count"], record["share"], files, own)
        )
    return tuple(clusters)


# ---------------------------------------------------------------------------------------------------------------------
# Components
# ---------------------------------------------------------------------------------------------------------------------


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


def _load_components(folder: Path) -> tuple[ComponentExemplars, ...]:
    value, thumbnails = load_sheet(folder / "components.json")
    start = 0

    def load_end(images: list[dict[str, Any]]) -> ComponentEnd:
        nonlocal start
        own, start = thumbnails[start : start + len(images)], start + len(images)
        coordinates, names, files = (tuple(image[key] for image in images) for key in ("coordinate", "class", "file"))
        return ComponentEnd(coordinates, names, files, own)

    return tuple(
        ComponentExemplars(record["spread"], load_end(record["low"]), load_end(record["high"]))
        for record in value["components"]
    )


# ---------------------------------------------------------------------------------------------------------------------
# Projections
# ---------------------------------------------------------------------------------------------------------------------


def save_projection(folder: Path, projection: Projection) -> None:
    """Write one projection."""
    save_arrays(
        folder / f"projection-{projection.name}.safetensors",
        {"points": projection.points, "class_ids": projection.class_ids, "cluster_ids": projection.cluster_ids},
        {
            "explained": list(projection.explained),
            "class_names": list(projection.class_names),
            "n_images": projection.n_images,
        },
    )


def _load_projection(path: Path) -> Projection:
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


# ---------------------------------------------------------------------------------------------------------------------
# Examples
# ---------------------------------------------------------------------------------------------------------------------


def save_examples(folder: Path, examples: Examples) -> None:
    """Write the examples of one kind and source."""
    records = [
        {
            "file": image.file,
            "label": image.label,
            "class": image.class_name,
            "probability": image.probability,
            "uncertainty": image.uncertainty,
            "score": image.score,
            "is_ood": image.is_ood,
        }
        for image in examples.images
    ]
    value = {"kind": examples.kind, "source": examples.source, "images": records}
    thumbnails = [image.thumbnail for image in examples.images]
    save_sheet(folder, f"examples-{examples.kind}-{_slug(examples.source)}", value, thumbnails)


def _load_examples(path: Path) -> Examples:
    value, thumbnails = load_sheet(path)
    images = tuple(_example(record, own) for record, own in zip(value["images"], thumbnails))
    return Examples(value["kind"], value["source"], images)


def _example(record: Mapping[str, Any], own: np.ndarray) -> Example:
    def number(key: str) -> float:
        return math.nan if record[key] is None else record[key]  # JSON has no NaN

    return Example(
        file=record["file"],
        label=record["label"],
        class_name=record["class"],
        probability=number("probability"),
        uncertainty=number("uncertainty"),
        score=number("score"),
        is_ood=record["is_ood"],
        thumbnail=own,
    )


def _slug(name: str) -> str:
    """A file name for a source; the digest separates names that differ only in special characters."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return f"{plain}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}"
