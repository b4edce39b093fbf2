"""Functions that return a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from maple.errors import UsageError
from maple.networks import (
    open_model,
    wrap_backbone,
)
from maple.prediction.store import load_backbone, load_predictor, save_backbone
from opening import assert_same_as, assert_survives, settle

pytestmark = [
    pytest.mark.filterwarnings("ignore:torchvision was built for another torch"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


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
