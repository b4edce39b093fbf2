"""A small backbone and images for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maple.networks import (
    Backbone,
    create_backbone,
)


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(0)
    return create_backbone("resnet9", n_classes=5)


@pytest.fixture
def pixels(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, size=(11, 8, 8, 3), dtype=np.uint8)
