"""Formats of run files: the present version, and the steps that turn files of earlier versions into it.

Every file of a run carries the version that it was written in. A version is raised where software that does not know it
would read the file wrongly; what is only added and may be ignored keeps it. Files of later versions are refused. Files
of earlier versions are brought forward when they are read, one version at a time, and never changed on disk: each step
below is history and stays as it is.

====== =========================================================================================================
format what changed
====== =========================================================================================================
1      the first
2      moments by exponent of the norm, one record of calibration scores with predicted classes, a decision
3      a score says how it counts its parts; probabilities have shares of the network and of class frequencies
====== =========================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

FORMAT_VERSION = 3
OLDEST_FORMAT = 1


class Content(NamedTuple):
    """What a file holds: metadata, or the sections of ``config.toml``, and arrays where it has any."""

    metadata: dict[str, Any]
    arrays: dict[str, np.ndarray]


def bring_forward(name: str, found: int, content: Content) -> Content:
    """The content of the file ``name``, written in format ``found``, as the present version would have written it.

    >>> old = Content({"detector": {"score": "fused"}}, {})
    >>> sorted(bring_forward("detector.safetensors", 2, old).metadata["detector"]["parts"])
    ['distance', 'energy', 'shallow', 'spread']
    """
    for version in range(found, FORMAT_VERSION):
        step = _STEPS.get((version, name))
        content = content if step is None else step(content)
    return content


# --- from 1 to 2 ------------------------------------------------------------------------------------------------------


def _detector_from_1(content: Content) -> Content:
    """Moments of one exponent; calibration scores without classes, which therefore share one threshold."""
    metadata, arrays = content
    state = metadata["detector"]
    exponent = float(state["norm_exponent"])
    moments = {name: array for name, array in arrays.items() if name.startswith("moments.")}
    scores = arrays["calibration_scores"]
    added = {
        **{name.replace("moments.", f"moments.{exponent:g}."): array for name, array in moments.items()},
        "gaussians.norm_exponent": np.array([exponent]),
        "gaussians.float32": np.array([state["float32"]]),
        "calibration.scores": scores,
        "calibration.class_ids": np.zeros(len(scores), dtype=np.int64),
        "calibration.n_classes": np.array([len(metadata["class_names"])]),
        "calibration.set_scores": np.empty(0),
    }
    kept = {name: array for name, array in arrays.items() if name not in moments and name != "calibration_scores"}
    score = "normalised" if exponent else "distance"
    options = {**state["options"], "score_by": score}
    decision = {"false_alarm": metadata["false_alarm"], "confidence": None, "per_class": False}
    detector = {"detector": state["detector"], "options": options, "exponent": exponent, "score": score, "appended": 0}
    probability = {"network_weight": 0.0, "softmax_temperature": 1.0, "class_rule": "sum"}
    return Content({**metadata, **probability, "detector": detector, "options": decision}, kept | added)


def _weights_from_1(content: Content) -> Content:
    """Numbers were arrays of one number."""
    arrays = {
        name: array.reshape(()) if name.endswith("num_batches_tracked") else array
        for name, array in content.arrays.items()
    }
    return Content({"made_by": None, "origin": None, **content.metadata}, arrays)


def _config_from_1(content: Content) -> Content:
    """Two switches of the recipe became recipes of their own names; mining was always batch-hard."""
    sections = dict(content.metadata)
    if "recipe" in sections:
        switches = ("triplet", "clustering")
        kept = {name: value for name, value in sections["recipe"].items() if name not in switches}
        sections["recipe"] = {"triplet_softness": 0.0, "prototype_weight": 0.0, **kept}
    return Content(sections, {})


# --- from 2 to 3 ------------------------------------------------------------------------------------------------------


def _detector_from_2(content: Content) -> Content:
    """Files written just before format 3 have some of these values already."""
    metadata = dict(content.metadata)
    state = {"parts": {"energy": [1.0, 0.0], "spread": [1.0, 0.0], "shallow": [0.5, 0.0], "distance": [1.0, 7.0]}}
    metadata["detector"] = state | metadata["detector"]
    probability = {"odds_exponent": 1.0, "gaussian_weight": 1.0, "prior_weight": 0.0, "frequency_share": 0.0}
    return Content(probability | metadata, content.arrays)


_STEPS: dict[tuple[int, str], Callable[[Content], Content]] = {
    (1, "detector.safetensors"): _detector_from_1,
    (1, "weights.safetensors"): _weights_from_1,
    (1, "config.toml"): _config_from_1,
    (2, "detector.safetensors"): _detector_from_2,
}
