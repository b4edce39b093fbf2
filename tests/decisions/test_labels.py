"""Confident learning: thresholds per class, and which labels are issues."""

from __future__ import annotations

import numpy as np

from maple.decisions.labels import class_thresholds, find_label_issues


def test_thresholds_are_the_mean_self_confidence_of_each_class():
    p = np.array([[0.6, 0.4, 0.0], [0.8, 0.2, 0.0], [0.3, 0.7, 0.0]])
    assert class_thresholds(p, np.array([0, 0, 1])).tolist() == [0.7, 0.7, np.inf]


def test_the_rule_equals_explicit_loops(rng):
    p = rng.dirichlet(np.full(4, 0.3), 200)
    labels = rng.integers(0, 4, 200)
    thresholds = [p[labels == j, j].mean() for j in range(4)]
    expected, instead = [], []
    for row, label in zip(p, labels):
        confident = [j for j in range(4) if row[j] >= thresholds[j]]
        best = max(confident, key=lambda j: row[j]) if confident else label
        expected.append(best != label)
        instead.append(best)
    issues, found = find_label_issues(p, labels)
    assert issues.tolist() == expected and found.tolist() == instead and 0 < sum(expected) < 200


def test_planted_errors_are_found(rng):
    """A model that is right, but surer of one class than of the other."""
    truth = np.repeat([0, 1], 500)
    sure = np.where(truth == 0, rng.uniform(0.9, 1, 1000), rng.uniform(0.55, 0.75, 1000))
    p = np.stack([np.where(truth == 0, sure, 1 - sure), np.where(truth == 1, sure, 1 - sure)], axis=1)
    wrong = rng.random(1000) < 0.05
    issues, _ = find_label_issues(p, np.where(wrong, 1 - truth, truth))
    assert issues[wrong].mean() > 0.7 and not issues[~wrong].any()
