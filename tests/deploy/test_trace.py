"""Tracing: networks that cannot be traced are refused, idle nodes are removed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from exported import pictures
from maple.baselines.mc_dropout import SampledBackbone
from maple.deploy.trace import drop_idle_abs
from maple.detectors.maple import MapleDetector
from maple.errors import UsageError
from maple.networks import Backbone, create_backbone, embed
from maple.prediction.predictor import Predictor


def test_absolute_values_of_what_is_never_negative_are_left_out(onnx):
    import onnxruntime

    text = """<ir_version: 8, opset_import: ["": 18]>
    example (float[N, 3] x) => (float[N, 3] of_relus, float[N, 3] of_any)
    { a = Relu(x)  b = Cast<to = 1>(a)  c = Add(a, b)  d = Abs(c)  of_relus = Neg(d)
      e = Add(a, x)  f = Abs(e)  g = Abs(f)  of_any = Neg(g) }"""
    model, x = onnx.parser.parse_model(text), np.array([[-1.0, 0.0, 2.0]], np.float32)
    before = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    drop_idle_abs(model.graph)
    assert sum(node.op_type == "Abs" for node in model.graph.node) == 2
    onnx.checker.check_model(model)
    np.testing.assert_array_equal(onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x}), before)


def test_networks_that_are_no_graph(predictor, tmp_path, onnx):
    from maple.deploy.export import export_onnx

    sampled = SampledBackbone.from_backbone(create_backbone("resnet9", 5), n_samples=3).eval()
    with pytest.raises(UsageError, match="MC-Dropout"):
        export_onnx(Predictor(sampled, predictor.detector, size=8), tmp_path / "model.onnx")
    body = torch.jit.trace(create_backbone("resnet9", 5).eval().body, torch.rand(2, 3, 8, 8), check_trace=False)
    compiled = Backbone(body, None, embedding_size=128, name="net.pt")
    with pytest.raises(UsageError, match=r"net\.pt"):
        export_onnx(Predictor(compiled, predictor.detector, size=8), tmp_path / "model.onnx")

    class Stubborn(torch.nn.Module):
        def forward(self, x):
            raise ValueError("no tracing\nof any kind")

    with pytest.raises(UsageError, match=r"'mine'.*no tracing"):
        backbone = Backbone(Stubborn(), None, embedding_size=128, name="mine")
        detector = MapleDetector(score_by="normalised").fit(
            dataclasses.replace(embed(predictor.backbone, pictures(80)), cluster_to_class=None)
        )
        export_onnx(Predictor(backbone, detector, size=8), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_is_too_large(predictor, tmp_path, onnx, monkeypatch):
    from maple.deploy.export import export_onnx

    monkeypatch.setattr("maple.deploy.trace.MAX_FILE_BYTES", 10**6)
    with pytest.raises(UsageError, match="GB"):
        export_onnx(predictor, tmp_path / "model.onnx")
