"""Lists of files and labels: CSV of spreadsheets, JSON of Label Studio, and lists that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from image_files import noise
from maple.data.sources import open_images
from maple.data.sources.labels import NO_LABEL
from maple.errors import DataError


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    for name in ("a.png", "b.png", "c.png"):
        noise(rng).save(tmp_path / name)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "marked"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_spreadsheet_of_labels(folder: Path, separator: str, start: str) -> None:
    rows = [
        ("file", "label", "class"),
        ("a.png", "emu", "cat"),
        ("b.png", "", "cat"),
        (str(folder / "c.png"), "cat", ""),
    ]
    text = start + "\r\n".join(separator.join(row) for row in rows)
    images = open_images(write(folder / "list.csv", text))
    assert images.class_names == ("cat", "emu") and images.labels.tolist() == [1, 0]
    assert [Path(file).name for file in images.files] == ["a.png", "c.png"]
    assert [(Path(each.file).name, each.reason) for each in images.skipped] == [("b.png", NO_LABEL)]
    assert len(open_images(folder / "list.csv", labelled=False)) == 3


def choose(label: str, **about: object) -> dict[str, object]:
    return {"result": [{"from_name": "class", "type": "choices", "value": {"choices": [label]}}], **about}


def test_an_export_of_label_studio(folder: Path) -> None:
    served = f"/data/local-files/?d={str(folder / 'b.png').lstrip('/')}"
    tasks = [
        {"data": {"file": "a.png", "image": "/x"}, "annotations": [choose("cat"), choose("emu")]},  # corrected
        {"data": {"image": served}, "annotations": [choose("cat"), choose("emu", was_cancelled=True)]},
        {"data": {"file": "c.png"}, "annotations": []},
    ]
    images = open_images(write(folder / "export.json", json.dumps(tasks)))
    named = {Path(file).name: images.class_names[label] for file, label in zip(images.files, images.labels)}
    assert named == {"a.png": "emu", "b.png": "cat"} and len(images.skipped) == 1
    short = [{"file": "a.png", "class": "cat"}, {"file": "b.png", "class": {"choices": ["emu"]}}, {"file": "c.png"}]
    again = open_images(write(folder / "min.json", json.dumps(short)))
    assert again.class_names == ("cat", "emu") and len(again.skipped) == 1


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("list.csv", "path,label\na.png,cat\n", "'file'"),
        ("list.csv", "file,class\na.png,cat\n", "'label'"),
        ("list.csv", "", "'file'"),
        ("list.csv", "file,label\n", "no images"),
        ("list.csv", "file,label\na.png,\n", "'label'"),
        ("list.csv", "file,label\na.png,cat\na.png,emu\n", "'a.png'.*'cat' and 'emu'"),
        ("list.json", "{", "JSON"),
        ("list.json", "{}", "tasks"),
        ("list.json", "[3]", "tasks"),
        ("list.json", "[" * 100_000, "JSON"),
        ("list.json", '[{"data": {}}]', "task 1"),
        ("list.json", '[{"file": "a.png", "annotations": [3, {"result": [4, {"value": {"choices": 5}}]}]}]', "label"),
    ],
)
def test_lists_that_cannot_be_used(folder: Path, name: str, text: str, named: str) -> None:
    with pytest.raises(DataError, match=named):
        open_images(write(folder / name, text))


def test_a_list_that_is_not_text(folder: Path) -> None:
    (folder / "list.csv").write_bytes("file,label\na.png,Bär\n".encode("latin-1"))
    with pytest.raises(DataError, match="UTF-8"):
        open_images(folder / "list.csv")


def test_a_file_of_the_list_that_is_gone_is_skipped(folder: Path) -> None:
    images = open_images(write(folder / "list.csv", "file,label\na.png,cat\nb.png,emu\nc.png,emu\ngone.png,cat\n"))
    assert len(images) == 3 and [Path(each.file).name for each in images.skipped] == ["gone.png"]


@pytest.mark.parametrize("name", ["~$a.png", "~nobody-here/a.png", "a" * 5000 + ".png", "a\0.png"])
def test_a_name_that_cannot_be_a_file_is_skipped(folder: Path, name: str) -> None:
    tasks = [{"file": "a.png", "class": "cat"}, {"file": "b.png", "class": "emu"}, {"file": name, "class": "emu"}]
    images = open_images(write(folder / "min.json", json.dumps(tasks)))
    assert len(images) == 2 and [each.file for each in images.skipped] == [name]


def test_a_file_listed_twice_needs_one_label(folder: Path) -> None:
    images = open_images(write(folder / "list.csv", "file,label\na.png,cat\nb.png,emu\n./a.png,\n"))
    assert len(images) == 2 and not images.skipped
