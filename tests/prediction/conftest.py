"""Digits as splits and as arrays, a predictor fitted on them, and clusters of embeddings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from maple.data.splits import load_splits
from maple.networks import create_backbone, wrap_backbone
from maple.prediction.fit import fit_predictor
from maple.types import Outputs
from own_training import BATCH

CENTRES = np.array([[6, 0, 0], [-6, 0, 0], [0, 8, 0], [0, 0, 7], [0, -4, -7]], dtype=float) @ np.eye(3, 6)
CLUSTER_TO_CLASS = np.array([0, 0, 1, 2, 2])


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


@pytest.fixture
def outputs(rng: np.random.Generator) -> Outputs:
    """Correlated clusters of unequal size, in seven features."""
    cluster_ids = rng.permutation(np.repeat(np.arange(5), [80, 120, 100, 90, 110]))
    spread = np.diag([1, 1, 1, 2, 1, 0.5]) + 0.3 * rng.normal(size=(6, 6))
    within = rng.normal(size=(500, 6)) @ spread + 0.2 * rng.normal(size=(500, 6)) * cluster_ids[:, None]
    embeddings = (within + CENTRES[cluster_ids]) @ rng.normal(size=(6, 7)) + 3
    return Outputs(embeddings, None, CLUSTER_TO_CLASS[cluster_ids], cluster_ids, CLUSTER_TO_CLASS)
