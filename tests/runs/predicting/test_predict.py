"""Predictions of any number of images: what is written, in which memory, and what is left of it by a kill.

A cheap predictor stands in for a network, and processes of their own are killed in its place.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy.stats import false_discovery_control

from cheap import Cheap, files_in, predict, use, write_images
from commands import python_path
from image_files import encode, endless_jpeg, noise
from maple.data.decode import Decoding
from maple.decisions.conformal import benjamini_hochberg
from maple.errors import DataError, RunError, UsageError
from maple.runs.predicting import writer
from maple.runs.predicting.predict import flag_together
from maple.runs.predicting.writer import ResumableFile
from maple.types import DOUBTFUL_PROBABILITY, PREDICTION_COLUMNS, Prediction

ENVIRONMENT = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
FORMATS = ("csv", "jsonl", "parquet")


@pytest.fixture
def cheap(monkeypatch, tmp_path):
    """The cheap predictor, and the file that stands for it."""
    monkeypatch.setitem(sys.modules, "maple.prediction.onnx", types.ModuleType("maple.prediction.onnx"))
    monkeypatch.setattr(writer, "SAVE_SECONDS", 0.0)
    predictor = Cheap()
    use(predictor)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "cheap.onnx").write_bytes(b"a graph")
    return predictor, tmp_path / "model" / "cheap.onnx"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows with values of their types, whatever the form of the file."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {"file": str, "class": str, "md_class": str, "softmax_class": str, "cluster": int}
    kinds |= {"is_ood": "True".__eq__, "prediction_set": lambda text: text.split(" | ")}
    with path.open(newline="") as file:
        return [{key: kinds.get(key, float)(value) for key, value in row.items()} for row in csv.DictReader(file)]


# --- what is written


def test_the_three_forms_say_the_same(cheap, tmp_path):
    predictor, model = cheap
    folder = write_images(tmp_path / "images", 30)
    said = []
    for form in FORMATS:
        out = tmp_path / "out" / f"p.{form}"
        n = predict(model, [str(folder)], str(out), coverage=0.9, all_probabilities=True, batch_size=8)
        said.append(read_rows(out))
        assert n == len(said[-1]) == 26
    assert said[0] == said[1] == said[2]
    assert list(said[0][0]) == [*PREDICTION_COLUMNS, "prediction_set", "p_dark", "p_b|right"]
    good = [i for i in range(30) if i % 7 != 5]
    pixels = np.stack([np.full((8, 8, 3), 255 * i // 30, np.uint8) for i in good])
    expected = predictor.predict_pixels(pixels)
    sets = predictor.prediction_sets(expected, 0.9)
    assert said[0] == list(expected.rows([str(folder / f"{i:04}.png") for i in good], True, sets))
    assert any(row["is_ood"] for row in said[0]) and not all(row["is_ood"] for row in said[0])
    assert files_in(tmp_path / "out") == {"p.csv", "p.jsonl", "p.parquet", "p.skipped.csv"}
    with (tmp_path / "out" / "p.skipped.csv").open(newline="") as file:
        lost = list(csv.reader(file))
    assert lost[0] == ["file", "reason"] and [Path(name).name for name, _ in lost[1:]] == [
        "0005.png", "0012.png", "0019.png", "0026.png",
    ]  # fmt: skip


@pytest.mark.parametrize("fdr", [None, 0.2])
@pytest.mark.parametrize("form", [*FORMATS, "-"])
def test_the_last_lines_count_every_image(cheap, tmp_path, capsys, form, fdr):
    """Found = predicted + skipped; flagged and doubtful are those of the rows, also where --fdr decided at the end."""
    _, model = cheap
    folder, reference = write_images(tmp_path / "images", 30), tmp_path / "reference.csv"
    predict(model, [str(folder)], str(reference), fdr=fdr)
    rows = read_rows(reference)
    capsys.readouterr()
    out = form if form == "-" else str(tmp_path / f"p.{form}")
    predict(model, [str(folder)], out, batch_size=8, fdr=fdr)
    *_, found, counts = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("predictions:")]
    assert found.startswith("30 found: 26 predicted, 4 skipped") and ("p.skipped.csv" in found) == (form != "-")
    flagged = sum(row["is_ood"] for row in rows)
    doubtful = sum(not row["is_ood"] and row["probability"] < DOUBTFUL_PROBABILITY for row in rows)
    assert doubtful > 0 and counts.startswith(f"{flagged} flagged") and f", {doubtful} doubtful" in counts


def test_parquet_is_typed_and_says_what_was_promised(cheap, tmp_path):
    predictor, model = cheap
    predict(model, [str(write_images(tmp_path / "images", 9))], str(tmp_path / "p.parquet"), coverage=0.9)
    schema = pq.read_schema(tmp_path / "p.parquet")
    names = pa.dictionary(pa.int32(), pa.string())
    assert dict(zip(schema.names, schema.types)) == {
        "file": pa.string(), "class": names, "probability": pa.float64(), "typicality": pa.float64(),
        "uncertainty": pa.float64(), "score": pa.float64(), "p_value": pa.float64(), "is_ood": pa.bool_(),
        "cluster": pa.int64(), "md_class": names, "softmax_class": names, "prediction_set": pa.list_(pa.string()),
    }  # fmt: skip
    about = json.loads(schema.metadata[b"maple"])
    assert about["decision"] == predictor.decision.sentence() and about["network"] == "brightness"
    assert about["prediction_set"].startswith("holds the true class of at least 90 % of in-distribution images")
    assert set(about) == {"version", "network", "score", "decision", "prediction_set"}


def test_a_coverage_that_takes_all_classes_is_reported(cheap, tmp_path, capsys):
    predictor, model = cheap
    n, folder, out = len(predictor.calibration.set_scores), write_images(tmp_path / "images", 3), tmp_path / "p.jsonl"
    predict(model, [str(folder)], str(out), coverage=n / (n + 1))
    assert "all classes" not in capsys.readouterr().err
    predict(model, [str(folder)], str(out), coverage=(n + 1) / (n + 2), overwrite=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "every prediction set will hold all classes" in said and f"takes at least {n + 1} labelled" in said
    assert all(len(row["prediction_set"]) == 2 for row in read_rows(out))


@pytest.mark.parametrize(("fdr", "n_images", "words"), [
    (0.05, 9, "nothing can be flagged, in batches of any size: --fdr 0.05 takes at least 19 calibration images"),
    (0.1, 50, "unless at least 50 score above all calibration images: predict smaller batches"),
    (0.29, 29, "unless at least 10 score above all calibration images: predict smaller batches"),  # 29 / (0.29 * 10)
    (0.1, 1, ""),
])  # fmt: skip
def test_what_it_takes_to_flag_anything_in_a_batch(fdr, n_images, words, capsys):
    assert not flag_together(np.full(n_images, 0.9), fdr, n_calibration=9).any()
    said = " ".join(capsys.readouterr().err.split())
    assert words in said and bool(said) == bool(words)


def test_row_groups_do_not_tell_how_rows_were_written(cheap, tmp_path, monkeypatch):
    _, model = cheap
    folder = write_images(tmp_path / "images", 40)
    monkeypatch.setattr(writer, "MAX_GROUP_ROWS", 10)
    for batch_size in (3, 8, 64):
        predict(model, [str(folder)], str(tmp_path / f"{batch_size}.parquet"), batch_size=batch_size)
    written = [(tmp_path / f"{batch_size}.parquet").read_bytes() for batch_size in (3, 8, 64)]
    assert written[0] == written[1] == written[2]
    assert pq.ParquetFile(tmp_path / "3.parquet").num_row_groups == 4  # of 34 rows


def test_without_calibration_there_are_no_p_values(cheap, tmp_path):
    _, model = cheap
    use(Cheap(n_calibration=0))
    folder = write_images(tmp_path / "images", 3)
    for form, missing in (("csv", "nan"), ("jsonl", None), ("parquet", None)):
        predict(model, [str(folder)], str(tmp_path / f"p.{form}"))
        rows = read_rows(tmp_path / f"p.{form}")
        assert [row["p_value"] if missing is None else str(row["p_value"]) for row in rows] == [missing] * 3


@pytest.mark.parametrize("request_", [{"coverage": 0.9}, {"fdr": 0.1}])
def test_who_cannot_go_on_without_calibration_is_not_warned_of_what_would_come(cheap, tmp_path, capsys, request_):
    _, model = cheap
    use(Cheap(n_calibration=0))
    with pytest.raises(UsageError, match=r"--(fdr|coverage)"):
        predict(model, [str(write_images(tmp_path / "images", 3))], "-", **request_)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("fdr", [0.1, 0.6])
def test_all_images_decide_together(cheap, tmp_path, form, fdr, monkeypatch):
    _, model = cheap
    monkeypatch.setattr(writer, "READ_ROWS", 10)
    monkeypatch.setattr(writer, "MAX_GROUP_ROWS", 16)
    folder = write_images(tmp_path / "images", 70)
    predict(model, [str(folder)], str(tmp_path / f"p.{form}"), fdr=fdr, batch_size=9)
    predict(model, [str(folder)], str(tmp_path / f"alone.{form}"), batch_size=9)
    rows, alone = read_rows(tmp_path / f"p.{form}"), read_rows(tmp_path / f"alone.{form}")
    p_values, flagged = np.array([row["p_value"] for row in rows]), [row["is_ood"] for row in rows]
    np.testing.assert_array_equal(flagged, benjamini_hochberg(p_values, fdr))
    np.testing.assert_array_equal(flagged, false_discovery_control(p_values) <= fdr)
    assert 0 < sum(flagged) < len(rows) == 60
    assert [row | {"is_ood": 0} for row in rows] == [row | {"is_ood": 0} for row in alone]
    if form == "parquet":
        about = json.loads(pq.read_schema(tmp_path / "p.parquet").metadata[b"maple"])
        assert f"at most {100 * fdr:g} % are in-distribution" in about["decision"]


@pytest.mark.parametrize("fdr", [None, 0.6])
def test_printing_says_the_same_as_a_file(cheap, tmp_path, capsys, fdr):
    _, model = cheap
    folder = write_images(tmp_path / "images", 30)
    before = files_in(tmp_path)
    predict(model, [str(folder)], "-", fdr=fdr, batch_size=9)
    printed = capsys.readouterr()
    assert "4 files could not be used" in printed.err and "listed" not in printed.err
    assert files_in(tmp_path) == before
    predict(model, [str(folder)], str(tmp_path / "p.csv"), fdr=fdr, batch_size=9)
    assert printed.out == (tmp_path / "p.csv").read_text()
    assert "p.skipped.csv" in " ".join(capsys.readouterr().err.split())


def test_what_an_earlier_file_left_out_is_not_listed_beside_a_new_one(cheap, tmp_path):
    _, model = cheap
    folder = write_images(tmp_path / "images", 8)  # of which 0005.png is broken
    predict(model, [str(folder)], str(tmp_path / "p.csv"))
    assert (tmp_path / "p.skipped.csv").exists()
    predict(model, [str(folder / "0000.png")], str(tmp_path / "p.csv"))
    assert not (tmp_path / "p.skipped.csv").exists()


@pytest.mark.parametrize("out", ["-", "p.csv", "p.parquet"])
def test_when_no_image_can_be_used(cheap, tmp_path, capsys, out):
    _, model = cheap
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "0.png").write_bytes(b"not an image")
    target = out if out == "-" else str(tmp_path / out)
    with pytest.raises(DataError, match=r"cannot use '.*0.png': not an image.*; give another image"):
        predict(model, [str(folder)], target)
    (folder / "1.png").write_bytes(b"neither")
    with pytest.raises(DataError, match=r"\b2 images of 'images'.*0.png"):
        predict(model, [str(folder)], target, batch_size=1)
    assert files_in(tmp_path) == {"model", "images"} and capsys.readouterr().out == ""


class Overflowing(Cheap):
    """A network whose embeddings overflow where an image is bright."""

    limit = 200

    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        self.n_chunks += 1
        usable = pixels.mean((1, 2, 3)) < self.limit
        return self.predict_pixels(pixels[usable]), usable


@pytest.mark.parametrize("fdr", [None, 0.6])
@pytest.mark.parametrize("form", FORMATS)
def test_an_image_without_a_score_is_skipped_and_named(cheap, tmp_path, capsys, form, fdr):
    _, model = cheap
    folder, out = write_images(tmp_path / "images", 30), tmp_path / f"p.{form}"
    predict(model, [str(folder)], str(tmp_path / f"all.{form}"), batch_size=8)
    use(predictor := Overflowing())
    assert predict(model, [str(folder)], str(out), fdr=fdr, batch_size=8) == 21
    assert predictor.n_chunks == 4  # each once
    kept = [row for row in read_rows(tmp_path / f"all.{form}") if row["file"] < str(folder / "0024.png")]
    assert [row | {"is_ood": None} for row in read_rows(out)] == [row | {"is_ood": None} for row in kept]
    with (tmp_path / "p.skipped.csv").open(newline="") as file:
        lost = {Path(row["file"]).name: row["reason"] for row in csv.DictReader(file)}
    unsaid = [f"{i:04}.png" for i in (24, 25, 27, 28, 29)]
    assert {name for name, reason in lost.items() if "NaN" in reason} == set(unsaid) and len(lost) == 9
    assert "could not be used" in " ".join(capsys.readouterr().err.split())


def test_when_no_image_has_a_score(cheap, tmp_path):
    _, model = cheap
    use(nothing := Overflowing())
    nothing.limit = 0
    with pytest.raises(DataError, match=r"\b9 images .*0000.png"):
        predict(model, [str(write_images(tmp_path / "images", 9))], str(tmp_path / "p.csv"), batch_size=4)
    assert files_in(tmp_path) == {"images", "model"}


def test_a_name_that_begins_like_a_home_folder_is_a_name(cheap, tmp_path, monkeypatch):
    """As of files that office programs leave beside a table."""
    _, model = cheap
    (file, *_) = sorted(write_images(tmp_path / "images", 1).iterdir())
    file.rename(tmp_path / "~$a.png")
    monkeypatch.chdir(tmp_path)
    assert predict(model, ["~$a.png"], "p.csv") == 1


def test_the_images_themselves_are_not_overwritten(cheap, tmp_path, rng):
    _, model = cheap
    path = tmp_path / "images.parquet"
    pq.write_table(pa.table({"image": [encode(noise(rng))]}), path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="--out"):
        predict(model, [str(path)], str(path))
    assert path.read_bytes() == before
    folder = write_images(tmp_path / "images", 3)
    with pytest.raises(UsageError, match="--out"):
        predict(model, [str(folder)], str(folder / "p.parquet"))
    listed = tmp_path / "labels.csv"
    listed.write_text("file,label\n" + "".join(f"{file},dark\n" for file in sorted(folder.iterdir())))
    with pytest.raises(UsageError, match="--out"):
        predict(model, [str(listed)], str(tmp_path / "images" / ".." / "labels.csv"))
    assert listed.read_text().startswith("file,label")
    for _ in range(2):
        assert predict(model, [str(folder)], str(folder / "p.csv")) == 3


def test_names_with_commas_quotes_and_new_lines(cheap, tmp_path, rng):
    _, model = cheap
    names = ['a, "b".png', "c\nd.png", "e\r.png", "ü\u2028.png"]
    data = [{"bytes": encode(noise(rng)), "path": name} for name in names]
    pq.write_table(pa.table({"image": data}), tmp_path / "images.parquet")
    for form in FORMATS:
        predict(model, [str(tmp_path / "images.parquet")], str(tmp_path / f"p.{form}"), fdr=0.1)
    with (tmp_path / "p.csv").open(encoding="utf-8", newline="") as file:
        assert [row["file"] for row in csv.DictReader(file)] == [name.replace("\r", "\\r") for name in names]
    lines = (tmp_path / "p.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["file"] for line in lines if line] == names
    assert pq.read_table(tmp_path / "p.parquet")["file"].to_pylist() == names


# --- going on


class Interrupting(Cheap):
    """Ctrl-C after some chunks."""

    def __init__(self, before: int = 2) -> None:
        super().__init__()
        self.before = before

    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        if self.n_chunks == self.before:
            raise KeyboardInterrupt
        return super().predict_usable(pixels)


def test_one_image_is_done_and_two_are(cheap, tmp_path, capsys):
    _, model = cheap
    folder = write_images(tmp_path / "images", 5)
    for n, verb in ((1, "1 image is"), (2, "2 images are")):
        use(Interrupting(before=n))
        with pytest.raises(KeyboardInterrupt):
            predict(model, [str(folder)], str(tmp_path / f"{n}.csv"), batch_size=1)
        assert f"{verb} done and kept in" in " ".join(capsys.readouterr().err.split())


class Removing(Cheap):
    """The folder of the images is renamed while the third chunk is predicted."""

    def __init__(self, folder: Path, gone: Path) -> None:
        super().__init__()
        self.folder, self.gone = folder, gone

    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        if self.n_chunks == 2:
            self.folder.rename(self.gone)
        return super().predict_usable(pixels)


def test_images_that_vanish_stop_the_command_and_no_row_is_lost(cheap, tmp_path):
    _, model = cheap
    folder = write_images(tmp_path / "images", 30)
    again = partial(predict, model, [str(folder)], str(tmp_path / "p.csv"), batch_size=7, workers=0)
    use(Removing(folder, tmp_path / "gone"))
    with pytest.raises(DataError, match=r"images/.*gone"):
        again()
    (tmp_path / "gone").rename(folder)
    use(Cheap())
    assert again() == 26
    predict(model, [str(folder)], str(tmp_path / "whole.csv"), batch_size=7)
    for name in ("p.csv", "p.skipped.csv"):
        assert (tmp_path / name).read_bytes() == (tmp_path / name.replace("p.", "whole.", 1)).read_bytes()


def test_images_that_go_one_by_one_are_skipped(cheap, tmp_path):
    _, model = cheap
    folder = write_images(tmp_path / "images", 30)
    images = sorted(folder.iterdir())

    class Losing(Cheap):
        def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
            for path in images[10:15]:
                path.unlink(missing_ok=True)
            return super().predict_usable(pixels)

    use(Losing())
    assert predict(model, [str(folder)], str(tmp_path / "p.csv"), batch_size=2, workers=0) == 26 - 4


@pytest.fixture(params=FORMATS)
def interrupted(request, cheap, tmp_path, capsys):
    """A call that was interrupted, what it leaves, and what says the same again."""
    _, model = cheap
    folder = write_images(tmp_path / "images", 30)
    out = tmp_path / "out" / f"p.{request.param}"
    again = partial(predict, model, [str(folder)], str(out), batch_size=7)
    use(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        again()
    assert "14 images are done and kept in" in " ".join(capsys.readouterr().err.split())
    use(Cheap())
    predict(model, [str(folder)], str(tmp_path / f"whole.{request.param}"), batch_size=7)
    capsys.readouterr()
    use(predictor := Cheap())
    return types.SimpleNamespace(
        out=out, again=again, folder=folder, model=model, predictor=predictor,
        expected=(tmp_path / f"whole.{request.param}").read_bytes(),
    )  # fmt: skip


def test_the_same_call_goes_on(interrupted, capsys):
    name = interrupted.out.name
    assert files_in(interrupted.out.parent) == {f"{name}.partial"}
    assert interrupted.again() == 26
    assert "resuming after 14 images" in " ".join(capsys.readouterr().err.split())
    assert interrupted.predictor.n_chunks == 3  # of 5
    assert interrupted.out.read_bytes() == interrupted.expected
    assert files_in(interrupted.out.parent) == {name, "p.skipped.csv"}
    assert len((interrupted.out.parent / "p.skipped.csv").read_text().splitlines()) == 1 + 4


def test_fewer_images_at_a_time_go_on(interrupted):
    interrupted.again(batch_size=2)
    assert interrupted.predictor.n_chunks == 8
    assert interrupted.out.read_bytes() == interrupted.expected


def test_another_request_is_refused(interrupted, tmp_path):
    kept = {path: path.read_bytes() for path in interrupted.out.parent.rglob("*") if path.is_file()}
    again = interrupted.again
    cases = [
        (partial(again, flags={"false_alarm": 0.2}), "--false-alarm"),
        (partial(again, fdr=0.1), "--fdr"),
        (partial(again, coverage=0.9, all_probabilities=True), "--coverage, --all-probabilities"),
    ]
    for call, what in cases:
        use(Cheap())
        with pytest.raises(UsageError, match=f"14 images.* {what}: .*--overwrite"):
            call()
    use(predictor := Cheap())
    interrupted.model.write_bytes(b"another graph")
    os.utime(interrupted.folder / "0003.png", ns=(1, 1))
    with pytest.raises(UsageError, match="the model, the images"):
        again()
    assert {path: path.read_bytes() for path in interrupted.out.parent.rglob("*") if path.is_file()} == kept
    again(overwrite=True)
    assert predictor.n_chunks == 5
    assert interrupted.out.read_bytes() == interrupted.expected
    assert files_in(interrupted.out.parent) == {interrupted.out.name, "p.skipped.csv"}


@pytest.mark.parametrize(("damaged", "n_chunks"), [("000000.part", 5), ("000001.part", 4)])
@pytest.mark.parametrize("is_truncated", [True, False])
def test_a_damaged_part_is_predicted_again(interrupted, damaged, n_chunks, is_truncated, capsys):
    part = interrupted.out.with_name(f"{interrupted.out.name}.partial") / damaged
    if is_truncated:
        os.truncate(part, 40)
    else:
        part.unlink()
    interrupted.again()
    assert is_truncated == (damaged in capsys.readouterr().err)
    assert interrupted.predictor.n_chunks == n_chunks
    assert interrupted.out.read_bytes() == interrupted.expected


def test_what_another_process_writes_is_left_alone(interrupted):
    pytest.importorskip("fcntl")
    names = interrupted.predictor.class_names
    kept = files_in(interrupted.out.parent)
    with ResumableFile(interrupted.out, PREDICTION_COLUMNS, names, {}, overwrite=True) as first:
        with pytest.raises(RunError, match="partial"):
            interrupted.again()
        first.discard()
    assert kept and files_in(interrupted.out.parent) == set()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("n_writes", [3, 6, 7])  # six parts, the list of skipped images, the file
def test_a_full_disk_is_a_pause(cheap, tmp_path, capsys, monkeypatch, form, n_writes):
    _, model = cheap
    folder = write_images(tmp_path / "images", 30)
    out = tmp_path / "out" / f"p.{form}"
    sync, n_syncs = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal n_syncs
        n_syncs += 1
        if n_syncs > n_writes:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=f"p.{form}.*No space left on device"):
            predict(model, [str(folder)], str(out), batch_size=5)
    assert "images are done and kept" in " ".join(capsys.readouterr().err.split())
    predict(model, [str(folder)], str(out), batch_size=5)
    assert len(read_rows(out)) == 26


# --- killed


def run_here(code: str) -> str:
    """Run code that may use this module in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import cheap as here; {code}"],
        capture_output=True, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_kill_at_any_moment_leaves_neither_gaps_nor_duplicates(tmp_path):
    cases = [("csv", None), ("jsonl", 0.6), ("parquet", None)]
    for left in json.loads(run_here(f"print([here.killed_anywhere({str(tmp_path)!r}, *case) for case in {cases}])")):
        assert len(left) > 20
        assert set(left) == {0, 1, 2, 3}  # chunks
        early = left[: left.index(0)]  # afterwards the parts are removed, in any order
        assert early == sorted(early, reverse=True) and left.count(0) > 5


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc here")
def test_a_kill_leaves_no_process_behind(cheap, tmp_path):
    _, model = cheap
    folder, out = write_images(tmp_path / "images", 160), tmp_path / "p.csv"
    call = f"here.predict_slowly({str(model)!r}, {str(folder)!r}, {str(out)!r}, 2)"
    process = subprocess.Popen([sys.executable, "-c", f"import cheap as here; {call}"], env=ENVIRONMENT)
    try:
        assert wait(lambda: Path(f"{out}.partial", "000000.part").exists())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    finally:
        process.kill()
        process.wait()
    assert len(children) >= 2 and not out.exists()
    assert wait(lambda: not any(is_alive(child) for child in children))
    predict(model, [str(folder)], str(out), batch_size=4)
    use(Cheap())
    predict(model, [str(folder)], str(tmp_path / "whole.csv"), batch_size=4)
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="has no signal that ends a decoder")
def test_a_kill_while_an_image_decodes_forever_changes_nothing(cheap, tmp_path, monkeypatch):
    _, model = cheap
    folder, out = write_images(tmp_path / "images", 30), tmp_path / "p.csv"
    (folder / "0014.png").write_bytes(endless_jpeg())  # of the fourth chunk, after which others wait
    call = f"here.predict_slowly({str(model)!r}, {str(folder)!r}, {str(out)!r}, 2, seconds=60)"
    process = subprocess.Popen([sys.executable, "-c", f"import cheap as here; {call}"], env=ENVIRONMENT)
    try:
        assert wait(lambda: Path(f"{out}.partial", "000002.part").exists())
    finally:
        process.kill()
        process.wait()
    monkeypatch.setattr("maple.runs.predicting.predict.Decoding", partial(Decoding, seconds=1.5))
    for path in (out, tmp_path / "whole.csv"):  # the first goes on
        predict(model, [str(folder)], str(path), batch_size=4, workers=2)
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    skipped = (tmp_path / "p.skipped.csv").read_text()
    assert skipped == (tmp_path / "whole.skipped.csv").read_text()
    assert '0014.png,"takes longer than 1.5 s to decode' in skipped and len(read_rows(out)) == 25


