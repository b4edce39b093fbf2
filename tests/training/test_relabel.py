"""Hard classes, and which classes a relabelling changed."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import recall_score

from maple.training.hard_classes import false_negative_ratios, find_hard_classes
from maple.training.relabel import changed_classes
from maple.types import Relabelling


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


def regrouped(cluster_ids, cluster_to_class):
    mapping = np.array(cluster_to_class)
    return Relabelling(np.array(cluster_ids), mapping, np.arange(len(mapping)), np.ones(len(mapping)))


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        (regrouped([0, 0, 1, 1, 2, 2], [0, 0, 1]), []),
        (regrouped([1, 1, 0, 0, 2, 2], [0, 0, 1]), []),  # other numbers, same clusters
        (regrouped([0, 1, 1, 0, 2, 2], [0, 0, 1]), [0]),  # as many clusters, other members
        (regrouped([0, 0, 1, 1, 2, 3], [0, 0, 1, 1]), [1]),
        (regrouped([0, 0, 0, 0, 1, 2], [0, 1, 1]), [0, 1]),
    ],
)
def test_changed_classes_compare_members(after, changed):
    before = regrouped([0, 0, 1, 1, 2, 2], [0, 0, 1])
    assert changed_classes(before, after).tolist() == changed
