"""Hard classes by their validation errors."""

from __future__ import annotations

import numpy as np
from sklearn.metrics import recall_score

from maple.training.hard_classes import false_negative_ratios, find_hard_classes


def test_false_negative_ratio_is_one_minus_recall(rng):
    labels, predicted = rng.integers(0, 4, 200), rng.integers(0, 4, 200)
    expected = 1 - recall_score(labels, predicted, average=None)
    np.testing.assert_allclose(false_negative_ratios(predicted, labels, 4), expected)


def test_class_without_validation_images_is_never_hard():
    predicted, labels = np.array([1, 0]), np.array([0, 0])
    assert find_hard_classes(predicted, labels, 3, 0.3).tolist() == [0]


def test_threshold_is_exclusive():
    predicted, labels = np.array([0, 1]), np.array([0, 0])
    assert find_hard_classes(predicted, labels, 2, 0.5).tolist() == []
