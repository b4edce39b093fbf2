"""``maple evaluate``: test and unknown images, and runs without either."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from commands import flat, run, tiny
from maple.errors import UsageError
from maple.runs.evaluate import create_detectors, describe_hardware, find_commit


def test_evaluate_adds_unknown_sets_and_the_report(finished, capsys):
    assert run("evaluate", finished, "--ood", "far=simulated-diatoms/far?n=60", "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert results["n_ood"] == {"far": 60}
    assert results["methods"]["maple"]["detection"]["far"]["auroc"] > 0.5
    assert "far" in (finished / "report.html").read_text()


def test_seeds_and_groups_of_unknown_images_in_written_tables(finished, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    far = "simulated-diatoms/far?n=60"
    asked = ("--ood", "close=simulated-diatoms/near?n=60", "--near", "close", "--far", far)
    tables = [tmp_path / f"table.{suffix}" for suffix in ("tex", "md", "csv")]
    written = [part for path in tables for part in ("--table", path)]
    assert run("evaluate", finished, other, *asked, *written, "--json") == 0
    both = json.loads(capsys.readouterr().out)
    assert len(both) == 2 and both[0]["groups"] == {"near": ["close"], "far": [far]}
    assert both[0]["n_ood"] == {"close": 60, far: 60}
    tex, text, rows = (path.read_text() for path in tables)
    assert "near-OOD mean" in tex and r"$\pm$" in tex and "far-OOD mean" in text and "near_ood/auroc" in rows
    assert "mean of near" in (finished / "report.html").read_text().replace("<wbr/>", "")
    assert run("evaluate", finished, *asked, "--table", tmp_path / "table.doc") == 2
    assert "--table" in flat(capsys.readouterr().err)
    assert run("evaluate", finished, "--near", "close", "--far", "close") == 2
    assert "--near" in flat(capsys.readouterr().err)


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


def test_corrupt_unknown_images_are_counted(finished, image_folder, capsys):
    (image_folder / "dark" / "broken.png").write_bytes(b"not an image")
    assert run("evaluate", finished, "--ood", f"noise={image_folder / 'dark'}", "--json") == 0
    out, errors = capsys.readouterr()
    assert json.loads(out)["n_ood"] == {"noise": 12}
    assert "'dark'" in flat(errors)


def test_without_test_images_nothing_is_measured(image_folder, tmp_path, capsys):
    folder = tmp_path / "r"
    assert tiny(image_folder, "--out", folder, "--splits", "0.8,0.1,0.1,0") == 0
    assert "--ind" in flat(capsys.readouterr().err)
    assert (folder / "report.html").exists() and not (folder / "results.json").exists()
    assert run("evaluate", folder) == 2
    assert "--ind" in capsys.readouterr().err
    assert run("evaluate", folder, "--ind", image_folder) == 0


def test_what_is_no_run_is_named_with_the_next_step(tmp_path, capsys):
    assert run("evaluate", tmp_path / "NOSUCH") == 1
    said = flat(capsys.readouterr().err)
    assert "NOSUCH" in said and "maple train" in said and not (tmp_path / "NOSUCH").exists()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"knn.kk": "3"}, "'k'"),
        ({"knn.k": "0"}, "--set knn"),
        ({"knm.k": "3"}, "'knn'"),
        ({"energy.x": "3"}, "energy"),
        ({"knn.k": "3"}, "--detector knn"),
    ],
)
def test_wrong_settings_of_detectors(given, named):
    with pytest.raises(UsageError, match=named):
        create_detectors(["rmd"], given)


def test_newer_run_is_refused(finished, tmp_path, capsys):
    copy = tmp_path / "newer"
    shutil.copytree(finished, copy)
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(re.sub(r"format = \d+", "format = 99", text))
    assert run("evaluate", copy) == 1
    assert "config.toml" in capsys.readouterr().err


# --- provenance -------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A repository with one tracked file."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "module.py").write_text("")
    for arguments in (["init", "-q"], ["add", "module.py"], ["commit", "-q", "-m", "Start"]):
        subprocess.run([*git, *arguments], check=True)
    return tmp_path


def test_the_commit_of_a_checkout(checkout):
    asked = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    found = find_commit(checkout / "module.py")
    assert found is not None and asked.stdout.startswith(found)


def test_files_that_a_checkout_does_not_track_have_no_commit(checkout):
    """Such as the package, installed in an environment inside somebody's repository."""
    (checkout / "installed.py").write_text("")
    assert find_commit(checkout / "installed.py") is None


def test_no_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert find_commit(tmp_path / "module.py") is None


def test_no_git(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert find_commit(checkout / "module.py") is None


def test_hardware_names_the_cores():
    assert "cores" in describe_hardware()
