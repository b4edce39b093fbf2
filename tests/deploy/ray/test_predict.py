"""Predictions on Ray: the rows of the one-process engine, also after an interruption."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clusters_of_ray import BATCH, N, contents, parts, request, when, write_images
from commands import flat
from commands import run as maple
from disks import change, disk
from image_files import endless_jpeg
from maple.data.decode import Decoding
from maple.data.sources import open_source
from maple.deploy.ray.model import Model
from maple.deploy.ray.predict import Layout, Part, PartWriter, plan_parts, predict_on_ray
from maple.deploy.ray.spans import Span
from maple.errors import DataError, RunError, UsageError
from maple.reporting.predictions import iterate_predictions
from maple.runs.predicting.parts import Footer
from maple.runs.predicting.predict import Extras, predict_images
from maple.runs.predicting.writer import ResumableFile
from maple.types import PREDICTION_COLUMNS


class Kept(NamedTuple):
    """A value that is here, and not in the object store."""

    value: Any

    def get(self) -> Any:
        return self.value


def place(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "p.csv"


# --- the same rows


def test_files_are_equal_to_the_last_byte(nodes, run, images, tmp_path):
    """With torch in the workers, as in this process."""
    out, local = place(tmp_path), tmp_path / "local" / "p.csv"
    local.parent.mkdir()
    predict_images(request(run, images, local))
    assert predict_on_ray(request(run, images, out)) == N - 1
    assert contents(out) == contents(local)
    assert len(nodes.workers("PartWriter")) <= 2


def test_a_table_gives_the_rows_of_one_process(nodes, graph, images, tmp_path):
    """Its rows are read by the workers, by absolute path; other batches change numbers by rounding at most."""
    table = pa.table({"image": [path.read_bytes() for path in sorted(images.glob("*.png"))]})
    pq.write_table(table, tmp_path / "images.parquet", row_group_size=50)
    kept = {}
    for batch_size, predict in ((BATCH, predict_on_ray), (64, predict_images)):
        out = tmp_path / f"{batch_size}.parquet"
        more = {"fdr": 0.2, "coverage": 0.9, "all_probabilities": True, "batch_size": batch_size}
        predict(request(graph, tmp_path / "images.parquet", out, **more))
        kept[batch_size] = pq.read_table(out)
    for name, column in zip(kept[64].column_names, kept[64].columns, strict=True):
        other = kept[BATCH][name]
        if pa.types.is_floating(column.type):
            assert column.to_numpy() == pytest.approx(other.to_numpy(), rel=2e-4, abs=1e-6), name
        else:
            assert column.to_pylist() == other.to_pylist(), name


def test_images_by_address_are_read_by_the_workers(nodes, graph, images, expected, tmp_path):
    out = place(tmp_path)
    assert predict_on_ray(request(graph, f"file://{images}", out, workers=1)) == N - 1
    with io.StringIO(expected[0].decode().replace(str(images), f"file://{images}")) as text, out.open() as file:
        assert [*csv.reader(file)] == [*csv.reader(text)]


def test_a_folder_holds_parquet_files_and_a_manifest(nodes, graph, images, expected, tmp_path):
    out = tmp_path / "predictions"
    with pytest.raises(UsageError, match="no folder of predictions"):
        predict_on_ray(request(graph, images, images))
    for _ in range(2):  # the second replaces the first
        predict_on_ray(request(graph, images, out, workers=1))
    names = {path.name for path in out.iterdir()}
    assert names == {"part-000000.parquet", "_manifest.json", "_skipped.csv"}
    manifest = json.loads((out / "_manifest.json").read_text())
    assert (manifest["images"], manifest["rows"], manifest["skipped"]) == (N, N - 1, 1)
    assert manifest["parts"] == [{"file": "part-000000.parquet", "rows": N - 1}]
    with io.StringIO(expected[0].decode()) as text:
        rows = [*csv.DictReader(text)]
    assert pq.read_table(out)["file"].to_pylist() == [row["file"] for row in rows]  # as one table
    assert [row.class_name for row in iterate_predictions(out)] == [row["class"] for row in rows]


# --- interruptions (kills: test_kills.py)


def test_the_same_command_goes_on_from_finished_parts(
    nodes, graph, run, images, expected, tmp_path, monkeypatch, capsys
):
    out = place(tmp_path)

    class Stopped(BaseException):
        pass

    def stop(file, number, footer) -> None:
        if len(file.found) >= 4:
            raise Stopped
        record(file, number, footer)

    record = ResumableFile.record
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(ResumableFile, "record", stop)
        predict_on_ray(request(graph, images, out))
    before = {path.name: path.stat().st_mtime_ns for path in parts(out)}
    assert 4 <= len(before) < 15
    with pytest.raises(UsageError, match="--coverage"):  # another request
        predict_on_ray(request(graph, images, out, coverage=0.9))
    with pytest.raises(UsageError, match=r"p\.csv\.partial.*the model.*--overwrite"):
        predict_on_ray(request(run, images, out))
    kept = []
    with when(lambda: len(parts(out)) > len(before), lambda: kept.extend(parts(out))):
        predict_on_ray(request(graph, images, out, workers=1))
    assert set(before) <= {path.name for path in kept}
    assert "resuming after" in capsys.readouterr().err
    assert contents(out) == expected


def test_a_disk_that_is_full_at_the_end_costs_no_part(nodes, graph, images, expected, tmp_path, monkeypatch):
    """Once there is room the file is joined without a cluster."""
    out = place(tmp_path)

    def fail(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"p\.csv.*free some space"):
        patch.setattr(ResumableFile, "_write_text", fail)
        predict_on_ray(request(graph, images, out))
    assert len(parts(out)) == 15 and not out.exists()
    monkeypatch.setattr("maple.deploy.ray.predict.connected", None)
    assert predict_on_ray(request(graph, images, out)) == N - 1
    assert contents(out) == expected


def test_a_source_that_vanishes_stops_the_command_and_one_process_ends_it(nodes, graph, images, expected, tmp_path):
    out, gone = place(tmp_path), Path(f"{images}-gone")
    vanish = when(lambda: len(parts(out)) >= 3, lambda: images.rename(gone))  # type: ignore[func-returns-value]
    try:
        with vanish, pytest.raises(DataError, match=r"\.png.* gone"):
            predict_on_ray(request(graph, images, out))
    finally:
        gone.rename(images)
    assert not out.exists() and len(parts(out)) >= 3
    predict_images(request(graph, images, out))
    assert contents(out) == expected


# --- images


def test_images_that_end_their_decoder_are_skipped_and_listed(nodes, graph, tmp_path, monkeypatch):
    images, out = write_images(tmp_path / "images", 24), place(tmp_path)
    (images / "0010.png").write_text("SIGSEGV")
    (images / "0011.png").write_text("SIGKILL")
    (images / "0020.png").write_bytes(endless_jpeg())
    monkeypatch.setattr("maple.runs.predicting.predict.Decoding", partial(Decoding, seconds=1.5))
    assert predict_on_ray(request(graph, images, out)) == 20
    with out.with_name("p.skipped.csv").open(newline="") as file:
        reasons = {Path(name).stem: reason for name, reason in [*csv.reader(file)][1:]}
    assert set(reasons) == {"0005", "0010", "0011", "0020"}
    assert "SIGSEGV" in reasons["0010"] and "SIGKILL" in reasons["0011"] and "1.5 s" in reasons["0020"]


def test_a_folder_that_a_worker_cannot_write_is_named(run, images, tmp_path):
    (tmp_path / "closed").write_text("")  # no folder
    layout = Layout(tmp_path / "closed", PREDICTION_COLUMNS, {}, Extras())
    span = Span.cut(open_source([str(images)], size=8), 0, 4)
    with pytest.raises(RunError, match=r"cannot write '.*closed/000000.part'.*let all nodes write there"):
        model, chunks = Kept(Model.read(run, {})), span.decode(Decoding(8), 4)
        PartWriter().predict(model, Kept(layout), Part(0, 0, 4, 4), chunks, [])


@pytest.mark.torture  # another worker may still be writing when the command has ended
def test_a_disk_that_fills_up_ends_the_command_and_the_same_one_goes_on(
    nodes, graph, images, expected, tmp_path, capsys
):
    """A real one, with room for some of the parts, on which all workers write."""
    with disk(tmp_path / "out", kibibytes=64) as folder:
        out = folder / "p.csv"
        flags = ["--batch-size", BATCH, "--workers", 2, "--engine", "ray"]
        assert maple("predict", graph, images, "--out", out, *flags) == 1
        said = flat(capsys.readouterr().err)
        failed = said[said.index("cannot write") :]
        assert "No space left on device" in failed and socket.gethostname() in failed and "Traceback" not in said
        assert f"{out}.partial" in failed and "free some space, then rerun the same command" in failed
        kept = {path: path.stat().st_mtime_ns for path in parts(out)}
        assert 0 < len(kept) < 15 and not out.exists()
        assert all(Footer.read(path).rows for path in kept)
        assert {path.name for path in Path(f"{out}.partial").iterdir()} == {".lock", *(path.name for path in kept)}
        change(folder, "size=1m")
        again = []
        with when(lambda: len(parts(out)) > len(kept), lambda: again.extend((p, p.stat().st_mtime_ns) for p in kept)):
            assert maple("predict", graph, images, "--out", out, *flags) == 0
        assert dict(again) == kept and "resuming after" in capsys.readouterr().err
        assert contents(out) == expected


def test_a_disk_of_one_node_that_is_full_is_named(nodes, graph, images, tmp_path):
    """That of its temporary files, where a worker unpacks its model; only this node has room for the worker."""
    out = place(tmp_path)
    with disk(tmp_path / "temporary", kibibytes=64) as folder:
        third = nodes.add(num_cpus=2, env_vars={"TMPDIR": str(folder)})
        try:
            with pytest.raises(
                RunError, match=rf"cannot write '{folder}/.*No space left.*{socket.gethostname()}; free"
            ):
                predict_on_ray(request(graph, images, out, workers=1, cpus_per_worker=2))
            assert not out.exists() and not [*folder.rglob("*.onnx")]
            change(folder, "size=64m")
            assert predict_on_ray(request(graph, images, out, workers=1, cpus_per_worker=2)) == N - 1
        finally:
            nodes.cluster.remove_node(third)


# --- the plan


def test_parts_cover_every_image_once_behind_those_of_one_process():
    in_order = {0: Footer({}, 5, 5, []), 1: Footer({}, 12, 7, [])}
    ranges = {3: Footer({}, 20, 4, [], first=16, step=4)}
    found = {**in_order, **ranges}
    plan = plan_parts(found, 27, step=100)
    assert plan == [Part(2, 12, 16, 4), Part(4, 20, 24, 4), Part(5, 24, 27, 4)]
    shifted = plan_parts({0: Footer({}, 9, 4, [], first=5, step=4)}, 8, step=2)  # not at its place: again
    assert [(part.first, part.stop) for part in shifted] == [(0, 4), (4, 8)]
