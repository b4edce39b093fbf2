"""What training and evaluation put into a gallery."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from maple.errors import UsageError, suggest
from maple.reporting.gallery._selection import (
    ORDERS,
    check_rows,
    distance_to_mean,
    list_clusters,
    list_members,
    main_axes,
)
from maple.reporting.gallery._sheet import thumbnail
from maple.reporting.gallery.records import (
    ClusterExemplars,
    ComponentEnd,
    ComponentExemplars,
    Example,
    Examples,
    Projection,
)
from maple.reporting.gallery.store import (
    MAX_EXEMPLARS,
    remove_examples,
    save_clusters,
    save_components,
    save_examples,
    save_projection,
)
from maple.types import Outputs, Prediction

if TYPE_CHECKING:
    from pathlib import Path

    from maple.data.image_set import ImageSet

EXEMPLARS_PER_CLUSTER = 12
EXEMPLARS_PER_END = 4
MAX_POINTS = 2_000
EXAMPLES = 24
CLUSTER_THUMBNAIL = 64  # pixels a side; smaller images keep their size
EXAMPLE_THUMBNAIL = 96


def write_training_gallery(
    folder: Path,
    images: ImageSet,
    outputs: Outputs,
    *,
    squared_distance: np.ndarray | None = None,
    cluster_sizes: np.ndarray | None = None,
    components: tuple[np.ndarray, np.ndarray] | None = None,
    snapshots: Mapping[str, Outputs] | None = None,
) -> None:
    """Write exemplars of clusters and components, and projections; examples of an evaluation stay.

    ``images`` and ``outputs`` are those of (a sample of) the training images, see `write_cluster_gallery`;
    ``components`` are coordinates (N, K) and spreads (K,) from ``component_coordinates`` of ``explain``; ``snapshots``
    are labelled outputs at moments of the training, ``{"before": ..., "after": ...}``.
    """
    write_cluster_gallery(folder, images, outputs, squared_distance=squared_distance, cluster_sizes=cluster_sizes)
    if components is not None:
        write_component_gallery(folder, images, *components)
    for name, snapshot in (snapshots or {}).items():
        write_projection(folder, name, snapshot, images.class_names)


def write_evaluation_gallery(
    folder: Path,
    test: tuple[ImageSet, Prediction] | None = None,
    ood: Mapping[str, tuple[ImageSet, Prediction]] | None = None,
) -> None:
    """Write the examples of an evaluation; those of an earlier one are deleted."""
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

    ``outputs`` are those of ``images``, row by row, with cluster ids (without them, each class is one cluster).
    Nearest is by ``squared_distance`` (N,) of each image to its own cluster, or else by Euclidean distance between
    embeddings. ``cluster_sizes`` (M,) are needed if ``images`` are only a sample of each cluster.
    """
    check_rows(images, len(outputs), "outputs")
    cluster_ids, cluster_to_class = list_clusters(outputs, len(images.class_names))
    n_clusters = len(cluster_to_class)
    if cluster_sizes is None:
        cluster_sizes = np.bincount(cluster_ids, minlength=n_clusters)  # (M,)
    class_sizes = np.bincount(cluster_to_class, cluster_sizes, minlength=len(images.class_names))  # (C,)
    shown = max(1, min(per_cluster, MAX_EXEMPLARS // n_clusters))
    clusters = []
    for cluster, members in enumerate(list_members(cluster_ids, n_clusters)):
        class_id, count = int(cluster_to_class[cluster]), int(cluster_sizes[cluster])
        if squared_distance is None:
            distance = distance_to_mean(outputs.embeddings[members])
        else:
            distance = squared_distance[members]
        nearest = members[np.argsort(distance, kind="stable")[:shown]]
        files = tuple(images.files[i] for i in nearest)
        name, share = images.class_names[class_id], float(count / max(1, class_sizes[class_id]))
        clusters.append(ClusterExemplars(cluster, name, count, share, files, _thumbnails(images, nearest)))
    save_clusters(folder, clusters)


def write_component_gallery(
    folder: Path,
    images: ImageSet,
    coordinates: np.ndarray,  # (N, K)
    spreads: np.ndarray,  # (K,)
    *,
    per_end: int = EXEMPLARS_PER_END,
) -> None:
    """Store thumbnails of the images at both ends of each component; ``coordinates`` match ``images`` row by row."""
    check_rows(images, len(coordinates), "coordinates")
    shown = max(1, min(per_end, MAX_EXEMPLARS // (2 * len(spreads)), len(coordinates) // 2))

    def end(along: np.ndarray, rows: np.ndarray) -> ComponentEnd:
        names = tuple(images.class_names[images.labels[i]] for i in rows)
        files = tuple(images.files[i] for i in rows)
        return ComponentEnd(tuple(along[rows].tolist()), names, files, _thumbnails(images, rows))

    components = []
    for along, spread in zip(coordinates.T, spreads):
        order = np.argsort(along, kind="stable")
        low, high = end(along, order[:shown]), end(along, order[::-1][:shown])
        components.append(ComponentExemplars(float(spread), low, high))
    save_components(folder, components)


def write_projection(
    folder: Path, name: str, outputs: Outputs, class_names: Sequence[str] = (), *, max_points: int = MAX_POINTS
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
        sample = np.sort(np.random.default_rng(0).choice(len(outputs), max_points, replace=False))
    points, explained = main_axes(outputs.embeddings[sample])
    projection = Projection(
        name=name,
        points=points.astype(np.float32),
        class_ids=labels[sample].astype(np.int64),
        cluster_ids=cluster_ids[sample].astype(np.int64),
        class_names=tuple(class_names),
        explained=explained,
        n_images=len(outputs),
    )
    save_projection(folder, projection)


def write_examples(
    folder: Path,
    kind: str,
    images: ImageSet,
    prediction: Prediction,
    *,
    source: str | None = None,
    limit: int = EXAMPLES,
) -> None:
    """Store the first images of ``source`` in the order of one criterion.

    ========== ===================================================================================
    kind       order
    ========== ===================================================================================
    uncertain  in-distribution images by decreasing uncertainty
    mistakes   in-distribution images given a wrong class, by decreasing probability of that class
    caught     out-of-distribution images by decreasing score
    missed     out-of-distribution images by increasing score
    ========== ===================================================================================
    """
    if kind not in ORDERS:
        raise UsageError(f"unknown kind of examples '{kind}': {suggest(kind, ORDERS)}")
    check_rows(images, len(prediction), "predictions")
    names = prediction.class_names or images.class_names
    chosen = ORDERS[kind](images, prediction)[:limit]
    shown = tuple(
        Example(
            file=images.files[i],
            label=images.class_names[images.labels[i]] if images.labels[i] >= 0 else None,
            class_name=names[prediction.class_id[i]],
            probability=float(prediction.probability[i]),
            uncertainty=float(prediction.uncertainty[i]),
            score=float(prediction.score[i]),
            is_ood=bool(prediction.is_ood[i]),
            thumbnail=thumbnail(images.read(int(i)), EXAMPLE_THUMBNAIL),
        )
        for i in chosen
    )
    save_examples(folder, Examples(kind, images.name if source is None else source, shown))


def _thumbnails(images: ImageSet, rows: np.ndarray) -> np.ndarray:
    """Thumbnails (n, S, S, 3) of some images."""
    shown = [thumbnail(images.read(int(i)), CLUSTER_THUMBNAIL) for i in rows]
    return np.stack(shown) if shown else np.zeros((0, 0, 0, 3), dtype=np.uint8)
