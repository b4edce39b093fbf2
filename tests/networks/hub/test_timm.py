"""Architectures of timm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from maple.networks import (
    open_model,
)
from opening import N_CLASSES, assert_same_as, assert_survives, optional, settle

pytestmark = [
    pytest.mark.filterwarnings("ignore:torchvision was built for another torch"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("name", "embedding_size", "head"),
    [
        ("resnet18", 512, "fc"),
        ("convnext_atto", 320, "head.fc"),
        ("vit_tiny_patch16_224", 192, "head"),
        ("mobilenetv3_small_100", 1024, "classifier"),
        ("efficientnet_b0", 1280, "classifier"),
    ],
)
def test_timm(name: str, embedding_size: int, head: str, tmp_path: Path) -> None:
    timm = optional("timm")
    options = {"img_size": 32} if name.startswith("vit") else {}
    module = settle(timm.create_model(name, num_classes=N_CLASSES, **options))
    weights = tmp_path / "weights.safetensors"
    save_file(module.state_dict(), weights)
    backbone = open_model(f"timm/{name}", weights=weights, size=32)
    assert backbone.embedding_size == embedding_size and backbone.head.out_features == N_CLASSES
    assert (backbone.embedding_size == module.num_features) == (name != "mobilenetv3_small_100")
    assert backbone.origin.head == head and backbone.origin.fit == "crop" and backbone.size == 32
    np.testing.assert_allclose(backbone.mean, module.pretrained_cfg["mean"], rtol=1e-6)
    assert_same_as(backbone, module, 32)
    weights.unlink()  # a run needs none but its own
    assert_survives(backbone, tmp_path / "run", 32)


def test_the_configuration_of_the_model_gives_way_to_what_is_asked(tmp_path: Path) -> None:
    optional("timm")
    backbone = open_model("timm/mobilenetv3_small_050", n_classes=4, size=48, mean=(0.1, 0.2, 0.3), std=(1, 1, 1))
    assert backbone.size == 48 and backbone.mean.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert backbone.origin.n_classes == 4
