"""Commands as a user runs them: what they write, and what they say when the input is bad."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import false_discovery_control

from commands import flat, run
from maple.data.sources import open_images
from maple.files import load_json
from maple.options import read_toml
from maple.prediction.store import load_predictor
from maple.runs.presets import list_presets
from maple.types import PREDICTION_COLUMNS


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run on digits."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    code = run(
        "train", "digits", "--out", folder, "--epochs", 3, "--batch-size", 64, "--relabel-every", 1,
        "--hard-class-error", 0.05, "--min-cluster-size", 10,
    )  # fmt: skip
    assert code == 0
    return folder


@pytest.fixture
def image_folder(tmp_path, rng):
    """Two classes of twelve noise images, dark and bright."""
    for name, level in (("dark", 40), ("bright", 200)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(level - 30, level + 30, (16, 16, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"


def tiny(source: object, *more: object) -> int:
    """A training of one epoch on few images."""
    return run("train", source, "--epochs", 1, "--batch-size", 8, *more)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def interrupted(image_folder, tmp_path, monkeypatch):
    """A run that was interrupted after its training, before its detector was fitted."""
    with monkeypatch.context() as patch:
        patch.setattr("maple.runs.train.fit_predictor", _interrupt)
        assert (
            tiny(image_folder, "--out", tmp_path / "interrupted", "--preset", "paper", "--backbone", "resnet9") == 130
        )
    return tmp_path / "interrupted"


def _interrupt(*_arguments, **_options):
    raise KeyboardInterrupt


# --- train


def test_run_folder_is_complete(finished):
    expected = {
        "config.toml", "history.csv", "weights.safetensors", "detector.safetensors", "classes.json", "gallery",
        "results.json", "report.html", ".lock",
    }  # fmt: skip
    assert {path.name for path in finished.iterdir()} == expected


def test_results_hold_provenance(finished):
    results = json.loads((finished / "results.json").read_text())
    assert results["provenance"]["config"]["train"]["epochs"] == 3
    assert results["provenance"]["command"].startswith("maple train digits")
    assert set(results["methods"]) == {"softmax", "softmax-scaled", "energy", "maple", "maple-paper"}
    assert results["provenance"]["decision"]["kind"] == "marginal"
    assert results["provenance"]["promise"].startswith("flags at most 5 %")
    assert results["provenance"]["score"] == "fused"


def test_left_out_classes_are_the_unknown_ones(image_folder, tmp_path, capsys):
    (tmp_path / "names.txt").write_text("# held back\n9\n\n8\n")
    out = tmp_path / "run"
    assert tiny("digits", "--out", out, "--leave-out", f"@{tmp_path / 'names.txt'}", "--ood", "unknown=left-out") == 0
    classes, results = load_json(out / "classes.json"), json.loads((out / "results.json").read_text())
    assert classes["classes"] == [str(i) for i in range(8)] and classes["left_out"] == ["8", "9"]
    assert results["n_ood"] == {"unknown": 354}  # all images of both
    capsys.readouterr()
    assert run("evaluate", out, "--ood", "again=left-out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["n_ood"] == {"again": 354}
    assert tiny("digits", "--out", tmp_path / "all", "--ood", "unknown=left-out") == 2
    assert "--leave-out" in flat(capsys.readouterr().err) and not (tmp_path / "all").exists()
    assert tiny("digits", "--out", tmp_path / "all", "--leave-out", "@nowhere.txt") == 2
    assert "cannot read the names in 'nowhere.txt'" in flat(capsys.readouterr().err)


def test_clusters_in_files_agree(finished):
    classes = load_json(finished / "classes.json")
    assert len(classes["cluster_to_class"]) == len(classes["cluster_sizes"]) > 10
    assert classes["classes"] == [str(i) for i in range(10)]


def test_existing_run_is_not_overwritten(finished, capsys):
    assert run("train", "digits", "--out", finished, "--epochs", 1) == 2
    assert "--resume" in capsys.readouterr().err
    assert run("train", "digits", "--out", finished, "--resume") == 2
    assert "nothing to resume" in flat(capsys.readouterr().err)


def test_killed_run_resumes_with_its_own_settings(finished, tmp_path):
    """Kill the process after its first checkpoint; the resumed run equals the uninterrupted one."""
    folder = tmp_path / "killed"
    options = ["--epochs", "3", "--batch-size", "64", "--relabel-every", "1", "--hard-class-error", "0.05"]
    process = start_training(folder, *options, "--min-cluster-size", "10")
    read_until(process, "epoch 2/3")  # the checkpoint of epoch 1 is there
    process.kill()
    process.wait()
    assert not (folder / "detector.safetensors").exists()
    assert run("train", "digits", "--out", folder, "--resume") == 0
    assert (folder / "weights.safetensors").read_bytes() == (finished / "weights.safetensors").read_bytes()
    assert (folder / "detector.safetensors").read_bytes() == (finished / "detector.safetensors").read_bytes()


def test_ctrl_c_says_how_to_go_on(tmp_path):
    process = start_training(tmp_path / "stopped", "--epochs", "500", "--batch-size", "64")
    read_until(process, "epoch 1/500")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors and "--resume" in errors
    assert "Traceback" not in errors


def start_training(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "maple", "train", "digits", "--out", str(folder), *options]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background may have been told not to
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=listen)


def read_until(process: subprocess.Popen[str], start: str) -> None:
    """Read standard error up to a line; a process that ends before it fails the test."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith(start):
            return
    pytest.fail(f"no line starts with '{start}': {''.join(lines)}")


