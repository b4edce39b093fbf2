"""Update run folders: what is replaced, kept and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import flat, read_rows
from commands import run as command
from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.detectors.maple import MapleDetector
from maple.errors import DataError, RunError, UsageError
from maple.files import load_json
from maple.networks import embed
from maple.options import as_dict
from maple.prediction.store import load_predictor
from maple.prediction.update import update_predictor
from maple.reporting.gallery import read_gallery
from maple.runs.folder import RunFolder
from maple.runs.requests import UpdateRequest
from maple.runs.update import update_run
from updating import read_digits, save_npz, train_nine


@pytest.fixture(scope="module")
def nine(tmp_path_factory) -> Path:
    return train_nine(tmp_path_factory.mktemp("runs") / "nine")


@pytest.fixture(scope="module")
def digits() -> dict[str, ImageSet]:
    return read_digits()


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

    with pytest.raises(UsageError, match="'new'"):
        update_run(UpdateRequest(run, data=new))
    done = update_run(UpdateRequest(run, calibrate=held, report=False))
    assert done.images == {} and len(load_predictor(run).calibration) == done.calibration_images
    assert done.validation_images + done.calibration_images == len(digits["calibrate"])
    assert len(load_json(run / "classes.json")["updates"]) == 2 and read_gallery(run / "gallery").clusters
    assert not (run / "report.html").exists()
    assert sorted(path.name for path in run.parent.iterdir()) == ["calibrate.npz", "new.npz", "run"]


def test_links_of_a_run_from_elsewhere_are_not_copied(run, digits, tmp_path):
    """An update copies the run: a link would add a folder of any size, and files that a push then publishes."""
    (tmp_path / "private").mkdir()
    (run / "gallery" / "private").symlink_to(tmp_path / "private")
    with pytest.raises(RunError, match="gallery/private"):
        update_run(UpdateRequest(run, data=save_npz(tmp_path / "new.npz", digits["new"])))
    assert (run / "gallery" / "private").is_symlink()


def test_corrected_labels_of_flagged_images_come_back(run, digits, tmp_path):
    """Predict, label the list as a person would, update."""
    new, listed, out = save_npz(tmp_path / "new.npz", digits["new"]), tmp_path / "list.csv", tmp_path / "p.csv"
    options = ["--copy-flagged", tmp_path / "flagged", "--label-flagged", listed, "--false-alarm", "0.3"]
    assert command("predict", run, new, "--out", out, *options) == 0
    rows = read_rows(listed)
    assert len(rows) == len(list((tmp_path / "flagged").iterdir())) > 5
    listed.write_text("file;label\n" + "".join(f"{row['file']};9\n" for row in rows))  # as some spreadsheets save it
    done = update_run(UpdateRequest(run, data=str(listed), report=False))
    assert done.images == {"9": len(rows)} and done.new_classes == ("9",)


@pytest.mark.parametrize("out", [None, "copy"])
def test_the_run_is_locked_from_before_it_is_read(run, digits, tmp_path, monkeypatch, out):
    out = out and tmp_path / out
    new, states = save_npz(tmp_path / "new.npz", digits["new"]), []

    def load(folder, **how):
        with pytest.raises(RunError, match="maple update"):
            RunFolder(folder).check_unlocked()
        states.append("locked")
        return load_predictor(folder, **how)

    monkeypatch.setattr("maple.runs.update.load_predictor", load)
    update_run(UpdateRequest(run, new, out=out, report=False))
    assert states == ["locked"]
    RunFolder(run).check_unlocked()
    with RunFolder(run).lock("maple evaluate"), pytest.raises(RunError, match="maple evaluate"):
        update_run(UpdateRequest(run, new, out=out and out / "again"))
    assert states == ["locked"], "a run that another command writes is not even read"


def test_with_many_clusters_an_update_keeps_fewer_exemplars_of_each(run, digits, tmp_path, monkeypatch):
    n_clusters = len(read_gallery(run / "gallery").clusters) + 1
    monkeypatch.setattr("maple.reporting.gallery.store.MAX_EXEMPLARS", 3 * n_clusters)
    update_run(UpdateRequest(run, save_npz(tmp_path / "new.npz", digits["new"]), report=False))
    clusters = read_gallery(run / "gallery").clusters
    assert len(clusters) == n_clusters
    assert {(len(each.files), len(each.thumbnails)) for each in clusters} == {(3, 3)}


def test_another_folder_leaves_the_run_as_it_was(run, digits, tmp_path):
    content = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    both = [save_npz(tmp_path / f"{name}.npz", digits[name]) for name in ("new", "calibrate")]
    out = tmp_path / "deep" / "ten"
    update_run(UpdateRequest(run, *both, out=out, report=False))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == content
    predictor = load_predictor(out)
    assert predictor.class_names[-1] == "9" and len(predictor.calibration)
    with pytest.raises(UsageError, match="--out"):
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
    assert done.images == {"9": 90} and "20 files" in " ".join(capsys.readouterr().err.split())
    assert len(load_json(run / "classes.json")["skipped"]) == 20
    with pytest.raises(DataError, match="--calibrate"):
        update_run(UpdateRequest(run, *[str(tmp_path / "held.npz")] * 2))


def test_an_error_while_writing_leaves_the_run_as_it_was(run, digits, tmp_path, monkeypatch):
    new = save_npz(tmp_path / "new.npz", digits["new"])
    content = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def no_permission(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    failures = (
        (full_disk, RunError, "space.*free some space"),
        (no_permission, RunError, "(?!.*free some space)"),
        (interrupt, KeyboardInterrupt, None),
    )
    for function, error, said in failures:
        with monkeypatch.context() as patch, pytest.raises(error, match=said):
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
        (UpdateRequest(run, new, only=("emu",)), UsageError, "'emu'", 2),
        (UpdateRequest(run, "nowhere"), UsageError, "'nowhere'", 2),
        (UpdateRequest(tmp_path / "nowhere", new), RunError, "nowhere", 1),
        (UpdateRequest(loose, new), RunError, "loose", 1),
        (UpdateRequest(run, str(loose)), DataError, "loose", 1),
        (UpdateRequest(run, calibrate=new), DataError, "'9'", 1),
        (UpdateRequest(run, new, new), DataError, "--calibrate", 1),
    ]
    for request, kind, message, code in wrong:
        with pytest.raises(kind, match=message) as caught:
            update_run(request)
        assert caught.value.exit_code == code
    assert not (tmp_path / "nowhere").exists() and not any(loose.iterdir())
    monkeypatch.chdir(run)
    with pytest.raises(UsageError, match="folder"):
        update_run(UpdateRequest(Path(), new))


def test_a_run_with_full_covariances_says_what_to_do(run, digits):
    predictor = load_predictor(run)
    options = {**as_dict(predictor.detector), "covariance": "full"}
    outputs = embed(predictor.backbone, digits["more"])
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
    rows = read_rows(tmp_path / "rows.csv")
    assert {row["p_value"] for row in rows} == {"nan"} and {row["is_ood"] for row in rows} == {"False"}
    assert "9" in {row["class"] for row in rows} and "9" not in {row["softmax_class"] for row in rows}
    assert "p_9" in rows[0]
    assert command("evaluate", run) == 0
    assert "'9'" in (text := said()) and "--ind" in text
    assert f"maple update {run} --calibrate" in (run / "report.html").read_text().replace("<wbr/>", "")
    assert command("evaluate", run, "--ind", test, "--ood", "unknown=left-out") == 2
    assert "'left-out'" in said()
    assert command("evaluate", run, "--ind", test, "--detector", "knn") == 2
    assert "--detector" in said()
    assert command("update", run, "--calibrate", held) == 0
    assert "fit temperature and score" in capsys.readouterr().out
    assert command("evaluate", run, "--ind", test, "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert results["false_alarm"] < 0.2 and results["methods"]["softmax"]["classification"]["nll"] == "inf"
    page = (run / "report.html").read_text()
    assert f"maple update {run} --calibrate" not in page and "90 images" in page
    assert command("explain", run, test, "--limit", 2) == 0
    assert command("monitor", run, test) in (0, 3)
    assert command("update", run) == 2 and command("update", tmp_path / "nowhere", "--data", new) == 1
    assert command("update", run, "--data", tmp_path / "nowhere") == 2
