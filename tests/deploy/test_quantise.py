"""Quantisation: smaller files, an unchanged head, and the change measured or reported as unknown."""

from __future__ import annotations

import numpy as np

from exported import pictures
from maple.data.image_set import ImageSet
from maple.deploy.quantise import Change
from maple.stats.metrics import auroc, calibration_floor


def test_quantised(predictor, tmp_path, onnx):
    from maple.deploy.export import export_onnx
    from maple.prediction.onnx import OnnxPredictor

    test = pictures(60, seed=3)
    unknown = ImageSet.from_arrays(np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3)).astype(np.uint8))
    plain = export_onnx(predictor, tmp_path / "plain.onnx")
    report = export_onnx(
        predictor, tmp_path / "small.onnx", check=test.pixels, quantise=True, test=test, ood={"noise": unknown}
    )
    assert report.n_bytes < 0.6 * plain.n_bytes
    exact, small = (OnnxPredictor.open(tmp_path / name) for name in ("plain.onnx", "small.onnx"))
    assert small.metadata["quantised"] and not exact.metadata["quantised"]
    change = report.change
    assert change is not None and change.accuracy is not None and change.auroc is not None
    said = small(test)
    assert change.accuracy[1] == (said.class_id == test.labels).mean() and change.flagged[1] == said.is_ood.mean()
    assert change.auroc["noise"] == (
        auroc(exact(test).score, exact(unknown).score),
        auroc(said.score, small(unknown).score),
    )
    assert change.ece_floor == (calibration_floor(exact(test).probability), calibration_floor(said.probability))
    assert "AUROC noise" in report.describe()
    assert f"(by chance {change.ece_floor[0]:.4f} -> {change.ece_floor[1]:.4f})" in report.describe()
    kinds = {node.op_type for node in onnx.load(tmp_path / "small.onnx").graph.node if "/description/" in node.name}
    assert not {kind for kind in kinds if "Integer" in kind or "quantize" in kind.lower()}
    tensors = {tensor.name: tensor for tensor in onnx.load(tmp_path / "small.onnx").graph.initializer}
    large = [tensor for tensor in tensors.values() if np.prod(tensor.dims) > 1000 and "description" not in tensor.name]
    assert large and all(tensor.data_type == onnx.TensorProto.INT8 for tensor in large)


def test_what_quantisation_changes_is_said_or_said_to_be_unknown():
    both = (0.5, 0.6)
    nothing, some = Change(1.0), Change(1.0, accuracy=both, ece=both, flagged=both, auroc={})
    assert "accuracy, ECE and AUROC" in nothing.describe() and "--ood" not in nothing.describe()
    assert "ECE 0.5000 -> 0.6000" in some.describe() and "--ood" in some.describe()
    assert "unknown" not in Change(1.0, both, both, flagged=both, auroc={"noise": both}).describe()
