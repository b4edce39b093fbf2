"""The plan of a benchmark: state, number of images and estimated time of each training."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from maple.data.catalogue.table import CATALOGUE, is_built_in
from maple.data.shares import fold_shares
from maple.data.sources.names import find_source, split_files
from maple.errors import UsageError
from maple.networks import fit_whitening
from maple.runs.benchmark.jobs import Job
from maple.runs.setup.config import RunConfig
from maple.runs.train import new_network
from maple.text import plural
from maple.training.head import prepare_backbone
from maple.training.processes import make_fabric
from maple.training.step import TrainingStep

_BATCHES = (4, 4, 64)  # timed: to warm up, for large networks, and for those that are fast enough
_IMAGES = 1000
_SECONDS = 0.5  # a step that takes longer is not repeated with more images
_SIZE = 64  # pixels at most; the time of larger images is in proportion to their area
_DEFAULT_SIZE = 32  # pixels, where the source decides


@dataclass(frozen=True)
class Plan:
    """A training over all its seeds: what it learns from and how long that takes."""

    training: str
    network: str
    epochs: int
    images: int | None  # to learn from; None if not known
    seeds: int
    hours: float | None  # estimate for the seeds that are not finished, as if from the start; None if not known
    state: str  # finished, so many finished, started, new, or what is missing


def plan_jobs(jobs: Sequence[Job]) -> Iterator[Plan]:
    """State, images and estimated time of each training; a few steps of each kind of network are timed for that."""
    per_image: dict[Any, float] = {}
    for training in dict.fromkeys(job.training for job in jobs):
        seeds = [job for job in jobs if job.training == training]
        config, n_images = seeds[0].config, count_images(seeds[0])
        kind = (config.model.recipe, config.model.backbone, config.data.size)
        state, n_finished = _state(seeds)
        hours: float | None = 0.0
        if n_finished < len(seeds):
            if kind not in per_image:
                per_image[kind] = time_step(config)
            members = getattr(config.recipe, "members", 1)
            steps = config.train.epochs * members * (len(seeds) - n_finished)
            hours = None if n_images is None else round(per_image[kind] * n_images * steps / 3600, 2)
        yield Plan(seeds[0].name, config.model.backbone, config.train.epochs, n_images, len(seeds), hours, state)


def describe_plan(jobs: Sequence[Job]) -> str:
    """Number of trainings, and the hours that those to be done take; a few steps of each kind of network are timed."""
    done = sum(job.is_finished for job in jobs)
    said = f"{plural(len(jobs), 'training')}, {done} of them finished"
    if done == len(jobs) or any(job.config.train.devices * job.config.train.nodes > 1 for job in jobs):
        return said  # nothing to do, or processes that timing would start
    hours = sum(plan.hours or 0 for plan in plan_jobs(jobs))
    planned = f"about {hours:.1f} hours" if hours >= 0.1 else "less than 0.1 hours"
    return f"{said}; the others take {planned} of training on this machine"


def _state(seeds: Sequence[Job]) -> tuple[str, int]:
    """The state as text, and the number of seeds that are finished."""
    first = seeds[0]
    if "train" not in _count_splits(first.protocol.source, first.data_root):
        return f"no {first.protocol.source.partition('/')[0]}/train", 0
    n_finished = sum(job.is_finished for job in seeds)
    if n_finished == len(seeds):
        return "finished", n_finished
    if n_finished:
        return f"{n_finished} of {len(seeds)} finished", n_finished
    return ("started" if any(job.is_started for job in seeds) else "new"), 0


def count_images(job: Job) -> int | None:
    """Images to learn from: those of the source, less the shares of other splits; none is opened."""
    source, sizes = job.protocol.source, _count_splits(job.protocol.source, job.data_root)
    name = source.partition("/")[0]
    if "train" not in sizes and name in CATALOGUE:
        sizes = {split.name: split.images for split in CATALOGUE[name].splits}
    given = {*sizes, "test"} if job.protocol.test else {*sizes}
    held = [role for role in ("validation", "calibration", "test") if role in given]
    return round(sizes["train"] * fold_shares(job.config.data.splits, held)[0]) if "train" in sizes else None


def _count_splits(source: str, data_root: Path | None) -> dict[str, int]:
    """Images in each split of a source that is here; empty for one that is not."""
    if is_built_in(source):
        asked = re.search(r"[?&]n=(\d+)", source)
        return {"train": int(asked[1]) if asked else 0}
    try:
        path = find_source(source, data_root)
    except UsageError:
        return {}
    files = {"train": path} if path.is_file() else split_files(path)
    return {role: pq.read_metadata(file).num_rows for role, file in files.items() if file.suffix == ".parquet"}


def time_step(config: RunConfig) -> float:
    """Seconds per image of a training step, measured on random images."""
    fabric, recipe = make_fabric(config.train), config.recipe
    asked = config.data.size if isinstance(config.data.size, int) else _DEFAULT_SIZE
    size = min(asked, _SIZE)
    backbone = new_network(config.model, 10, seed=0)
    fit_whitening(backbone, torch.rand(_IMAGES, 3, size, size))
    prepare_backbone(backbone, recipe, 10, fabric)
    rows = torch.randn(_IMAGES, backbone.embedding_size).numpy()  # in place of embeddings of the training images
    recipe.start(backbone, lambda chosen: rows[chosen], np.arange(_IMAGES) % 10, 0)
    step = TrainingStep(fabric, recipe, backbone, config.train)
    recipe.begin_epoch(backbone, 1, config.train.epochs)
    seconds = math.inf
    for n in _BATCHES:
        images, labels = torch.rand(n, 3, size, size), torch.arange(n) % 10
        started = time.perf_counter()
        step(images, labels, epoch=1, share=0.5)
        took = time.perf_counter() - started
        seconds = min(seconds, took / n)
        if took > _SECONDS:
            break
    return seconds * (asked / size) ** 2
