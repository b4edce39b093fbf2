"""Small predictors to export, and images for them."""

from __future__ import annotations

import numpy as np

from maple.data.image_set import ImageSet
from maple.networks import Backbone
from maple.prediction.fit import fit_predictor
from maple.prediction.predictor import Predictor
from maple.types import Relabelling


def pictures(n: int, size: int = 8, seed: int = 0) -> ImageSet:
    """Four classes of different colour and pattern."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 4
    grid = np.indices((size, size)).sum(0)
    stripes = (grid[None] * (labels[:, None, None] + 1) % 5 * 30)[..., None]
    noise = rng.integers(0, 90, (n, size, size, 3))
    return ImageSet.from_arrays((stripes + noise).astype(np.uint8), labels, ["a", "b", "c", "d"])


def fit_pictures(backbone: Backbone, size: int = 8, split: bool = False, n: int = 160, **options) -> Predictor:
    train = pictures(n, size)
    relabelling = None
    if split:
        ids = np.where((train.labels == 3) & (np.arange(n) % 8 == 7), 4, train.labels)
        mapping = np.array([0, 1, 2, 3, 3])
        relabelling = Relabelling(ids, mapping, mapping, np.ones(5))
    return fit_predictor(
        backbone.eval(), train, pictures(80, size, 1), pictures(120, size, 2), relabelling=relabelling, **options
    )
