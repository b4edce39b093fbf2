"""``maple fit``: from a network that others trained to a run that every other command takes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from commands import flat, read_rows, run
from maple.data.image_set import ImageSet
from maple.data.shares import split_indices
from maple.data.sources import open_images
from maple.data.splits import load_splits
from maple.errors import DataError, UsageError
from maple.files import load_json
from maple.networks import create_backbone, load_weights, open_model, wrap_backbone
from maple.options import read_toml
from maple.prediction.fit import fit_predictor
from maple.prediction.store import load_predictor
from maple.runs.fit import check_head, fit_run, prepare_folder, sample_rows
from maple.runs.folder import RunFolder, RunOrigin
from maple.runs.requests import FitRequest
from maple.runs.setup.config import resolve_config
from maple.runs.setup.splits import load_run_splits, reopen_splits

N_CLASSES = 5
ZOO = f"""
from pathlib import Path

from safetensors.torch import load_file
from torch import nn


def make():
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.Linear(32, {N_CLASSES}))
    module.load_state_dict(load_file(Path(__file__).with_suffix(".safetensors")))
    return module
"""


@pytest.fixture(scope="module")
def digits():
    images = open_images("digits")
    known = images.labels < N_CLASSES
    return ImageSet.from_arrays(images.pixels[known], images.labels[known], name="digits")


@pytest.fixture(scope="module")
def place(tmp_path_factory, digits):
    """Digits in three files, other digits in a fourth, and a network that knows the first five, in a module."""
    folder = tmp_path_factory.mktemp("place")
    for name, part in (("train", slice(0, 500)), ("unseen", slice(500, 750)), ("test", slice(750, 900))):
        np.savez(folder / f"{name}.npz", images=digits.pixels[part], labels=digits.labels[part])
    others = open_images("digits")
    np.savez(folder / "others.npz", images=others.pixels[others.labels >= N_CLASSES][:200])
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.Linear(32, N_CLASSES))
    x = torch.from_numpy(digits.pixels[:500].transpose(0, 3, 1, 2).copy()).float() / 255
    with torch.no_grad():  # the head by least squares
        embedding = module[:3](x)
        targets = 8 * nn.functional.one_hot(torch.from_numpy(digits.labels[:500]), N_CLASSES).float()
        bias = targets.mean(0)
        module[3].weight.copy_(torch.linalg.lstsq(embedding, targets - bias).solution.T)
        module[3].bias.copy_(bias)
    name = f"fit_zoo_{os.getpid()}"
    (folder / f"{name}.py").write_text(ZOO)
    save_file(module.state_dict(), folder / f"{name}.safetensors")
    return folder, f"python:{name}:make", module


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place[0])
    return place


def fit(model: object, *more: object) -> int:
    return run("fit", model, "--data", "train.npz", "--calibrate", "unseen.npz", "--size", 8, *more)


@pytest.fixture(scope="module")
def finished(place):
    """A run of that network, made by the command."""
    folder, model, _ = place
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert fit(model, "--test", "test.npz", "--ood", "others=others.npz", "--trust", "--out", "run") == 0
    finally:
        os.chdir(before)
    return folder / "run"


def test_the_run_is_like_any_other(finished):
    expected = {
        "config.toml", "weights.safetensors", "detector.safetensors", "manifest.json", "classes.json", "gallery",
        "results.json", "report.html", "labels.csv", ".lock",
    }  # fmt: skip
    assert {path.name for path in finished.iterdir()} == expected
    config, classes = read_toml(finished / "config.toml"), load_json(finished / "classes.json")
    assert config.keys() == {"origin", "model", "data", "detector", "decision"}
    assert config["model"]["backbone"].startswith("python:fit_zoo") and config["origin"]["calibrate"].endswith("npz")
    assert classes["classes"] == [str(i) for i in range(N_CLASSES)] and sum(classes["cluster_sizes"]) == 500
    results = json.loads((finished / "results.json").read_text())
    assert results["n_ind"] == 150 and results["n_ood"] == {"others": 200}
    assert results["methods"]["softmax"]["classification"]["accuracy"] > 0.8
    assert results["provenance"]["config"].keys() == {"model", "data", "detector", "decision"}
    assert results["provenance"]["command"].startswith("maple fit python:")
    assert "After training" in (finished / "report.html").read_text()


def test_numbers_are_those_of_python(finished, here, digits, tmp_path):
    """Predictions of the command, next to those of the pieces put together by hand."""
    assert run("predict", finished, "test.npz", "--out", tmp_path / "p.csv", "--trust") == 0
    unseen = digits.subset(np.arange(500, 750))
    parts = split_indices(unseen.labels, unseen.keys, (0.5, 0.5), 0)
    backbone = wrap_backbone(here[2], example=torch.rand(2, 3, 8, 8))
    predictor = fit_predictor(backbone, digits.subset(np.arange(500)), *(unseen.subset(part) for part in parts))
    said = predictor(digits.subset(np.arange(750, 900)))
    found = read_rows(tmp_path / "p.csv")
    assert [row["class"] for row in found] == [str(c) for c in said.class_id]
    for column, values in (("probability", said.probability), ("score", said.score), ("p_value", said.p_value)):
        np.testing.assert_allclose([float(row[column]) for row in found], values, rtol=1e-4, atol=1e-9)


def test_other_commands_take_the_run(finished, here, tmp_path, capsys):
    results = (finished / "results.json").read_bytes()
    assert run("evaluate", finished, "--ood", "others=others.npz", "--detector", "rmd,react", "--trust", "--json") == 0
    again = json.loads(capsys.readouterr().out)  # the same test images, opened again
    assert again["n_ind"] == 150 and {"rmd", "react"} <= again["methods"].keys()
    before = json.loads(results)["methods"]["maple"]["detection"]["others"]["auroc"]
    assert again["methods"]["maple"]["detection"]["others"]["auroc"] == pytest.approx(before, abs=1e-12)
    assert run("explain", finished, "test.npz", "--limit", 2, "--out", tmp_path / "e.html", "--trust") == 0
    assert run("monitor", finished, "others.npz", "--trust") == 3
    assert run("report", finished, "--out", tmp_path / "r.html") == 0


@pytest.mark.parametrize("command", ["predict", "evaluate", "explain", "monitor", "update", "export", "serve"])
def test_commands_trust_only_if_told(finished, here, command, capsys):
    """Also in the process, and with the environment, of a command that was told."""
    before = dict(os.environ)
    assert run("explain", finished, "test.npz", "--limit", 1, "--trust") == 0
    assert dict(os.environ) == before
    images = {"evaluate": (), "serve": ("--port", 0), "update": ("--calibrate", "test.npz"), "export": ("x.onnx",)}
    assert run(command, finished, *images.get(command, ("test.npz",))) == 2
    assert "--trust" in flat(capsys.readouterr().err)


def test_unseen_images_are_split_and_seen_ones_left_out(here, digits, tmp_path):
    """Of the images for calibration some are in the training images, and one is twice there."""
    part = np.r_[490:510, 505, 510:600]
    np.savez(tmp_path / "mixed.npz", images=digits.pixels[part], labels=digits.labels[part])
    origin = RunOrigin(source="train.npz", calibrate=str(tmp_path / "mixed.npz"), test="test.npz")
    options = resolve_config({"splits": (0.1, 0.6, 0.2, 0.1)}).data
    splits = load_run_splits(origin, options, None)
    assert len(splits.train) == 500 and len(splits.test) == 150
    keys = [set(images.keys) for images in (splits.train, splits.validation, splits.calibration, splits.test)]
    assert sum(map(len, keys)) == len(set.union(*keys))
    assert keys[1] | keys[2] == set(digits.keys[500:600])
    share = len(keys[1]) / 100
    assert 0.7 < share < 0.8  # 0.6 of 0.8
    for images in (splits.validation, splits.calibration):
        assert set(images.labels) == set(range(N_CLASSES))
    assert sum("trained on it" in item.reason for item in splits.skipped) == 10
    with pytest.raises(DataError, match="--calibrate"):
        load_run_splits(replace(origin, calibrate="train.npz"), options, None)
    with pytest.raises(UsageError, match="both shares"):
        load_run_splits(origin, resolve_config({"splits": (0.8, 0.2, 0.0, 0.0)}).data, None)


def test_classes_in_the_order_of_the_head(here, tmp_path, capsys):
    model = here[1]
    assert fit(model, "--trust", "--out", tmp_path / "run", "--test", "test.npz", "--class-names", "4,3,2,1,0") == 0
    assert "--class-names" in flat(capsys.readouterr().err)  # they are not: the head is wrong now, and that is said
    assert load_json(tmp_path / "run" / "classes.json")["classes"] == ["4", "3", "2", "1", "0"]
    methods = json.loads((tmp_path / "run" / "results.json").read_text())["methods"]
    assert methods["maple-paper"]["classification"]["accuracy"] > 0.8
    assert methods["softmax"]["classification"]["accuracy"] < 0.5
    splits = reopen_splits(RunFolder(tmp_path / "run"), 8)  # which checks digests
    assert splits.test.class_names == ("4", "3", "2", "1", "0")
    assert fit(model, "--trust", "--out", tmp_path / "other", "--class-names", "4,3,2,1,zero") == 2
    assert "first '0'" in flat(capsys.readouterr().err)
    assert not (tmp_path / "other").exists()


def test_an_embedding_for_other_classes(here, tmp_path, capsys):
    """Without its head a network serves for classes it never saw, and one set of images is enough."""
    out = tmp_path / "run"
    options = ("--size", 8, "--drop-head", "--leave-out", "8,9", "--ood", "unknown=left-out", "--trust", "--out", out)
    assert run("fit", here[1], "--data", "digits", *options) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["n_ood"] == {"unknown": 354} and len(results["class_names"]) == 8
    assert results["methods"].keys() == {"maple", "maple-paper"}
    assert results["methods"]["maple"]["classification"]["accuracy"] > 0.8
    assert load_predictor(out, trust=True).backbone.head is None


def test_a_run_is_replaced_only_if_asked(finished, here, tmp_path, capsys):
    _, model, module = here
    torch.jit.trace(module, torch.rand(2, 3, 8, 8)).save(str(tmp_path / "net.pt"))
    out = tmp_path / "run"
    assert fit(tmp_path / "net.pt", "--trust", "--out", out) == 0
    assert (out / "network" / "net.pt").is_file()
    assert "maple evaluate" in flat(capsys.readouterr().err)  # there were no test images
    assert fit(model, "--trust", "--out", out) == 2
    assert "--overwrite" in flat(capsys.readouterr().err)
    assert fit(model, "--trust", "--out", out, "--overwrite") == 0
    assert not (out / "network").exists()
    assert RunFolder(out).read_config().origin.model == model


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["MODEL", "--calibrate", "unseen.npz"], "--trust"),
        (["MODEL", "--trust"], "--calibrate"),
        (["resnet20", "--calibrate", "unseen.npz"], "--weights"),
        (["resnet81", "--calibrate", "unseen.npz"], "'resnet18'"),
        (["MODEL", "--calibrate", "unseen.npz", "--trust", "--size", 9], "9 pixels"),
        (["MODEL", "--calibrate", "unseen.npz", "--trust", "--size", 8, "--ood", "a=nowhere"], "nowhere"),
        (["MODEL", "--calibrate", "unseen.npz", "--trust", "--size", 8, "--mean", "1,2"], "mean"),
        (["MODEL", "--calibrate", "unseen.npz", "--trust", "--size", 8, "--classes", 7], "--classes"),
        (["MODEL", "--calibrate", "unseen.npz", "--trust", "--size", 8, "--head", "fc"], "'fc'"),
    ],
)
def test_refusals(here, tmp_path, capsys, options, named):
    model = here[1] if options[0] == "MODEL" else options[0]
    assert run("fit", model, "--data", "train.npz", *options[1:], "--out", tmp_path / "run") == 2
    assert named in flat(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_head_for_other_classes_is_refused(here, digits):
    splits = load_splits(digits.subset(digits.labels < 4).with_class_names("0123"))
    with pytest.raises(UsageError, match="--drop-head"):
        check_head(open_model(here[1], trust=True, size=8), splits)


def test_images_of_the_wrong_size_are_noticed_before_anything_is_written(here, tmp_path):
    """The network does not say how large its images are, and no size that is tried by itself fits."""
    request = FitRequest(model=here[1], source="train.npz", calibrate="unseen.npz", out=tmp_path / "run", trust=True)
    with pytest.raises(UsageError, match=r"failed on images of 32, 64, 224 pixels.*--size"):
        fit_run(request)


# --- the public ResNet-20


def test_public_resnet20_through_the_command_line(shared_dir, tmp_path, capsys):
    """The command on the first few hundred CIFAR-10 images, and the pieces put together by hand on the same images."""
    weights = shared_dir / "weights" / "resnet20-12fca82f.th"
    sources = {"train": ("train", 0, 600), "unseen": ("test", 0, 400), "test": ("test", 400, 200)}
    if not weights.is_file() or not (shared_dir / "data" / "cifar10" / "train.parquet").is_file():
        pytest.skip("no CIFAR-10 or public weights here")
    for name, (file, start, n) in sources.items():
        with pq.ParquetFile(shared_dir / "data" / "cifar10" / f"{file}.parquet") as whole:
            first = pa.Table.from_batches([next(whole.iter_batches(600))], whole.schema_arrow)
        pq.write_table(first.slice(start, n), tmp_path / f"{name}.parquet")
    files = {name: tmp_path / f"{name}.parquet" for name in sources}
    data = ["--data", files["train"], "--calibrate", files["unseen"], "--test", files["test"]]
    out = tmp_path / "run"
    assert run("fit", "resnet20", "--weights", weights, *data, "--out", out, "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert run("predict", out, files["test"], "--out", tmp_path / "p.csv") == 0

    train, unseen, test = (open_images(files[name], size=32) for name in sources)
    halves = split_indices(unseen.labels, unseen.keys, (0.5, 0.5), 0)
    backbone = load_weights(create_backbone("resnet20", 10), weights).eval()
    said = fit_predictor(backbone, train, *(unseen.subset(half) for half in halves))(test)
    found = read_rows(tmp_path / "p.csv")
    assert [row["class"] for row in found] == [train.class_names[c] for c in said.class_id]
    for column, values in (("probability", said.probability), ("score", said.score), ("p_value", said.p_value)):
        np.testing.assert_allclose([float(row[column]) for row in found], values, rtol=1e-3, atol=1e-6)
    by_head = (said.softmax_class_id == test.labels).mean()
    assert results["methods"]["softmax"]["classification"]["accuracy"] == pytest.approx(by_head) and by_head > 0.85


# --- steps that training shares ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 8))
def test_every_cluster_gives_some_rows_and_none_too_many(cluster_ids, most):
    ids = np.array(cluster_ids)
    rows = sample_rows(ids, most)
    assert (np.diff(rows) > 0).all(), "in order, each once"
    for cluster in np.unique(ids):
        members, taken = np.flatnonzero(ids == cluster), rows[ids[rows] == cluster]
        assert 1 <= len(taken) <= most and taken[0] == members[0]
        steps = np.diff(np.searchsorted(members, taken))
        assert len(set(steps.tolist())) <= 1, "evenly spread"
        assert len(taken) == len(members) or len(members) > most


def test_a_run_that_is_replaced_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("MAPLE_DATA", str(tmp_path / "data"))
    run = RunFolder(tmp_path / "run")
    asked = FitRequest(source="digits", out=run.path, model="net", command="maple fit net")
    prepare_folder(asked, {"model": {"backbone": "net"}})
    origin = run.read_config().origin
    assert (origin.command, origin.data_root, origin.plugin) == ("maple fit net", str(tmp_path / "data"), None)
    (run / "results.json").touch()
    (run / "notes.txt").touch()
    prepare_folder(replace(asked, overwrite=True), {"model": {"backbone": "other"}})
    assert sorted(path.name for path in run.path.iterdir()) == ["config.toml", "notes.txt"]
    assert run.read_config().sections["model"]["backbone"] == "other"