def wait(condition: Any, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_alive(pid: str) -> bool:
    """Whether a process runs; one that has ended may wait for its exit code to be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory in other units")
@pytest.mark.parametrize(("kind", "form"), [("files", "csv"), ("table", "parquet")])
def test_memory_does_not_grow_with_the_number_of_images(tmp_path, kind, form):
    """Eight times as many images: 69 MB of pixels more, and 84 MB of encoded images in the table."""
    data = encode(Image.new("RGB", (128, 128))) + bytes(60_000)  # which cost nothing to decode
    (tmp_path / "one.png").write_bytes(data)
    peaks = []
    for n in (200, 1600):
        source = tmp_path / f"{n}"
        if kind == "table":
            source = source.with_suffix(".parquet")
            table = pa.table({"image": [data] * n})
            plain = {"use_dictionary": False, "compression": "none", "write_batch_size": 16}  # a page is read at once
            pq.write_table(table, source, row_group_size=n, **plain)
            assert source.stat().st_size > n * len(data)
        else:
            source.mkdir()
            for i in range(n):
                (source / f"{i:05}.png").hardlink_to(tmp_path / "one.png")
        out = tmp_path / f"out{n}" / f"p.{form}"
        peaks.append(float(run_here(f"here.measure({str(source)!r}, {str(out)!r})")))
        assert len(read_rows(out)) == n
    assert peaks[1] < peaks[0] + 25, peaks


# --- predictors


def test_an_exported_graph_needs_no_torch(tmp_path):
    write_images(tmp_path / "images", 20)
    (tmp_path / "m.onnx").write_bytes(b"a graph")
    out = tmp_path / "p.parquet"
    run_here(
        "here.use(here.Cheap()); here.sys.modules['torch'] = None; "
        f"here.predict(here.Path({str(tmp_path / 'm.onnx')!r}), [{str(tmp_path / 'images')!r}], {str(out)!r})"
    )
    assert len(read_rows(out)) == 17
