"""The networks that suites ask for: trained once, whoever asks, and evaluated once.

A training is known by its *key*, a digest of everything that decides what is learned: options, seed, sources and the
bytes of their files. Suites that ask for the same network get the same folder; a training that was interrupted goes on,
one that is finished is not repeated, and other data or options make another folder. Several processes may share a
folder of networks: a lock, which the system releases however a process ends, says who is at work on which.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from maple.data.catalogue import CATALOGUE
from maple.data.shares import fold_shares
from maple.data.sources import clean_source, find_source, is_built_in, split_files
from maple.errors import RunError, UsageError
from maple.evaluation.paper.suites import STANDARD_DETECTORS, Profile, Protocol, Suite, Training
from maple.evaluation.results import Results
from maple.files import FORMAT_VERSION, RunFile, take_lock, write_atomic
from maple.prediction.predictor import load_backbone
from maple.progress import is_first_process, say
from maple.runs.config import RunConfig, drop_unused, resolve_config
from maple.runs.evaluate import EvaluateRequest, evaluate_run
from maple.runs.request import LEFT_OUT
from maple.runs.train import TrainRequest, new_network, train_run
from maple.training.distributed import make_fabric
from maple.training.prepare import prepare_backbone
from maple.training.resume import FREE_OPTIONS
from maple.training.step import TrainingStep

TRAININGS = "trainings"
EVALUATIONS = "evaluations"
FACTS = ("minutes", "parameters")  # columns that the training tells, not the results
FINISHED = RunFile.RESULTS  # the last file of a training that matters
TIMED_BATCHES = (4, 4, 64)  # to warm up, for large networks, and for those that are fast enough
TIMED_IMAGES = 1000
TIMED_SECONDS = 0.5  # a step that takes longer is not tried with more images
TIMED_SIZE = 64  # pixels at most; the time of larger images is in proportion to their area
DEFAULT_SIZE = 32  # pixels, where a source decides
_SHORT = {  # how titles say a flag, in the paper's letters where it has some
    "backbone": "{}",
    "cluster_method": "{}",
    "cluster_space": "{}",
    "hard_class_error": "t={:g}",
    "max_clusters": "K<={}",
    "members": "{} members",
    "metric_loss": "{}",
    "relabel_every": "p={}",
}


@dataclass(frozen=True, eq=False)
class Job:
    """One network of one seed, and where it is kept."""

    training: Training
    profile: Profile
    seed: int
    root: Path
    data_root: Path | None = None
    changes: dict[str, Any] = field(default_factory=dict)  # flags of the command line, which go before all others

    @property
    def protocol(self) -> Protocol:
        return self.profile.protocols[self.training.protocol]

    @property
    def preset(self) -> str | None:
        return self.protocol.preset if self.profile.as_paper else None

    @property
    def flags(self) -> dict[str, Any]:
        """The flags of ``maple train``."""
        asked = {**self.profile.flags, **self.protocol.flags, **dict(self.training.flags), **self.changes}
        return drop_unused(asked, asked.get("recipe", "maple")) | {"seed": self.seed}

    @cached_property
    def config(self) -> RunConfig:
        return resolve_config(self.flags, preset=self.preset)

    @cached_property
    def key(self) -> str:
        """The digest of everything that decides what is learned."""
        sections = self.config.sections()
        sections["train"] = {k: v for k, v in sections["train"].items() if k not in FREE_OPTIONS}
        decides = {
            "format": FORMAT_VERSION,
            "options": sections,
            "source": [self.protocol.source, self.protocol.test],
            "files": [digest_source(source, self.data_root) for source in self._sources],
        }
        return _digest(json.dumps(decides, sort_keys=True, default=str).encode())

    @property
    def _sources(self) -> list[str]:
        return [source for source in (self.protocol.source, self.protocol.test) if source is not None]

    @property
    def folder(self) -> Path:
        return self.root / TRAININGS / self.key

    @property
    def lock(self) -> Path:
        """Held by the process that is at work on it."""
        return self.root / "locks" / self.key

    @property
    def name(self) -> str:
        """What sets it apart from others of its seed, in few words: ``maple on cifar10, xmeans raw t=0.3 K<=5 p=4``."""
        said = [_SHORT.get(key, f"{key}={{}}").format(value) for key, value in self.training.flags if key != "recipe"]
        return f"{self.config.model.recipe} on {self.training.protocol}{', ' if said else ''}{' '.join(said)}"

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.seed}"

    @property
    def is_finished(self) -> bool:
        return (self.folder / FINISHED).exists()

    @property
    def is_started(self) -> bool:
        return not self.is_finished and any(self.folder.rglob(RunFile.CHECKPOINT))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=10).hexdigest()


def digest_source(source: str, data_root: Path | None = None) -> dict[str, str]:
    """The digest of each file of a source; of image folders that of the names and sizes.

    >>> digest_source("digits")
    {}
    """
    source = clean_source(source)
    if is_built_in(source):
        return {}
    path = find_source(source, data_root)
    files = [path] if path.is_file() else [file for file in split_files(path).values() if file.is_file()]
    if files:
        return {file.name: _digest_file(file, file.stat().st_mtime_ns) for file in files}
    inside = sorted(file for file in path.rglob("*") if file.is_file())
    return {"listing": _digest("\n".join(f"{f.relative_to(path)} {f.stat().st_size}" for f in inside).encode())}


@cache
def _digest_file(path: Path, changed: int) -> str:
    """Of a file as it was when last ``changed``: all networks of a suite ask for the same files."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=10)).hexdigest()


