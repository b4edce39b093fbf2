"""TorchScript and torch.export files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from maple.errors import UsageError
from maple.networks import (
    find_kind,
    linear_head,
    open_model,
)
from maple.prediction.store import load_backbone, save_backbone
from opening import N_CLASSES, Small, assert_same_as, assert_survives, settle, traced


def test_torchscript(tmp_path: Path) -> None:
    module = settle(Small())
    path = traced(module, tmp_path / "net.pt")
    assert find_kind(str(path)) == "torchscript"
    backbone = open_model(str(path), trust=True, mean=(0.2, 0.2, 0.2))
    assert backbone.embedding_size == 5 and backbone.origin.head == "classifier"
    assert_same_as(backbone, module, 16)
    assert_same_as(backbone, module, 20)
    run = tmp_path / "run"
    again = assert_survives(backbone, run, 16, trust=True)
    assert (run / "network" / "net.pt").read_bytes() == path.read_bytes()
    path.unlink()
    save_backbone(tmp_path / "copy" / "weights.safetensors", again)  # a loaded run can be saved elsewhere
    copied = load_backbone(tmp_path / "copy" / "weights.safetensors", trust=True)
    assert_same_as(copied, module, 16)
    assert linear_head(copied).weight.shape == (N_CLASSES, 5)
    trainable = {name for name, parameter in copied.named_parameters() if parameter.requires_grad}
    assert "head.weight" in trainable and "body.graph.classifier.weight" not in trainable


def test_torchscript_of_other_forms(tmp_path: Path) -> None:
    module = settle(Small("dict"))
    backbone = open_model(str(traced(module, tmp_path / "dict.pt", strict=False)), trust=True)
    assert backbone.origin.path == ("logits",)
    assert_same_as(backbone, lambda x: module(x)["logits"], 16)
    assert_survives(backbone, tmp_path / "run", 16, trust=True)
    path = str(traced(settle(Small("two")), tmp_path / "two.pt"))
    with pytest.raises(UsageError, match="--head classifier"):
        open_model(path, trust=True)
    assert open_model(path, head="other", trust=True).head.out_features == 7
    with pytest.raises(UsageError, match=r"'fc'.*classifier"):
        open_model(path, head="fc", trust=True)
    with pytest.raises(UsageError, match=r"softmax.pt"):
        open_model(str(traced(settle(Small("softmax")), tmp_path / "softmax.pt")), trust=True)
    frozen = torch.jit.freeze(torch.jit.trace(settle(Small()), torch.rand(2, 3, 16, 16)))
    frozen.save(str(tmp_path / "frozen.pt"))
    with pytest.raises(UsageError, match=r"frozen.pt"):
        open_model(str(tmp_path / "frozen.pt"), trust=True)
    with pytest.raises(UsageError, match=r"torch\.float64"):
        open_model(str(traced_double(tmp_path)), trust=True)


def traced_double(folder: Path) -> Path:
    torch.jit.trace(Small().double().eval(), torch.rand(2, 3, 16, 16).double()).save(str(folder / "double.pt"))
    return folder / "double.pt"


def test_exported(tmp_path: Path) -> None:
    module = settle(Small("dict"))
    some = {0: torch.export.Dim("n")}
    program = torch.export.export(module, (torch.rand(2, 3, 16, 16),), dynamic_shapes=(some,))
    torch.export.save(program, tmp_path / "net.pt2")
    assert find_kind(str(tmp_path / "net.pt2")) == "export"
    backbone = open_model(str(tmp_path / "net.pt2"), trust=True)
    assert backbone.size == 16 and backbone.origin.path == ("logits",)  # the size of the export
    assert_same_as(backbone, lambda x: module(x)["logits"], 16)
    assert_survives(backbone, tmp_path / "run", 16, trust=True)
    assert (tmp_path / "run" / "network" / "net.pt2").is_file()
    torch.export.save(torch.export.export(module, (torch.rand(2, 3, 16, 16),)), tmp_path / "two.pt2")
    with pytest.raises(UsageError, match=r"two.pt2.*dynamic_shapes"):
        open_model(str(tmp_path / "two.pt2"), trust=True)
