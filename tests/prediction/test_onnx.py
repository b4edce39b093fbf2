"""A file predicts as its run does, without torch, at any level; files that were meddled with are errors of one line."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from maple.data.sources import open_images
from maple.data.splits import load_splits
from maple.errors import DataError, RunError, UsageError
from maple.networks import create_backbone
from maple.prediction.fit import fit_predictor
from maple.prediction.onnx import MAX_EXEMPLARS, NEEDED, OnnxPredictor, read_metadata, write_metadata
from maple.prediction.predictor import Predictor

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

COLUMNS = ("class_id", "cluster", "md_class_id", "softmax_class_id", "is_ood")


@pytest.fixture(scope="module")
def splits():
    return load_splits("digits")


@pytest.fixture(scope="module")
def predictor(splits) -> Predictor:
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 10).eval()
    return fit_predictor(backbone, splits.train, splits.validation, splits.calibration)


@pytest.fixture(scope="module")
def file(predictor, splits, tmp_path_factory) -> Path:
    from maple.deploy.export import export_onnx

    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    exemplars = {3: splits.train.pixels[:4], 0: splits.train.pixels[4:5]}
    export_onnx(predictor, path, preprocess=True, exemplars=exemplars, check=splits.test.pixels[:32])
    return path


@pytest.fixture(scope="module")
def opened(file) -> OnnxPredictor:
    return OnnxPredictor.open(file, threads=1)


def test_it_predicts_as_the_run_does(opened, predictor, splits):
    said, expected = opened(splits.test), predictor(splits.test)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(said, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(said.probabilities, expected.probabilities, atol=1e-4)
    np.testing.assert_allclose(said.score, expected.score, rtol=1e-3)
    np.testing.assert_allclose(said.p_value, expected.p_value, atol=0.02)
    np.testing.assert_allclose(said.position, predictor.predict_pixels(splits.test.pixels).position, atol=1e-3)
    assert said.class_names == splits.class_names


def test_it_knows_what_the_run_knows(opened, predictor, splits):
    for name in ("class_names", "size", "fit", "network", "score_name", "map_radius", "options", "threshold"):
        assert getattr(opened, name) == getattr(predictor, name), name
    for name in ("cluster_to_class", "map_centroids", "calibration_scores"):
        np.testing.assert_array_equal(getattr(opened, name), getattr(predictor, name), err_msg=name)
    np.testing.assert_array_equal(opened.calibration.set_scores, predictor.calibration.set_scores)
    assert opened.decision.describe() == predictor.decision.describe()
    assert opened.runtime == "onnxruntime" and "n_calibration=" in repr(opened)
    assert opened.metadata["decision"]["sentence"] == predictor.decision.sentence()
    assert opened.metadata["options"]["false_alarm"] == 0.05
    json.dumps(opened.metadata)
    assert set(opened.exemplars) == {0, 3}
    np.testing.assert_array_equal(opened.exemplars[3], splits.train.pixels[:4])
    np.testing.assert_array_equal(opened.exemplars[0], splits.train.pixels[4:5])


@pytest.mark.parametrize(
    "options", [{"false_alarm": 0.3}, {"false_alarm": 0.1, "confidence": 0.9}, {"false_alarm": 0.2, "per_class": True}]
)
def test_another_level(file, predictor, splits, options):
    """Decided anew from the scores in the file: the level of the graph does not matter."""
    opened = OnnxPredictor.open(file).decide(**options)
    other = Predictor(predictor.backbone, predictor.detector, size=8, calibration=predictor.calibration)
    other.decide(**options)
    said = opened(splits.test)
    np.testing.assert_array_equal(opened.decision.thresholds, other.decision.thresholds)
    np.testing.assert_array_equal(said.is_ood, said.score > other.decision.thresholds[said.class_id])
    np.testing.assert_array_equal(opened.prediction_sets(said, 0.9), other.prediction_sets(said, 0.9))
    assert opened.run(splits.test.pixels)["is_ood"].sum() < said.is_ood.sum()  # that of 0.05


def test_images_without_a_score_are_left_out(opened, splits, monkeypatch):
    pixels = splits.test.pixels[:6]
    expected = opened.predict_pixels(pixels)
    said = opened.run(pixels)
    said["score"][[1, 4]] = np.nan
    monkeypatch.setattr(opened, "run", lambda _: said)
    prediction, usable = opened.predict_usable(pixels)
    assert usable.tolist() == [True, False, True, True, False, True]
    np.testing.assert_array_equal(prediction.class_id, expected.class_id[usable])


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_images_on_disk(opened, splits, tmp_path, workers):
    for i, pixels in enumerate(splits.test.pixels[:23]):
        Image.fromarray(pixels).save(tmp_path / f"{i:02}.png")
    images = open_images(tmp_path, size=8, labelled=False, memory_limit=0)
    assert images.pixels is None
    whole, seen = opened(splits.test.pixels[:23]), []
    parts = list(opened.predict_batches(images, batch_size=5, workers=workers, progress=lambda *n: seen.append(n)))
    assert [len(part) for part in parts] == [5, 5, 5, 5, 3] and seen[-1] == (23, 23) and len(seen) == 5
    np.testing.assert_allclose(np.concatenate([part.score for part in parts]), whole.score, rtol=1e-4)
    some = list(opened.predict_batches(images, batch_size=2, indices=[7, 1, 20], workers=workers))
    np.testing.assert_allclose(np.concatenate([part.score for part in some]), whole.score[[7, 1, 20]], rtol=1e-4)
    np.testing.assert_allclose(opened(str(tmp_path)).score, whole.score, rtol=1e-4)
    one = opened([tmp_path / "03.png", tmp_path / "04.png"])
    np.testing.assert_allclose(one.score, whole.score[3:5], rtol=1e-4)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_named(opened, splits, tmp_path, workers):
    for i, pixels in enumerate(splits.test.pixels[:6]):
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    images = open_images(tmp_path, size=8, labelled=False, memory_limit=0)
    (tmp_path / "4.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"4\.png"):
        list(opened.predict_batches(images, batch_size=2, workers=workers))


def test_no_images_and_wrong_images(opened, splits):
    nothing = opened.predict_pixels(np.empty((0, 8, 8, 3), np.uint8))
    assert len(nothing) == 0 and nothing.log_probabilities.shape == (0, 10) and nothing.position.shape == (0, 2)
    assert list(opened.predict_batches(splits.test.subset([]))) == []
    for wrong in (np.zeros((2, 3, 8, 8), np.uint8), np.zeros((2, 9, 9, 3), np.uint8), np.zeros((2, 8, 8, 3))):
        with pytest.raises(UsageError, match=r"\(N, 8, 8, 3\) uint8"):
            opened.predict_pixels(wrong)
    with pytest.raises(UsageError, match=r"\(8, 8, 3\)"):
        opened.predict_pixels(np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(UsageError, match="batch_size is 0"):
        next(opened.predict_batches(splits.test, batch_size=0))
    with pytest.raises(UsageError, match="9 px"):
        opened(dataclasses.replace(splits.test, size=9))


def test_it_works_without_torch(file, splits, tmp_path):
    np.save(tmp_path / "pixels.npy", splits.test.pixels[:5])
    code = f"""
