"""What a training writes after an epoch: its history, and the checkpoint from which it is resumed."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maple.data.image_set import ImageSet
from maple.errors import RunError, UsageError
from maple.files import load_arrays, naming_damage, save_arrays
from maple.options import flag_name
from maple.training.head import NamedState
from maple.training.recipe import RECIPES, History
from maple.types import Relabelling

SNAPSHOT_IMAGES = 2000
COLUMNS = (
    "epoch",
    "learning_rate",
    "loss",
    "cross_entropy",
    "triplet",
    "prototype",
    "validation_accuracy",
    "validation_loss",
    "clusters",
    "spread",
    "relabelled",
    "relabel_shift",
    "relabel_seconds",
    "images",
    "cpu_seconds",
    "seconds",
)
# Options that change no result
FREE_OPTIONS = {
    "workers",
    "checkpoint_every",
    "devices",
    "nodes",
    "strategy",
    "accelerator",
    "allocator",
    "on_collapse",
    "time_limit",
}


def history_csv(history: History) -> str:
    """The history as CSV text; loss terms that only some recipe has come last.

    >>> print(history_csv([{"epoch": 1, "loss": 0.5, "my_term": 0.25}]).splitlines()[1])
    1,,0.5,,,,,,,,,,,,,,0.25
    """
    further = dict.fromkeys(name for row in history for name in row if name not in COLUMNS)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *further], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()


@dataclass(frozen=True, eq=False)
class Record:
    """What a training reports: its history, and validation embeddings after two of its epochs."""

    history: History
    snapshots: dict[str, np.ndarray]  # embeddings 'before' the first relabelling and 'after' the last epoch
    snapshot_epochs: dict[str, int]  # after which epoch each snapshot was taken


def snapshot_rows(n: int) -> np.ndarray:
    """Positions of the validation images in the snapshots: evenly spaced, so that every class is included."""
    return np.linspace(0, n - 1, min(n, SNAPSHOT_IMAGES)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Checkpoint(Record):
    """Everything that a resumed training continues from."""

    relabelling: Relabelling
    weights: dict[str, torch.Tensor]
    optimizer: NamedState
    options: dict[str, Any]  # of training and recipe
    data: str  # digest of the training images

    def save(self, path: Path) -> None:
        groups: dict[str, Mapping[str, Any]] = {
            "weights": self.weights,
            **{f"optimizer/{name}": values for name, values in self.optimizer.items()},
            "snapshot": self.snapshots,
            "relabelling": vars(self.relabelling),
        }
        arrays = {
            f"{group}/{name}": value.cpu().numpy() if isinstance(value, torch.Tensor) else value
            for group, values in groups.items()
            for name, value in values.items()
        }
        kept = {name: getattr(self, name) for name in ("history", "snapshot_epochs", "options", "data")}
        save_arrays(path, arrays, {"epoch": len(self.history), **kept})

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        arrays, metadata = load_arrays(path)
        with naming_damage(path):
            return cls._unpack(arrays, metadata)

    @classmethod
    def _unpack(cls, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> Checkpoint:
        groups: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
        for key, value in arrays.items():
            group, name = key.rsplit("/", 1)
            groups[group][name] = value
        return cls(
            snapshots=groups.pop("snapshot"),
            relabelling=Relabelling(**groups.pop("relabelling")),
            weights=_as_tensors(groups.pop("weights")),
            optimizer={key.removeprefix("optimizer/"): _as_tensors(values) for key, values in groups.items()},
            **{name: metadata[name] for name in ("history", "snapshot_epochs", "options", "data")},
        )

    def check(self, options: Mapping[str, Any], data: str, folder: Path) -> None:
        """Raise an error if images or options differ from those the training was started with.

        Options that did not exist then had no effect and are not compared.
        """
        if self.data != data:
            raise RunError(f"'{folder}' was trained on other images or labels: give the same data or another --out")
        for key, value in options.items():
            then = self.options.get(key, value)
            if key not in FREE_OPTIONS and value != (RECIPES.present_name(then) if key == "recipe" else then):
                raise started_otherwise(folder, flag_name(key), self.options[key], value)


def _as_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


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
