"""Splits of the digits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from maple.data.options import DataOptions
from maple.data.splits import load_splits


@pytest.fixture(scope="module")
def splits():
    return load_splits("digits", DataOptions())


@pytest.fixture(scope="module")
def few(splits):
    """A few images, for tests of what surrounds the learning."""
    return dataclasses.replace(splits, train=splits.train.subset(np.arange(256)))
