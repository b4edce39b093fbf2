"""The one training loop. It owns the optimiser, the schedule, the checkpoints and the processes; recipes own the rest.

Everything random is drawn from (seed, epoch, rank) alone, so an interrupted run that is resumed reaches the same
weights as one that was not, and no random state has to be saved.
"""

from __future__ import annotations

import csv
import io
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import nn

from maple.backbone import Backbone, embed
from maple.batches import count_batches, training_batches
from maple.checkpoint import load_arrays, save_arrays, write_atomic
from maple.config import TrainOptions, as_dict, build_options
from maple.errors import DataError, RunError, TrainError
from maple.images import ImageSet
from maple.loss import relative_spread
from maple.networks import bfloat16_is_fast, use_fast_allocator
from maple.progress import TrainDisplay
from maple.recipe import Recipe
from maple.types import Outputs, Relabelling

HISTORY_COLUMNS = (
    "epoch",
    "learning_rate",
    "loss",
    "cross_entropy",
    "triplet",
    "validation_accuracy",
    "validation_loss",
    "clusters",
    "spread",
    "relabelled",
    "relabel_shift",
    "seconds",
)
COLLAPSED_SPREAD = 0.02
SNAPSHOT_IMAGES = 2000


@dataclass(frozen=True, eq=False)
class Run:
    """A trained network with its clusters and history. In several processes every rank holds the same ``Run``."""

    backbone: Backbone
    relabelling: Relabelling
    class_names: tuple[str, ...]
    history: list[dict[str, Any]]
    snapshots: dict[str, np.ndarray]  # validation embeddings 'before' the first relabelling and 'after' the last epoch
    fabric: Fabric = field(repr=False)

    @property
    def cluster_to_class(self) -> np.ndarray:
        return self.relabelling.cluster_to_class


def train_backbone(
    backbone: Backbone,
    recipe: Recipe,
    train: ImageSet,
    validation: ImageSet,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    show_progress: bool = True,
    options: TrainOptions | None = None,
    fabric: Fabric | None = None,
    **keywords: Any,
) -> Run:
    """Train ``backbone`` with ``recipe``; keywords are those of :class:`~maple.config.TrainOptions`.

    With a ``folder``, history and a checkpoint are written there after every epoch, and ``resume=True`` continues from
    the last one. With ``devices=2`` the calling program is started once more for the second process.
    """
    options = options or build_options(TrainOptions, keywords, "training options")
    _check_classes(train, validation)
    folder = Path(folder) if folder is not None else None
    fabric = fabric or make_fabric(options)
    loop = _Loop(fabric, backbone, recipe, train, validation, options, folder)
    if resume:
        loop.restore()
    display = TrainDisplay(options.epochs, enabled=show_progress and fabric.is_global_zero)
    with display:
        for epoch in range(loop.epoch + 1, options.epochs + 1):
            loop.run_epoch(epoch, display)
    return loop.result()


