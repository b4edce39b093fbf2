"""The one training loop. It owns the optimiser, the schedule, the checkpoints and the processes; recipes own the rest.

Everything random is drawn from (seed, epoch, rank) alone, so no random state has to be saved, and an interrupted run
that is resumed reaches the same weights as one that was not. (In precision 16-mixed only nearly so: the factor that
scales the gradients starts afresh.)
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import nn

from maple.data.batches import count_batches, training_batches
from maple.data.image_set import ImageSet
from maple.errors import DataError, RunError, TrainError, UsageError
from maple.files import RunFile, load_arrays, save_arrays, write_atomic
from maple.networks import Backbone, MadeBy, embed
from maple.options import as_dict, build_options
from maple.progress import TrainDisplay
from maple.training.distributed import agree_on_buffers, gather_rows, make_fabric, mean_over_ranks, together
from maple.training.head import NamedState, grow_head, named_state, probability_shift, set_named_state
from maple.training.loss import relative_spread, weighted_sum
from maple.training.maple import MapleRecipe
from maple.training.options import TrainOptions
from maple.training.recipe import Recipe, Step
from maple.training.relabel import changed_classes
from maple.types import Outputs, Relabelling

HISTORY_COLUMNS = (
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
    "seconds",
)
SNAPSHOT_IMAGES = 2000


@dataclass(frozen=True, eq=False)
class Run:
    """A trained network with its clusters and history. In several processes every rank holds the same ``Run``."""

    backbone: Backbone
    relabelling: Relabelling
    class_names: tuple[str, ...]
    history: list[dict[str, Any]]
    snapshots: dict[str, np.ndarray]  # validation embeddings 'before' the first relabelling and 'after' the last epoch
    snapshot_epochs: dict[str, int]  # after which epoch each snapshot was taken
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
    on_epoch: Callable[[list[dict[str, Any]]], None] | None = None,
    **keywords: Any,
) -> Run:
    """Train ``backbone`` with ``recipe``; keywords are those of :class:`~maple.training.options.TrainOptions`.

    With a ``folder``, history and a checkpoint are written there after every epoch, and ``resume=True`` continues from
    the last one. With ``devices=2`` the calling program is started once more for the second process. ``on_epoch`` is
    handed the whole history after every epoch; what it raises ends the training, which can be resumed like any other.
    """
    if options is not None and keywords:
        raise UsageError(f"give the training options in options= or as keywords, not both: {', '.join(keywords)}")
    options = options or build_options(TrainOptions, keywords, "training options")
    _check_classes(train, validation)
    folder = Path(folder) if folder is not None else None
    fabric = fabric or make_fabric(options)
    loop = _Loop(fabric, backbone, recipe, train, validation, options, folder)
    if resume:
        loop.restore()
    display = TrainDisplay(options.epochs, enabled=show_progress and fabric.is_global_zero)
    with display:
        if loop.epoch == 0:
            loop.start()
        for epoch in range(loop.epoch + 1, options.epochs + 1):
            loop.run_epoch(epoch, display)
            if on_epoch is not None:
                on_epoch(loop.history)
    return loop.result()


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


def history_csv(history: list[dict[str, Any]]) -> str:
    """The history as CSV text; terms of a loss that only some recipe has come last."""
    further = dict.fromkeys(name for row in history for name in row if name not in HISTORY_COLUMNS)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*HISTORY_COLUMNS, *further], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()


def snapshot_rows(n: int) -> np.ndarray:
    """Which of ``n`` validation images the snapshots hold: evenly spread, so that every class is seen."""
    return np.linspace(0, n - 1, min(n, SNAPSHOT_IMAGES)).astype(np.int64)


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


# --- the head --------------------------------------------------------------------------------------------------------


def fit_head(backbone: Backbone, recipe: Recipe, n_outputs: int) -> nn.Module:
    """The backbone's head, checked, or the recipe's where it has none, or where the recipe has one of its own."""
    if backbone.head is None or recipe.own_head:
        return recipe.build_head(backbone.embedding_size, n_outputs).to(backbone.mean.device)
    found = count_outputs(backbone.head, backbone.embedding_size)
    if found != n_outputs:
        raise UsageError(
            f"the head of the backbone has {found} outputs, but there are {n_outputs} classes: "
            "set backbone.head = None to start with a new head"
        )
    return backbone.head


def check_processes(recipe: Recipe, fabric: Fabric) -> None:
    """Refuse several processes where a recipe keeps what they would not share."""
    if recipe.one_process and fabric.world_size > 1:
        raise UsageError(f"recipe '{recipe.name}' trains in one process: leave out --devices and --nodes")


def check_recipe(recipe: Recipe, backbone: Backbone, n_outputs: int, fabric: Fabric) -> None:
    """Try on a backbone, which is not fit for use afterwards, what the recipe will do to the one to be trained."""
    check_processes(recipe, fabric)
    backbone.head = fit_head(backbone, recipe, n_outputs)
    recipe.prepare(backbone)


def describe_maker(recipe: Recipe, n_outputs: int) -> MadeBy | None:
    """How to build the network of a recipe again; ``None`` if it is one of ``create_backbone``."""
    if isinstance(recipe, MapleRecipe):
        return None
    options = {key: value for key, value in recipe.options().items() if key != "recipe"}
    return MadeBy(recipe.name, options, n_outputs)


def count_outputs(head: nn.Module, embedding_size: int) -> int:
    """How many logits a head gives, by its own account or found by asking it.

    >>> count_outputs(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)), embedding_size=8)
    3
    """
    if isinstance(n_outputs := getattr(head, "out_features", None), int):
        return n_outputs
    like = next(head.parameters(), torch.empty(0))
    mode = head.training
    with torch.no_grad():
        logits = head.eval()(like.new_zeros(1, embedding_size))
    head.train(mode)
    return logits.shape[1]


def saved_head(
    head: nn.Module, recipe: Recipe, embedding_size: int, weights: dict[str, torch.Tensor], n: int
) -> nn.Module:
    """A head with ``n`` outputs of the shape that the weights of a checkpoint have."""
    if isinstance(head, nn.Linear):
        return nn.Linear(embedding_size, n, bias="head.bias" in weights)
    if count_outputs(head, embedding_size) == n:
        return head
    return recipe.build_head(embedding_size, n)


# --- what must not change when a run is resumed ----------------------------------------------------------------------


def data_digest(images: ImageSet) -> str:
    """A digest of the images, their order, labels and class names."""
    digest = hashlib.blake2b(json.dumps(images.class_names).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(images.keys).tobytes())
    digest.update(images.labels.astype("<i8").tobytes())
    return digest.hexdigest()


FREE_OPTIONS = {"workers", "checkpoint_every", "devices", "nodes", "accelerator", "allocator"}


def check_same_options(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with options that change what is learnt."""
    for key in now:
        if key not in FREE_OPTIONS and then.get(key) != now[key]:
            flag = key.replace("_", "-")
            raise RunError(
                f"the run was started with --{flag} {then.get(key)}, not {now[key]}: leave the option out to resume, "
                "or choose another --out"
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
        check_processes(recipe, fabric)
        self.fabric, self.recipe, self.options, self.folder = fabric, recipe, options, folder
        self.train_images, self.validation_images = train, validation
        self.backbone = backbone
        self.backbone.size = backbone.size or train.size
        self.backbone.head = fit_head(backbone, recipe, len(train.class_names))
        self.backbone.made_by = describe_maker(recipe, len(train.class_names))
        recipe.prepare(backbone)
        self.relabelling = Relabelling.initial(train.labels, len(train.class_names))
        self.epoch = 0
        self.history: list[dict[str, Any]] = []
        self.snapshots: dict[str, np.ndarray] = {}
        self.snapshot_epochs: dict[str, int] = {}
        self.warned = False
        self._set_up({})

    def _set_up(self, state: NamedState) -> None:
        """Hand the backbone, as it is now, to a new optimiser that starts from ``state``."""
        self.raw_optimizer = make_optimizer(self.backbone, self.options)
        set_named_state(self.raw_optimizer, self.backbone, state)
        self.module, self.optimizer = self.fabric.setup(self.backbone, self.raw_optimizer)

    def start(self) -> None:
        """Let the recipe see the images before the first step."""
        labels = self.train_images.labels
        self.recipe.start(self.backbone, self._embed_training_rows, labels, self.options.seed)

    # One epoch

    def run_epoch(self, epoch: int, display: TrainDisplay) -> None:
        started = time.monotonic()
        losses = self._train_epoch(epoch, display)
        validation = self._embed_validation()
        self._check_finite("an embedding or logit", validation.embeddings, validation.logits, epoch=epoch)
        probabilities = self.recipe.class_probabilities(validation)
        row = {
            "epoch": epoch,
            "learning_rate": round(float(self.raw_optimizer.param_groups[0]["lr"]), 8),
            **losses,
            **self._measure(validation, probabilities),
        }
        self._check_finite("the validation loss", row["validation_loss"], epoch=epoch)
        self._take_snapshots(epoch, validation)
        relabelling = time.monotonic()
        row |= self._relabel(epoch, validation, probabilities)
        row["relabel_seconds"] = round(time.monotonic() - relabelling, 2)
        row |= {"clusters": self.relabelling.n_clusters, "seconds": round(time.monotonic() - started, 2)}
        self.epoch = epoch
        self.history.append(row)
        display.end_epoch(row)
        self._warn_once(display)
        with together(self.fabric):
            self._save()

    def _train_epoch(self, epoch: int, display: TrainDisplay) -> dict[str, float]:
        """One pass over the training images; the mean loss and the means of its unweighted terms."""
        steps = count_batches(len(self.train_images), self.options.batch_size, self.fabric.world_size)
        display.begin_epoch(epoch, steps)
        self._seed(epoch)
        self.module.train()
        self.recipe.begin_epoch(self.backbone, epoch, self.options.epochs)
        sums: dict[str, float] = {}
        for step, (x, targets) in enumerate(self._batches(epoch)):
            for name, value in self._step(x, targets, epoch, step / steps).items():
                sums[name] = sums.get(name, 0.0) + value
            display.step({name: value / (step + 1) for name, value in sums.items()})
        return mean_over_ranks(self.fabric, {name: value / steps for name, value in sums.items()})

    def _step(self, x: torch.Tensor, targets: torch.Tensor, epoch: int, share: float) -> dict[str, float]:
        """One step of the optimiser, when ``share`` of the epoch is done; the loss and its unweighted terms."""
        progress = self._progress(epoch, share)
        for group in self.raw_optimizer.param_groups:
            group["lr"] = learning_rate_at(progress, self.options)
        images = self.fabric.to_device(x).requires_grad_(self.recipe.needs_image_gradients)
        embeddings, logits = self._forward(images)
        with together(self.fabric):
            targets = self.fabric.to_device(targets)
            done = Step(images, embeddings.float(), logits.float(), targets, progress, self.backbone)
            terms = self.recipe.loss(done)
            loss = weighted_sum(terms)
            self._check_finite("the loss", loss.item(), epoch=epoch)
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        self.optimizer.step()
        with torch.no_grad():
            self.recipe.after_step(done.detached())
        return {"loss": loss.item(), **{name: term.value.item() for name, term in terms.items()}}

    def _forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and logits; past Fabric's wrapper where a loss takes gradients itself, which it would refuse."""
        if not self.recipe.needs_image_gradients:
            return self.module(images)
        with self.fabric.autocast():
            return self.backbone(images)

    def _batches(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's batches of images and targets; one that cannot be read is an error of all ranks."""
        options = self.options
        batches = training_batches(
            self.train_images,
            self.relabelling.cluster_ids,
            batch_size=options.batch_size,
            augment=options.augment,
            sampler="shuffle" if options.sampler == "auto" and not self.recipe.compares_images else options.sampler,
            seed=options.seed,
            epoch=epoch,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
            workers=options.workers,
        )
        while True:
            with together(self.fabric):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch[:2]

    def _seed(self, epoch: int) -> None:
        """Seed what draws from torch's own generator: dropout and fresh heads."""
        torch.manual_seed(((self.options.seed * 1_000_003 + epoch) * 1_009 + self.fabric.global_rank) % 2**63)

    def _progress(self, epoch: int, share: float) -> float:
        """The share of the whole training that is done when ``share`` of an epoch is."""
        return min(1.0, (epoch - 1 + share) / self.options.epochs)

    def _check_finite(self, what: str, *values: Any, epoch: int) -> None:
        """Stop before numbers that are none reach a checkpoint."""
        if not all(np.isfinite(value).all() for value in values):
            rate = self.options.learning_rate
            raise TrainError(
                f"{what} of recipe '{self.recipe.name}' is no longer finite in epoch {epoch}: start again with "
                f"--overwrite and {self.recipe.remedy} (such as --learning-rate {rate / 10:g}; it was {rate:g})"
            )

    # Between epochs

    def _embed_validation(self) -> Outputs:
        """Outputs of all validation images on every rank, each rank computing its share."""
        agree_on_buffers(self.fabric, self.backbone)
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
        return gather_rows(self.fabric, self._embed(self.train_images, rows, logits=False).embeddings, len(rows))

    def _embed(self, images: ImageSet, rows: np.ndarray, logits: bool = True) -> Outputs:
        share = rows[self.fabric.global_rank :: self.fabric.world_size]
        with together(self.fabric):
            return embed(self.backbone, images, indices=share, workers=self.options.workers, logits=logits)

    def _measure(self, validation: Outputs, probabilities: np.ndarray) -> dict[str, float]:
        labels = self.validation_images.labels
        return {
            "validation_accuracy": float((probabilities.argmax(1) == labels).mean()),
            "validation_loss": float(-np.log(probabilities[np.arange(len(labels)), labels] + 1e-12).mean()),
            "spread": float(relative_spread(torch.from_numpy(validation.embeddings))),
        }

    def _warn_once(self, display: TrainDisplay) -> None:
        """Say that the embeddings have collapsed, after the first epoch in which they have."""
        found = None if self.warned else self.recipe.find_collapse(self.history, self.options.epochs)
        if found is not None:
            self.warned = True
            display.warn(found)

    def _take_snapshots(self, epoch: int, validation: Outputs) -> None:
        """Keep embeddings as they are before the first split (or half-way, should there be none), and at the end."""
        unsplit = self.relabelling.n_clusters == len(self.train_images.class_names)
        before = "before" not in self.snapshots or (unsplit and epoch <= self.options.epochs / 2)
        for name, due in (("before", before), ("after", epoch == self.options.epochs)):
            if due:
                self.snapshots[name] = validation.embeddings[snapshot_rows(len(validation))]
                self.snapshot_epochs[name] = epoch

    def _relabel(self, epoch: int, validation: Outputs, probabilities: np.ndarray) -> dict[str, Any]:
        """Let the recipe split hard classes, but not after the last epoch; what the history says about it."""
        if epoch == self.options.epochs:
            return {"relabelled": ""}
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
            return {"relabelled": ""}
        changed = changed_classes(self.relabelling, after)
        self.relabelling = after
        self._set_up(grow_head(self.backbone, self.recipe, after, named_state(self.raw_optimizer, self.backbone)))
        return {
            "relabelled": ";".join(self.train_images.class_names[c] for c in changed),
            "relabel_shift": probability_shift(self.recipe, self.backbone, after, validation, probabilities),
        }

    # Checkpoints

    def _save(self) -> None:
        """Write history and checkpoint, where one is due: in the first process only."""
        last = self.epoch == self.options.epochs
        due = self.epoch % self.options.checkpoint_every == 0 or last
        if self.folder is None or not self.fabric.is_global_zero or not due:
            return
        write_atomic(self.folder / RunFile.HISTORY, history_csv(self.history))
        arrays = {f"weights/{name}": tensor.cpu().numpy() for name, tensor in self.backbone.state_dict().items()}
        for name, values in named_state(self.raw_optimizer, self.backbone).items():
            arrays |= {f"optimizer/{name}/{key}": value.cpu().numpy() for key, value in values.items()}
        arrays |= {f"snapshot/{name}": value for name, value in self.snapshots.items()}
        arrays |= {f"relabelling/{f.name}": getattr(self.relabelling, f.name) for f in fields(self.relabelling)}
        metadata = {
            "epoch": self.epoch,
            "history": self.history,
            "snapshot_epochs": self.snapshot_epochs,
            "options": self._fixed_options(),
            "data": data_digest(self.train_images),
        }
        save_arrays(self.folder / RunFile.CHECKPOINT, arrays, metadata)

    def _fixed_options(self) -> dict[str, Any]:
        """What a resumed run must share with the run it continues."""
        return {**as_dict(self.options), **self.recipe.options()}

    def restore(self) -> None:
        """Continue from the checkpoint in the run folder; without one, from the start."""
        if self.folder is None or not self.fabric.broadcast((self.folder / RunFile.CHECKPOINT).exists()):
            return
        with together(self.fabric):
            state = self._load(self.folder / RunFile.CHECKPOINT)
        self._set_up(state)

    def _load(self, path: Path) -> NamedState:
        """Take everything from a checkpoint but the state of the optimiser, which is returned."""
        arrays, metadata = load_arrays(path)
        if metadata["data"] != data_digest(self.train_images):
            raise RunError(
                f"'{path.parent}' was trained on other images or labels: resume with the same data or choose another "
                "--out"
            )
        check_same_options(metadata["options"], self._fixed_options())
        parts: dict[str, dict[str, np.ndarray]] = {"weights": {}, "optimizer": {}, "snapshot": {}, "relabelling": {}}
        for key, value in arrays.items():
            kind, name = key.split("/", 1)
            parts[kind][name] = value
        self.epoch, self.history = metadata["epoch"], metadata["history"]
        self.snapshots, self.snapshot_epochs = parts["snapshot"], metadata["snapshot_epochs"]
        self.relabelling = Relabelling(**parts["relabelling"])
        self._load_weights({name: torch.from_numpy(value.copy()) for name, value in parts["weights"].items()}, path)
        state: NamedState = {}
        for name, value in parts["optimizer"].items():
            parameter, key = name.rsplit("/", 1)
            state.setdefault(parameter, {})[key] = torch.from_numpy(value.copy()).to(self.fabric.device)
        return state

    def _load_weights(self, weights: dict[str, torch.Tensor], path: Path) -> None:
        backbone = self.backbone
        assert backbone.head is not None
        backbone.head = saved_head(
            backbone.head, self.recipe, backbone.embedding_size, weights, self.relabelling.n_clusters
        )
        try:
            backbone.load_state_dict(weights)
        except RuntimeError:
            raise RunError(
                f"'{path}' holds the weights of another network than '{backbone.name}': resume with the --backbone and "
                "--embedding-size of the run, or choose another --out"
            ) from None
        backbone.to(self.fabric.device)

    def result(self) -> Run:
        agree_on_buffers(self.fabric, self.backbone)
        return Run(
            self.recipe.finish(self.backbone.eval()),
            self.relabelling,
            self.train_images.class_names,
            self.history,
            self.snapshots,
            self.snapshot_epochs,
            self.fabric,
        )
