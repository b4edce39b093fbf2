"""Train and evaluate the networks of suites, each once.

An interrupted training is resumed and a finished one is not repeated. Several processes may share a folder of networks:
each holds a lock on the network it works on, which the operating system releases however the process ends.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from maple.errors import RunError
from maple.evaluation.paper.columns import Images
from maple.evaluation.paper.rows import STANDARD_DETECTORS
from maple.evaluation.results import Results
from maple.files import RunFile, load_record, save_json, take_lock, write_atomic
from maple.prediction.store import load_backbone
from maple.progress import is_first_process, say
from maple.runs.benchmark.jobs import Job, digest, digest_source
from maple.runs.evaluate import evaluate_run
from maple.runs.folder import RunFolder
from maple.runs.requests import EvaluateRequest, TrainRequest
from maple.runs.setup.request import LEFT_OUT
from maple.runs.train import train_run

FACTS = ("minutes", "parameters")  # columns read from the training, not from the results
EVALUATIONS = "evaluations"


@contextmanager
def locked(job: Job, wait: bool = True) -> Iterator[bool]:
    """Keep other processes from a training; yields whether the lock is held, always so with ``wait``."""
    if not is_first_process():  # the others of one training work under the lock of their first
        yield True
        return
    lock = take_lock(job.lock)
    if lock is None and wait:
        say(f"waiting for another process: {job.title}")
        lock = take_lock(job.lock, wait=True)
    try:
        yield lock is not None
    finally:
        if lock is not None:
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
    """Skip networks that another benchmark is training, as long as there is other work."""
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
        if RunFolder(folder).has_checkpoint():  # the training that finished it could not remove it
            RunFolder(folder).remove_training_state()
        return folder
    started, protocol = job.is_started, job.protocol
    say(f"{'continuing' if started else 'training'}: {job.title}")
    request = TrainRequest(
        source=protocol.source,
        test=protocol.test,
        out=folder,
        data_root=job.data_root,
        flags=job.flags,
        preset=job.preset,
        resume=started,
        overwrite=folder.exists() and not started,
        report=False,
        command=f"maple benchmark ({job.title})",
    )
    train_run(request)
    return folder


def ensure_evaluated(job: Job, detectors: Sequence[str] = (), images: Images = "test") -> Results:
    """The results of a finished training with the standard detectors and these; evaluated now, or found."""
    with locked(job):
        return _evaluate(job, _train(job), detectors, images)


def _evaluate(job: Job, folder: Path, detectors: Sequence[str], images: Images) -> Results:
    asked = [*STANDARD_DETECTORS, *(name for name in detectors if name not in STANDARD_DETECTORS)]
    protocol = job.protocol
    ind = protocol.corrupted if images == "corrupted" else None
    ood = protocol.ood if images == "test" else {}
    files = {source: digest_source(source, job.data_root) for source in ood.values() if source != LEFT_OUT}
    near, far = (protocol.near, protocol.far) if images == "test" else ((), ())
    decides: list[Any] = [ind, ood, sorted(asked), files] + (["training"] if images == "training" else [])
    decides += [[near, far]] if near or far else []
    key = digest(json.dumps(decides, sort_keys=True).encode())
    path = folder / EVALUATIONS / f"{key}.json"
    if path.exists():
        try:
            return Results.load(path)
        except RunError:
            path.unlink()  # of another format: once more
    if not RunFolder(folder).is_finished():  # only its figures were kept, and other ones are asked for
        (folder / RunFile.RESULTS).unlink()
        folder = _train(job)
    say(f"evaluating: {job.title}{'' if images == 'test' else f', {images} images'}")
    request = EvaluateRequest(
        run=folder,
        ind=ind,
        ood=ood,
        near=near,
        far=far,
        detectors=asked,
        workers=job.config.train.workers,
        data_root=job.data_root,
        on_training=images == "training",
        keep=images == "test",
        report=False,
        command="maple benchmark",
    )
    results = evaluate_run(request)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, results.to_json())
    return results


def training_facts(job: Job) -> dict[str, float]:
    """Figures of a training: its minutes, and the parameters of the network; kept beside the evaluations."""
    path = job.folder / EVALUATIONS / "facts.json"
    if path.exists():
        return load_record(path, lambda facts: {name: float(facts[name]) for name in FACTS})
    with (job.folder / RunFile.HISTORY).open(encoding="utf-8", newline="") as lines:
        seconds = sum(float(row["seconds"]) for row in csv.DictReader(lines))
    backbone = load_backbone(job.folder / RunFile.WEIGHTS)
    facts = {"minutes": seconds / 60, "parameters": float(sum(p.numel() for p in backbone.parameters()))}
    path.parent.mkdir(exist_ok=True)
    save_json(path, facts)
    return facts
