"""Modules made by timm, torchvision and functions."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from maple.errors import UsageError
from maple.networks import (
    embed,
    open_model,
    wrap_backbone,
)
from maple.prediction.store import load_backbone, load_predictor, save_backbone
from opening import N_CLASSES, assert_same_as, assert_survives, make_images, optional, settle


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


def test_a_vision_transformer_takes_images_of_another_size(tmp_path: Path) -> None:
    timm = optional("timm")
    module = settle(timm.create_model("vit_tiny_patch16_224", num_classes=N_CLASSES))
    weights = tmp_path / "weights.safetensors"
    save_file(module.state_dict(), weights)
    backbone = open_model("timm/vit_tiny_patch16_224", weights=weights, size=64)
    flexible = timm.create_model("vit_tiny_patch16_224", num_classes=N_CLASSES, dynamic_img_size=True).eval()
    flexible.load_state_dict(module.state_dict())  # interpolates its positions with each batch
    assert_same_as(backbone, flexible, 64)
    assert_survives(backbone, tmp_path / "run", 64)


def test_the_configuration_of_the_model_gives_way_to_what_is_asked(tmp_path: Path) -> None:
    optional("timm")
    backbone = open_model("timm/mobilenetv3_small_050", n_classes=4, size=48, mean=(0.1, 0.2, 0.3), std=(1, 1, 1))
    assert backbone.size == 48 and backbone.mean.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert backbone.origin.n_classes == 4


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


def test_a_function_that_returns_a_module(zoo: str, tmp_path: Path) -> None:
    path = list(sys.path)
    backbone = open_model(f"python:{zoo}:make", trust=True)
    assert sys.path == path
    original = sys.modules[zoo].made[0]
    assert_same_as(backbone, lambda x: original(x)["scores"][0], 16)
    assert_survives(backbone, tmp_path / "run", 16, trust=True)
    with pytest.raises(UsageError, match=rf"python:{zoo}:make.*--trust"):
        load_predictor(tmp_path / "run")


def test_weights_beside_a_function(zoo: str, tmp_path: Path) -> None:
    settled = settle(wrap_backbone(open_model(f"python:{zoo}:make", trust=True)))  # a backbone is its own wrapper
    state = {key.removeprefix("body.module."): value for key, value in settled.state_dict().items()}
    module_state = {key: value for key, value in state.items() if key.startswith("layers")}
    module_state |= {"out.weight": state["head.weight"], "out.bias": state["head.bias"]}
    save_file(module_state, tmp_path / "w.safetensors")
    backbone = open_model(f"python:{zoo}:make", weights=tmp_path / "w.safetensors", trust=True)
    for name, value in settled.state_dict().items():
        torch.testing.assert_close(backbone.state_dict()[name], value)


def test_a_function_that_returns_a_backbone_without_head(zoo: str, tmp_path: Path) -> None:
    backbone = open_model(f"python:{zoo}:embedding", trust=True)
    assert backbone.head is None and backbone.embedding_size == 48
    again = assert_survives(backbone, tmp_path / "run", 16, trust=True)
    assert again.head is None


def test_functions_that_cannot_be_used(zoo: str) -> None:
    for spec, message in (
        (f"{zoo}:number", "int"),
        (f"{zoo}:broken", "RuntimeError"),
        (f"{zoo}:absent", "absent"),
        ("nowhere_at_all:make", "nowhere_at_all"),
        (zoo, zoo),
    ):
        with pytest.raises(UsageError, match=message):
            open_model(f"python:{spec}", trust=True)


def test_only_the_caller_can_trust(zoo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = open_model(f"python:{zoo}:make", trust=True)
    save_backbone(tmp_path / "weights.safetensors", backbone)
    monkeypatch.setenv("MAPLE_TRUST", "1")  # the environment does not count
    with pytest.raises(UsageError, match="--trust"):
        load_backbone(tmp_path / "weights.safetensors")
    assert load_backbone(tmp_path / "weights.safetensors", trust=True).origin == backbone.origin
