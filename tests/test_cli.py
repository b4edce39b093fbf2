"""Commands as a user runs them: what they write, and what they say when the input is bad."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from maple.checkpoint import load_json
from maple.cli import main
from maple.config import PRESETS
from maple.types import PREDICTION_COLUMNS


def run(*arguments: object) -> int:
    """Run the command in this process, as the entry point does; the exit code."""
    argv = sys.argv
    sys.argv = ["maple", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = argv
    return 0


def flat(text: str) -> str:
    return " ".join(text.split())


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


# --- train


def test_run_folder_is_complete(finished):
    expected = {
        "config.toml", "history.csv", "weights.safetensors", "detector.safetensors", "classes.json", "gallery",
        "results.json", "report.html",
    }  # fmt: skip
    assert {path.name for path in finished.iterdir()} == expected


def test_results_hold_provenance(finished):
    results = json.loads((finished / "results.json").read_text())
    assert results["provenance"]["config"]["train"]["epochs"] == 3
    assert results["provenance"]["command"].startswith("maple train digits")
    assert set(results["methods"]) == {"softmax", "energy", "maple", "maple-paper"}


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
    arguments = ["train", "digits", "--out", str(folder), "--epochs", "3", "--batch-size", "64", "--relabel-every", "1"]
    arguments += ["--hard-class-error", "0.05", "--min-cluster-size", "10"]
    process = subprocess.Popen([sys.executable, "-m", "maple", *arguments], stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("epoch 1/3"):
            break
    while not (folder / "resume.safetensors").exists():
        pass
    process.kill()
    process.wait()
    assert not (folder / "detector.safetensors").exists()
    assert run("train", "digits", "--out", folder, "--resume") == 0
    assert (folder / "weights.safetensors").read_bytes() == (finished / "weights.safetensors").read_bytes()
    assert (folder / "detector.safetensors").read_bytes() == (finished / "detector.safetensors").read_bytes()


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
    """Really starts two processes; both hold the same network, clusters and moments."""
    folder = tmp_path / "two"
    command = [sys.executable, "-m", "maple", "train", "digits", "--out", str(folder), "--devices", "2"]
    command += ["--epochs", "2", "--batch-size", "64", "--relabel-every", "1", "--hard-class-error", "0.05"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("epoch 2/2") == 1, "only the first process may speak"
    results = json.loads((folder / "results.json").read_text())
    assert results["methods"]["maple"]["classification"]["accuracy"] > 0.5
    assert results["n_clusters"] > 10


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


# --- evaluate, report, data


def test_evaluate_adds_unknown_sets_and_the_report(finished, capsys):
    assert run("evaluate", finished, "--ood", "far=simulated-diatoms/far?n=60", "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert results["n_ood"] == {"far": 60}
    assert results["methods"]["maple"]["detection"]["far"]["auroc"] > 0.5
    assert "far" in (finished / "report.html").read_text()


def test_report_with_predictions(finished, image_folder, tmp_path):
    out, html = tmp_path / "p.csv", tmp_path / "r.html"
    run("predict", finished, image_folder / "dark", "--out", out)
    assert run("report", finished, out, "--out", html) == 0
    assert "<html" in html.read_text()


def test_data_lists_and_describes(capsys, tmp_path):
    assert run("data", "--json") == 0
    assert "digits" in [row["source"] for row in json.loads(capsys.readouterr().out)]
    assert run("data", "digits", "--json") == 0
    assert json.loads(capsys.readouterr().out)["images"] == 1797


# --- bad input: a sentence that says what to do, the right exit code, no traceback


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "cifar11", "--out", "{tmp}/r"], 2, "cifar11"),
        (["train", "digits", "--out", "{tmp}/r", "--backbone", "resnet90"], 2, "did you mean 'resnet9'"),
        (["train", "digits", "--out", "{tmp}/r", "--recipe", "mapel"], 2, "did you mean 'maple'"),
        (["train", "digits", "--out", "{tmp}/r", "--epochs", "0"], 2, "greater than or equal to 1"),
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
    errors = flat(capsys.readouterr().err)
    assert errors.startswith("error: ")
    assert message in errors
    assert "Traceback" not in errors
    assert errors.count("\n") == 0


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
    (copy / "config.toml").write_text(text.replace("format = 1", "format = 99"))
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
    assert all(name in flat(text).replace("│ │ ", "") for name in PRESETS)


def test_full_disk_keeps_the_old_predictions(finished, tmp_path, capsys, monkeypatch):
    out = tmp_path / "p.csv"
    out.write_text("old")
    monkeypatch.setattr(
        "maple.workflow._row_writer",
        lambda *_a, **_k: lambda _row: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    assert run("predict", finished, "digits", "--out", out) == 1
    assert "No space left" in capsys.readouterr().err
    assert out.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["p.csv"]