def test_run_folder_has_a_default(image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tiny(image_folder) == 0
    assert (tmp_path / "runs" / "images" / "report.html").exists()
    assert "runs/images" in capsys.readouterr().err


def test_overwrite_waits_until_everything_is_valid(image_folder, tmp_path):
    folder = tmp_path / "r"
    assert tiny(image_folder, "--out", folder) == 0
    (folder / "gallery" / "projection-old.safetensors").write_bytes(b"old")
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    assert tiny(tmp_path / "typo", "--out", folder, "--overwrite") == 2
    for wrong in (["--backbone", "resnet90"], ["--recipe", "mapel"], ["--augment", "crup"], ["--splits", "1,0,0,0"]):
        assert tiny(image_folder, "--out", folder, "--overwrite", *wrong) != 0
    assert tiny(image_folder, "--out", folder, "--overwrite", "--resume") == 2
    assert contents(folder) == before
    assert tiny(image_folder, "--out", folder, "--overwrite", "--seed", 1) == 0
    after = contents(folder)
    assert "gallery/projection-old.safetensors" not in after
    assert sum(name.startswith("gallery/clusters.") for name in after) == 2  # one record, one sheet of images
    assert after["notes.txt"] == b"mine"
    assert after["weights.safetensors"] != before["weights.safetensors"]


def test_overwrite_leaves_folders_that_are_no_runs(image_folder, tmp_path, capsys):
    (tmp_path / "site" / "gallery").mkdir(parents=True)
    (tmp_path / "site" / "gallery" / "mine.png").write_bytes(b"mine")
    (tmp_path / "site" / "config.toml").write_text("title = 'my site'")
    before = contents(tmp_path / "site")
    assert tiny(image_folder, "--out", tmp_path / "site", "--overwrite") == 1
    assert "not written by maple" in capsys.readouterr().err
    assert contents(tmp_path / "site") == before


def test_demo_replaces_only_demos(finished, tmp_path, monkeypatch, capsys):
    before = contents(finished)
    assert run("demo", "--out", finished) == 2
    assert "not a demo" in capsys.readouterr().err
    assert contents(finished) == before
    requests = []

    def record(request):
        requests.append(request)
        _interrupt()

    monkeypatch.setattr("maple.runs.train.train_run", record)
    (tmp_path / "config.toml").write_text('[origin]\nformat = 2\ncommand = "maple demo"\n')
    for folder in (tmp_path, tmp_path / "new"):
        run("demo", "--out", folder)
    assert [request.overwrite for request in requests] == [True, False]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (["--epochs", 2], "--epochs 1, not with 2"),
        (["--margin", 0.1], "--margin 0.7, not with 0.1"),
        (["--backbone", "resnet18"], "--backbone resnet9, not with resnet18"),
        (["--preset", "paper-diatoms"], "--preset paper, not with paper-diatoms"),
        (["--test", "digits"], "without --test, not with digits"),
        (["--config", "{tmp}/c.toml"], "--seed 0, not with 5"),
    ],
)
def test_resume_with_other_options_is_refused(interrupted, image_folder, tmp_path, capsys, other, message):
    (tmp_path / "c.toml").write_text("[train]\nseed = 5\n")
    before = contents(interrupted)
    words = [str(word).format(tmp=tmp_path) for word in other]
    assert run("train", image_folder, "--out", interrupted, "--resume", *words) == 2
    assert message in flat(capsys.readouterr().err)
    assert contents(interrupted) == before


