"""Flagged images in a folder, and in lists for a person to label."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from cheap import Cheap, files_in, predict, use, write_images
from commands import read_rows
from image_files import encode, write_parquet
from maple.data.sources import open_images
from maple.errors import DataError, RunError, UsageError
from maple.files import to_csv
from maple.runs.predicting import writer


@pytest.fixture
def model(monkeypatch, tmp_path) -> Path:
    """The file that stands for a cheap predictor."""
    monkeypatch.setitem(sys.modules, "maple.prediction.onnx", types.ModuleType("maple.prediction.onnx"))
    monkeypatch.setattr(writer, "SAVE_SECONDS", 0.0)
    use(Cheap())
    (tmp_path / "cheap.onnx").write_bytes(b"a graph")
    return tmp_path / "cheap.onnx"


def flagged_in(predictions: Path) -> list[str]:
    return [row["file"] for row in read_rows(predictions) if row["is_ood"] == "True"]


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("fdr", [None, 0.2])
def test_flagged_images_are_copied_or_linked(model, tmp_path, capsys, link, fdr):
    """From two folders with the same names."""
    folders = [write_images(tmp_path / name, 12) for name in ("one", "two")]
    out, target = tmp_path / "p.csv", tmp_path / "flagged"
    predict(model, list(map(str, folders)), str(out), copy_flagged=target, link=link, fdr=fdr)
    flagged = flagged_in(out)
    placed = sorted(target.iterdir())
    assert 0 < len(flagged) < 20 and len(placed) == len(flagged) and str(target) in capsys.readouterr().err
    assert sorted(path.read_bytes() for path in placed) == sorted(Path(file).read_bytes() for file in flagged)
    assert all(path.is_symlink() == link for path in placed)
    assert {path.resolve() for path in placed} == ({*map(Path, flagged)} if link else {*placed})


def test_rows_of_tables_and_arrays_become_files(model, tmp_path):
    pixels = np.stack([np.full((8, 8, 3), 25 * i, np.uint8) for i in range(11)])
    encoded = [encode(Image.fromarray(each), "JPEG" if i % 2 else "PNG") for i, each in enumerate(pixels)]
    np.savez(tmp_path / "images.npz", images=pixels)
    write_parquet(tmp_path / "images.parquet", {"image": encoded})
    for name, suffixes in (("images.npz", {".png"}), ("images.parquet", {".png", ".jpg"})):
        target, listed = tmp_path / name.replace(".", "-"), tmp_path / f"{name}.csv"
        out = tmp_path / f"{name}-said.csv"
        predict(model, [str(tmp_path / name)], str(out), copy_flagged=target, label_flagged=listed)
        assert len(files_in(target)) == len(flagged_in(out)) > 1 and {p.suffix for p in target.iterdir()} <= suffixes
        assert len(open_images(listed, labelled=False)) == len(flagged_in(out))
        with pytest.raises(UsageError, match="--copy-flagged"):
            predict(model, [str(tmp_path / name)], str(out), label_flagged=tmp_path / "other.csv")


def test_a_list_comes_back_with_labels(model, tmp_path, capsys):
    folder, out, listed = write_images(tmp_path / "images", 30), tmp_path / "p.parquet", tmp_path / "list.csv"
    predict(model, [str(folder)], str(out), label_flagged=listed)
    assert str(listed) in capsys.readouterr().err
    rows = read_rows(listed)
    assert len(rows) > 3 and list(rows[0]) == ["file", "label", "class", "probability", "p_value"]
    with pytest.raises(DataError, match="label"):
        open_images(listed)
    for row in rows[1:]:
        row["label"] = "emu"
    listed.write_text(to_csv(rows, list(rows[0]), header=True))
    images = open_images(listed, size=8)
    assert len(images) == len(rows) - 1 and images.class_names == ("emu",) and len(images.skipped) == 1


def test_tasks_of_label_studio_come_back_with_labels(model, tmp_path, capsys):
    folder, listed = write_images(tmp_path / "a folder", 30), tmp_path / "tasks.json"
    predict(model, [str(folder)], str(tmp_path / "p.csv"), label_flagged=listed)
    tasks = json.loads(listed.read_text())
    interface = ElementTree.parse(tmp_path / "tasks.xml").getroot()
    assert [each.get("value") for each in interface.iter("Choice")] == ["dark", "b|right"]
    names = {each.get("name") for each in interface.iter()}
    for task in tasks:
        assert task["data"]["image"].startswith("/data/local-files/?d=") and "a%20folder" in task["data"]["image"]
        result = task["predictions"][0]["result"][0]
        assert {result["from_name"], result["to_name"]} <= names and result["value"]["choices"][0] in (
            "dark",
            "b|right",
        )
        task["annotations"] = [{"result": [{**result, "value": {"choices": ["emu"]}}]}]
        del task["data"]["file"]  # the address alone says where it is
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    images = open_images(tmp_path / "export.json", size=8)
    assert len(images) == len(tasks) > 3 and images.class_names == ("emu",) and not images.skipped


@pytest.mark.parametrize(
    ("out", "options", "named"),
    [
        ("-", {"copy_flagged": Path("new")}, "--copy-flagged.*--out"),
        ("-", {"label_flagged": Path("new.csv")}, "--label-flagged.*--out"),
        ("p.csv", {"link": True}, "--link"),
        ("p.csv", {"label_flagged": Path("new.txt")}, "--label-flagged.*csv"),
        ("p.csv", {"label_flagged": Path("old.csv")}, "--label-flagged.*old"),
        ("p.csv", {"label_flagged": Path("./p.csv")}, "--label-flagged.*--out"),
        ("p.csv", {"label_flagged": Path("p.skipped.csv")}, "--label-flagged.*--out"),
        ("p.csv", {"label_flagged": Path("old.json")}, "--label-flagged.*old.xml"),
        ("new/p.csv", {"copy_flagged": Path("new")}, "--out.*--copy-flagged"),
        ("p.csv", {"copy_flagged": Path("images")}, "--copy-flagged.*images"),
        ("p.csv", {"copy_flagged": Path("images/flagged")}, "--copy-flagged.*inside"),
        ("p.csv", {"copy_flagged": Path("old.csv")}, "--copy-flagged.*old"),
    ],
)
def test_wrong_targets_are_refused_before_anything_is_read(tmp_path, monkeypatch, out, options, named):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", 3)
    for name in ("old.csv", "old.xml"):
        Path(name).write_text("file,label\n")
    with pytest.raises(UsageError, match=named) as raised:
        predict(Path("no-model"), ["images"], out, **options)
    assert raised.value.exit_code == 2 and files_in(tmp_path) == {"images", "old.csv", "old.xml"}


def test_a_copy_that_fails_leaves_the_predictions(model, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    folder = write_images(tmp_path / "images", 12)
    with pytest.raises(RunError, match=r"free some space.*predictions are complete"):
        predict(model, [str(folder)], str(tmp_path / "p.csv"), copy_flagged=tmp_path / "flagged")
    assert (tmp_path / "p.csv").exists() and not (tmp_path / "flagged").exists()
