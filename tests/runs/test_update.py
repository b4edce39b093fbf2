"""More images and new classes for what is fitted: equal to a fit on all of them, and never wrong silently."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commands import flat
from commands import run as command
from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.data.splits import load_splits
from maple.decisions.conformal import conformal_p_values
from maple.detectors.maple import MapleDetector
from maple.errors import DataError, RunError, UsageError
from maple.evaluation.evaluate import evaluate
from maple.files import load_json
from maple.options import as_dict
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor
from maple.reporting.gallery import read_gallery
from maple.runs.train import TrainRequest, train_run
from maple.runs.update import (
    UpdateRequest,
    cut_calibration,
    join_class_names,
    update_from_outputs,
    update_predictor,
    update_run,
)
from maple.types import Outputs

# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nine(tmp_path_factory) -> Path:
    """A small run on the digits 0 to 8."""
    folder = tmp_path_factory.mktemp("runs") / "nine"
    flags = {"epochs": 2, "batch_size": 64, "relabel_every": 1, "hard_class_error": 0.05, "min_cluster_size": 10}
    train_run(TrainRequest(source="digits", out=folder, flags={**flags, "leave_out": ("9",)}, report=False))
    return folder


@pytest.fixture(scope="module")
def digits() -> dict[str, ImageSet]:
    """Nines to learn from, images of all digits to calibrate with, and others to test; of 0 to 8, as the run cut them.

    Half of the nines are learned from, a quarter calibrates, a quarter tests.
    """
    whole, splits = open_images("digits"), load_splits("digits")
    nines = np.flatnonzero(whole.labels == 9)
    keys = np.concatenate([splits.calibration.keys, splits.validation.keys])
    held = np.flatnonzero(np.isin(whole.keys, keys) & (whole.labels < 9))
    test = np.flatnonzero(np.isin(whole.keys, splits.test.keys) & (whole.labels < 9))
    return {
        "new": whole.subset(nines[:90]),
        "calibrate": whole.subset(np.concatenate([held, nines[90:135]])),
        "test": whole.subset(np.concatenate([test, nines[135:]])),
        "more": whole.subset(test),
    }


def save_npz(path: Path, images: ImageSet) -> str:
    np.savez(path, images=images.pixels, labels=np.array(images.class_names)[images.labels])
    return str(path)


def same_state(one: Predictor, other: Predictor) -> bool:
    a, b = one.detector.get_state()[0], other.detector.get_state()[0]
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_a_new_class_is_recognised_without_retraining(nine, digits, tmp_path):
    before, test = load_predictor(nine), digits["test"]
    untouched = load_predictor(nine)
    old = test.subset(test.labels < 9)
    was = (before(old).class_id == old.labels).mean()
    after = update_predictor(before, digits["new"])
    assert same_state(before, untouched) and before.class_names == tuple("012345678")
    assert after.class_names == tuple("0123456789")
    said = after(test)
    assert (said.class_id[test.labels == 9] == 9).mean() > 0.7
    assert (said.class_id[test.labels < 9] == old.labels).mean() > was - 0.1
    assert (said.softmax_class_id < 9).all()
    np.testing.assert_allclose(said.probabilities.sum(axis=1), 1)
    after.save(tmp_path)
    again = load_predictor(tmp_path)(test)
    for name in ("class_id", "log_probabilities", "score", "p_value", "cluster", "softmax_class_id"):
        np.testing.assert_array_equal(getattr(again, name), getattr(said, name), err_msg=name)


def test_thresholds_are_void_until_images_calibrate_them(nine, digits):
    before = load_predictor(nine)
    assert not np.isnan(before(digits["test"]).p_value).any()
    for images in (digits["new"], digits["more"]):  # of a new class, of known ones
        void = update_predictor(before, images)
        said = void(digits["test"])
        assert len(void.calibration) == 0 and np.isnan(said.p_value).all() and not said.is_ood.any()
        assert void.options == before.options
    validation, calibration = cut_calibration(digits["calibrate"], void.class_names + ("9",))
    after = update_predictor(before, digits["new"], calibration, validation)
    said, scores = after(digits["test"]), after(calibration).score
    np.testing.assert_array_equal(said.p_value, conformal_p_values(said.score, scores))
    np.testing.assert_array_equal(said.is_ood, said.p_value <= 0.05)
    assert said.is_ood.mean() < 0.2  # 5 % on average
    assert after.probability.temperature != before.probability.temperature
    sets = after.prediction_sets(said, 0.9)
    assert sets[np.arange(len(sets)), digits["test"].labels].mean() > 0.8


def test_only_calibrating_keeps_the_gaussians(nine, digits):
    before = load_predictor(nine)
    held = digits["calibrate"].subset(digits["calibrate"].labels < 9)
    validation, calibration = cut_calibration(held, before.class_names)
    assert not np.isin(validation.keys, calibration.keys).any() and len(validation) + len(calibration) == len(held)
    assert set(validation.labels) == set(calibration.labels) == set(range(9))
    after = update_predictor(before, None, calibration, validation)
    np.testing.assert_array_equal(after.detector.gaussians_.matrix, before.detector.gaussians_.matrix)
    assert len(after.calibration) == len(calibration)
    only = update_predictor(before, calibration=calibration)  # temperature and score stay
    assert only.probability == before.probability and same_state(only, before)


def test_updating_with_nothing_changes_nothing(nine, digits):
    before = load_predictor(nine)
    for nothing in (None, digits["new"].subset([])):
        after = update_predictor(before, nothing)
        assert same_state(after, before) and after.class_names == before.class_names
        np.testing.assert_array_equal(after(digits["test"]).p_value, before(digits["test"]).p_value)


def test_two_updates_equal_one(nine, digits):
    before, new = load_predictor(nine), digits["new"]
    once = update_predictor(before, new)
    twice = update_predictor(update_predictor(before, new.subset(np.arange(30))), new.subset(np.arange(30, 90)))
    a, b = once(digits["test"]), twice(digits["test"])
    np.testing.assert_allclose(a.squared_distance, b.squared_distance, rtol=1e-4)  # networks are float32
    np.testing.assert_array_equal(a.class_id, b.class_id)


def test_evaluation_of_a_run_whose_head_does_not_know_all_classes(nine, digits):
    predictor = update_predictor(load_predictor(nine), digits["new"])
    outputs = predictor.detector.complete(outputs_of(predictor, digits["test"]))
    results = evaluate(predictor, outputs, {"more": outputs[:50]})
    assert np.isnan(results.false_alarm) and np.isnan(results.threshold)
    own, ours = results.methods["softmax"].classification, results.methods["maple"].classification
    known = (digits["test"].labels < 9).mean()
    assert own.nll == np.inf and own.accuracy <= known < ours.accuracy
    assert type(results).from_json(results.to_json()).methods["softmax"].classification.nll == np.inf


def outputs_of(predictor: Predictor, images: ImageSet) -> Outputs:
    from maple.networks import embed

    return embed(predictor.backbone, images)


def test_class_names_are_matched_by_name(nine, digits):
    """A source that lists its classes in another order, and names one that it has no images of."""
    before, new = load_predictor(nine), digits["new"]
    shuffled = new.with_class_names(("9", "zebra", "0", *map(str, range(1, 9))))
    assert join_class_names(before.class_names, shuffled) == tuple("0123456789")
    one, other = update_predictor(before, new), update_predictor(before, shuffled)
    assert one.class_names == other.class_names and same_state(one, other)


def test_wrong_images_are_refused(nine, digits):
    predictor, new = load_predictor(nine), digits["new"]
    with pytest.raises(UsageError, match="16 px, but the run reads images of 8 px"):
        update_predictor(predictor, ImageSet.from_arrays(np.zeros((2, 16, 16), np.uint8), ["a", "a"], size=16))
    with pytest.raises(DataError, match=r"90 of 90 images .* have no label"):
        update_predictor(predictor, replace(new, labels=np.full(90, -1)))
    with pytest.raises(DataError, match=r"'9' .* is not among the 9 known classes"):
        update_predictor(predictor, None, digits["calibrate"])
    with pytest.raises(DataError, match="class '9' has fewer than two"):
        cut_calibration(digits["more"], tuple("0123456789"))
    with pytest.raises(UsageError, match="begin with those known"):
        update_from_outputs(predictor, None, tuple("9012345678"))
    with pytest.raises(DataError, match="validation images need labels"):
        update_from_outputs(predictor, validation=replace(outputs_of(predictor, new), labels=None))
    with pytest.raises(DataError, match="no images of the new class 'emu'"):
        update_from_outputs(predictor, None, (*predictor.class_names, "emu"))


# --- run folders ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(nine, tmp_path) -> Path:
    return Path(shutil.copytree(nine, tmp_path / "run"))


def test_a_run_is_updated_and_calibrated_in_its_place(run, digits, tmp_path, capsys):
    new, held = (save_npz(tmp_path / f"{name}.npz", digits[name]) for name in ("new", "calibrate"))
    weights, before = (run / "weights.safetensors").read_bytes(), load_json(run / "classes.json")
    old = read_gallery(run / "gallery")
    done = update_run(UpdateRequest(run, data=new))
    assert done.images == {"9": 90} and done.new_classes == ("9",) and done.describe().endswith("new: 9")
    assert f"maple update {run} --calibrate" in " ".join(capsys.readouterr().err.split())
    assert len(load_predictor(run).calibration) == 0
    classes = load_json(run / "classes.json")
    assert classes["classes"] == list("0123456789") and classes["left_out"] == []
    assert classes["cluster_sizes"] == [*before["cluster_sizes"], 90]
    assert classes["cluster_to_class"] == [*before["cluster_to_class"], 9]
    assert [entry["images"] for entry in classes["updates"]] == [{"9": 90}]
    assert classes["digests"] == before["digests"]
    gallery = read_gallery(run / "gallery")
    assert [c.cluster for c in gallery.clusters] == list(range(len(old.clusters) + 1))
    for one, other in zip(gallery.clusters, old.clusters):
        assert (one.files, one.class_name, one.count) == (other.files, other.class_name, other.count)
        np.testing.assert_array_equal(one.thumbnails, other.thumbnails)
    last = gallery.clusters[-1]
    assert (last.class_name, last.count, len(last.files)) == ("9", 90, 12)
    row = int(last.files[0].partition("#")[2])
    np.testing.assert_array_equal(last.thumbnails[0], digits["new"].pixels[row])
    assert not gallery.components and not gallery.examples and gallery.projections.keys() == old.projections.keys()
    assert not (run / "results.json").exists() and "10 classes" in (run / "report.html").read_text()
    assert (run / "weights.safetensors").read_bytes() == weights

    with pytest.raises(UsageError, match="has seen the images"):
        update_run(UpdateRequest(run, data=new))
    done = update_run(UpdateRequest(run, calibrate=held, report=False))
    assert done.images == {} and len(load_predictor(run).calibration) == done.calibration_images
    assert done.validation_images + done.calibration_images == len(digits["calibrate"])
    assert len(load_json(run / "classes.json")["updates"]) == 2 and read_gallery(run / "gallery").clusters
    assert not (run / "report.html").exists()
    assert sorted(path.name for path in run.parent.iterdir()) == ["calibrate.npz", "new.npz", "run"]


def test_another_folder_leaves_the_run_as_it_was(run, digits, tmp_path):
    content = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    both = [save_npz(tmp_path / f"{name}.npz", digits[name]) for name in ("new", "calibrate")]
    out = tmp_path / "deep" / "ten"
    update_run(UpdateRequest(run, *both, out=out, report=False))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == content
    predictor = load_predictor(out)
    assert predictor.class_names[-1] == "9" and len(predictor.calibration)
    with pytest.raises(UsageError, match="exists already"):
        update_run(UpdateRequest(run, *both, out=out))


def test_images_that_calibrate_are_not_learned_from(run, digits, tmp_path, capsys):
    both = digits["new"].subset(np.arange(90)), digits["calibrate"]
    whole = open_images("digits")
    mixed = whole.subset(np.isin(whole.keys, np.concatenate([both[0].keys, both[1].keys[-20:]])))
    done = update_run(
        UpdateRequest(
            run,
            save_npz(tmp_path / "mixed.npz", mixed),
            save_npz(tmp_path / "held.npz", both[1]),
            only=("9",),
            report=False,
        )
    )
    assert done.images == {"9": 90} and "20 files could not be used" in " ".join(capsys.readouterr().err.split())
    assert len(load_json(run / "classes.json")["skipped"]) == 20
    with pytest.raises(DataError, match="also among those to calibrate"):
        update_run(UpdateRequest(run, *[str(tmp_path / "held.npz")] * 2))


def test_an_error_while_writing_leaves_the_run_as_it_was(run, digits, tmp_path, monkeypatch):
    new = save_npz(tmp_path / "new.npz", digits["new"])
    content = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for function, error in ((full_disk, RunError), (interrupt, KeyboardInterrupt)):
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr("maple.runs.update.save_clusters", function)
            update_run(UpdateRequest(run, new))
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == content
        assert sorted(path.name for path in run.parent.iterdir()) == ["new.npz", "run"]


def test_wrong_requests_are_refused(run, digits, tmp_path, monkeypatch):
    new = save_npz(tmp_path / "new.npz", digits["new"])
    loose = tmp_path / "loose"
    loose.mkdir()
    wrong: list[tuple[UpdateRequest, type[Exception], str, int]] = [
        (UpdateRequest(run), UsageError, "--data", 2),
        (UpdateRequest(run, calibrate=new, only=("9",)), UsageError, "--only", 2),
        (UpdateRequest(run, new, only=("emu",)), UsageError, "has no class 'emu'", 2),
        (UpdateRequest(run, "nowhere"), UsageError, "no data set, file or folder 'nowhere'", 2),
        (UpdateRequest(tmp_path / "nowhere", new), RunError, "is not a run folder", 1),
        (UpdateRequest(run, str(loose)), DataError, "no images", 1),
        (UpdateRequest(run, calibrate=new), DataError, "is not among the 9 known classes", 1),
        (UpdateRequest(run, new, new), DataError, "also among those to calibrate", 1),
    ]
    for request, kind, message, code in wrong:
        with pytest.raises(kind, match=message) as caught:
            update_run(request)
        assert caught.value.exit_code == code
    monkeypatch.chdir(run)
    with pytest.raises(UsageError, match="current folder"):
        update_run(UpdateRequest(Path(), new))


def test_a_run_with_full_covariances_says_what_to_do(run, digits):
    predictor = load_predictor(run)
    options = {**as_dict(predictor.detector), "covariance": "full"}
    outputs = outputs_of(predictor, digits["more"])
    predictor.detector = MapleDetector(**options).fit(outputs)
    with pytest.raises(UsageError, match="covariance='tied'"):
        update_predictor(predictor, digits["new"])


# --- commands ---------------------------------------------------------------------------------------------------------


def test_commands_say_what_is_void_and_how_to_go_on(run, digits, tmp_path, capsys):
    new, held, test = (save_npz(tmp_path / f"{name}.npz", digits[name]) for name in ("new", "calibrate", "test"))

    def said() -> str:
        return flat(capsys.readouterr().err)

    assert command("update", run, "--data", new, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["new_classes"] == ["9"]
    assert f"maple update {run} --calibrate IMAGES" in flat(printed.err)
    assert command("predict", run, test, "--out", tmp_path / "rows.csv", "--all-probabilities") == 0
    assert "maple update RUN --calibrate IMAGES" in said()
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["p_value"] for row in rows} == {"nan"} and {row["is_ood"] for row in rows} == {"False"}
    assert "9" in {row["class"] for row in rows} and "9" not in {row["softmax_class"] for row in rows}
    assert "p_9" in rows[0]
    assert command("evaluate", run) == 0
    assert "do not show '9'" in said()
    assert f"maple update {run} --calibrate" in (run / "report.html").read_text()
    assert command("evaluate", run, "--ind", test, "--ood", "unknown=left-out") == 2
    assert "maple update added all classes" in said()
    assert command("evaluate", run, "--ind", test, "--detector", "knn") == 2
    assert "--detector" in said()
    assert command("update", run, "--calibrate", held) == 0
    assert "taught temperature and score" in capsys.readouterr().out
    assert command("evaluate", run, "--ind", test, "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert results["false_alarm"] < 0.2 and results["methods"]["softmax"]["classification"]["nll"] == "inf"
    page = (run / "report.html").read_text()
    assert f"maple update {run} --calibrate" not in page and "90 images" in page
    assert command("explain", run, test, "--limit", 2) == 0
    assert command("monitor", run, test) in (0, 3)
    assert command("update", run) == 2 and command("update", tmp_path / "nowhere", "--data", new) == 1
    assert command("update", run, "--data", tmp_path / "nowhere") == 2
