"""Parity of an exported graph with its predictor: NumPy is the reference, every output has a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.special import chdtr, chdtrc

from maple.decisions.conformal import conformal_threshold
from maple.decisions.pool import raise_odds
from maple.deploy.graph import OUTPUTS
from maple.errors import RunError
from maple.networks import embed
from maple.prediction.predictor import Predictor
from maple.types import Prediction

CHECK_IMAGES = 256  # at most
NOISE_IMAGES = 16  # far from all training images
CHECK_BATCH = 64

# Tolerances of rounding errors; for ties, see _differences.
TOLERANCES = {
    "squared_distance": 1e-4,  # relative
    "probabilities": 1e-4,
    "typicality": 1e-6,  # against SciPy, at the graph's own squared distance
    "uncertainty": 1e-6,
    "score": 5e-3,  # relative: the fused score may be steep
    "position": 1e-3,  # relative
    "p_value": 1e-9,  # at the graph's own score
    "class_id": 2e-4,  # probability by which the graph's class may fall short of the best
    "cluster": 2e-4,  # relative squared distance by which the graph's cluster may exceed the nearest
    "md_class_id": 0.0,
    "softmax_class_id": 2e-4,
    "is_ood": 0.0,  # decisions that differ although the score is not within DECISION_BAND of the threshold
    "batch": 1e-4,  # relative: squared distance of one image alone against that in a batch
}
DECISION_BAND = 1e-4  # relative

CHECK_LEVELS = (0.01, 0.1, 0.5)

Run = Callable[[np.ndarray], dict[str, np.ndarray]]  # images (N, S, S, 3) uint8 to outputs by name
RunAt = Callable[[np.ndarray, float], dict[str, np.ndarray]]  # the same at a false-alarm level


def check_parity(predictor: Predictor, run: Run, pixels: np.ndarray) -> dict[str, float]:
    """The largest difference of each output between a graph and its predictor on images (N, S, S, 3) uint8.

    A difference above its tolerance is a :class:`RunError`.
    """
    batches = [run(pixels[start : start + CHECK_BATCH]) for start in range(0, len(pixels), CHECK_BATCH)]
    said = {name: np.concatenate([batch[name] for batch in batches]) for name in OUTPUTS}
    alone = float(run(pixels[:1])["squared_distance"][0])
    together = float(said["squared_distance"][0])
    found = _differences(predictor, said, pixels) | {"batch": abs(alone - together) / max(together, 1.0)}
    for name, difference in found.items():
        if not difference <= TOLERANCES[name]:  # NaN is not
            raise RunError(
                f"the exported graph and the run differ in '{name}' by {difference:.2g}, more than "
                f"{TOLERANCES[name]:g} ({len(pixels)} images): no file was written; predict with the run "
                "itself, or fit it with fewer components (--explained-variance 0.9) to reduce rounding errors"
            )
    return found


def check_levels(predictor: Predictor, run: RunAt, pixels: np.ndarray) -> None:
    """Raise :class:`RunError` if a graph decides otherwise than its predictor at other false-alarm levels.

    The groups of calibration images are those of the decision, at every level.
    """
    decision = predictor.decision
    for level in CHECK_LEVELS:
        limits = [conformal_threshold(group, level, decision.confidence) for group in decision.group_scores]
        said = run(pixels, level)
        thresholds = np.array(limits)[decision.group_of_class[said["class_id"]]]  # (N,)
        if not np.array_equal(said["is_ood"], said["score"] > thresholds):
            raise RunError(
                f"the exported graph and the run decide otherwise at a false-alarm level of {level:g} ({len(pixels)} "
                "images): no file was written; predict with the run itself"
            )


def _differences(predictor: Predictor, said: Mapping[str, np.ndarray], pixels: np.ndarray) -> dict[str, float]:
    """The differences that :func:`check_parity` compares with ``TOLERANCES``.

    Tail, p-value and decision are compared at the graph's own squared distance and score, because they may be steep
    there; probabilities are raised for the graph's own class. If two classes or clusters are nearly equal, either is
    accepted: the difference is by how much the graph's choice is worse.
    """
    found = predictor.detector.describe(embed(predictor.backbone, pixels, cluster_to_class=predictor.cluster_to_class))
    expected = predictor.predict_described(found)
    rows, decision = np.arange(len(pixels)), predictor.decision
    own = said["score"], said["class_id"]
    degrees, squared = found.degrees_of_freedom, said["squared_distance"]
    before = predictor.probability.log_pooled(found)  # (N, C)
    probabilities = np.exp(raise_odds(before, predictor.probability.odds_exponent, said["class_id"]))
    p_values = decision.p_values(*own)
    shortfall = {
        "class_id": np.exp(before.max(axis=1)) - np.exp(before[rows, said["class_id"]]),
        "cluster": _relative(found.squared_distances[rows, said["cluster"]], expected.squared_distance),
    }
    if found.logits is None:
        shortfall["softmax_class_id"] = (said["softmax_class_id"] != said["md_class_id"]).astype(float)
    else:
        network = predictor.probability.network_probabilities(found)  # (N, C)
        shortfall["softmax_class_id"] = network.max(axis=1) - network[rows, said["softmax_class_id"]]
    differences = {
        "squared_distance": _relative(squared, expected.squared_distance),
        "probabilities": np.maximum(
            np.abs(said["probabilities"] - probabilities), np.abs(np.exp(said["log_probabilities"]) - probabilities)
        ),
        "typicality": np.abs(said["typicality"] - chdtrc(degrees, squared)),
        "uncertainty": np.abs(said["uncertainty"] - chdtr(degrees, squared)),
        "score": _relative(said["score"], expected.score),
        "position": _relative(said["position"], found.position),
        "p_value": np.where(np.isnan(p_values), ~np.isnan(said["p_value"]), np.abs(said["p_value"] - p_values)),
        "md_class_id": (said["md_class_id"] != found.cluster_to_class[said["cluster"]]).astype(float),
        "is_ood": (said["is_ood"] != decision.is_ood(*own)) | _decided_otherwise(predictor, said, expected),
        **shortfall,
    }
    return {name: float(np.max(each)) for name, each in differences.items()}


def _relative(said: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Differences relative to the expected values; absolute if those are below 1."""
    return np.abs(said - expected) / np.maximum(np.abs(expected), 1.0)


def _decided_otherwise(predictor: Predictor, said: Mapping[str, np.ndarray], expected: Prediction) -> np.ndarray:
    """Images (N,) of the same class with another decision although their score is not at the threshold."""
    thresholds = predictor.decision.thresholds[expected.class_id]
    with np.errstate(invalid="ignore"):  # of infinite thresholds
        near = np.abs(expected.score - thresholds) <= DECISION_BAND * np.maximum(np.abs(thresholds), 1.0)
    near &= np.isfinite(thresholds)
    return (said["is_ood"] != expected.is_ood) & (said["class_id"] == expected.class_id) & ~near


def check_images(check: np.ndarray | None, size: int) -> np.ndarray:
    """The images of the check, and a few of noise."""
    noise = noise_images(NOISE_IMAGES, size)
    return noise if check is None else np.concatenate([check[:CHECK_IMAGES], noise])


def noise_images(n: int, size: int) -> np.ndarray:
    """Random images (n, S, S, 3) uint8."""
    return np.random.default_rng(0).integers(0, 256, (n, size, size, 3), dtype=np.uint8)
