"""Records of how a backbone was made survive JSON, with the keys of each kind."""

from __future__ import annotations

import json

import pytest

from maple.networks import MadeBy, Origin


@pytest.mark.parametrize(
    "origin",
    [
        Origin(head="fc", path=("logits", 0)),
        Origin("timm", "timm/resnet18", n_classes=3, head="fc", embedding_size=512, size=32, fit="crop"),
        Origin("huggingface", "vit", config={"model_type": "vit"}, class_names=("a", "b"), head="classifier"),
        Origin("python", "python:zoo:embedding", embedding_size=48),
        Origin("onnx", "net.onnx", file="net.onnx", embedding="pooled", size=8),
    ],
)
def test_origin_survives_json(origin: Origin) -> None:
    stored = json.loads(json.dumps(origin.to_dict()))
    assert Origin.from_dict(stored) == origin


def test_each_kind_stores_its_own_keys() -> None:
    assert set(Origin("python", "python:a:b").to_dict()) == {"kind", "spec", "embedding_size", "size", "shallow", "fit"}
    assert set(Origin("onnx", "n.onnx", file="n.onnx", head="x").to_dict()) == {
        "kind", "spec", "file", "embedding", "logits", "size", "fit",
    }  # fmt: skip


def test_made_by_survives_json() -> None:
    for made_by in (MadeBy("duq", {"length_scale": 0.1}, 10), MadeBy("ensemble", {"members": 2}, 10, 16)):
        assert MadeBy.from_dict(json.loads(json.dumps(made_by.to_dict()))) == made_by
    assert MadeBy.from_dict({"recipe": "ensemble", "options": {}, "n_outputs": 3, "embedding_size": None})