def list_jobs(
    suites: Sequence[Suite],
    profile: Profile,
    seeds: Sequence[int],
    root: Path,
    data_root: Path | None = None,
    changes: dict[str, Any] | None = None,
) -> list[Job]:
    """The networks that suites need, each once, in the order in which they are needed; seed by seed."""
    trainings = dict.fromkeys(training for suite in suites for training in suite.trainings(profile))
    return [Job(training, profile, seed, root, data_root, changes or {}) for seed in seeds for training in trainings]


# --- doing -----------------------------------------------------------------------------------------------------------


@contextmanager
def locked(job: Job, wait: bool = True) -> Iterator[bool]:
    """Keep other processes from a training. Without ``wait``, whether the lock was free, and is held now."""
    if not is_first_process():  # the others of one training work under the lock of their first
        yield True
        return
    lock = take_lock(job.lock)
    if lock is None and not wait:
        yield False
        return
    if lock is None:
        say(f"waiting for another process: {job.title}")
        lock = take_lock(job.lock, wait=True)
    assert lock is not None
    try:
        yield True
    finally:
        lock.release()


def ensure_trained(job: Job) -> Path:
    """The folder of a finished training: trained now, continued, or found."""
    with locked(job):
        return _train(job)


def train_all(jobs: Sequence[Job]) -> None:
    """Train what is not finished, next to other benchmarks that use the same folder."""
    if any(job.config.train.devices * job.config.train.nodes > 1 for job in jobs):
        _train_in_step(jobs)
    else:
        _train_in_turn(jobs)


def _train_in_turn(jobs: Sequence[Job]) -> None:
    """What another benchmark is training is left to it, as long as there is other work."""
    missing = [job for job in jobs if not job.is_finished]
    while missing:
        taken = []
        for job in missing:
            with locked(job, wait=False) as mine:
                if not mine:
                    taken.append(job)
                elif not job.is_finished:
                    say(f"{jobs.index(job) + 1} of {len(jobs)}")
                    _train(job)
        if len(taken) == len(missing):
            with locked(taken[0]):
                pass
        missing = [job for job in taken if not job.is_finished]


def _train_in_step(jobs: Sequence[Job]) -> None:
    """All processes of a training must see the same networks unfinished: no other benchmark may finish one now."""
    by_key = {job.key: job for job in jobs}
    with ExitStack() as held:
        for key in sorted(by_key):  # in one order, so that no two benchmarks wait for each other
            held.enter_context(locked(by_key[key]))
        for job in jobs:
            _train(job)


def _train(job: Job) -> Path:
    folder = job.folder
    if job.is_finished:
        return folder
    started = job.is_started
    say(f"{'continuing' if started else 'training'}: {job.title}")
    train_run(
        TrainRequest(
            source=job.protocol.source,
            test=job.protocol.test,
            out=folder,
            data_root=job.data_root,
            flags=job.flags,
            preset=job.preset,
            resume=started,
            overwrite=folder.exists() and not started,
            report=False,
            command=f"maple benchmark ({job.title})",
        )
    )
    return folder


def ensure_evaluated(job: Job, detectors: Sequence[str] = (), corrupted: bool = False) -> Results:
    """The results of a finished training with the standard detectors and these; evaluated now, or found."""
    with locked(job):
        return _evaluate(job, _train(job), detectors, corrupted)


