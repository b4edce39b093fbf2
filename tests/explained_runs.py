"""A run on digits that can be explained, and images for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from maple.data.image_set import ImageSet
from maple.data.splits import load_splits
from maple.files import RunFile
from maple.networks import create_backbone, embed
from maple.prediction.components import component_coordinates
from maple.prediction.fit import fit_predictor
from maple.reporting.gallery import write_training_gallery
from maple.types import Relabelling

HOSTILE = "<script>alert('x')</script>\x00"


def build_explained_run(folder: Path) -> Path:
    """A run on digits with an untrained network: class 9 has two clusters, class 0 a hostile name."""
    splits = load_splits("digits")
    names = (HOSTILE, *splits.class_names[1:])
    train, validation, calibration = (
        ImageSet.from_arrays(part.pixels, part.labels, names, name="digits")
        for part in (splits.train, splits.validation, splits.calibration)
    )
    cluster_ids = train.labels.copy()
    cluster_ids[np.flatnonzero(train.labels == 9)[::2]] = 10
    cluster_to_class = np.array([*range(10), 9])
    relabelling = Relabelling(cluster_ids, cluster_to_class, cluster_to_class, np.r_[np.ones(9), 0.5, 0.5])
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 11).eval()
    predictor = fit_predictor(backbone, train, validation, calibration, relabelling=relabelling)
    predictor.save(folder)
    outputs = embed(backbone, train, cluster_ids=cluster_ids, cluster_to_class=cluster_to_class)
    components = component_coordinates(predictor.detector.gaussians_, outputs.embeddings)
    write_training_gallery(folder / RunFile.GALLERY, train, outputs, components=components)
    return folder


def write_images(folder: Path) -> Path:
    """Three digits and a picture of noise, one of them with a hostile name."""
    folder.mkdir()
    test = load_splits("digits").test
    for i in range(3):
        Image.fromarray(test.pixels[i]).save(folder / f"{i}.png")
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(noise).save(folder / "<b>noise & co.png")
    return folder
