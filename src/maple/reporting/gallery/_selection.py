"""Which images a gallery shows, and the two main axes of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import eigh

from maple.errors import DataError
from maple.types import Outputs, Prediction

if TYPE_CHECKING:
    from maple.data.image_set import ImageSet


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


def list_clusters(outputs: Outputs, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Cluster ids (N,) and the class of each cluster (M,); without cluster ids, each class is one cluster."""
    if outputs.cluster_ids is not None:
        if outputs.cluster_to_class is None:
            raise DataError("outputs with cluster_ids need cluster_to_class: give the class of each cluster")
        return outputs.cluster_ids, outputs.cluster_to_class
    if outputs.labels is None:
        raise DataError("outputs have neither cluster ids nor labels: embed the labelled training images")
    return outputs.labels, np.arange(n_classes)


def list_members(cluster_ids: np.ndarray, n_clusters: int) -> Iterator[np.ndarray]:
    """Indices of the images of each cluster, in order."""
    order = np.argsort(cluster_ids, kind="stable")
    return iter(np.split(order, np.searchsorted(cluster_ids[order], np.arange(1, n_clusters))))


def distance_to_mean(embeddings: np.ndarray) -> np.ndarray:
    """Squared Euclidean distance (n,) of each row to the mean of all."""
    if not len(embeddings):
        return np.zeros(0)
    block = embeddings.astype(np.float64)
    return ((block - block.mean(axis=0)) ** 2).sum(axis=1)


def check_rows(images: ImageSet, n: int, what: str) -> None:
    if len(images) != n:
        raise DataError(f"{len(images)} images of '{images.name}' but {n} {what}: they must match row by row")


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


ORDERS: dict[str, Callable[[ImageSet, Prediction], np.ndarray]] = {  # rows by kind of examples, first to last
    "uncertain": _by_uncertainty,
    "mistakes": _by_confident_mistake,
    "caught": _by_score,
    "missed": _by_low_score,
}
