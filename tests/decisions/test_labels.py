"""Confident learning: thresholds per class, and which labels are issues."""

from __future__ import annotations

import numpy as np
import pytest

from maple.decisions.labels import (
    JudgedLabel,
    class_thresholds,
    find_label_issues,
    judge_labels,
    labels_csv,
    read_labels,
)
from maple.errors import RunError


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


def test_the_predicted_label_is_the_confident_or_the_most_probable_one():
    """The last image is no issue, since no class is confident; its label is still not what the model says."""
    p = np.array([[0.9, 0.1, 0.0], [0.1, 0.9, 0.0], [0.0, 0.1, 0.9], [0.1, 0.85, 0.05], [0.2, 0.35, 0.45]])
    judged = judge_labels(p, np.array([0, 1, 2, 0, 1]), ["a", "b", "c"], [("test", f"{i}.png") for i in range(5)])
    assert [each.is_label_issue for each in judged] == [False, False, False, True, False]
    assert [(each.predicted_label, each.probability) for each in judged[3:]] == [("b", 0.85), ("c", 0.45)]


def test_the_list_has_issues_first_and_is_read_again(tmp_path):
    p = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.05, 0.95], [0.2, 0.8], [0.2, 0.8]])
    files = [("test", f"{i}.png") for i in range(6)]
    judged = judge_labels(p, np.array([0, 0, 1, 0, 0, 1]), ["cat", "dog"], files)
    assert [each.is_label_issue for each in judged] == [False, False, False, True, False, False]
    assert judged[3] == JudgedLabel("3.png", "cat", True, 0.05, "dog", 0.95, "test")
    path = tmp_path / "labels.csv"
    path.write_text(labels_csv(judged), encoding="utf-8")
    found = read_labels(path)
    assert [each.file for each in found] == ["3.png", "4.png", "1.png", "5.png", "0.png", "2.png"]
    assert sorted(found, key=lambda each: each.file) == judged


@pytest.mark.parametrize(
    "content", ["file,label\na.png,cat\n", "file,label,is_label_issue,label_quality\na,b,True,?\n"]
)
def test_a_damaged_list_is_named(tmp_path, content):
    (tmp_path / "labels.csv").write_text(content, encoding="utf-8")
    with pytest.raises(RunError, match=r"labels\.csv"):
        read_labels(tmp_path / "labels.csv")


@pytest.mark.parametrize("n", [3, 5, 7, 10])
def test_equal_images_are_as_confident_as_their_class(n):
    """The mean of n equal probabilities may be rounded up: none of them is then below its own threshold."""
    for percent in range(51, 100):
        sure = percent / 100
        p = np.array([[sure, 1 - sure]] * n + [[(1 + sure) / 2, (1 - sure) / 2]])  # the other class takes little
        issues, confident = find_label_issues(p, np.array([0] * n + [1]))
        assert not issues[:n].any() and not confident[:n].any()
