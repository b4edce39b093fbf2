"""Architectures of torchvision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from maple.networks import (
    embed,
    open_model,
)
from opening import N_CLASSES, assert_same_as, assert_survives, make_images, optional, settle

pytestmark = [
    pytest.mark.filterwarnings("ignore:torchvision was built for another torch"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def test_torchvision(tmp_path: Path) -> None:
    models = optional("torchvision").models
    module = settle(models.resnet18(weights=None, num_classes=N_CLASSES))
    torch.save({"state_dict": {f"module.{k}": v for k, v in module.state_dict().items()}}, tmp_path / "w.pth")
    backbone = open_model("torchvision/resnet18", weights=tmp_path / "w.pth", size=32, shallow="layer2")
    np.testing.assert_allclose(backbone.std, [0.229, 0.224, 0.225], rtol=1e-6)
    assert_same_as(backbone, module, 32)
    again = assert_survives(backbone, tmp_path / "run", 32)
    responses = [embed(each, make_images(32)).shallow for each in (backbone, again)]
    assert responses[0].shape == (30, 128)
    np.testing.assert_array_equal(*responses)
    assert open_model("torchvision/resnet18", n_classes=4).size == 224
