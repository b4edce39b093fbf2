"""Digits as splits and as arrays, and a predictor fitted on them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from maple.data.splits import load_splits
from maple.networks import create_backbone, wrap_backbone
from maple.prediction.fit import fit_predictor
from own_training import BATCH


@pytest.fixture(scope="module")
def whole():
    return load_splits("digits")


@pytest.fixture(scope="module")
def backbone():
    torch.manual_seed(0)
    return create_backbone("resnet9", 10).eval()


@pytest.fixture(scope="module")
def predictor(backbone, whole):
    return fit_predictor(backbone, whole.train, whole.validation, whole.calibration)


@pytest.fixture(scope="module")
def splits(whole):
    """Splits with fewer training images, for own loops."""
    return dataclasses.replace(whole, train=whole.train.subset(np.arange(6 * BATCH)))


@pytest.fixture(scope="module")
def arrays(splits):
    """Digits as tensors, and a small network that is not trained."""
    torch.manual_seed(1)
    x = torch.from_numpy(splits.train.pixels.transpose(0, 3, 1, 2).copy())  # uint8
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 10))
    return x, wrap_backbone(module, example=x[:2].float() / 255)
