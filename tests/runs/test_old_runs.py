"""Runs of formats 1 and 2 still work: small runs on digits, packed, and the predictions of the code that made them.

Format 1 is that of the first day; format 2 was written before options lost their prefixes and run files got an owner.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import flat, read_rows, run
from maple.data.sources import open_images
from maple.files import RunFile
from maple.options import read_toml

SAMPLES = Path(__file__).parents[1] / "samples"
IMAGES = SAMPLES / "run_format2" / "images.parquet"
RUNS = ("run_format1/maple", "run_format2/maple", "run_format2/sngp", "run_format2/mc-dropout")
NUMBERS = ("probability", "typicality", "uncertainty", "score", "p_value")


def unpack(name: str, folder: Path) -> Path:
    with zipfile.ZipFile(SAMPLES / f"{name}.zip") as packed:
        packed.extractall(folder / name)
    return folder / name


@pytest.fixture(params=RUNS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack(request.param, tmp_path)


@pytest.fixture(params=RUNS[:2])
def old_maple(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack(request.param, tmp_path)


def first_predictions(old: Path) -> list[dict[str, str]]:
    """What the code that made a run said about the images."""
    return read_rows(SAMPLES / old.parent.name / f"{old.name}.csv")


def test_predictions_are_those_of_the_code_that_made_the_run(old: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    before = first_predictions(old)
    sets = ("--coverage", 0.9) if "prediction_set" in before[0] else ()
    assert run("predict", old, IMAGES, "--out", out, *sets, "--workers", 0) == 0
    after = read_rows(out)
    for name in set(before[0]) - {"file"}:
        if name in NUMBERS:
            old_values, new_values = (np.array([float(row[name]) for row in rows]) for rows in (before, after))
            # an image that calibrates, too, may change its place among equal scores by one
            atol = 1 / 150 if name == "p_value" else 1e-6
            np.testing.assert_allclose(new_values, old_values, rtol=1e-4, atol=atol)
        else:
            assert [row[name] for row in after] == [row[name] for row in before], name


def test_evaluate_and_report(old: Path, capsys: pytest.CaptureFixture) -> None:
    before = json.loads((old / RunFile.RESULTS).read_text())
    assert run("evaluate", old, "--workers", 0, "--json") == 0
    after = json.loads(capsys.readouterr().out)
    for method in {"maple", "softmax-scaled"} & set(before["methods"]):
        figures = (results["methods"][method]["classification"]["accuracy"] for results in (before, after))
        assert next(figures) == pytest.approx(next(figures))
    assert (old / RunFile.REPORT).exists()
    assert run("report", old, "--out", old / "other.html") == 0


def test_export(old_maple: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    assert run("export", old_maple, tmp_path / "run.onnx") == 0
    out = tmp_path / "p.csv"
    assert run("predict", tmp_path / "run.onnx", IMAGES, "--out", out) == 0
    assert [row["class"] for row in read_rows(out)] == [row["class"] for row in first_predictions(old_maple)]


def test_update_with_a_new_class(old_maple: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "new" / "noise").mkdir(parents=True)
    for i in range(12):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / "new" / "noise" / f"{i}.png")
    assert run("update", old_maple, "--data", tmp_path / "new", "--workers", 0) == 0
    classes = json.loads((old_maple / RunFile.CLASSES).read_text())
    assert classes["classes"][-1] == "noise" and len(classes["updates"]) == 1


def test_a_finished_run_is_not_resumed(old: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("train", "digits", "--out", old, "--resume") == 2
    assert "resume" in flat(capsys.readouterr().err)


def test_training_goes_on_from_an_old_run(old_maple: Path, tmp_path: Path) -> None:
    images = open_images("digits").subset(np.arange(200))
    np.savez(tmp_path / "few.npz", images=images.pixels, labels=images.labels)
    out = tmp_path / "tuned"
    assert run("train", tmp_path / "few.npz", "--init", old_maple, "--out", out, "--epochs", 1, "--workers", 0) == 0
    assert read_toml(out / RunFile.CONFIG)["origin"]["init"] == str(old_maple)
