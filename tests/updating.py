"""A run on the digits 0 to 8 and images of all ten, for tests of updates."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.data.splits import load_splits
from maple.runs.requests import TrainRequest
from maple.runs.train import train_run


def train_nine(folder: Path) -> Path:
    """A small run on the digits 0 to 8."""
    flags = {"epochs": 2, "batch_size": 64, "relabel_every": 1, "hard_class_error": 0.05, "min_cluster_size": 10}
    train_run(TrainRequest(source="digits", out=folder, flags={**flags, "leave_out": ("9",)}, report=False))
    return folder


def read_digits() -> dict[str, ImageSet]:
    """Nines to learn from, images of all digits to calibrate with, and others to test; of 0 to 8, as the run cut them.

    Half of the nines are learned from, a quarter calibrates, a quarter tests.
    """
    whole, splits = open_images("digits"), load_splits("digits")
    nines = np.flatnonzero(whole.labels == 9)
    keys = np.concatenate([splits.calibration.keys, splits.validation.keys])
    held = np.flatnonzero(np.isin(whole.keys, keys) & (whole.labels < 9))
    test = np.flatnonzero(np.isin(whole.keys, splits.test.keys) & (whole.labels < 9))
    return {
        "new": whole.subset(nines[:90]),
        "calibrate": whole.subset(np.concatenate([held, nines[90:135]])),
        "test": whole.subset(np.concatenate([test, nines[135:]])),
        "more": whole.subset(test),
    }


def save_npz(path: Path, images: ImageSet) -> str:
    np.savez(path, images=images.pixels, labels=np.array(images.class_names)[images.labels])
    return str(path)