def test_resume_with_other_data_is_refused(interrupted, capsys):
    assert run("train", "digits", "--out", interrupted, "--resume") == 2
    assert "DATA" in capsys.readouterr().err


def test_resume_takes_equal_and_free_options(interrupted, image_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("MAPLE_DATA", str(tmp_path / "elsewhere"))  # no flag: the run's own root counts
    same = ["--epochs", 1, "--margin", "0.70", "--preset", "paper", "--workers", 0, "--checkpoint-every", 7]
    assert run("train", image_folder, "--out", interrupted, "--resume", *same) == 0
    assert read_toml(interrupted / "config.toml")["train"]["epochs"] == 1
    assert (interrupted / "detector.safetensors").exists()


def test_resume_needs_a_run(image_folder, tmp_path, monkeypatch, capsys):
    assert tiny(image_folder, "--out", tmp_path / "mistyped", "--resume") == 2
    assert "no run in" in capsys.readouterr().err
    assert not (tmp_path / "mistyped").exists()
    with monkeypatch.context() as patch:
        patch.setattr("maple.runs.train.train_backbone", _interrupt)
        assert tiny(image_folder, "--out", tmp_path / "early") == 130
    assert load_json(tmp_path / "early" / "classes.json")["classes"] == ["bright", "dark"]
    assert run("train", image_folder, "--out", tmp_path / "early", "--resume") == 0
    assert "no checkpoint yet" in flat(capsys.readouterr().err)


def test_without_test_images_nothing_is_measured(image_folder, tmp_path, capsys):
    folder = tmp_path / "r"
    assert tiny(image_folder, "--out", folder, "--splits", "0.8,0.1,0.1,0") == 0
    assert "no test images" in flat(capsys.readouterr().err)
    assert (folder / "report.html").exists() and not (folder / "results.json").exists()
    assert run("evaluate", folder) == 2
    assert "--ind" in capsys.readouterr().err
    assert run("evaluate", folder, "--ind", image_folder) == 0


def test_too_few_calibration_images_are_reported(image_folder, tmp_path, capsys):
    folder = tmp_path / "r"
    assert tiny(image_folder, "--out", folder, "--false-alarm", 0.2) == 0
    warning = flat(capsys.readouterr().err)
    assert "--false-alarm 0.2 takes at least 4 calibration images, and the run has 2" in warning
    assert "--false-alarm 0.334 or more" in warning
    assert "2 calibration images" in (folder / "report.html").read_text()
    assert run("predict", folder, image_folder / "dark") == 0
    assert "no image will be flagged" in flat(capsys.readouterr().err)
    assert run("predict", folder, image_folder / "dark", "--false-alarm", 0.334) == 0
    assert "no image will be flagged" not in flat(capsys.readouterr().err)


def test_augmentation_is_announced(image_folder, tmp_path, capsys):
    diatoms = image_folder.rename(tmp_path / "river-diatoms")
    assert tiny(diatoms, "--out", tmp_path / "r") == 0
    assert "augmentation crop,flip-both" in flat(capsys.readouterr().err)


def test_config_names_the_recipe_once(image_folder, tmp_path):
    assert tiny(image_folder, "--out", tmp_path / "r", "--recipe", "cross-entropy") == 0
    sections = read_toml(tmp_path / "r" / "config.toml")
    assert sections["model"]["recipe"] == "cross-entropy"
    assert not {"triplet", "clustering"} & sections["recipe"].keys()


# --- predict


def test_predictions_of_files_folders_and_globs(finished, image_folder, tmp_path):
    out = tmp_path / "predictions.csv"
    single = image_folder / "dark" / "0.png"
    assert (
        run("predict", finished, image_folder / "bright", single, image_folder / "dark" / "1*.png", "--out", out) == 0
    )
    rows = list(csv.DictReader(out.open()))
    assert tuple(rows[0]) == PREDICTION_COLUMNS
    assert len(rows) == 12 + 1 + 3
    for row in rows:
        assert 0 <= float(row["p_value"]) <= 1
        assert float(row["uncertainty"]) == pytest.approx(1 - float(row["typicality"]), abs=1e-12)
        assert row["is_ood"] in ("True", "False")


def test_json_lines_with_all_probabilities(finished, image_folder, tmp_path):
    out = tmp_path / "predictions.jsonl"
    assert run("predict", finished, image_folder / "dark", "--out", out, "--all-probabilities") == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 12
    for row in rows:
        assert sum(row[f"p_{i}"] for i in range(10)) == pytest.approx(1)
        assert row["probability"] == max(row[f"p_{i}"] for i in range(10))


def test_predictions_do_not_change_from_run_to_run(finished, image_folder, tmp_path):
    for name in ("a.csv", "b.csv"):
        run("predict", finished, image_folder / "dark", "--out", tmp_path / name)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_corrupt_images_are_listed_and_the_rest_predicted(finished, image_folder, tmp_path, capsys):
    (image_folder / "dark" / "broken.png").write_bytes(b"not an image")
    truncated = (image_folder / "dark" / "0.png").read_bytes()[:-40]
    (image_folder / "dark" / "truncated.png").write_bytes(truncated)
    out = tmp_path / "p.csv"
    assert run("predict", finished, image_folder / "dark", "--out", out) == 0
    assert len(out.read_text().splitlines()) == 1 + 12
    assert "2 files could not be used" in flat(capsys.readouterr().err)
    assert len((tmp_path / "p.skipped.csv").read_text().splitlines()) == 3


def test_false_alarm_moves_the_decisions_only(finished, tmp_path):
    shares = []
    for level in (0.02, 0.5):
        out = tmp_path / f"{level}.csv"
        assert run("predict", finished, "digits", "--out", out, "--false-alarm", level) == 0
        rows = list(csv.DictReader(out.open()))
        assert all((float(row["p_value"]) <= level) == (row["is_ood"] == "True") for row in rows)
        shares.append(np.mean([row["is_ood"] == "True" for row in rows]))
    assert shares[0] < shares[1]


def test_confidence_flags_less_and_classes_have_their_own_rate(finished, tmp_path):
    folder, images = tmp_path / "run", open_images("digits")
    shutil.copytree(finished, folder)
    load_predictor(folder).calibrate(images).save(folder)  # on all images, so that classes have enough of them

    def flagged(*flags: object) -> np.ndarray:
        out = tmp_path / "p.csv"
        assert run("predict", folder, "digits", "--out", out, "--false-alarm", 0.2, *flags) == 0
        return np.array([row["is_ood"] == "True" for row in csv.DictReader(out.open())])

    shared, careful, own = flagged(), flagged("--confidence", 0.95), flagged("--per-class")
    assert 0 < careful.sum() < shared.sum()
    predictor = load_predictor(folder).decide(false_alarm=0.2, per_class=True)
    assert predictor.decision.n_own_thresholds == len(predictor.class_names)
    said = predictor(images)
    # A threshold is the score of one of these images, whose other digits depend on its batch.
    clear = ~np.isclose(said.score, predictor.decision.thresholds[said.class_id], rtol=1e-4)
    np.testing.assert_array_equal(own[clear], said.is_ood[clear])

    def rates_hold(is_ood: np.ndarray) -> bool:
        """Whether 0.2 of each class is flagged, give or take the image at the threshold and its neighbour."""
        counts, above = (np.bincount(ids, minlength=10) for ids in (said.class_id, said.class_id[is_ood]))
        return bool((np.abs(above - 0.2 * counts) <= 2).all())

    assert rates_hold(own) and not rates_hold(shared)


def test_batch_decides_by_benjamini_hochberg(finished, tmp_path):
    shares = []
    for source in ("digits", "simulated-diatoms/far?n=200"):
        out = tmp_path / "p.csv"
        assert run("predict", finished, source, "--out", out, "--fdr", 0.2) == 0
        rows = list(csv.DictReader(out.open()))
        p_values = np.array([float(row["p_value"]) for row in rows])
        flagged = np.array([row["is_ood"] == "True" for row in rows])
        np.testing.assert_array_equal(flagged, false_discovery_control(p_values) <= 0.2)
        shares.append(flagged.mean())
    assert shares[0] < 0.05 < 0.5 < shares[1]


def test_too_few_calibration_images_for_a_batch_are_reported(finished, capsys):
    assert run("predict", finished, "digits", "--fdr", 0.001) == 0
    captured = capsys.readouterr()
    assert "--fdr 0.001 takes at least 999 calibration images" in flat(captured.err)
    assert ",True," not in captured.out


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_prediction_sets_hold_the_class_and_cover(finished, tmp_path, suffix):
    out = tmp_path / f"p.{suffix}"
    assert run("predict", finished, "digits", "--out", out, "--coverage", 0.9) == 0
    lines = out.read_text().splitlines()
    rows = list(csv.DictReader(lines)) if suffix == "csv" else [json.loads(line) for line in lines]
    sets = [row["prediction_set"].split(" | ") if suffix == "csv" else row["prediction_set"] for row in rows]
    assert all(row["class"] == classes[0] for row, classes in zip(rows, sets))
    truth = open_images("digits")
    covered = np.mean([truth.class_names[label] in classes for label, classes in zip(truth.labels, sets)])
    assert covered > 0.87


# --- evaluate, report, data


def test_evaluate_adds_unknown_sets_and_the_report(finished, capsys):
    assert run("evaluate", finished, "--ood", "far=simulated-diatoms/far?n=60", "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert results["n_ood"] == {"far": 60}
    assert results["methods"]["maple"]["detection"]["far"]["auroc"] > 0.5
    assert "far" in (finished / "report.html").read_text()


def test_unknown_images_are_counted_by_class_and_none_is_left_out(finished, image_folder, capsys):
    """Class folders name classes; an image beside them belongs to no class, but to the set."""
    assert run("evaluate", finished, "--ood", f"noise={image_folder}", "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert {name: row["images"] for name, row in results["unknown_classes"]["noise"].items()} == {
        "bright": 12,
        "dark": 12,
    }
    assert results["methods"]["maple"]["detection"]["noise"]["flagged"] == pytest.approx(
        np.mean([row["flagged"] for row in results["unknown_classes"]["noise"].values()])
    )
    Image.new("RGB", (16, 16)).save(image_folder / "loose.png")
    assert run("evaluate", finished, "--ood", f"noise={image_folder}", "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert results["n_ood"] == {"noise": 25} and results["unknown_classes"] == {"noise": {}}


def test_evaluate_works_from_another_folder(image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tiny("images", "--out", "r") == 0
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert run("evaluate", tmp_path / "r") == 0


def test_only_a_flag_replaces_the_recorded_data_root(image_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MAPLE_DATA", str(tmp_path))
    monkeypatch.chdir(image_folder)
    assert tiny("images", "--out", tmp_path / "r") == 0
    monkeypatch.setenv("MAPLE_DATA", str(tmp_path / "elsewhere"))
    assert run("evaluate", tmp_path / "r") == 0
    assert run("evaluate", tmp_path / "r", "--data-root", tmp_path / "elsewhere") == 1


def test_evaluate_notices_changed_data(image_folder, tmp_path, capsys):
    folder = tmp_path / "r"
    assert tiny(image_folder, "--out", folder) == 0
    (image_folder / "dark" / "0.png").rename(image_folder / "dark" / "renamed.png")
    assert run("evaluate", folder) == 0
    (image_folder / "dark" / "renamed.png").unlink()
    assert run("evaluate", folder) == 1
    assert "the data changed since training" in flat(capsys.readouterr().err)
    assert run("evaluate", folder, "--ind", image_folder) == 0
    shutil.rmtree(image_folder)
    assert run("evaluate", folder) == 1
    assert "--ind" in capsys.readouterr().err


def test_corrupt_unknown_images_are_counted(finished, image_folder, capsys):
    (image_folder / "dark" / "broken.png").write_bytes(b"not an image")
    assert run("evaluate", finished, "--ood", f"noise={image_folder / 'dark'}", "--json") == 0
    out, errors = capsys.readouterr()
    assert json.loads(out)["n_ood"] == {"noise": 12}
    assert "1 file of 'dark' could not be used" in flat(errors)


def test_report_with_predictions(finished, image_folder, tmp_path):
    out, html = tmp_path / "p.csv", tmp_path / "r.html"
    run("predict", finished, image_folder / "dark", "--out", out)
    assert run("report", finished, out, "--out", html) == 0
    assert "<html" in html.read_text()


def test_data_lists_and_describes(capsys, root):
    assert run("data", "--json") == 0
    assert "digits" in [row["source"] for row in json.loads(capsys.readouterr().out)]
    assert run("data", "--data-root", root, "--json") == 0
    rows = {row["source"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["digits"]["where"] == "built in"
    assert run("data", "digits", "--json") == 0
    assert json.loads(capsys.readouterr().out)["images"] == 1797


# --- bad input: a sentence that says what to do, the right exit code, no traceback


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "cifar11", "--out", "{tmp}/r"], 2, "cifar11"),
        (["train", "digits", "--out", "{tmp}/r", "--backbone", "resnet90"], 2, "did you mean 'resnet9'"),
        (["train", "digits", "--out", "{tmp}/r", "--recipe", "mapel"], 2, "did you mean 'maple'"),
        (["train", "digits", "--out", "{tmp}/r", "--epochs", "0"], 2, "--epochs 0: input should be greater than or"),
        (["train", "digits", "--out", "{tmp}/r", "--size", "abc"], 2, "--size abc: expected side of the square"),
        (
            ["train", "digits", "--out", "{tmp}/r", "--splits", "0.8,0.1,0.1"],
            2,
            "--splits 0.8,0.1,0.1: expected shares",
        ),
        (["train", "digits", "--out", "{tmp}/r", "--seed", "-10"], 2, "--seed -10: input should be greater than or"),
        (["demo", "--out", "{tmp}/r", "--seed", "-10"], 2, "--seed -10"),
        (["predict", "{run}", "digits", "--confidence", "1.5"], 2, "--confidence 1.5"),
        (["predict", "{run}", "digits", "--fdr", "2"], 2, "--fdr 2"),
        (["predict", "{run}", "digits", "--fdr", "0.1", "--per-class"], 2, "leave out --per-class"),
        (["predict", "{run}", "digits", "--coverage", "1"], 2, "--coverage 1"),
        (["train", "digits", "--out", "{tmp}/r", "--ood", "x=nowhere"], 2, "no data set, file or folder 'nowhere'"),
        (["train", "digits", "--out", "{tmp}/r", "--augment", "crup"], 2, "did you mean 'crop'"),
        (["train", "digits", "--out", "{tmp}/r", "--false-alarm", "0"], 2, "--false-alarm 0: input should be greater"),
        (["train", "digits", "--out", "{tmp}/r", "--preset", "papr"], 2, "did you mean 'paper'"),
        (["train", "{tmp}/empty", "--out", "{tmp}/r"], 1, "no images"),
        (["train", "{tmp}/one", "--out", "{tmp}/r"], 1, "at least two are needed"),
        (["predict", "{tmp}/nothing", "{tmp}/empty"], 1, "is not a run folder"),
        (["evaluate", "{run}", "--ood", "svhn"], 2, "NAME=SOURCE"),
        (["predict", "{run}", "{tmp}/missing.png"], 2, "missing.png"),
        (["predict", "{run}", "digits", "--out", "{tmp}/p.xls"], 2, ".csv"),
        (["predict", "{run}", "digits", "--false-alarm", "2"], 2, "false-alarm"),
    ],
)
def test_errors_are_one_sentence(finished, tmp_path, capsys, arguments, code, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "one" / "only").mkdir(parents=True)
    for i in range(8):
        Image.new("RGB", (8, 8), (i, i, 9 * i)).save(tmp_path / "one" / "only" / f"{i}.png")
    words = [word.format(tmp=tmp_path, run=finished) for word in arguments]
    assert run(*words) == code
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "r").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("option", [("--accelerator", "cuda"), ("--precision", "16-mixed")])
def test_hardware_that_is_not_there(tmp_path, capsys, option):
    assert run("train", "digits", "--out", tmp_path / "r", *option) == 2
    assert " ".join(option).removeprefix("--") in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_only_the_first_process_speaks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run("train", "cifar11", "--out", tmp_path / "r") == 2
    assert capsys.readouterr().err == ""


def test_output_names_are_checked_before_images_are_read(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("maple.runs.loading.open_images", _interrupt)
    assert run("predict", finished, "digits", "--out", tmp_path / "p.xls") == 2


def test_class_with_one_image_is_named(image_folder, tmp_path, capsys):
    (image_folder / "rare").mkdir()
    Image.new("RGB", (16, 16), (9, 200, 9)).save(image_folder / "rare" / "0.png")
    assert run("train", image_folder, "--out", tmp_path / "r", "--epochs", 1) == 1
    errors = flat(capsys.readouterr().err)
    assert "'rare'" in errors
    assert "--min-images" in errors


def test_newer_run_is_refused(finished, tmp_path, capsys):
    copy = tmp_path / "newer"
    shutil.copytree(finished, copy)
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace("format = 2", "format = 99"))
    assert run("evaluate", copy) == 1
    assert "upgrade" in capsys.readouterr().err


def test_unknown_config_key_is_suggested(tmp_path, capsys):
    (tmp_path / "c.toml").write_text("[train]\nepoch = 3\n")
    assert run("train", "digits", "--out", tmp_path / "r", "--config", tmp_path / "c.toml") == 2
    assert "did you mean 'epochs'" in flat(capsys.readouterr().err)


def test_help_is_complete(capsys):
    assert run("train", "--help") == 0
    text = capsys.readouterr().out
    for flag in ("--relabel-every", "--hard-class-error", "--max-clusters", "--devices", "--resume", "--preset"):
        assert flag in text
    assert all(name in flat(text).replace("│ │ ", "") for name in list_presets())


def test_full_disk_keeps_the_old_predictions(finished, tmp_path, capsys, monkeypatch):
    out = tmp_path / "p.csv"
    out.write_text("old")
    monkeypatch.setattr(
        "maple.runs.writer.pq.write_table",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    assert run("predict", finished, "digits", "--out", out) == 1
    assert "No space left" in capsys.readouterr().err
    assert out.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["p.csv"]
