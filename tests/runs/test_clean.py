"""Probable wrong labels of a run: those of its own images, and those planted in others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import flat, read_rows, run
from maple.data.sources import open_images
from maple.data.splits import load_splits
from maple.decisions.labels import judge_labels
from maple.files import RunFile
from maple.prediction.store import load_predictor
from maple.runs.clean import clean_run
from maple.runs.requests import CleanRequest
from updating import read_digits, train_nine


@pytest.fixture(scope="module")
def nine(tmp_path_factory) -> Path:
    return train_nine(tmp_path_factory.mktemp("runs") / "nine")


def test_every_image_of_the_run_is_listed_once(nine, tmp_path):
    found = clean_run(CleanRequest(nine, tmp_path / "labels.csv"))
    rows, digits = read_rows(tmp_path / "labels.csv"), open_images("digits")
    known = {digits.files[i] for i in np.flatnonzero(digits.labels < 9)}
    assert sorted(row["file"] for row in rows) == sorted(known) and sum(found.images.values()) == len(known)
    assert list(rows[0]) == [
        "file", "label", "is_label_issue", "label_quality", "predicted_label", "probability", "split",
    ]  # fmt: skip
    of_test = {row["file"] for row in rows if row["split"] == "test"}
    assert of_test == {file for file in load_splits("digits").test.files if file in known}
    order = [(row["is_label_issue"] == "False", float(row["label_quality"])) for row in rows]
    assert order == sorted(order) and sum(found.issues.values()) == sum(not right for right, _ in order)
    assert all(row["label"] != row["predicted_label"] for row in rows if row["is_label_issue"] == "True")
    predictor = load_predictor(nine)
    predicted = dict(zip(digits.files, predictor(digits).probabilities.max(axis=1)))
    for row in (row for row in rows if row["is_label_issue"] == "False"):
        assert float(row["probability"]) == pytest.approx(predicted[row["file"]], abs=1e-6)


def test_the_report_judges_test_images_as_clean_does(nine, tmp_path):
    clean_run(CleanRequest(nine, tmp_path / "labels.csv"))
    wide = {row["file"]: row for row in read_rows(tmp_path / "labels.csv") if row["split"] == "test"}
    rows = read_rows(nine / RunFile.LABELS)
    assert {row["file"] for row in rows} == wide.keys() and {row["split"] for row in rows} == {"test"}
    for row in rows:  # thresholds are those of the test images alone, probabilities the same
        assert row["label"] == wide[row["file"]]["label"]
        assert float(row["label_quality"]) == pytest.approx(float(wide[row["file"]]["label_quality"]), abs=1e-6)


def test_planted_errors_come_first(nine, tmp_path, capsys, rng):
    images = read_digits()["more"]
    wrong = rng.random(len(images)) < 0.1
    labels = np.where(wrong, (images.labels + 1 + rng.integers(0, 8, len(images))) % 9, images.labels)
    np.savez(tmp_path / "more.npz", images=images.pixels, labels=np.array(images.class_names)[labels])
    out = tmp_path / "issues.csv"
    assert run("clean", nine, "--data", tmp_path / "more.npz", "--out", out, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    rows = read_rows(out)
    listed = {int(row["file"].partition("#")[2]) for row in rows if row["is_label_issue"] == "True"}
    planted = {*np.flatnonzero(wrong).tolist()}
    assert said["issues"] == {"given": len(listed)} and len(planted) > 5
    assert len(listed & planted) > 0.7 * len(planted) and len(listed - planted) < 0.1 * len(images)


def test_wrong_requests_are_refused(nine, tmp_path, capsys):
    assert run("clean", nine, "--out", tmp_path / "labels.txt") == 2
    assert "--out" in flat(capsys.readouterr().err)
    assert run("clean", nine, "--data", tmp_path / "nowhere") == 2
    assert run("clean", tmp_path / "no-run", "--out", tmp_path / "labels.csv") == 1
    assert not (tmp_path / "labels.csv").exists()


def test_images_that_are_gone_are_replaced_by_an_option_that_exists(nine, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(nine, copy)
    config = copy / "config.toml"
    config.write_text(config.read_text().replace('source = "', f'source = "{tmp_path}/gone/'))
    assert run("clean", copy, "--out", tmp_path / "labels.csv") == 1
    said = flat(capsys.readouterr().err)
    assert "--data" in said and "--ind" not in said
    assert run("evaluate", copy) == 1
    assert "--ind" in flat(capsys.readouterr().err)
    assert run("evaluate", copy, "--detector", "energy", "--ind", "digits") == 1  # which needs the training images
    said = flat(capsys.readouterr().err)
    assert "--data-root" in said and "--ind" not in said


def test_the_list_that_the_labels_come_from_is_not_replaced(nine, tmp_path, capsys, monkeypatch):
    """Neither that of --data, nor the one that the run was trained on, however it is spelt."""
    monkeypatch.chdir(tmp_path)
    listed = tmp_path / "labels.csv"
    listed.write_text("file,label\na.png,1\n")
    assert run("clean", nine, "--data", listed) == 2
    copied = shutil.copytree(nine, tmp_path / "of-a-list")
    config = (copied / "config.toml").read_text().replace('source = "digits"', f'source = "{listed}"')
    (copied / "config.toml").write_text(config)
    assert run("clean", copied) == 2
    assert flat(capsys.readouterr().err).count("--out") > 1 and listed.read_text() == "file,label\na.png,1\n"


def test_training_images_are_judged_apart_from_the_others(nine, tmp_path, monkeypatch):
    """By thresholds of their own: the network is surer of images that it has learned."""
    groups = []

    def judge(*arguments):
        groups.append(len(arguments[1]))
        return judge_labels(*arguments)

    monkeypatch.setattr("maple.runs.clean.judge_labels", judge)
    found = clean_run(CleanRequest(nine, tmp_path / "labels.csv"))
    n_train = found.images["train"]
    assert groups == [n_train, sum(found.images.values()) - n_train]
