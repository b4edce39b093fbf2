"""Gaussian clusters with known answers, for the tests of moments, Gaussians and clustering."""

from __future__ import annotations

import numpy as np

from maple.stats.moments import Moments


def correlated_blobs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Four correlated clusters in 6 dimensions with different scales per feature, and their labels."""
    labels = rng.permutation(np.repeat(np.arange(4), [100, 150, 200, 350]))
    mixing = rng.normal(size=(6, 6)) * np.array([1, 10, 0.1, 3, 1, 5])
    embeddings = (rng.normal(size=(800, 6)) + 2 * rng.normal(size=(4, 6))[labels]) @ mixing + 7
    return embeddings, labels


def spherical_blobs(centers: np.ndarray, sizes: list[int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Points of spherical Gaussians of variance 1, shuffled, and the Gaussian that each came from."""
    origins = rng.permutation(np.repeat(np.arange(len(centers)), sizes))
    return centers[origins] + rng.standard_normal((len(origins), centers.shape[1])), origins


def moments_of(embeddings, labels, **options) -> Moments:
    return Moments(int(labels.max()) + 1, embeddings.shape[1], **options).update(embeddings, labels)


def within_covariance(embeddings: np.ndarray, labels: np.ndarray) -> np.ndarray:
    centred = embeddings - np.stack([embeddings[labels == c].mean(axis=0) for c in range(labels.max() + 1)])[labels]
    return centred.T @ centred / len(embeddings)
