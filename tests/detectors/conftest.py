"""Outputs with and without split classes."""

from __future__ import annotations

import numpy as np
import pytest

from maple.types import Outputs
from split_classes import split_classes


@pytest.fixture
def split(rng: np.random.Generator) -> Outputs:
    return split_classes(rng)


@pytest.fixture
def plain(split) -> Outputs:
    """The same images, no class split."""
    return Outputs(embeddings=split.embeddings, labels=split.labels)