def _evaluate(job: Job, folder: Path, detectors: Sequence[str], corrupted: bool) -> Results:
    asked = [*STANDARD_DETECTORS, *(name for name in detectors if name not in STANDARD_DETECTORS)]
    protocol = job.protocol
    ind, ood = (protocol.corrupted, {}) if corrupted else (None, protocol.ood)
    files = {source: digest_source(source, job.data_root) for source in ood.values() if source != LEFT_OUT}
    key = _digest(json.dumps([ind, ood, sorted(asked), files], sort_keys=True).encode())
    path = folder / EVALUATIONS / f"{key}.json"
    if path.exists():
        try:
            return Results.from_json(path.read_text(encoding="utf-8"))
        except RunError:
            path.unlink()  # of another format: once more
    say(f"evaluating: {job.title}{', corrupted images' if corrupted else ''}")
    request = EvaluateRequest(
        run=folder, ind=ind, ood=ood, data_root=job.data_root, detectors=asked, report=False, command="maple benchmark"
    )
    results = evaluate_run(request)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, results.to_json())
    return results


def training_facts(job: Job) -> dict[str, float]:
    """What is known of a training: minutes that it took, and parameters of the network."""
    with (job.folder / RunFile.HISTORY).open(encoding="utf-8", newline="") as lines:
        seconds = sum(float(row["seconds"]) for row in csv.DictReader(lines))
    backbone = load_backbone(job.folder / RunFile.WEIGHTS)
    return {"minutes": seconds / 60, "parameters": float(sum(p.numel() for p in backbone.parameters()))}


# --- planning --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a training will take, over all its seeds."""

    jobs: tuple[Job, ...]  # one per seed
    state: str  # finished, so many finished, started, new, or what is missing
    n_images: int | None  # to learn from; None where that is not known
    seconds: float  # estimate for the seeds that are not finished, as if from the start; NaN where that is not known

    def to_dict(self) -> dict[str, Any]:
        hours = None if math.isnan(self.seconds) else round(self.seconds / 3600, 2)
        config = self.jobs[0].config
        return {
            "training": self.jobs[0].name,
            "network": config.model.backbone,
            "epochs": config.train.epochs,
            "images": self.n_images,
            "seeds": len(self.jobs),
            "hours": hours,
            "state": self.state,
        }


def plan_jobs(jobs: Sequence[Job]) -> Iterator[Plan]:
    """State, images and estimated time of each training; a few steps of each kind of network are timed for that."""
    per_image: dict[Any, float] = {}
    for training in dict.fromkeys(job.training for job in jobs):
        seeds = tuple(job for job in jobs if job.training == training)
        config, n_images = seeds[0].config, count_images(seeds[0])
        kind = (config.model.recipe, config.model.backbone, config.data.size)
        state, n_finished = _state(seeds)
        seconds = 0.0
        if n_finished < len(seeds):
            if kind not in per_image:
                per_image[kind] = time_step(config)
            members = getattr(config.recipe, "members", 1)
            each = math.nan if n_images is None else per_image[kind] * n_images * config.train.epochs * members
            seconds = each * (len(seeds) - n_finished)
        yield Plan(seeds, state, n_images, seconds)


def _state(seeds: Sequence[Job]) -> tuple[str, int]:
    """In words, and how many of the seeds are finished."""
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
    source, shares = job.protocol.source, job.config.data.splits
    if is_built_in(source):
        return round(_count_splits(source, None)["train"] * shares[0])
    sizes = _count_splits(source, job.data_root)
    name = source.partition("/")[0]
    if "train" not in sizes:
        known = CATALOGUE[name].splits if name in CATALOGUE else ()
        sizes = {split.name: split.images for split in known}
    held = [
        role
        for role in ("validation", "calibration", "test")
        if role in sizes or (role == "test" and job.protocol.test)
    ]
    return round(sizes["train"] * fold_shares(shares, held)[0]) if "train" in sizes else None


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
    fabric = make_fabric(config.train)
    asked = config.data.size if isinstance(config.data.size, int) else DEFAULT_SIZE
    size = min(asked, TIMED_SIZE)
    recipe = config.recipe
    backbone = new_network(config.model, 10, seed=0)
    prepare_backbone(backbone, recipe, 10, fabric)
    rows = torch.randn(TIMED_IMAGES, backbone.embedding_size).numpy()  # stand for embeddings of the training images
    recipe.start(backbone, lambda chosen: rows[chosen], np.arange(TIMED_IMAGES) % 10, 0)
    step = TrainingStep(fabric, recipe, backbone, config.train)
    recipe.begin_epoch(backbone, 1, config.train.epochs)
    seconds = math.inf
    for n in TIMED_BATCHES:
        images, labels = torch.rand(n, 3, size, size), torch.arange(n) % 10
        started = time.perf_counter()
        step(images, labels, epoch=1, share=0.5)
        took = time.perf_counter() - started
        seconds = min(seconds, took / n)
        if took > TIMED_SECONDS:
            break
    return seconds * (asked / size) ** 2
