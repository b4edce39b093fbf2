"""Criteria: against loops, on halves of the validation images."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import maple.runs.tune.criteria as criteria
from maple.data.image_set import ImageSet
from maple.networks import create_backbone, embed
from maple.prediction.fit import fit_predictor
from maple.runs.setup.config import resolve_config
from maple.runs.tune.criteria import halve, judge_run
from maple.training.loop import train_backbone
from maple.training.maple import MapleRecipe


def test_criteria_are_what_loops_say(rng):
    logits = rng.normal(size=(60, 3)) * 2
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    labels = rng.integers(0, 3, size=60)
    scores, distances = rng.normal(size=60), rng.chisquare(5, size=60)
    found = criteria.judge(logs, scores, distances, 5, labels, false_alarm=0.1)

    wrong = [int(np.argmax(row)) != label for row, label in zip(logs, labels)]
    right_scores = sorted((s for s, w in zip(scores, wrong) if not w), reverse=True)
    allowed = math.floor(0.1 * (len(right_scores) + 1)) - 1  # right images above the threshold
    silent = sum(w and s <= right_scores[allowed] for s, w in zip(scores, wrong))
    quantiles = [chi2.ppf((i + 0.5) / 60, 5) for i in range(60)]
    assert found["nll"] == pytest.approx(-sum(row[label] for row, label in zip(logs, labels)) / 60)
    assert found["errors"] == pytest.approx(silent / 60)
    assert found["gaussian"] == pytest.approx(np.mean(np.abs(np.sort(distances) - quantiles)) / 5)
    assert found["accuracy"] == pytest.approx(1 - sum(wrong) / 60)
    assert sum(s > right_scores[allowed] for s in right_scores) <= 0.1 * len(right_scores)


def test_silent_errors_fall_with_fewer_errors_and_with_better_scores():
    ranks = np.arange(100.0)
    few, many = ranks >= 98, ranks >= 80  # wrong images score highest
    assert criteria.silent_errors(ranks, many, 0.05) == 0
    assert criteria.silent_errors(-ranks, many, 0.05) == 0.2 > criteria.silent_errors(-ranks, few, 0.05) == 0.02
    assert criteria.silent_errors(ranks, np.ones(100, dtype=bool), 0.05) == 1, (
        "nothing right, so that nothing is flagged"
    )
    assert criteria.silent_errors(ranks[:10], many[90:], 0.05) == 1, "too few right images to flag any at that rate"


def test_halves_are_balanced_and_keep_copies_together(rng):
    pixels = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    pixels[31:34] = pixels[30]
    labels = np.repeat([0, 1, 2, 3], [20, 9, 10, 1])
    images = ImageSet.from_arrays(pixels, labels)
    one, other = halve(images)
    assert sorted([*one, *other]) == list(range(40))
    assert len({30, 31, 32, 33} & set(one)) in (0, 4)
    for c in (0, 1):
        assert abs(np.sum(labels[one] == c) - np.sum(labels[other] == c)) <= 1
    shuffled = rng.permutation(40)
    again = halve(images.subset(shuffled))[0]
    assert set(shuffled[again]) == set(one), "the order of the images does not matter"


@pytest.fixture(scope="module")
def trained(splits):
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 10)
    options = {"epochs": 3, "batch_size": 64, "learning_rate": 0.03, "show_progress": False}
    return train_backbone(backbone, MapleRecipe(), splits.train, splits.validation, **options)


def test_each_half_is_judged_by_what_the_other_taught(splits, trained):
    config = resolve_config()
    found = judge_run(trained, splits.train, splits.validation, config)
    halves = halve(splits.validation)
    parts = []
    for taught, judged in ((0, 1), (1, 0)):
        predictor = fit_predictor(trained.backbone, splits.train, splits.validation.subset(halves[taught]))
        unseen = splits.validation.subset(halves[judged])
        prediction = predictor.predict_outputs(embed(trained.backbone, unseen))
        truth = prediction.log_probabilities[np.arange(len(unseen)), unseen.labels]
        parts += [(-value, hit) for value, hit in zip(truth, prediction.class_id == unseen.labels)]
    assert found["nll"] == pytest.approx(np.mean([value for value, _ in parts]))
    assert found["accuracy"] == pytest.approx(np.mean([hit for _, hit in parts]))
