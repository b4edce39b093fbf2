"""A predictor to export, and ONNX."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from exported import fit_pictures
from maple.networks import create_backbone
from maple.prediction.predictor import Predictor


@pytest.fixture(scope="session")
def predictor() -> Predictor:
    """With a split class, and one threshold for all classes, for lack of calibration images."""
    torch.manual_seed(0)
    return fit_pictures(create_backbone("resnet9", 5), split=True)


@pytest.fixture
def onnx() -> ModuleType:
    pytest.importorskip("onnxruntime")
    return pytest.importorskip("onnx")