def make_fabric(options: TrainOptions) -> Fabric:
    """Start the processes: one, ``devices`` on this machine, or as many as torchrun or SLURM started."""
    on_cpu = options.accelerator == "cpu" or not (torch.cuda.is_available() or torch.backends.mps.is_available())
    if options.allocator and on_cpu:
        use_fast_allocator()
    precision = options.precision
    if precision == "auto":
        precision = "bf16-mixed" if bfloat16_is_fast("cpu" if on_cpu else None) else "32-true"
    fabric = Fabric(
        accelerator=options.accelerator,
        strategy="ddp" if options.devices * options.nodes > 1 else "auto",
        devices=options.devices,
        num_nodes=options.nodes,
        precision=precision,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Fabric's advice on processes and workers is not for our users
        fabric.launch()
    return fabric


# --- pure helpers --------------------------------------------------------------------------------------------------


def learning_rate_at(progress: float, options: TrainOptions) -> float:
    """The learning rate when the share ``progress`` of all steps is done.

    ``triangular`` rises from a tenth of the peak over the first quarter and falls to zero; ``cosine`` falls from the
    peak.

    >>> [round(learning_rate_at(p, TrainOptions(learning_rate=1.0)), 3) for p in (0, 0.25, 0.625, 1)]
    [0.1, 1.0, 0.5, 0.0]
    """
    peak = options.learning_rate
    if options.schedule == "triangular":
        rise = 0.25
        return peak * (0.1 + 0.9 * progress / rise if progress < rise else (1 - progress) / (1 - rise))
    if options.schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak


def make_optimizer(module: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    if options.optimizer == "adam":
        return torch.optim.Adam(module.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    return torch.optim.SGD(
        module.parameters(),
        lr=options.learning_rate,
        momentum=options.momentum,
        nesterov=options.nesterov and options.momentum > 0,
        weight_decay=options.weight_decay,
    )


def named_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """The optimiser's state by parameter name."""
    return {
        name: {key: value for key, value in optimizer.state[parameter].items() if value is not None}
        for name, parameter in module.named_parameters()
        if parameter in optimizer.state
    }


def set_named_state(
    optimizer: torch.optim.Optimizer, module: nn.Module, state: dict[str, dict[str, torch.Tensor]]
) -> None:
    """Give the optimiser a state by parameter name; parameters without an entry start afresh."""
    for name, parameter in module.named_parameters():
        if name in state:
            optimizer.state[parameter] = dict(state[name])


def inherit_rows(state: dict[str, dict[str, torch.Tensor]], prefix: str, parents: np.ndarray) -> None:
    """Let each new row of the head carry the momentum of its parent's row, in place."""
    index = torch.from_numpy(parents)
    for name, values in state.items():
        if name.startswith(prefix):
            values.update({key: value[index] for key, value in values.items() if value.ndim > 0})


def history_csv(history: list[dict[str, Any]]) -> str:
    """The history as CSV text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, HISTORY_COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()


def snapshot_rows(n: int) -> np.ndarray:
    """Which of ``n`` validation images the snapshots hold: evenly spread, so that every class is seen."""
    return np.linspace(0, n - 1, min(n, SNAPSHOT_IMAGES)).astype(np.int64)


def gather_rows(fabric: Fabric, rows: np.ndarray, n: int) -> np.ndarray:
    """All ``n`` rows in order on every rank, where rank r of R holds the rows r, r + R, r + 2R, ..."""
    if fabric.world_size == 1:
        return rows
    longest = -(-n // fabric.world_size)
    padded = np.zeros((longest, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    stacked = _numpy(fabric.all_gather(torch.from_numpy(padded).to(fabric.device)))  # (R, longest, ...)
    return stacked.swapaxes(0, 1).reshape(-1, *rows.shape[1:])[:n]


def _numpy(tensor: Any) -> np.ndarray:
    return torch.as_tensor(tensor).cpu().numpy()


def _check_classes(train: ImageSet, validation: ImageSet) -> None:
    n_classes = len(train.class_names)
    for name, images in (("training", train), ("validation", validation)):
        counts = np.bincount(images.labels[images.labels >= 0], minlength=n_classes)
        missing = [train.class_names[c] for c in np.flatnonzero(counts[:n_classes] == 0)]
        if missing:
            others = f" (nor have {len(missing) - 1} other classes)" if len(missing) > 1 else ""
            raise DataError(
                f"class '{missing[0]}' has no {name} image{others}: add images of it or leave the class out"
            )


# --- the loop --------------------------------------------------------------------------------------------------------


class _Loop:
    """State of one training: what an epoch changes and a checkpoint holds."""

    def __init__(
        self,
        fabric: Fabric,
        backbone: Backbone,
        recipe: Recipe,
        train: ImageSet,
        validation: ImageSet,
        options: TrainOptions,
        folder: Path | None,
    ) -> None:
        self.fabric, self.recipe, self.options, self.folder = fabric, recipe, options, folder
        self.train_images, self.validation_images = train, validation
        self.backbone = backbone
        self.relabelling = Relabelling.initial(train.labels, len(train.class_names))
        self.epoch = 0
        self.history: list[dict[str, Any]] = []
        self.snapshots: dict[str, np.ndarray] = {}
        self._set_up({})

    def _set_up(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Hand the backbone, as it is now, to a new optimiser that starts from ``state``."""
        self.raw_optimizer = make_optimizer(self.backbone, self.options)
        set_named_state(self.raw_optimizer, self.backbone, state)
        self.module, self.optimizer = self.fabric.setup(self.backbone, self.raw_optimizer)

    # One epoch

    def run_epoch(self, epoch: int, display: TrainDisplay) -> None:
        started = time.monotonic()
        losses = self._train_epoch(epoch, display)
        validation = self._embed_validation()
        probabilities = self.recipe.class_probabilities(validation)
        labels = self.validation_images.labels
        spread = float(relative_spread(torch.from_numpy(validation.embeddings)))
        row: dict[str, Any] = {
            "epoch": epoch,
            "learning_rate": round(float(self.raw_optimizer.param_groups[0]["lr"]), 8),
            "loss": sum(losses.values()),
            **losses,
            "validation_accuracy": float((probabilities.argmax(1) == labels).mean()),
            "validation_loss": float(-np.log(probabilities[np.arange(len(labels)), labels] + 1e-12).mean()),
            "spread": spread,
            "relabelled": "",
        }
        self._take_snapshots(epoch, validation)
        if epoch < self.options.epochs:
            row |= self._relabel(epoch, validation, probabilities)
        row |= {"clusters": self.relabelling.n_clusters, "seconds": round(time.monotonic() - started, 2)}
        self.epoch = epoch
        self.history.append(row)
        if spread < COLLAPSED_SPREAD:
            display.warn(_collapse_message(self.recipe, spread, losses.get("triplet")))
        display.end_epoch(row)
        self._save()

    def _train_epoch(self, epoch: int, display: TrainDisplay) -> dict[str, float]:
        options, fabric = self.options, self.fabric
        torch.manual_seed((options.seed * 1_000_003 + epoch) * 1_009 + fabric.global_rank)  # dropout, fresh heads
        batches = training_batches(
            self.train_images,
            self.relabelling.cluster_ids,
            batch_size=options.batch_size,
            augment=self.train_images.augment if options.augment == "auto" else options.augment,
            sampler=options.sampler,
            seed=options.seed,
            epoch=epoch,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
            workers=options.workers,
        )
        steps = count_batches(len(self.train_images), options.batch_size, fabric.world_size)
        display.begin_epoch(epoch, steps)
        self.module.train()
        sums: dict[str, float] = {}
        count = 0
        for step, (x, targets, _) in enumerate(batches):
            progress = min(1.0, (epoch - 1 + step / steps) / options.epochs)
            for group in self.raw_optimizer.param_groups:
                group["lr"] = learning_rate_at(progress, options)
            embeddings, logits = self.module(fabric.to_device(x))
            terms = self.recipe.loss(embeddings.float(), logits.float(), fabric.to_device(targets), progress)
            loss = torch.stack(list(terms.values())).sum()
            if not torch.isfinite(loss):
                raise TrainError(
                    f"the loss became {loss.item()} in epoch {epoch}: lower --learning-rate "
                    f"(now {options.learning_rate}); the checkpoint of epoch {epoch - 1} is intact"
                )
            self.optimizer.zero_grad()
            fabric.backward(loss)
            self.optimizer.step()
            count += 1
            for name, term in terms.items():
                sums[name] = sums.get(name, 0.0) + term.item()
            display.step({name: value / count for name, value in sums.items()})
        if count == 0:
            raise DataError("an epoch had no batch: there are fewer training images than processes; use --devices 1")
        means = np.array([sums[name] / count for name in sorted(sums)], dtype=np.float32)
        means = _numpy(fabric.all_reduce(torch.from_numpy(means).to(fabric.device), reduce_op="mean"))
        return dict(zip(sorted(sums), means.tolist()))

    # Between epochs

    def _embed_validation(self) -> Outputs:
        """Outputs of all validation images on every rank, each rank computing its share."""
        self._agree_on_buffers()
        n = len(self.validation_images)
        mine = self._embed(self.validation_images, np.arange(n))
        assert mine.logits is not None
        return Outputs(
            embeddings=gather_rows(self.fabric, mine.embeddings, n),
            logits=gather_rows(self.fabric, mine.logits, n),
            labels=self.validation_images.labels,
            cluster_to_class=self.relabelling.cluster_to_class,
        )

    def _embed_training_rows(self, rows: np.ndarray) -> np.ndarray:
        return gather_rows(self.fabric, self._embed(self.train_images, rows).embeddings, len(rows))

    def _embed(self, images: ImageSet, rows: np.ndarray) -> Outputs:
        share = rows[self.fabric.global_rank :: self.fabric.world_size]
        return embed(self.backbone, images, indices=share, workers=self.options.workers)

    def _agree_on_buffers(self) -> None:
        """Batch-norm statistics are those of rank 0."""
        if self.fabric.world_size > 1:
            for buffer in self.backbone.buffers():
                torch.distributed.broadcast(buffer, 0)

    def _take_snapshots(self, epoch: int, validation: Outputs) -> None:
        """Keep embeddings as they are before the first split (or half-way, should there be none), and at the end."""
        unsplit = self.relabelling.n_clusters == len(self.train_images.class_names)
        rows = snapshot_rows(len(validation))
        if "before" not in self.snapshots or (unsplit and epoch <= self.options.epochs / 2):
            self.snapshots["before"] = validation.embeddings[rows]
        if epoch == self.options.epochs:
            self.snapshots["after"] = validation.embeddings[rows]

    def _relabel(self, epoch: int, validation: Outputs, probabilities: np.ndarray) -> dict[str, Any]:
        after = self.recipe.relabel(
            epoch,
            probabilities,
            self.validation_images.labels,
            self.relabelling,
            self._embed_training_rows,
            self.options.seed,
        )
        if self.fabric.world_size > 1:
            after = self.fabric.broadcast(after)
        if after is None:
            return {}
        before = self.relabelling
        state = named_state(self.raw_optimizer, self.backbone)
        head = self.backbone.head
        assert head is not None
        self.backbone.head, inherits = self.recipe.grow_head(head, after)
        if inherits:
            inherit_rows(state, "head.", after.parents)
        else:
            state = {name: values for name, values in state.items() if not name.startswith("head.")}
        self.relabelling = after
        self._set_up(state)
        return {
            "relabelled": ";".join(self.train_images.class_names[c] for c in _changed_classes(before, after)),
            "relabel_shift": self._shift(validation, probabilities),
        }

    def _shift(self, validation: Outputs, probabilities: np.ndarray) -> float:
        """How far the last relabelling moved any validation class probability."""
        assert self.backbone.head is not None
        with torch.no_grad():
            embeddings = torch.from_numpy(validation.embeddings).to(self.fabric.device)
            logits = self.backbone.head(embeddings).float().cpu().numpy()
        moved = Outputs(validation.embeddings, logits, cluster_to_class=self.relabelling.cluster_to_class)
        return float(np.abs(self.recipe.class_probabilities(moved) - probabilities).max())

    # Checkpoints

    def _save(self) -> None:
        last = self.epoch == self.options.epochs
        due = self.epoch % self.options.checkpoint_every == 0 or last
        if self.folder is None or not self.fabric.is_global_zero or not due:
            return
        write_atomic(self.folder / "history.csv", history_csv(self.history))
        arrays = {f"weights/{name}": tensor.cpu().numpy() for name, tensor in self.backbone.state_dict().items()}
        for name, values in named_state(self.raw_optimizer, self.backbone).items():
            arrays |= {f"optimizer/{name}/{key}": value.cpu().numpy() for key, value in values.items()}
        arrays |= {f"snapshot/{name}": value for name, value in self.snapshots.items()}
        arrays |= {
            "relabelling/cluster_ids": self.relabelling.cluster_ids,
            "relabelling/cluster_to_class": self.relabelling.cluster_to_class,
            "relabelling/parents": self.relabelling.parents,
            "relabelling/shares": self.relabelling.shares,
        }
        metadata = {"epoch": self.epoch, "history": self.history, "options": as_dict(self.options)}
        save_arrays(self.folder / "resume.safetensors", arrays, metadata)

    def restore(self) -> None:
        """Continue from the checkpoint in the run folder; without one, from the start."""
        if self.folder is None or not (self.folder / "resume.safetensors").exists():
            return
        arrays, metadata = load_arrays(self.folder / "resume.safetensors")
        _check_same_options(metadata["options"], as_dict(self.options))
        parts: dict[str, dict[str, np.ndarray]] = {}
        for key, value in arrays.items():
            kind, name = key.split("/", 1)
            parts.setdefault(kind, {})[name] = value
        relabelling = Relabelling(**parts["relabelling"])
        if len(relabelling.cluster_ids) != len(self.train_images):
            raise RunError(
                f"'{self.folder}' was trained on {len(relabelling.cluster_ids)} images, now there are "
                f"{len(self.train_images)}: resume with the same data or choose another --out"
            )
        self.relabelling = relabelling
        self.epoch, self.history = metadata["epoch"], metadata["history"]
        self.snapshots = parts.get("snapshot", {})
        self.backbone.head = self.recipe.build_head(self.backbone.embedding_size, relabelling.n_clusters)
        weights = {name: torch.from_numpy(value.copy()) for name, value in parts["weights"].items()}
        self.backbone.load_state_dict(weights)
        self.backbone.to(self.fabric.device)
        state: dict[str, dict[str, torch.Tensor]] = {}
        for path, value in parts.get("optimizer", {}).items():
            name, key = path.rsplit("/", 1)
            state.setdefault(name, {})[key] = torch.from_numpy(value.copy()).to(self.fabric.device)
        self._set_up(state)

    def result(self) -> Run:
        self._agree_on_buffers()
        self.backbone.eval()
        return Run(
            self.backbone, self.relabelling, self.train_images.class_names, self.history, self.snapshots, self.fabric
        )


def _changed_classes(before: Relabelling, after: Relabelling) -> Iterator[int]:
    for class_id in np.unique(after.cluster_to_class):
        if np.sum(before.cluster_to_class == class_id) != np.sum(after.cluster_to_class == class_id):
            yield int(class_id)


def _check_same_options(then: dict[str, Any], now: dict[str, Any]) -> None:
    free = {"workers", "checkpoint_every", "devices", "nodes", "accelerator"}
    for key, value in now.items():
        if key not in free and then.get(key) != value:
            flag = key.replace("_", "-")
            raise RunError(
                f"the run was started with --{flag} {then.get(key)}, not {value}: leave the option out to resume, "
                "or choose another --out"
            )


def _collapse_message(recipe: Recipe, spread: float, triplet: float | None) -> str:
    message = f"the embeddings have collapsed to almost one point (relative spread {spread:.4f})"
    if triplet is not None:
        margin = getattr(recipe, "margin", float("nan"))
        message += f" and the triplet loss sits at {triplet:.3f} (margin {margin})"
    return message + ": lower --learning-rate, raise --triplet-warmup, or use --triplet-space normalised"