import sys
for name in ("torch", "lightning_fabric", "onnx", "onnxscript"):
    sys.modules[name] = None
import numpy as np
from maple.prediction.onnx import OnnxPredictor
predictor = OnnxPredictor.open({str(file)!r}, threads=1)
said = predictor(np.load({str(tmp_path / "pixels.npy")!r}))
assert len(predictor.exemplars) == 2 and predictor.decide(false_alarm=0.2).false_alarm == 0.2
print(*said.class_id)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(i) for i in OnnxPredictor.open(file)(splits.test.pixels[:5]).class_id]


# --- files that will not do -------------------------------------------------------------------------------------------


def with_metadata(file: Path, text: str | None) -> bytes:
    model = onnx.load(file)
    del model.metadata_props[:]
    if text is not None:
        model.metadata_props.add(key="maple", value=text)
    return model.SerializeToString()


def test_files_that_are_not_ours(file, tmp_path):
    with pytest.raises(UsageError, match=r"none\.onnx"):
        OnnxPredictor.open(tmp_path / "none.onnx")
    other = tmp_path / "other.onnx"
    other.write_bytes(with_metadata(file, None))
    with pytest.raises(UsageError, match=r"other\.onnx.*maple fit"):
        OnnxPredictor.open(other)
    for content in (b"", b"no graph", file.read_bytes()[:5000]):
        other.write_bytes(content)
        with pytest.raises((RunError, UsageError), match=r"other\.onnx"):
            OnnxPredictor.open(other)


