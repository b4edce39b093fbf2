"""Checkpoints: the state of a training between two epochs, and what must not change when it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maple.data.image_set import ImageSet
from maple.errors import RunError, UsageError
from maple.files import load_arrays, save_arrays
from maple.options import flag_name
from maple.training.head import NamedState
from maple.training.history import History
from maple.types import Relabelling

# Options that change no result
FREE_OPTIONS = {"workers", "checkpoint_every", "devices", "nodes", "accelerator", "allocator", "on_collapse"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything that a resumed training continues from."""

    epoch: int  # epochs done
    history: History
    snapshots: dict[str, np.ndarray]
    snapshot_epochs: dict[str, int]
    relabelling: Relabelling
    weights: dict[str, torch.Tensor]
    optimizer: NamedState
    options: dict[str, Any]  # of training and recipe
    data: str  # digest of the training images

    def save(self, path: Path) -> None:
        arrays = {f"weights/{name}": tensor.cpu().numpy() for name, tensor in self.weights.items()}
        for name, values in self.optimizer.items():
            arrays |= {f"optimizer/{name}/{key}": value.cpu().numpy() for key, value in values.items()}
        arrays |= {f"snapshot/{name}": value for name, value in self.snapshots.items()}
        arrays |= {f"relabelling/{f.name}": getattr(self.relabelling, f.name) for f in fields(self.relabelling)}
        metadata = {
            "epoch": self.epoch,
            "history": self.history,
            "snapshot_epochs": self.snapshot_epochs,
            "options": self.options,
            "data": self.data,
        }
        save_arrays(path, arrays, metadata)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        arrays, metadata = load_arrays(path)
        parts: dict[str, dict[str, np.ndarray]] = {"weights": {}, "optimizer": {}, "snapshot": {}, "relabelling": {}}
        for key, value in arrays.items():
            kind, name = key.split("/", 1)
            parts[kind][name] = value
        optimizer: NamedState = {}
        for name, value in parts["optimizer"].items():
            parameter, key = name.rsplit("/", 1)
            optimizer.setdefault(parameter, {})[key] = torch.from_numpy(value.copy())
        return cls(
            snapshots=parts["snapshot"],
            relabelling=Relabelling(**parts["relabelling"]),
            weights={name: torch.from_numpy(value.copy()) for name, value in parts["weights"].items()},
            optimizer=optimizer,
            **{key: metadata[key] for key in ("epoch", "history", "snapshot_epochs", "options", "data")},
        )

    def check(self, options: Mapping[str, Any], data: str, folder: Path) -> None:
        """Raise an error if images or options differ from those the training was started with.

        Options that did not exist then had no effect and are not compared.
        """
        if self.data != data:
            raise RunError(
                f"'{folder}' was trained on other images or labels: resume with the same data or choose another --out"
            )
        for key, value in options.items():
            if key not in FREE_OPTIONS and self.options.get(key, value) != value:
                raise started_otherwise(folder, flag_name(key), self.options[key], value)


def started_otherwise(folder: Path, option: str, then: Any, now: Any) -> UsageError:
    """The error of a training that is resumed with another value of ``option``."""
    before = f"without {option}" if then is None else f"with {option} {then}"
    return UsageError(
        f"the run in '{folder}' was started {before}, not with {now}: leave the option out to resume, or choose "
        "another --out"
    )


def data_digest(images: ImageSet) -> str:
    """A digest of the images, their order, labels and class names."""
    digest = hashlib.blake2b(json.dumps(images.class_names).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(images.keys).tobytes())
    digest.update(images.labels.astype("<i8").tobytes())
    return digest.hexdigest()
