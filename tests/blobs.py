"""Gaussian blobs with known classes and a predictor fitted on them: evaluation without a network."""

from __future__ import annotations

import numpy as np

from maple.decisions.options import DecisionOptions
from maple.decisions.probability import Probability
from maple.detectors.maple import MapleDetector
from maple.prediction.predictor import Predictor
from maple.types import Outputs

# Class 1 has two clusters, and its columns are not next to each other: clusters are not classes.
CLUSTER_TO_CLASS = np.array([0, 1, 2, 1])
CENTRES = 4.0 * np.array([[1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]])
NAMES = ("ash", "birch", "cedar")


class NoNetwork:
    """A backbone that must not be touched."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"evaluation reached for the backbone's {name}")


def blobs(seed: int, n: int = 600) -> Outputs:
    """Images of four Gaussian clusters in three classes, with noisy logits."""
    rng = np.random.default_rng(seed)
    cluster_ids = rng.integers(0, 4, n)
    embeddings = CENTRES[cluster_ids] + rng.normal(size=(n, 6))
    logits = embeddings[:, :4] + rng.normal(0, 1.5, size=(n, 4))
    return Outputs(
        embeddings.astype(np.float32),
        logits.astype(np.float32),
        CLUSTER_TO_CLASS[cluster_ids],
        cluster_ids,
        CLUSTER_TO_CLASS,
    )


def unknown(seed: int, shift: float, n: int = 300) -> Outputs:
    """Images of none of the clusters."""
    rng = np.random.default_rng(seed)
    embeddings = shift * np.array([0, 0, 0, 0, 1.0, 1.0]) + rng.normal(size=(n, 6))
    logits = embeddings[:, :4] + rng.normal(0, 1.5, size=(n, 4))
    return Outputs(embeddings.astype(np.float32), logits.astype(np.float32), cluster_to_class=CLUSTER_TO_CLASS)


def make_predictor(calibrated: bool = True) -> Predictor:
    detector = MapleDetector(norm_exponent=0.0, explained_variance=1.0).fit(blobs(0, 4000))
    options = DecisionOptions(false_alarm=0.1)
    predictor = Predictor(NoNetwork(), detector, NAMES, size=8, probability=Probability(1.3), options=options)
    return predictor.calibrate(blobs(1, 1000)) if calibrated else predictor
