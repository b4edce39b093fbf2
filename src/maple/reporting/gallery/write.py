"""The images and projections that training and evaluation put into a gallery."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.linalg import eigh

from maple.data.image_set import ImageSet
from maple.decisions.attention import look_rank
from maple.decisions.labels import find_label_issues
from maple.errors import DataError, UsageError, suggest
from maple.reporting.gallery import store
from maple.reporting.gallery._sheet import thumbnail
from maple.types import Outputs, Prediction

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
    store.remove_examples(folder)
    if test is not None:
        write_examples(folder, "uncertain", *test)
        write_examples(folder, "mistakes", *test)
        write_examples(folder, "labels", test[0], _say_confident(*test))
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
    _check_rows(images, len(outputs), "outputs")
    cluster_ids, cluster_to_class = _list_clusters(outputs, len(images.class_names))
    n_clusters = len(cluster_to_class)
    limit = max(1, min(per_cluster, store.MAX_EXEMPLARS // n_clusters))
    order = np.argsort(cluster_ids, kind="stable")
    clusters = []
    for cluster, members in enumerate(np.split(order, np.searchsorted(cluster_ids[order], np.arange(1, n_clusters)))):
        if squared_distance is None:
            distance = _distance_to_mean(outputs.embeddings[members])
        else:
            distance = squared_distance[members]
        name = images.class_names[cluster_to_class[cluster]]
        clusters.append(find_exemplars(images, members, distance, cluster, name, limit))
    sizes = np.bincount(cluster_ids, minlength=n_clusters) if cluster_sizes is None else cluster_sizes  # (M,)
    store.save_clusters(folder, count_images(clusters, sizes))


def find_exemplars(
    images: ImageSet,
    rows: np.ndarray,  # (n,)
    distance: np.ndarray,  # (n,)
    cluster: int,
    class_name: str,
    limit: int = EXEMPLARS_PER_CLUSTER,
) -> store.ClusterExemplars:
    """Thumbnails of the images of one cluster that lie nearest to its mean, among ``rows``."""
    nearest = rows[np.argsort(distance, kind="stable")[:limit]]
    files = tuple(images.files[i] for i in nearest)
    return store.ClusterExemplars(cluster, class_name, len(rows), 1.0, files, _thumbnails(images, nearest))


def count_images(clusters: Sequence[store.ClusterExemplars], sizes: np.ndarray) -> list[store.ClusterExemplars]:
    """The clusters with their training images counted; ``sizes`` (M,) are those of all clusters."""
    totals: Counter[str] = Counter()
    for each in clusters:
        totals[each.class_name] += int(sizes[each.cluster])
    return [
        replace(each, count=int(sizes[each.cluster]), share=int(sizes[each.cluster]) / max(1, totals[each.class_name]))
        for each in clusters
    ]


def write_component_gallery(
    folder: Path,
    images: ImageSet,
    coordinates: np.ndarray,  # (N, K)
    spreads: np.ndarray,  # (K,)
) -> None:
    """Store thumbnails of the images at both ends of each component; ``coordinates`` match ``images`` row by row."""
    _check_rows(images, len(coordinates), "coordinates")
    shown = max(1, min(EXEMPLARS_PER_END, store.MAX_EXEMPLARS // (2 * len(spreads)), len(coordinates) // 2))

    def end(along: np.ndarray, rows: np.ndarray) -> store.ComponentEnd:
        names = tuple(images.class_names[images.labels[i]] for i in rows)
        files = tuple(images.files[i] for i in rows)
        return store.ComponentEnd(tuple(along[rows].tolist()), names, files, _thumbnails(images, rows))

    components = []
    for along, spread in zip(coordinates.T, spreads):
        order = np.argsort(along, kind="stable")
        low, high = end(along, order[:shown]), end(along, order[::-1][:shown])
        components.append(store.ComponentExemplars(float(spread), low, high))
    store.save_components(folder, components)


def _list_clusters(outputs: Outputs, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Cluster ids (N,) and the class of each cluster (M,); without cluster ids, each class is one cluster."""
    if outputs.cluster_ids is not None:
        if outputs.cluster_to_class is None:
            raise DataError("outputs with cluster_ids need cluster_to_class: give the class of each cluster")
        return outputs.cluster_ids, outputs.cluster_to_class
    if outputs.labels is None:
        raise DataError("outputs have neither cluster ids nor labels: embed the labelled training images")
    return outputs.labels, np.arange(n_classes)


def _distance_to_mean(embeddings: np.ndarray) -> np.ndarray:
    """Squared Euclidean distance (n,) of each row to the mean of all."""
    if not len(embeddings):
        return np.zeros(0)
    block = embeddings.astype(np.float64)
    return ((block - block.mean(axis=0)) ** 2).sum(axis=1)


def _thumbnails(images: ImageSet, rows: np.ndarray) -> np.ndarray:
    """Thumbnails (n, S, S, 3) of some images."""
    shown = [thumbnail(images.read(int(i)), CLUSTER_THUMBNAIL) for i in rows]
    return np.stack(shown) if shown else np.zeros((0, 0, 0, 3), dtype=np.uint8)


def _check_rows(images: ImageSet, n: int, what: str) -> None:
    if len(images) != n:
        raise DataError(f"{len(images)} images of '{images.name}' but {n} {what}: they must match row by row")


