"""Images for own loops, as splits and as arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.networks import wrap_backbone
from own_training import BATCH


@pytest.fixture(scope="module")
def splits():
    whole = load_splits("digits", DataOptions())
    return dataclasses.replace(whole, train=whole.train.subset(np.arange(6 * BATCH)))


@pytest.fixture(scope="module")
def arrays(splits):
    """Digits as tensors, and a small network that is not trained."""
    torch.manual_seed(1)
    x = torch.from_numpy(splits.train.pixels.transpose(0, 3, 1, 2).copy())  # uint8
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 10))
    return x, wrap_backbone(module, example=x[:2].float() / 255)
