"""Folders of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from maple.errors import UsageError
from maple.networks import (
    open_model,
)
from opening import N_CLASSES, assert_same_as, assert_survives, optional, settle


@pytest.fixture
def vit(tmp_path: Path) -> tuple[nn.Module, Path]:
    """A small Hugging Face ViT, saved, with its image processor."""
    transformers = optional("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        num_labels=N_CLASSES, id2label={0: "2", 1: "0", 2: "1"}, label2id={"2": 0, "0": 1, "1": 2},
    )  # fmt: skip
    module = settle(transformers.ViTForImageClassification(config))
    transformers.utils.logging.disable_progress_bar()
    module.save_pretrained(tmp_path / "vit")
    processor = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1], "size": {"height": 16, "width": 16}}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(processor))
    return module, tmp_path / "vit"


def test_hugging_face(vit: tuple[nn.Module, Path], tmp_path: Path) -> None:
    module, folder = vit
    backbone = open_model(str(folder))
    assert backbone.size == 16 and backbone.embedding_size == 16 and backbone.origin.class_names == ("2", "0", "1")
    np.testing.assert_allclose(backbone.mean, [0.5, 0.4, 0.3], rtol=1e-6)
    assert_same_as(backbone, lambda x: module(x).logits, 16)
    for path in folder.iterdir():
        path.unlink()
    assert_survives(backbone, tmp_path / "run", 16)
    assert str(tmp_path).encode() not in (tmp_path / "run" / "weights.safetensors").read_bytes()


def test_hugging_face_configurations(vit: tuple[nn.Module, Path], tmp_path: Path) -> None:
    folder = vit[1]
    processor = folder / "preprocessor_config.json"
    crop = {"do_center_crop": True, "crop_size": {"height": 16, "width": 16}, "size": {"shortest_edge": 20}}
    processor.write_text(json.dumps({"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [51.0] * 3, **crop}))
    backbone = open_model(str(folder))
    assert backbone.size == 16 and backbone.origin.fit == "crop"
    np.testing.assert_allclose(backbone.mean, [0.5] * 3)  # images are 0 to 255 there
    np.testing.assert_allclose(backbone.std, [0.2] * 3, rtol=1e-6)
    processor.write_text(json.dumps({"do_normalize": False, "size": 16}))
    assert open_model(str(folder)).std.tolist() == [1, 1, 1]
    processor.unlink()
    assert open_model(str(folder), mean=(0.1, 0.1, 0.1)).size == 16  # the network's own
    settings = json.loads((folder / "config.json").read_text())
    theirs = {"auto_map": {"AutoModelForImageClassification": "theirs.Net"}, "attn_implementation": "theirs/kernel"}
    (folder / "config.json").write_text(json.dumps(settings | theirs))
    assert not theirs.keys() & open_model(str(folder)).origin.config.keys()
    (folder / "config.json").write_text(json.dumps(settings | {"id2label": {str(i): str(i) for i in range(5)}}))
    with pytest.raises(UsageError, match="classifier"):
        open_model(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="image classifier"):
        open_model(str(folder))
    with pytest.raises(UsageError, match=r"config\.json"):
        open_model(str(tmp_path))