def test_a_graph_without_inputs(file):
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    model = onnx.load(file)
    values = [helper.make_node("Constant", [], [name], value_float=0.0) for name in NEEDED]
    outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []) for name in NEEDED]
    empty = helper.make_model(
        helper.make_graph(values, "constants", [], outputs),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    empty.metadata_props.extend(model.metadata_props)
    with pytest.raises(RunError, match="0 inputs"):
        OnnxPredictor.open(empty.SerializeToString())


def picture(width: int, height: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


NUMBERS = base64.b64encode(np.array([1.0, np.nan]).tobytes()).decode()
WHOLE = base64.b64encode(np.array([0, 99]).tobytes()).decode()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 99}, "format 99"),
        ({"format": "new"}, "format: "),
        ({"class_names": []}, "class_names: "),
        ({"class_names": ["x" * 20_000] * 10}, r"class_names\.0: "),
        ({"class_names": ["a"]}, "cluster_to_class"),
        ({"cluster_to_class": [-1] * 10}, r"cluster_to_class\.0: "),
        ({"size": 10**9}, "size: "),
        ({"size": 9}, "takes tensor"),
        ({"preprocess": False}, "takes tensor"),
        ({"fit": "anything"}, "fit: "),
        ({"options": {"false_alarm": 7}}, r"options\.false_alarm: "),
        ({"map_centroids": [[0, 0]]}, "map_centroids"),
        ({"map_centroids": [[0, "inf"]] * 10}, r"map_centroids\.0\.1: "),
        ({"exemplars": {"77": {"n": 1, "side": 8, "png": ""}}}, "cluster 77"),
        ({"exemplars": {"0": {"n": MAX_EXEMPLARS + 1, "side": 8, "png": ""}}}, r"exemplars\.0\.n: "),
        ({"exemplars": {"0": {"n": 1, "side": 10**6, "png": ""}}}, r"exemplars\.0\.side: "),
        ({"calibration": {"scores": "#"}}, r"calibration\.scores: "),
        ({"calibration": {"scores": "AAAA"}}, r"calibration\.scores: "),
        ({"calibration": {"scores": NUMBERS, "class_ids": WHOLE}}, "calibration.*NaN"),
        ({"calibration": {"scores": WHOLE, "class_ids": WHOLE}}, "calibration.*class ids"),
        ({"calibration": {"scores": WHOLE, "class_ids": ""}}, "calibration.*shape"),
    ],
)
def test_hostile_metadata(file, change, reason):
    text = json.dumps(json.loads(write_like(file)) | change)
    with pytest.raises(RunError, match=reason) as caught:
        OnnxPredictor.open(with_metadata(file, text))
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def write_like(file: Path) -> str:
    return {each.key: each.value for each in onnx.load(file).metadata_props}["maple"]


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "[" * 100_000, '{"format": 1e999}', "\x00", '{"format":'])
def test_metadata_that_are_no_metadata(text):
    with pytest.raises(RunError, match="metadata of 'it'"):
        read_metadata(text, "it")


def test_metadata_that_are_too_large(monkeypatch):
    monkeypatch.setattr("maple.prediction.onnx.MAX_METADATA", 1000)
    with pytest.raises(RunError, match="metadata of 'it'"):
        read_metadata(" " * 1001, "it")


@pytest.mark.parametrize("png", ["", "####", base64.b64encode(b"GIF89a").decode(), picture(8, 8), picture(3000, 3000)])
def test_pictures_that_are_not_what_was_announced(file, png):
    text = json.dumps(json.loads(write_like(file)) | {"exemplars": {"0": {"n": 2, "side": 8, "png": png}}})
    opened = OnnxPredictor.open(with_metadata(file, text))
    with pytest.raises(RunError, match="images of clusters in 'the graph'"):
        _ = opened.exemplars


def test_nothing_beside_the_file_is_read(file, tmp_path, monkeypatch):
    """A tensor that is said to lie in another file is an error, even where that file is there."""
    model = onnx.load(file)
    tensor = next(each for each in model.graph.initializer if each.name.endswith("description.project.bias"))
    (tmp_path / "secret.bin").write_bytes(onnx.numpy_helper.to_array(tensor).tobytes())
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secret.bin")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"model\.onnx"):
        OnnxPredictor.open("model.onnx")


def test_metadata_survive_the_way(predictor, splits):
    text = write_metadata(
        predictor, preprocess=False, exemplars={1: splits.train.pixels[:2], 2: splits.train.pixels[:0]}
    )
    said = read_metadata(text, "it")
    assert said.class_names == list(predictor.class_names) and not said.preprocess and list(said.exemplars) == [1]
    odd = dataclasses.replace(predictor.options, false_alarm=0.123, confidence=0.9)
    other = Predictor(predictor.backbone, predictor.detector, [f"é {i}\n" for i in range(10)], size=8, options=odd)
    said = read_metadata(write_metadata(other, preprocess=True), "it")
    assert said.options == odd and said.class_names == list(other.class_names)
    assert said.decision["threshold"] is None


def test_a_newer_format_is_told_from_damage():
    with pytest.raises(RunError, match=r"'it' has format 99.*upgrade"):
        read_metadata(json.dumps({"format": 99, "fit": "new"}), "it")
