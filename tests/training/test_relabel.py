"""Pseudo-labels: when they change, and what follows."""

from __future__ import annotations

import numpy as np
import pytest

from maple.training.relabel import changed_classes
from maple.types import Relabelling


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
