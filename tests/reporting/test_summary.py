"""The summary: right numbers, defeats included, and a remedy for a threshold that is never reached."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from maple.evaluation.results import Gain
from maple.files import RunFile, save_json
from maple.reporting.predictions import read_predictions
from maple.reporting.record import read_run
from maple.reporting.summary import summarise
from maple.text import percent
from run_folders import change_results, write_predictions


def test_sentences(run: Path) -> None:
    record = read_run(run)
    assert record.results is not None
    training, accuracy, comparison, detection = summarise(record).sentences
    for figure in ("10 classes", "20 clusters", "899 images"):
        assert figure in training
    maple = record.results.methods["maple"]
    assert maple.classification is not None
    assert percent(maple.classification.accuracy) in accuracy and "898 test images" in accuracy
    assert "Compared with softmax" in comparison and "AUROC of near" in comparison
    assert percent(record.results.false_alarm) in detection
    ours, theirs = detection.split("softmax")
    assert f"{percent(maple.detection['near'].flagged)} of near" in ours and "%" in theirs


def test_key_figures(run: Path) -> None:
    record = read_run(run)
    figures = {figure.name: figure for figure in summarise(record).figures}
    known, unknown = (
        ["accuracy", "calibration error (ECE)", "negative log-likelihood"],
        ["AUROC of near", "AUROC of far"],
    )
    assert list(figures) == [*known, *unknown, "false alarms"]
    assert figures["accuracy"].note.startswith("softmax ")
    for name in (*known, *unknown):
        verdict, words = figures[name].verdict, figures[name].words
        assert (
            words == {"ahead": "ahead of", "equal": "equal within noise to", "behind": "behind"}[verdict] + " softmax"
        )


def test_the_calibration_error_is_shown_beside_that_of_perfect_calibration(copied: Path) -> None:
    results = change_results(copied)
    maple = results.methods["maple"]
    assert maple.classification is not None
    judged = replace(maple.classification, ece_floor=0.0123)
    change_results(copied, methods=results.methods | {"maple": replace(maple, classification=judged)})
    assert "0.012" in summarise(read_run(copied)).figures[1].note


def test_a_run_that_was_not_evaluated(copied: Path) -> None:
    (copied / RunFile.RESULTS).unlink()
    summary = summarise(read_run(copied))
    assert summary.figures == [] and len(summary.sentences) == 2


def test_a_run_that_is_unfinished(copied: Path) -> None:
    for name in (RunFile.RESULTS, RunFile.CLASSES):
        (copied / name).unlink()
    assert "unfinished" in summarise(read_run(copied)).sentences[0]


def test_a_defeat_is_not_hidden(copied: Path) -> None:
    results = change_results(copied)
    lost = {"accuracy": Gain(-0.1, 0.01), "auroc/near": Gain(-0.1, 0.01), "auroc/far": Gain(-0.1, 0.1)}
    change_results(copied, gains={"softmax": results.gains["softmax"] | lost})
    summary = summarise(read_run(copied))
    pointers = {pointer.anchor: pointer.text for pointer in summary.pointers}
    assert "near" in pointers["unknown"] and "far" not in pointers["unknown"] and "Accuracy" in pointers["results"]
    assert summary.sentences[2].endswith("; behind in accuracy and AUROC of near.")
    assert [figure.verdict for figure in summary.figures if "AUROC" in figure.name] == ["behind", "equal"]


def test_a_threshold_out_of_reach_names_the_remedy(copied: Path) -> None:
    assert not any("--false-alarm" in sentence for sentence in summarise(read_run(copied)).sentences)
    results = change_results(copied)
    few = {"false_alarm": 0.05, "calibration_images": 7}
    change_results(copied, threshold=math.inf, false_alarm=0.0, provenance={**results.provenance, **few})
    last = summarise(read_run(copied)).sentences[-1]
    assert "7 calibration images" in last and "5 %" in last and "--false-alarm" in last


@pytest.mark.parametrize("calibrated", [0, 50])
def test_updates(copied: Path, calibrated: int) -> None:
    classes = json.loads((copied / RunFile.CLASSES).read_text())
    update = {"images": {"ten": 3}, "new_classes": ["ten"], "calibration_images": calibrated}
    save_json(copied / RunFile.CLASSES, classes | {"updates": [update]})
    text = " ".join(summarise(read_run(copied)).sentences)
    assert "3 images" in text and "ten" in text
    assert ("--calibrate" in text) == (not calibrated)


def test_what_to_check(run: Path, tmp_path: Path) -> None:
    predictions = read_predictions(write_predictions(tmp_path / "p.csv"))
    pointers = {pointer.anchor: pointer.text for pointer in summarise(read_run(run), predictions).pointers}
    assert list(pointers) == ["predictions", "confusion", "labels", "clusters", "skipped"]
    assert "5 of 30" in pointers["predictions"] and "nine" in pointers["confusion"] and "2 files" in pointers["skipped"]
    assert "zero, one, two and 7 more" in pointers["clusters"] and "labels of test images" in pointers["labels"]
