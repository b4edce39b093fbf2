"""The contract of predictors: batches and progress, decisions at any level, prediction sets; the runtime is a stub."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maple.data.image_set import ImageSet
from maple.decisions.calibration import Calibration
from maple.decisions.conformal import conformal_threshold
from maple.decisions.options import DecisionOptions
from maple.errors import DataError, UsageError
from maple.prediction.base import BasePredictor
from maple.types import Prediction

NAMES = ("dark", "bright")


class Brightness(BasePredictor):
    """The class is the half of the grey scale, the score the distance of the mean grey level from the middle."""

    runtime = "numpy"
    network = "brightness"
    score_name = "grey"
    cluster_to_class = np.arange(2)
    map_centroids = np.array([[-1.0, 0.0], [1.0, 0.0]])
    map_radius = None

    def predict_pixels(self, pixels: np.ndarray) -> Prediction:
        grey = pixels.mean(axis=(1, 2, 3)) / 255
        class_id = (grey > 0.5).astype(np.int64)
        logs = np.log(np.stack([1 - grey, grey], axis=1).clip(1e-9))
        typical = np.ones(len(grey))
        return self._decided(
            class_id=class_id,
            probability=np.exp(logs.max(axis=1)),
            typicality=typical,
            uncertainty=1 - typical,
            score=np.abs(grey - 0.5),
            cluster=class_id,
            md_class_id=class_id,
            softmax_class_id=class_id,
            log_probabilities=logs,
            squared_distance=grey,
        )

    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        return self.predict_pixels(pixels), np.ones(len(pixels), dtype=bool)

    def _predict_rows(self, images: ImageSet, batch_size: int, indices: Any, workers: int) -> Iterator[Prediction]:
        assert images.pixels is not None
        rows = np.arange(len(images)) if indices is None else np.asarray(indices)
        return (self.predict_pixels(images.pixels[rows[i : i + batch_size]]) for i in range(0, len(rows), batch_size))


@pytest.fixture
def images(rng: np.random.Generator) -> ImageSet:
    grey = rng.integers(0, 256, (23, 1, 1, 1))
    return ImageSet.from_arrays(np.broadcast_to(grey, (23, 4, 4, 3)).astype(np.uint8))


def calibration(n: int, seed: int = 0) -> Calibration:
    rng = np.random.default_rng(seed)
    return Calibration(rng.random(n) / 2, rng.integers(0, 2, n), 2, rng.exponential(size=n))


def test_every_runtime_fills_the_same_holes():
    with pytest.raises(TypeError, match="predict_pixels"):
        BasePredictor(NAMES, size=4)
    predictor = Brightness(NAMES, size=4)
    assert predictor.class_names == NAMES and predictor.fit == "pad" and predictor.options == DecisionOptions()


def test_without_calibration_nothing_is_flagged(images):
    predictor = Brightness(NAMES, size=4)
    said = predictor.predict_pixels(images.pixels)
    assert np.isnan(said.p_value).all() and not said.is_ood.any() and said.class_names == NAMES
    assert predictor.threshold == math.inf and len(predictor.calibration_scores) == 0
    assert "not calibrated" in predictor._summary()
    with pytest.raises(DataError, match="labels"):
        predictor.prediction_sets(said, 0.9)


@settings(max_examples=25, deadline=None)
@given(
    batch_size=st.integers(1, 40),
    indices=st.none() | st.lists(st.integers(0, 22), max_size=30),
)
def test_batches_add_up_to_the_whole_and_progress_counts_them(batch_size, indices):
    grey = np.random.default_rng(1).integers(0, 256, (23, 1, 1, 1))
    images = ImageSet.from_arrays(np.broadcast_to(grey, (23, 4, 4, 3)).astype(np.uint8))
    predictor, seen = Brightness(NAMES, size=4, calibration=calibration(50)), []
    parts = list(
        predictor.predict_batches(
            images, batch_size=batch_size, indices=indices, progress=lambda *count: seen.append(count)
        )
    )
    rows = np.arange(23) if indices is None else np.array(indices, dtype=int)
    whole = predictor.predict_pixels(images.pixels[rows])
    for column in ("score", "p_value", "is_ood", "class_id"):
        joined = np.concatenate([np.empty(0), *(getattr(part, column) for part in parts)])
        np.testing.assert_array_equal(joined, getattr(whole, column), err_msg=column)
    assert seen == [(min((i + 1) * batch_size, len(rows)), len(rows)) for i in range(len(parts))]


def test_decisions_follow_from_calibration_and_options(images):
    held = calibration(200)
    predictor = Brightness(NAMES, size=4, calibration=held, options=DecisionOptions(false_alarm=0.1))
    assert predictor.false_alarm == 0.1 and predictor.threshold == conformal_threshold(held.scores, 0.1)
    np.testing.assert_array_equal(predictor.calibration_scores, np.sort(held.scores))
    said = predictor.predict_pixels(images.pixels)
    np.testing.assert_array_equal(said.is_ood, said.p_value <= 0.1)
    assert predictor.decide(confidence=0.9) is predictor
    assert predictor.options == DecisionOptions(false_alarm=0.1, confidence=0.9)  # other options stay
    assert predictor.threshold == conformal_threshold(held.scores, 0.1, 0.9)


def test_thresholds_of_classes_have_no_common_value():
    predictor = Brightness(NAMES, size=4, calibration=calibration(1000)).decide(per_class=True)
    assert predictor.decision.n_own_thresholds == 2 and math.isnan(predictor.threshold)


def test_a_wrong_level_leaves_the_predictor_as_it_is():
    predictor = Brightness(NAMES, size=4, calibration=calibration(100))
    before = predictor.decision
    for wrong in ({"false_alarm": 0.0}, {"confidence": 2}, {"false_alarms": 0.1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            predictor.decide(**wrong)
    assert predictor.decision is before and predictor.options == DecisionOptions()


def test_prediction_sets_hold_the_most_probable_class(images):
    predictor = Brightness(NAMES, size=4, calibration=calibration(100))
    said = predictor.predict_pixels(images.pixels)
    narrow, wide = (predictor.prediction_sets(said, coverage) for coverage in (0.1, 0.99))
    assert (narrow <= wide).all() and narrow[np.arange(23), said.class_id].all() and not narrow.all()
