"""Images, a backbone and a fitted detector."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gradient_images import MEAN, STD, make_body, make_images
from maple.data.image_set import ImageSet
from maple.detectors.gradients.lee import (
    LeeDetector,
)
from maple.networks import Backbone, embed


@pytest.fixture(scope="module")
def train() -> ImageSet:
    return make_images(150, 0)


@pytest.fixture(scope="module")
def validation() -> ImageSet:
    return make_images(90, 1)


@pytest.fixture(scope="module")
def test() -> ImageSet:
    return make_images(60, 2)


@pytest.fixture(scope="module")
def ood() -> ImageSet:
    """Other colours, other texture."""
    rng = np.random.default_rng(3)
    return ImageSet.from_arrays((np.array([0.35, 0.6, 0.75]) + 0.2 * rng.normal(size=(60, 8, 8, 3))).clip(0, 1))


@pytest.fixture(scope="module")
def backbone(train) -> Backbone:
    """A linear head fitted to the embeddings of a random body: right most of the time, not always."""
    found = Backbone(make_body(), nn.Linear(24, 3), embedding_size=24, mean=MEAN, std=STD)
    embeddings = embed(found, train).embeddings
    solution, *_ = np.linalg.lstsq(np.c_[embeddings, np.ones(150)], 12 * np.eye(3)[train.labels], rcond=None)
    with torch.no_grad():
        found.head.weight.copy_(torch.from_numpy(solution[:-1].T))
        found.head.bias.copy_(torch.from_numpy(solution[-1]))
    return found.eval()


@pytest.fixture(scope="module")
def fitted(backbone, train, validation) -> LeeDetector:
    return LeeDetector(magnitude=0.002).fit_images(backbone, train, validation)
