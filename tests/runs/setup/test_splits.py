"""The images of a run: left-out classes, and the same splits opened again."""

from __future__ import annotations

import json
import shutil

from PIL import Image

from commands import flat, run, tiny
from maple.files import load_json


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
    assert "'nowhere.txt'" in flat(capsys.readouterr().err)


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
    assert f"'{image_folder}'" in flat(capsys.readouterr().err)
    assert run("evaluate", folder, "--ind", image_folder) == 0
    shutil.rmtree(image_folder)
    assert run("evaluate", folder) == 1
    assert "--ind" in capsys.readouterr().err


def test_class_with_one_image_is_named(image_folder, tmp_path, capsys):
    (image_folder / "rare").mkdir()
    Image.new("RGB", (16, 16), (9, 200, 9)).save(image_folder / "rare" / "0.png")
    assert run("train", image_folder, "--out", tmp_path / "r", "--epochs", 1) == 1
    errors = flat(capsys.readouterr().err)
    assert "'rare'" in errors
    assert "--min-images" in errors
