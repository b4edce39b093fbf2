"""Outputs of three classes, two of them split in two clusters on opposite sides."""

from __future__ import annotations

import numpy as np

from maple.types import Outputs

CENTRES = np.array([[6, 0, 0, 0], [-6, 0, 0, 0], [0, 8, 0, 0], [0, 0, 7, 0], [0, 0, -7, 5]], dtype=float)
CLUSTER_TO_CLASS = np.array([0, 0, 1, 2, 2])  # classes 0 and 2 have two clusters each


def split_classes(rng: np.random.Generator) -> Outputs:
    """Three classes, two of them split in two clusters on opposite sides."""
    cluster_ids = rng.permutation(np.repeat(np.arange(5), [60, 80, 100, 70, 90]))
    embeddings = (rng.normal(size=(400, 4)) + CENTRES[cluster_ids]) @ rng.normal(size=(4, 6))
    return Outputs(
        embeddings=embeddings.astype(np.float32),
        labels=CLUSTER_TO_CLASS[cluster_ids],
        cluster_ids=cluster_ids,
        cluster_to_class=CLUSTER_TO_CLASS,
    )


def in_batches(outputs: Outputs, size: int = 64):
    return (outputs[start : start + size] for start in range(0, len(outputs), size))