def write_projection(folder: Path, name: str, outputs: Outputs, class_names: Sequence[str] = ()) -> None:
    """Store a sample of the embeddings on their two main axes, with class and cluster ids.

    The report draws the projections named ``before`` and ``after`` side by side.
    """
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise UsageError(f"projection name '{name}': use lower-case letters, digits and underscores")
    labels = np.full(len(outputs), -1, dtype=np.int64) if outputs.labels is None else outputs.labels
    cluster_ids = labels if outputs.cluster_ids is None else outputs.cluster_ids
    sample = np.arange(len(outputs))
    if len(outputs) > MAX_POINTS:
        sample = np.sort(np.random.default_rng(0).choice(len(outputs), MAX_POINTS, replace=False))
    points, explained = main_axes(outputs.embeddings[sample])
    projection = store.Projection(
        name=name,
        points=points.astype(np.float32),
        class_ids=labels[sample].astype(np.int64),
        cluster_ids=cluster_ids[sample].astype(np.int64),
        class_names=tuple(class_names),
        explained=explained,
        n_images=len(outputs),
    )
    store.save_projection(folder, projection)


def main_axes(embeddings: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Coordinates (n, 2) on the two main axes, and the share of the variance along each.

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


def write_examples(
    folder: Path, kind: str, images: ImageSet, prediction: Prediction, *, source: str | None = None
) -> None:
    """Store the first images of ``source`` in the order of one criterion.

    ========== ===================================================================================
    kind       order
    ========== ===================================================================================
    uncertain  in-distribution images: those flagged by increasing p-value, then by increasing probability
    mistakes   in-distribution images given a wrong class, by decreasing probability of that class
    labels     in-distribution images of another class than their label, by increasing probability of the label
    caught     out-of-distribution images by decreasing score
    missed     out-of-distribution images by increasing score
    ========== ===================================================================================
    """
    if kind not in _ORDERS:
        raise UsageError(f"unknown kind of examples '{kind}': {suggest(kind, _ORDERS)}")
    _check_rows(images, len(prediction), "predictions")
    names = prediction.class_names or images.class_names
    chosen = _ORDERS[kind](images, prediction)[:EXAMPLES]
    shown = tuple(
        store.Example(
            file=images.files[i],
            label=images.class_names[images.labels[i]] if images.labels[i] >= 0 else None,
            class_name=names[prediction.class_id[i]],
            probability=float(prediction.probability[i]),
            uncertainty=float(prediction.uncertainty[i]),
            score=float(prediction.score[i]),
            is_ood=bool(prediction.is_ood[i]),
            p_value=float(prediction.p_value[i]),
            thumbnail=thumbnail(images.read(int(i)), EXAMPLE_THUMBNAIL),
        )
        for i in chosen
    )
    store.save_examples(folder, store.Examples(kind, images.name if source is None else source, shown))


def _find_truth(images: ImageSet, prediction: Prediction) -> np.ndarray:
    """The labels (N,) as class ids of the prediction, -1 if unknown; classes are compared by name."""
    names = prediction.class_names or images.class_names
    known = {name: i for i, name in enumerate(names)}
    return np.array([known.get(name, -1) for name in images.class_names] + [-1])[images.labels]


def _find_mistakes(images: ImageSet, prediction: Prediction) -> np.ndarray:
    """Rows of images given a wrong class, most probable first."""
    truth = _find_truth(images, prediction)
    wrong = np.flatnonzero((truth >= 0) & (truth != prediction.class_id))
    return wrong[np.argsort(-prediction.probability[wrong], kind="stable")]


def _find_issues(images: ImageSet, prediction: Prediction) -> np.ndarray:
    """Rows of images given another class than their label, the least probable labels first."""
    truth = _find_truth(images, prediction)
    wrong = np.flatnonzero((truth >= 0) & (truth != prediction.class_id))
    return wrong[np.argsort(prediction.log_probabilities[wrong, truth[wrong]], kind="stable")]


def _say_confident(images: ImageSet, prediction: Prediction) -> Prediction:
    """The prediction with the class that confident learning puts in place of the label."""
    truth = _find_truth(images, prediction)
    rows = np.flatnonzero(truth >= 0)
    class_id = truth.copy()
    class_id[rows] = find_label_issues(prediction.probabilities[rows], truth[rows])[1]
    probability = np.where(truth >= 0, prediction.probabilities[np.arange(len(truth)), class_id], np.nan)
    return replace(prediction, class_id=class_id, probability=probability)


def _look_first(_: ImageSet, prediction: Prediction) -> np.ndarray:
    """All rows, those to look at first."""
    said = (prediction.probability, prediction.is_ood, prediction.p_value, prediction.score)
    ranks = [look_rank(*values) for values in zip(*(each.tolist() for each in said))]
    return np.array(sorted(range(len(ranks)), key=ranks.__getitem__), dtype=np.int64)


_ORDERS: dict[str, Callable[[ImageSet, Prediction], np.ndarray]] = {  # rows by kind of examples, first to last
    "uncertain": _look_first,
    "mistakes": _find_mistakes,
    "labels": _find_issues,
    "caught": lambda _, said: np.argsort(-said.score, kind="stable"),
    "missed": lambda _, said: np.argsort(said.score, kind="stable"),
}
