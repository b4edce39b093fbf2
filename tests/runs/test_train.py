"""``maple train``: the files of a run, overwriting, resuming, and two commands on one run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import contents, flat, interrupt, read_until, run, tiny
from maple.files import load_json
from maple.options import read_toml
from processes import fork_maple

LONG = ("--epochs", 500, "--batch-size", 64)


@pytest.fixture
def interrupted(image_folder, tmp_path, monkeypatch):
    """A run that was interrupted after its training, before its detector was fitted."""
    with monkeypatch.context() as patch:
        patch.setattr("maple.runs.train.fit_as", interrupt)
        assert (
            tiny(image_folder, "--out", tmp_path / "interrupted", "--preset", "paper", "--backbone", "resnet9") == 130
        )
    return tmp_path / "interrupted"


def test_run_folder_is_complete(finished):
    expected = {
        "config.toml", "history.csv", "weights.safetensors", "detector.safetensors", "manifest.json", "classes.json",
        "gallery", "results.json", "report.html", "labels.csv", ".lock",
    }  # fmt: skip
    assert {path.name for path in finished.iterdir()} == expected


def test_the_detector_is_written_after_all_that_later_commands_read(image_folder, tmp_path, monkeypatch):
    """A run with a detector is finished, whenever the training is killed."""
    written, replace = [], Path.replace

    def note(draft, target):
        written.append(Path(target).relative_to(folder).parts[0])
        return replace(draft, target)

    folder = tmp_path / "run"
    monkeypatch.setattr(Path, "replace", note)
    assert tiny(image_folder, "--out", folder, "--backbone", "resnet9") == 0
    order = ["config.toml", "classes.json", "gallery", "weights.safetensors", "detector.safetensors", "manifest.json"]
    assert [name for name in dict.fromkeys(written) if name in order] == order


def test_results_hold_provenance(finished):
    results = json.loads((finished / "results.json").read_text())
    assert results["provenance"]["config"]["train"]["epochs"] == 3
    assert results["provenance"]["command"].startswith("maple train digits")
    assert set(results["methods"]) == {"softmax", "softmax-scaled", "energy", "maple", "maple-paper"}
    assert results["provenance"]["decision"]["kind"] == "marginal"
    assert results["provenance"]["promise"].startswith("flags at most 5 %")
    assert results["provenance"]["score"] == "fused"


def test_clusters_in_files_agree(finished):
    classes = load_json(finished / "classes.json")
    assert len(classes["cluster_to_class"]) == len(classes["cluster_sizes"]) > 10
    assert classes["classes"] == [str(i) for i in range(10)]


def test_existing_run_is_not_overwritten(finished, capsys):
    assert run("train", "digits", "--out", finished, "--epochs", 1) == 2
    told = flat(capsys.readouterr().err)
    assert "--overwrite" in told and "--resume" not in told
    assert run("train", "digits", "--out", finished, "--resume") == 2
    told = flat(capsys.readouterr().err)
    assert str(finished) in told and "--overwrite" in told


def test_killed_run_resumes_with_its_own_settings(finished, tmp_path):
    """Kill the process after its first checkpoint; the resumed run equals the uninterrupted one."""
    folder = tmp_path / "killed"
    options = ["--epochs", "3", "--batch-size", "64", "--relabel-every", "1", "--hard-class-error", "0.05"]
    process = fork_maple("train", "digits", "--out", folder, *options, "--min-cluster-size", "10")
    read_until(process, "epoch 2/3")  # the checkpoint of epoch 1 is there
    process.kill()
    process.wait()
    assert not (folder / "detector.safetensors").exists()
    assert run("train", "digits", "--out", folder, "--resume") == 0
    assert (folder / "weights.safetensors").read_bytes() == (finished / "weights.safetensors").read_bytes()
    assert (folder / "detector.safetensors").read_bytes() == (finished / "detector.safetensors").read_bytes()


def test_ctrl_c_says_how_to_go_on(tmp_path):
    process = fork_maple("train", "digits", "--out", tmp_path / "stopped", *LONG)
    read_until(process, "epoch 1/500")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in errors
    assert "Traceback" not in errors


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
    assert "config.toml" in capsys.readouterr().err
    assert contents(tmp_path / "site") == before


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (["--epochs", 2], "--epochs 1"),
        (["--margin", 0.1], "--margin 0.7"),
        (["--backbone", "resnet18"], "--backbone resnet9"),
        (["--preset", "paper-diatoms"], "--preset paper"),
        (["--test", "digits"], "--test"),
        (["--config", "{tmp}/c.toml"], "--seed 0"),
    ],
)
def test_resume_with_other_options_is_refused(interrupted, image_folder, tmp_path, capsys, other, named):
    (tmp_path / "c.toml").write_text("[train]\nseed = 5\n")
    before = contents(interrupted)
    words = [str(word).format(tmp=tmp_path) for word in other]
    assert run("train", image_folder, "--out", interrupted, "--resume", *words) == 2
    assert named in flat(capsys.readouterr().err)
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
    assert "mistyped" in capsys.readouterr().err
    assert not (tmp_path / "mistyped").exists()
    with monkeypatch.context() as patch:
        patch.setattr("maple.runs.train.train_backbone", interrupt)
        assert tiny(image_folder, "--out", tmp_path / "early") == 130
    assert load_json(tmp_path / "early" / "classes.json")["classes"] == ["bright", "dark"]
    assert run("train", image_folder, "--out", tmp_path / "early", "--resume") == 0
    assert "checkpoint" in flat(capsys.readouterr().err)


def test_resume_auto_starts_continues_and_ends_a_run(image_folder, tmp_path, monkeypatch, capsys):
    """The same command line, as a job script that is put back into its queue would give it."""
    folder = tmp_path / "queued"
    command = (image_folder, "--out", folder, "--resume", "auto")
    assert tiny(*command, "--overwrite") == 2 and not folder.exists()
    with monkeypatch.context() as patch:
        patch.setattr("maple.runs.train.train_backbone", interrupt)
        assert tiny(*command) == 130
    assert (folder / "config.toml").exists() and not (folder / "detector.safetensors").exists()
    assert tiny(*command) == 0
    assert "the training starts from the beginning" in flat(capsys.readouterr().err)
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert tiny(*command, "--json") == 0
    told = capsys.readouterr()
    assert "nothing is left to do" in flat(told.err)
    assert json.loads(told.out) == json.loads((folder / "results.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written


def test_too_few_calibration_images_are_reported(image_folder, tmp_path, capsys):
    folder = tmp_path / "r"
    assert tiny(image_folder, "--out", folder, "--false-alarm", 0.2) == 0
    warning = flat(capsys.readouterr().err)
    assert "--false-alarm 0.2" in warning and "4 calibration images" in warning
    assert "--false-alarm 0.334" in warning
    assert "2 calibration images" in (folder / "report.html").read_text()
    assert run("predict", folder, image_folder / "dark") == 0
    assert "--false-alarm 0.334" in flat(capsys.readouterr().err)
    assert run("predict", folder, image_folder / "dark", "--false-alarm", 0.334) == 0
    assert "--false-alarm" not in flat(capsys.readouterr().err)


def test_augmentation_is_announced(image_folder, tmp_path, capsys):
    diatoms = image_folder.rename(tmp_path / "river-diatoms")
    assert tiny(diatoms, "--out", tmp_path / "r") == 0
    assert "crop,flip-both" in flat(capsys.readouterr().err)


def test_a_preset_says_what_the_recipe_cannot_use(image_folder, tmp_path, capsys):
    small = ("--preset", "paper-code", "--backbone", "wrn-10-1", "--recipe", "duq", "--out", tmp_path / "run")
    assert tiny(image_folder, *small) == 0
    assert "paper-code: --embedding-branch and --embedding-size" in flat(capsys.readouterr().err)
    assert not read_toml(tmp_path / "run" / "config.toml")["model"]["embedding_branch"]
    assert tiny(image_folder, *small, "--overwrite", "--embedding-branch", "--embedding-size", 8) == 2
    assert "leave out --embedding-branch" in flat(capsys.readouterr().err)


def test_a_preset_that_collapses_stops_after_the_first_epoch(tmp_path, capsys):
    """Images that differ in one value have almost equal embeddings; one other image sets the scale."""
    pixels = np.full((120, 32, 32, 3), 120, np.uint8)
    pixels.reshape(120, -1)[np.arange(120), np.arange(120)] += 1
    pixels[0] = np.random.default_rng(0).integers(0, 256, (32, 32, 3))
    np.savez(tmp_path / "grey.npz", images=pixels, labels=np.arange(120) % 2)
    preset = ("--preset", "paper", "--backbone", "wrn-10-1", "--epochs", 2)
    assert run("train", tmp_path / "grey.npz", "--out", tmp_path / "run", *preset) == 1
    told = flat(capsys.readouterr().err)
    assert "lower --learning-rate" in told and "--resume --on-collapse warn" in told
    assert "epoch 1/2" in told and "epoch 2/2" not in told


def test_config_names_the_recipe_once(image_folder, tmp_path):
    assert tiny(image_folder, "--out", tmp_path / "r", "--recipe", "cross-entropy") == 0
    sections = read_toml(tmp_path / "r" / "config.toml")
    assert sections["model"]["recipe"] == "cross-entropy"
    assert not {"triplet", "clustering"} & sections["recipe"].keys()


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


def test_a_second_command_names_the_one_that_holds_the_run(tmp_path, capsys):
    """Two processes meet on one run: a training, and commands that would write it too."""
    folder = tmp_path / "busy"
    first = fork_maple("train", "digits", "--out", folder, *LONG)
    try:
        read_until(first, "epoch 1/500")
        for command in (("train", "digits", "--out", folder, "--overwrite"), ("evaluate", folder), ("report", folder)):
            assert run(*command) in (1, 2)
            errors = flat(capsys.readouterr().err)
            assert str(folder) in errors and f"process {first.pid}" in errors
    finally:
        first.kill()
        first.communicate()
    assert (folder / "resume.safetensors").exists() and run("train", "digits", "--out", folder) == 2  # no lock is left
