"""The summary: right numbers, defeats included, and a remedy for a threshold that is never reached."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from maple.files import RunFile, save_json
from maple.reporting.predictions import read_predictions
from maple.reporting.record import read_run
from maple.reporting.summary import summarise
from maple.text import percent
from run_folders import change_results, write_predictions


def test_sentences(run: Path) -> None:
    record = read_run(run)
    assert record.results is not None
    training, accuracy, detection = summarise(record).sentences
    for figure in ("10 classes", "20 clusters", "899 images"):
        assert figure in training
    maple = record.results.methods["maple"]
    assert maple.classification is not None
    assert percent(maple.classification.accuracy) in accuracy and "898 test images" in accuracy
    assert percent(record.results.false_alarm) in detection
    ours, theirs = detection.split("softmax")
    assert f"{percent(maple.detection['near'].flagged)} of near" in ours and "%" in theirs


def test_key_figures(run: Path) -> None:
    record = read_run(run)
    figures = {figure.name: figure for figure in summarise(record).figures}
    assert list(figures) == ["accuracy", "calibration error", "of near detected", "of far detected", "false alarms"]
    assert figures["accuracy"].note.startswith("softmax ")


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
    worse = replace(results.methods["maple"].detection["near"], auroc=0.4)
    maple = replace(results.methods["maple"], detection=results.methods["maple"].detection | {"near": worse})
    change_results(copied, methods=results.methods | {"maple": maple})
    pointers = [pointer.text for pointer in summarise(read_run(copied)).pointers if pointer.anchor == "unknown"]
    assert len(pointers) == 1 and "near" in pointers[0] and "far" not in pointers[0]


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
    assert list(pointers) == ["predictions", "confusion", "unknown", "clusters", "images", "skipped"]
    assert "5 of 30" in pointers["predictions"] and "nine" in pointers["confusion"] and "2 files" in pointers["skipped"]
    assert "zero, one, two and 7 more" in pointers["clusters"]
