"""Networks and checks for tests that open trained networks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from maple.data.image_set import ImageSet
from maple.detectors.maple import MapleDetector
from maple.errors import UsageError
from maple.networks import (
    Backbone,
)
from maple.networks._torchvision import import_torchvision
from maple.prediction.fit import fit_predictor
from maple.prediction.store import load_predictor

N_CLASSES = 3


def optional(package: str) -> ModuleType:
    """A package that need not be installed; those here import torchvision, which may need its repair."""
    try:
        import_torchvision()
    except UsageError:
        pytest.skip("no torchvision here")
    return pytest.importorskip(package)


def make_images(size: int, n: int = 30) -> ImageSet:
    """Noise around another colour for each of three classes."""
    rng = np.random.default_rng(size)
    labels = np.arange(n) % N_CLASSES
    colours = np.array([[200, 60, 60], [60, 200, 60], [60, 60, 200]])[labels]
    pixels = np.clip(colours[:, None, None] + rng.normal(0, 40, (n, size, size, 3)), 0, 255).astype(np.uint8)
    return ImageSet.from_arrays(pixels, labels, size=size)


def settle(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights that differ from any new ones, and batch statistics that are not 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(0.1 * torch.rand(buffer.shape, generator=generator))
    return module.eval()


def assert_same_as(backbone: Backbone, module: Callable[[Tensor], Any], size: int) -> None:
    """The logits are those of the module, and the head makes them of the embedding."""
    x = torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = module((x - backbone.mean[:, None, None]) / backbone.std[:, None, None])
        embedding, logits = backbone(x)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        assert embedding.shape == (3, backbone.embedding_size)
        torch.testing.assert_close(backbone.head(embedding), logits)


def assert_survives(backbone: Backbone, folder: Path, size: int, trust: bool = False) -> Backbone:
    """Fitted, saved, loaded, predicted: equal before and after."""
    images = make_images(size)
    parts = [images.subset(np.arange(len(images)) // N_CLASSES % 3 == part) for part in range(3)]
    detector = MapleDetector(norm_exponent=0.0, score_by="distance")
    before = fit_predictor(backbone, *parts, detector=detector)
    before.save(folder)
    after = load_predictor(folder, trust=trust)
    assert after.backbone is not backbone and not after.backbone.training
    said, again = before(images), after(images)
    for name in ("class_id", "probabilities", "score", "p_value", "softmax_class_id"):
        np.testing.assert_array_equal(getattr(said, name), getattr(again, name), err_msg=name)
    assert after.backbone.size == backbone.size
    assert after.backbone.name in (backbone.name, Path(backbone.name).name)  # of a file or folder, its name
    assert after.class_names == images.class_names
    return after.backbone


class Small(nn.Module):
    """A small classifier whose output takes the form asked for; two of its layers have as many outputs as classes."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.conv = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.mixed = nn.Linear(6, N_CLASSES)
        self.hidden = nn.Linear(N_CLASSES, 5)
        self.drop = nn.Dropout(0.5)
        self.classifier = nn.Linear(5, N_CLASSES)
        self.other = nn.Linear(5, 7)

    def forward(self, x: Tensor):
        x = self.drop(torch.tanh(self.hidden(self.mixed(self.conv(x).mean(dim=(2, 3))))))
        logits = self.classifier(x)
        if self.form == "dict":
            return {"aux": x.sum(1), "logits": logits}
        if self.form == "two":
            return logits, self.other(x)
        return logits.softmax(1) if self.form == "softmax" else logits


def traced(module: nn.Module, path: Path, **options: Any) -> Path:
    torch.jit.trace(module.eval(), torch.rand(2, 3, 16, 16), **options).save(str(path))
    return path
