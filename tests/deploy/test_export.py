"""Exported files: they agree with the run, hold nothing of this machine, and are not written if they disagree."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from exported import fit_pictures, pictures
from maple.decisions.probability import Probability
from maple.deploy.graph import OUTPUTS
from maple.deploy.trace import trace_onnx
from maple.detectors.maple import MapleDetector
from maple.errors import RunError, UsageError
from maple.networks import create_backbone, embed, wrap_backbone
from maple.prediction.fit import fit_predictor
from maple.prediction.onnx import OnnxPredictor
from maple.prediction.predictor import Predictor
from maple.reporting.gallery import write_cluster_gallery


@pytest.mark.parametrize("preprocess", [False, True])
def test_the_file(predictor, preprocess, tmp_path, onnx):
    """Read by onnxruntime alone, in batches of any size."""
    import onnxruntime

    from maple.deploy.export import export_onnx

    images = pictures(20, seed=3).pixels
    path = tmp_path / "deep" / "model.onnx"
    report = export_onnx(predictor, path, preprocess=preprocess, check=images, exemplars={4: images[:3]})
    assert path.stat().st_size == report.n_bytes and list(path.parent.iterdir()) == [path]
    assert report.n_exemplars == 3 and report.n_images == 36
    assert "agrees with the run on 36 images" in report.describe()
    assert json.loads(json.dumps(report.to_dict()))["differences"]["squared_distance"] < 1e-4
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == list(OUTPUTS)
    expected = predictor.predict_pixels(images)
    x = images if preprocess else images.transpose(0, 3, 1, 2).astype(np.float32) / 255
    for rows in (slice(0, 1), slice(0, 20)):
        said = dict(zip(OUTPUTS, session.run(None, {"images": x[rows]}), strict=True))
        np.testing.assert_array_equal(said["class_id"], expected.class_id[rows])
        np.testing.assert_array_equal(said["is_ood"], expected.is_ood[rows])
        np.testing.assert_allclose(said["squared_distance"], expected.squared_distance[rows], rtol=1e-4)
        np.testing.assert_allclose(said["probabilities"], expected.probabilities[rows], atol=1e-4)
        np.testing.assert_allclose(said["p_value"], expected.p_value[rows], atol=0.02)
        degrees = predictor.detector.gaussians_.n_components
        np.testing.assert_allclose(said["typicality"], chi2.sf(said["squared_distance"], degrees), atol=1e-6)
        np.testing.assert_allclose(said["typicality"] + said["uncertainty"], 1)
        np.testing.assert_allclose(said["position"], expected.position[rows], rtol=1e-3, atol=1e-3)
    assert "Abs" not in {node.op_type for node in onnx.load(path).graph.node}  # the shallow layer ends in ReLUs
    text = path.read_bytes()
    assert b"site-packages" not in text and b".py" not in text  # nothing of the machine that it was made on


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("confidence", [None, 0.8])
def test_the_level_is_an_optional_input(quantise, confidence, tmp_path, onnx):
    import onnxruntime

    from maple.deploy.export import export_onnx
    from maple.prediction.onnx import OnnxPredictor

    torch.manual_seed(0)
    predictor = fit_pictures(create_backbone("resnet9", 4)).decide(false_alarm=0.1, confidence=confidence)
    images = np.concatenate([pictures(40, seed=3).pixels, 255 - pictures(20, seed=4).pixels])
    export_onnx(predictor, tmp_path / "model.onnx", check=images, preprocess=True, quantise=quantise)
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["images"]
    wanted = ["score", "class_id", "is_ood"]
    score, class_id, by_default = session.run(wanted, {"images": images})
    np.testing.assert_array_equal(by_default, predictor.decision.is_ood(score, class_id))
    flagged = []
    for level in (0.02, 0.1, 0.6):
        said = session.run(wanted, {"images": images, "false_alarm": np.array([level])})[2]
        at_level = predictor.calibration.decide(level, confidence)
        np.testing.assert_array_equal(said, at_level.is_ood(score, class_id))
        flagged.append(said.sum())
    assert flagged[0] < flagged[2] and by_default.sum() == flagged[1]
    each = np.where(np.arange(60) % 2, 0.6, 0.02)
    mixed = session.run(wanted, {"images": images, "false_alarm": each})[2]
    np.testing.assert_array_equal(mixed[1::2], said[1::2])
    opened = OnnxPredictor.open(tmp_path / "model.onnx")
    assert opened.takes_level and opened.decide(false_alarm=0.6)(images).is_ood.sum() == flagged[2]
    np.testing.assert_array_equal(opened.run(images, false_alarm=0.6)["is_ood"], said)


BIT_FOR_BIT = ("class_id", "p_value", "is_ood", "cluster", "md_class_id", "softmax_class_id")


@pytest.mark.parametrize("quantise", [False, True])
def test_an_image_has_the_same_answer_alone_and_in_a_batch(predictor, quantise, tmp_path, onnx):
    """Numbers may differ in the last bits: vectorised exponentials and products of one row round otherwise."""
    from maple.deploy.export import export_onnx
    from maple.prediction.onnx import OnnxPredictor

    images = np.concatenate([pictures(48, seed=3).pixels, 255 - pictures(16, seed=4).pixels])
    export_onnx(predictor, tmp_path / "model.onnx", check=images, quantise=quantise)
    opened = OnnxPredictor.open(tmp_path / "model.onnx", threads=1)
    alone, *others = ([opened.run(images[i : i + size]) for i in range(0, len(images), size)] for size in (1, 7, 64))
    for batches in others:
        for name in OUTPUTS:
            expected, said = (np.concatenate([part[name] for part in parts]) for parts in (alone, batches))
            if name in BIT_FOR_BIT:
                np.testing.assert_array_equal(said, expected, name)
            else:
                np.testing.assert_allclose(said, expected, rtol=1e-6, atol=1e-9, err_msg=name)


def test_classes_with_their_own_thresholds_and_a_new_class(tmp_path, onnx):
    from maple.deploy.export import export_onnx
    from maple.prediction.onnx import OnnxPredictor

    torch.manual_seed(1)
    predictor = fit_pictures(create_backbone("resnet9", 4), class_rule="max")
    new = dataclasses.replace(
        embed(predictor.backbone, pictures(60, seed=4).pixels[:, ::-1] // 3), labels=np.full(60, 4)
    )
    predictor.detector.extend(new)
    probability = Probability(network_weight=0.6, odds_exponent=0.5)
    known = Predictor(predictor.backbone, predictor.detector, list("abcde"), size=8, probability=probability)
    known.calibrate(pictures(900, seed=5), per_class=True, false_alarm=0.2)
    assert known.decision.n_own_thresholds >= 2
    export_onnx(known, tmp_path / "model.onnx", check=pictures(30, seed=6).pixels)
    said = OnnxPredictor.open(tmp_path / "model.onnx").run(pictures(40, seed=7).pixels)
    expected = known.predict_pixels(pictures(40, seed=7).pixels)
    np.testing.assert_array_equal(said["class_id"], expected.class_id)
    np.testing.assert_array_equal(said["softmax_class_id"], expected.softmax_class_id)
    np.testing.assert_allclose(said["probabilities"], expected.probabilities, atol=1e-4)
    np.testing.assert_array_equal(said["is_ood"], said["score"] > known.decision.thresholds[said["class_id"]])


def test_a_network_of_timm(tmp_path, onnx):
    from maple.deploy.export import export_onnx
    from maple.networks import open_model

    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    torch.manual_seed(0)
    backbone = open_model("timm/resnet18", n_classes=4, size=32, shallow="layer2")
    predictor = fit_pictures(backbone, size=32, n=60, detector=MapleDetector(covariance="full"))
    assert predictor.score_name == "fused" and "shallow" in predictor.detector.learned_.surprises
    report = export_onnx(predictor, tmp_path / "model.onnx", check=pictures(8, 32).pixels)
    assert report.differences["squared_distance"] <= 1e-4


def spoil(graph, predictor, opset):
    """A model that is wrong in one number: the first bias of the projection."""
    import onnx

    model = trace_onnx(graph, predictor, opset)
    (bias,) = (each for each in model.graph.initializer if each.name.endswith("description.project.bias"))
    array = onnx.numpy_helper.to_array(bias).copy()
    array[0] += 0.5
    bias.CopyFrom(onnx.numpy_helper.from_array(array, bias.name))
    return model


def test_a_file_that_disagrees_is_not_left_behind(predictor, tmp_path, onnx, monkeypatch):
    import maple.deploy.export

    monkeypatch.setattr(maple.deploy.export, "trace_onnx", spoil)
    path = tmp_path / "model.onnx"
    with pytest.raises(RunError, match="'squared_distance'"):
        maple.deploy.export.export_onnx(predictor, path, check=pictures(8).pixels)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"before")
    with pytest.raises(RunError):
        maple.deploy.export.export_onnx(predictor, path)
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(predictor, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    predictor.save(folder)
    train = pictures(160)
    outputs = dataclasses.replace(
        embed(predictor.backbone, train), cluster_ids=train.labels, cluster_to_class=np.arange(4)
    )
    write_cluster_gallery(folder / "gallery", train, outputs)
    return folder


def test_a_run_whose_images_are_gone_is_not_exported_unchecked(run_folder, tmp_path):
    from maple.deploy.export import export_run
    from maple.runs.requests import ExportRequest

    bare = tmp_path / "bare"
    shutil.copytree(run_folder, bare, ignore=shutil.ignore_patterns("gallery"))
    with pytest.raises(RunError, match="--data-root"):
        export_run(ExportRequest(bare, tmp_path / "model.onnx"))
    assert not (tmp_path / "model.onnx").exists()


def test_a_run(run_folder, predictor, tmp_path, onnx):
    from maple.deploy.export import export_run
    from maple.prediction.onnx import OnnxPredictor
    from maple.runs.requests import ExportRequest

    report = export_run(ExportRequest(run_folder, tmp_path / "model.onnx", preprocess=True))
    assert report.n_exemplars == 16 and report.n_images == 48 + 16  # 12 of each class, and noise
    opened = OnnxPredictor.open(report.path)
    assert {cluster: len(images) for cluster, images in opened.exemplars.items()} == {0: 4, 1: 4, 2: 4, 3: 4}
    shown = {image.tobytes() for image in pictures(160).pixels[3::4]}
    assert all(image.tobytes() in shown for image in opened.exemplars[3])
    assert export_run(ExportRequest(run_folder, tmp_path / "model.onnx", exemplars=False)).n_exemplars == 0
    assert OnnxPredictor.open(report.path).exemplars == {}


@pytest.mark.parametrize(
    ("out", "options", "reason"),
    [
        ("model.pb", {}, r"model\.pb"),
        ("model.pt2", {"quantise": True}, "--quantise"),
        ("model.onnx", {"ood": {"far": "digits"}}, "--ood"),
    ],
)
def test_requests_that_make_no_sense(run_folder, tmp_path, out, options, reason):
    from maple.deploy.export import export_run
    from maple.runs.requests import ExportRequest

    with pytest.raises(UsageError, match=reason):
        export_run(ExportRequest(run_folder, tmp_path / out, **options))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch about itself
def test_torch_export(predictor, tmp_path):
    from maple.deploy.export import export_torch

    images = pictures(20, seed=3)
    report = export_torch(predictor, tmp_path / "model.pt2", preprocess=True, check=images.pixels)
    extra = {"maple.json": ""}
    module = torch.export.load(report.path, extra_files=extra).module()
    for rows in (slice(0, 1), slice(0, 20)):
        with torch.no_grad():
            said = dict(zip(OUTPUTS, module(torch.from_numpy(images.pixels[rows])), strict=True))
        expected = predictor.predict_pixels(images.pixels[rows])
        np.testing.assert_allclose(said["squared_distance"], expected.squared_distance, rtol=1e-4)
        np.testing.assert_array_equal(said["is_ood"], expected.is_ood)
    assert json.loads(extra["maple.json"])["class_names"] == ["a", "b", "c", "d"]
    with zipfile.ZipFile(report.path) as archive:  # nothing of the machine that it was made on
        assert not any(
            str(Path(torch.__file__).parents[1]).encode() in archive.read(name) for name in archive.namelist()
        )


# --- real images ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("network", ["resnet9", "resnet18", "wrn-16-4"])
def test_a_thousand_images_of_cifar(network, shared_dir, tmp_path, onnx, monkeypatch):
    import pyarrow.parquet as pq

    import maple.deploy.export
    from maple.data.sources import open_images

    table = pq.read_table(shared_dir / "data" / "cifar10" / "test.parquet").slice(0, 1600)
    pq.write_table(table, tmp_path / "some.parquet")
    images = open_images(tmp_path / "some.parquet", size=32)
    train, validation, calibration, test = (
        images.subset(np.arange(*ends)) for ends in ((0, 400), (400, 500), (500, 600), (600, 1600))
    )
    torch.manual_seed(0)
    predictor = fit_predictor(create_backbone(network, 10).eval(), train, validation, calibration)
    monkeypatch.setattr("maple.deploy.parity.CHECK_IMAGES", 1000)
    report = maple.deploy.export.export_onnx(predictor, tmp_path / "model.onnx", check=test.pixels)
    assert report.n_images == 1016
    found = report.differences
    assert found["squared_distance"] <= 1e-4 and found["probabilities"] <= 1e-4 and found["typicality"] <= 1e-6
    assert found["class_id"] == 0 and found["is_ood"] == 0


class Tokens(torch.nn.Module):
    """A transformer of three blocks without normalisation."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 16, 4, 4)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(3))
        self.head = torch.nn.Linear(16, n_classes)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)  # (N, T, 16)
        for block in self.blocks:
            q, k, v = block(tokens).chunk(3, dim=2)
            tokens = tokens + (q @ k.transpose(1, 2) / 4).softmax(2) @ v
        return self.head(tokens.mean(1))


def test_the_layer_of_a_transformer_is_in_the_graph(tmp_path, onnx):
    """Its responses are means over tokens."""
    from maple.deploy.export import export_onnx

    torch.manual_seed(0)
    images = [pictures(200, seed=seed) for seed in range(3)]
    backbone = wrap_backbone(
        Tokens(len(images[0].class_names)), example=torch.rand(2, 3, images[0].size, images[0].size)
    )
    predictor = fit_predictor(backbone, *images)
    assert backbone.shallow == "blocks.1" and "shallow" in predictor.detector.learned_.surprises
    export_onnx(predictor, tmp_path / "model.onnx")
    said = OnnxPredictor.open(tmp_path / "model.onnx")(images[2])
    np.testing.assert_allclose(said.score, predictor(images[2]).score, rtol=1e-3, atol=1e-3)
