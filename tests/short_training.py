"""A short training of digits."""

from __future__ import annotations

import torch

from maple.networks import create_backbone
from maple.training.loop import train_backbone
from maple.training.maple import MapleRecipe


def start(recipe, splits, folder=None, epochs=4, resume=False, seed=0, backbone=None, **options):
    if backbone is None:
        torch.manual_seed(seed)
        backbone = create_backbone("resnet9", 10)
    return train_backbone(
        backbone,
        recipe,
        splits.train,
        splits.validation,
        folder=folder,
        resume=resume,
        show_progress=False,
        epochs=epochs,
        batch_size=64,
        seed=seed,
        **options,
    )


EAGER = MapleRecipe(relabel_every=1, hard_class_error=0.0, min_cluster_size=10, max_clusters=3)
