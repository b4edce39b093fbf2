"""The training loop. It owns the order of epochs, the checkpoints and the processes; recipes own the rest.

All random numbers derive from (seed, epoch, rank), so no random state is saved, and a resumed training reaches the
same weights as one that was not interrupted (in precision 16-mixed only approximately: the gradient scale is
reset).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maple.data.batches import Epoch, count_batches, training_batches
from maple.data.image_set import ImageSet
from maple.data.sources import open_images, open_like
from maple.data.splits import Images
from maple.errors import DataError, RunError, TrainError, UsageError
from maple.files import RunFile, write_atomic
from maple.networks import Backbone, fit_whitening
from maple.options import as_dict, build_options
from maple.progress import TrainDisplay
from maple.training.duration import Clock, describe_rise
from maple.training.head import NamedState, head_for, prepare_backbone
from maple.training.loss import relative_spread
from maple.training.optimizers import check_schedule
from maple.training.options import TrainOptions
from maple.training.processes import (
    agree_on_buffers,
    agree_on_state,
    embed_shared,
    make_fabric,
    mean_over_ranks,
    share_work,
    together,
)
from maple.training.recipe import History, Recipe, Row, SharedRows
from maple.training.relabel import PseudoLabels
from maple.training.resume import Checkpoint, Record, data_digest, history_csv, snapshot_rows
from maple.training.step import TrainingStep
from maple.types import Outputs, Relabelling

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass(frozen=True, eq=False)
class Run(Record):
    """A trained network with its clusters and history. With several processes every rank has the same ``Run``."""

    backbone: Backbone
    relabelling: Relabelling
    class_names: tuple[str, ...]
    validation: Outputs | None  # outputs of ``backbone`` for the validation images; None if not known
    fabric: Fabric = field(repr=False)

    @property
    def cluster_to_class(self) -> np.ndarray:
        return self.relabelling.cluster_to_class


def train_backbone(
    backbone: Backbone,
    recipe: Recipe,
    train: Images,
    validation: Images,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    show_progress: bool = True,
    options: TrainOptions | None = None,
    fabric: Fabric | None = None,
    on_epoch: Callable[[History], None] | None = None,
    **keywords: Any,
) -> Run:
    """Train ``backbone`` with ``recipe``; keywords are those of :class:`~maple.training.options.TrainOptions`.

    Paths and torch data sets are opened as by ``open_images``, without their augmentation (option ``augment``), in the
    size of the backbone if it knows it.

    With a ``folder``, history and a checkpoint are written there after every epoch, and ``resume=True`` continues from
    the last checkpoint. ``devices=2`` starts the calling program once more, as the second process. ``on_epoch`` gets
    the whole history after every epoch; an exception from it ends the training, which can then be resumed.

    >>> import maple
    >>> splits = maple.load_splits("digits")
    >>> train, backbone = splits.train.subset(range(200)), maple.create_backbone("resnet9", 10)
    >>> run = train_backbone(backbone, maple.MapleRecipe(), train, splits.validation, epochs=1, show_progress=False)
    >>> len(run.history), run.relabelling.n_clusters
    (1, 10)
    """
    if options is not None and keywords:
        raise UsageError(f"give the training options in options= or as keywords, not both: {', '.join(keywords)}")
    options = options or build_options(TrainOptions, keywords, "training options")
    check_schedule(options)
    known = train if isinstance(train, ImageSet) else open_images(train, size=backbone.size or "auto")
    unseen: ImageSet = open_like(validation, known.class_names, size=known.size)
    _check_classes(known, unseen)
    fabric = fabric or make_fabric(options)
    loop = _Loop(fabric, backbone, recipe, known, unseen, options, None if folder is None else Path(folder))
    if resume:
        loop.restore()
    with TrainDisplay(show_progress and fabric.is_global_zero) as display:
        if loop.epoch == 0:
            loop.start()
        while not loop.is_done:
            loop.run_epoch(loop.epoch + 1, display)
            if on_epoch is not None:
                on_epoch(loop.record.history)
        loop.say_how_it_ended(display)
    return loop.result()


def _check_classes(train: ImageSet, validation: ImageSet) -> None:
    """Raise ``DataError`` if a class has no training or no validation image."""
    n_classes = len(train.class_names)
    for name, images in (("training", train), ("validation", validation)):
        counts = np.bincount(images.labels[images.labels >= 0], minlength=n_classes)
        missing = [train.class_names[c] for c in np.flatnonzero(counts[:n_classes] == 0)]
        if missing:
            others = f" (nor have {len(missing) - 1} other classes)" if len(missing) > 1 else ""
            raise DataError(f"class '{missing[0]}' has no {name} image{others}: add images or leave the class out")


@dataclass(eq=False)
class _Loop:
    """State of one training: everything that an epoch changes and a checkpoint stores."""

    fabric: Fabric
    backbone: Backbone
    recipe: Recipe
    train: ImageSet
    validation: ImageSet
    options: TrainOptions
    folder: Path | None

    def __post_init__(self) -> None:
        self.backbone.size = self.backbone.size or self.train.size
        n_classes = len(self.train.class_names)
        prepare_backbone(self.backbone, self.recipe, n_classes, self.fabric)
        initial = Relabelling.initial(self.train.labels, n_classes)
        self.clusters = PseudoLabels(self.recipe, initial, self.options.seed)
        self.record = Record([], {}, {})
        self.outputs: Outputs | None = None  # of the validation images, after the last epoch
        self.warned = False
        self.clock, self.plan = Clock(self.options), self.options  # the plan has fewer epochs if a time limit asks
        self.backbone.to(self.fabric.device)
        self.step: TrainingStep
        self.state: NamedState = {}  # of the optimiser, after the last epoch

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return len(self.record.history)

    @property
    def is_done(self) -> bool:
        """Whether the last epoch is done, also if it was the last because of a time limit."""
        return self.epoch >= self.plan.epochs or "after" in self.record.snapshots

    def _make_step(self, state: NamedState) -> None:
        """Give the backbone, as it is now in the first process, a new optimiser that starts from ``state``."""
        agree_on_state(self.fabric, self.backbone)
        self.step = TrainingStep(self.fabric, self.recipe, self.backbone, self.plan, state)

    def start(self) -> None:
        """Initialise network and recipe from the training images, before the first step."""
        with together(self.fabric):
            if self.fabric.is_global_zero:
                fit_whitening(self.backbone, self.train, workers=self.options.workers)
        agree_on_state(self.fabric, self.backbone)
        self.recipe.start(self.backbone, self._embed_training_rows, self.train.labels, self.options.seed)
        self._make_step({})

    # One epoch

    def run_epoch(self, epoch: int, display: TrainDisplay) -> None:
        started, cpu_started = time.monotonic(), time.process_time()
        losses = self._train_epoch(epoch, display)
        self.state = self.step.collect()
        validation = self._embed_validation()
        self.step.check_finite(epoch, "an embedding or logit", validation.embeddings, validation.logits)
        self.outputs = validation
        probabilities = self.recipe.class_probabilities(validation)
        row = {
            "epoch": epoch,
            "learning_rate": round(self.step.learning_rate, 8),
            **losses,
            **self._measure(validation, probabilities),
        }
        self.step.check_finite(epoch, "the validation loss", row["validation_loss"])
        self._take_snapshots(epoch, validation)
        relabelling = time.monotonic()
        row |= self._relabel(epoch, validation, probabilities)
        row["relabel_seconds"] = round(time.monotonic() - relabelling, 2)
        row |= {
            "clusters": self.clusters.current.n_clusters,
            "images": min(len(self.train), self._n_steps() * self.options.batch_size),  # the last batch may be dropped
            "cpu_seconds": round(time.process_time() - cpu_started, 2),  # of all threads of this process
            "seconds": round(time.monotonic() - started, 2),
        }
        self.record.history.append(row)
        display.end_epoch(row, self.plan.epochs)
        with together(self.fabric):
            self._save()
        self._look_for_collapse(display)

    def _n_steps(self) -> int:
        return count_batches(len(self.train), self.options.batch_size, self.fabric.world_size)

    def _train_epoch(self, epoch: int, display: TrainDisplay) -> dict[str, float]:
        """One pass over the training images; the mean loss and the means of its unweighted terms."""
        steps = self._n_steps()
        display.begin_epoch(epoch, self.plan.epochs, steps)
        self._seed(epoch, self.fabric.global_rank)
        self.step.module.train()
        self.recipe.begin_epoch(self.step.network, epoch, self.plan.epochs)
        sums: dict[str, float] = {}
        looks = self.clock.looks(steps)
        for step, (x, targets) in enumerate(self._batches(epoch)):
            for name, value in self.step(x, targets, epoch, step / steps).items():
                sums[name] = sums.get(name, 0.0) + value
            display.step({name: value / (step + 1) for name, value in sums.items()})
            if step + 1 in looks:
                self._plan_epochs(epoch, (step + 1) / steps)
        return mean_over_ranks(self.fabric, {name: value / steps for name, value in sums.items()})

    def _plan_epochs(self, epoch: int, share: float) -> None:
        """Fit the epochs into the time limit, in all processes alike."""
        plan = self.clock.plan(self.plan, [row["seconds"] for row in self.record.history], epoch, share)
        self.plan = self.step.options = self.fabric.broadcast(plan) if self.fabric.world_size > 1 else plan

    def say_how_it_ended(self, display: TrainDisplay) -> None:
        """Say if a time limit ended the training, and if more epochs may help."""
        rise = describe_rise(self.record.history, len(self.validation), self.options)
        for message in (self.clock.describe(self.epoch), rise):
            if message is not None:
                display.say(message)

    def _batches(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of images and targets of this rank; one that cannot be read raises the error in all ranks."""
        options = self.options
        order = Epoch(
            batch_size=options.batch_size,
            sampler="shuffle" if options.sampler == "auto" and not self.recipe.compares_images else options.sampler,
            seed=options.seed,
            number=epoch,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
        )
        targets = self.clusters.current.cluster_ids
        batches = training_batches(self.train, targets, order, augment=options.augment, workers=options.workers)
        while True:
            with together(self.fabric):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch[:2]

    def _seed(self, epoch: int, rank: int) -> None:
        """Seed torch's generator, which dropout and fresh heads use."""
        torch.manual_seed(((self.options.seed * 1_000_003 + epoch) * 1_009 + rank) % 2**63)

    # Between epochs

    def _embed_validation(self) -> Outputs:
        """Outputs of all validation images in every process."""
        agree_on_buffers(self.fabric, self.backbone)
        found = self._embed(self.validation)
        assert found.logits is not None
        return replace(found, cluster_to_class=self.clusters.current.cluster_to_class)

    def _embed_training_rows(self, rows: np.ndarray) -> np.ndarray:
        return self._embed(self.train, rows, logits=False).embeddings

    def _embed(self, images: ImageSet, rows: np.ndarray | None = None, logits: bool = True) -> Outputs:
        return embed_shared(
            self.fabric,
            self.backbone,
            images,
            rows,
            workers=self.options.workers,
            logits=logits,
            finite=False,  # a training that has diverged has its own error: see TrainingStep.check_finite
        )

    def _measure(self, validation: Outputs, probabilities: np.ndarray) -> dict[str, float]:
        labels = self.validation.labels
        return {
            "validation_accuracy": float((probabilities.argmax(1) == labels).mean()),
            "validation_loss": float(-np.log(probabilities[np.arange(len(labels)), labels] + 1e-12).mean()),
            "spread": float(relative_spread(torch.from_numpy(validation.embeddings))),
        }

    def _look_for_collapse(self, display: TrainDisplay) -> None:
        """Warn of collapsed embeddings or stop, after the first epoch in which they have collapsed."""
        found = None if self.warned else self.recipe.find_collapse(self.record.history, self.plan.epochs)
        if found is None:
            return
        if self.options.on_collapse == "stop":
            raise TrainError(f"{found}; to continue nevertheless, add --resume --on-collapse warn")
        self.warned = True
        display.warn(found)

    def _take_snapshots(self, epoch: int, validation: Outputs) -> None:
        """Keep embeddings from before the first split (without one, from the middle) and from the last epoch."""
        unsplit = self.clusters.current.n_clusters == len(self.train.class_names)
        before = "before" not in self.record.snapshots or (unsplit and epoch <= self.plan.epochs / 2)
        for name, due in (("before", before), ("after", epoch == self.plan.epochs)):
            if due:
                self.record.snapshots[name] = validation.embeddings[snapshot_rows(len(validation))]
                self.record.snapshot_epochs[name] = epoch

    def _relabel(self, epoch: int, validation: Outputs, probabilities: np.ndarray) -> Row:
        """Let the recipe split hard classes, except after the last epoch; returns the columns of the history."""
        if epoch == self.plan.epochs:
            return {"relabelled": ""}
        rows = SharedRows(self._embed_training_rows, partial(share_work, self.fabric))
        after = self.clusters.propose(epoch, probabilities, self.validation.labels, rows)
        if self.fabric.world_size > 1:
            after = self.fabric.broadcast(after)
            self._seed(epoch, 0)  # for a fresh head, the same in all processes
        if after is None:
            return {"relabelled": ""}
        adopted = self.clusters.adopt(after, self.backbone, self.state, validation, probabilities)
        self.state = adopted.state
        self._make_step(self.state)
        return {
            "relabelled": ";".join(self.train.class_names[c] for c in adopted.classes),
            "relabel_shift": adopted.shift,
        }

    # Checkpoints

    def _save(self) -> None:
        """Write history and checkpoint if they are due, in the first process only."""
        last = self.epoch == self.plan.epochs
        due = self.epoch % self.options.checkpoint_every == 0 or last
        if self.folder is None or not self.fabric.is_global_zero or not due:
            return
        write_atomic(self.folder / RunFile.HISTORY, history_csv(self.record.history))
        Checkpoint(
            **vars(self.record),
            relabelling=self.clusters.current,
            weights=self.backbone.state_dict(),
            optimizer=self.state,
            options=self._fixed_options(),
            data=data_digest(self.train),
        ).save(self.folder / RunFile.CHECKPOINT)

    def _fixed_options(self) -> dict[str, Any]:
        """Options that a resumed run must share with the run it continues."""
        return {**as_dict(self.options), **self.recipe.options()}

    def restore(self) -> None:
        """Continue from the checkpoint in the run folder; without one, from the start."""
        if self.folder is None or not self.fabric.broadcast((self.folder / RunFile.CHECKPOINT).exists()):
            return
        with together(self.fabric):
            found = Checkpoint.load(self.folder / RunFile.CHECKPOINT)
            found.check(self._fixed_options(), data_digest(self.train), self.folder)
            self.record = Record(found.history, found.snapshots, found.snapshot_epochs)
            self.clock = Clock(self.options, before=sum(float(row["seconds"]) for row in found.history))
            self.clusters.current = found.relabelling
            self._load_weights(found.weights, self.folder)
        self.state = {name: self.fabric.to_device(values) for name, values in found.optimizer.items()}
        self._make_step(self.state)
        if self.options.time_limit is not None and not self.is_done:
            self._plan_epochs(self.epoch + 1, 0.0)

    def _load_weights(self, weights: dict[str, torch.Tensor], folder: Path) -> None:
        backbone = self.backbone
        assert backbone.head is not None
        n_outputs = self.clusters.current.n_clusters
        backbone.head = head_for(backbone.head, self.recipe, backbone.head_size, weights, n_outputs)
        try:
            backbone.load_state_dict(weights)
        except RuntimeError:
            raise RunError(
                f"'{folder}' is not of '{backbone.name}': give its --backbone and --embedding-size"
            ) from None
        backbone.to(self.fabric.device)

    def result(self) -> Run:
        agree_on_buffers(self.fabric, self.backbone)
        unchanged = type(self.recipe).finish is Recipe.finish or self.recipe.finish_keeps_outputs
        return Run(
            **vars(self.record),
            backbone=self.recipe.finish(self.backbone.eval()),
            relabelling=self.clusters.current,
            class_names=self.train.class_names,
            validation=self.outputs if unchanged else None,
            fabric=self.fabric,
        )
