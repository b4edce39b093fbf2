"""Short trainings of digits for one or several processes, described so that processes can be compared."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.networks import create_backbone
from maple.training.loop import Run, train_backbone
from maple.training.options import TrainOptions
from maple.training.processes import make_fabric
from maple.training.recipe import create_recipe

IMAGES = 320
SPLITTING = {
    "relabel_every": 1,
    "hard_class_error": 0.0,
    "min_cluster_size": 10,
    "max_clusters": 2,
    "cluster_method": "kmeans",
}


def train_digits(
    folder: Path | None = None,
    network: str = "resnet9",
    recipe: dict[str, Any] | None = None,
    epochs: int = 2,
    resume: bool = False,
    stop_after: int | None = None,
    **options: Any,
) -> Run:
    """A training; ``stop_after`` an epoch it is interrupted, and can be resumed from its folder."""
    settings = TrainOptions(epochs=epochs, batch_size=64, accelerator="cpu", precision="32-true", workers=0, **options)
    fabric = make_fabric(settings)
    torch.manual_seed(fabric.global_rank)  # processes that start apart
    splits = load_splits("digits", DataOptions())
    kind = {"name": "maple", "cluster_method": "kmeans", **SPLITTING, **(recipe or {})}

    def stop(history: list[dict[str, Any]]) -> None:
        if len(history) == stop_after:
            raise KeyboardInterrupt

    return train_backbone(
        create_backbone(network, 10), create_recipe(kind.pop("name"), **kind),
        splits.train.subset(np.arange(IMAGES)), splits.validation,
        folder=folder, resume=resume, show_progress=False, options=settings, fabric=fabric, on_epoch=stop,
    )  # fmt: skip


def describe(run: Run) -> dict[str, Any]:
    """What processes must agree on: digests of weights and clusters, and the history without its times."""
    return {
        "weights": digest(*run.backbone.state_dict().values()),
        "cluster_ids": digest(run.relabelling.cluster_ids),
        "validation": None if run.validation is None else digest(run.validation.embeddings),
        "history": [{k: v for k, v in row.items() if "seconds" not in k} for row in run.history],
    }


def digest(*arrays: Any) -> str:
    """A digest of the values of arrays or tensors."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()
