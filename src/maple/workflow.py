"""The commands as functions: from a request to a finished run folder, predictions or results."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from maple.backbone import create_backbone, embed
from maple.batches import to_input
from maple.benchmark import Results, evaluate, measure_latency
from maple.checkpoint import FORMAT_VERSION, check_format, save_json, write_atomic
from maple.config import RunConfig, as_dict, read_toml, resolve_config, to_toml
from maple.data import list_data_sets, open_images
from maple.detector import MapleDetector
from maple.errors import RunError, UsageError
from maple.gallery import remove_examples, write_gallery
from maple.images import ImageSet
from maple.predictor import Predictor, channel_statistics, fit_predictor, load_predictor
from maple.progress import console, track, warn
from maple.recipe import RECIPES, create_recipe
from maple.report import write_report
from maple.splits import Splits, load_splits
from maple.train import Run, make_fabric, snapshot_rows, train_backbone
from maple.types import PREDICTION_COLUMNS, Outputs, Skipped

CONFIG = "config.toml"
GALLERY = "gallery"
RUN_FILES = (
    CONFIG,
    "history.csv",
    "weights.safetensors",
    "resume.safetensors",
    "detector.safetensors",
    "classes.json",
    "results.json",
    "report.html",
)
GALLERY_SAMPLE = 200  # training images per cluster among which exemplars are sought
PREDICT_CHUNK = 4096
PREDICTION_SUFFIXES = (".csv", ".jsonl", ".ndjson")
DEMO_SOURCE = "simulated-diatoms?n=6000&size=32"
DEMO_EPOCHS = 12
DEMO_OOD = {"near": "simulated-diatoms/near?n=1000&size=32", "far": "simulated-diatoms/far?n=1000&size=32"}


@dataclass(frozen=True)
class TrainRequest:
    """What ``maple train`` was asked to do."""

    source: str
    out: Path
    data_root: Path | None = None
    validation: str | None = None
    calibration: str | None = None
    test: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    file: dict[str, Any] = field(default_factory=dict)
    preset: str | None = None
    resume: bool = False
    overwrite: bool = False
    command: str = "maple train"

    def origin(self) -> dict[str, Any]:
        """Where the images come from: the section [origin] of ``config.toml``."""
        return {
            "format": FORMAT_VERSION,
            "source": self.source,
            "data_root": str(self.data_root) if self.data_root else None,
            "validation": self.validation,
            "calibration": self.calibration,
            "test": self.test,
            "preset": self.preset,
            "command": self.command,
        }


# --- train ----------------------------------------------------------------------------------------------------------


def train_run(request: TrainRequest) -> Results | None:
    """Train, fit, calibrate, test and report; the results, or ``None`` in all processes but the first."""
    if _is_first_process():
        _check_folder(request)
    config = _resolve(request)
    recipe = create_recipe(config.model.recipe, **_recipe_options(config))
    fabric = make_fabric(config.train)
    splits = load_splits(
        request.source,
        config.data,
        data_root=request.data_root,
        test=request.test,
        validation=request.validation,
        calibration=request.calibration,
    )
    torch.manual_seed(config.train.seed)
    mean, std = channel_statistics(splits.train)
    backbone = create_backbone(
        config.model.backbone,
        len(splits.class_names),
        embedding_size=config.model.embedding_size,
        mean=mean,
        std=std,
    )
    if fabric.is_global_zero:
        _write_config(request, config)
        _announce(splits, config)
    run = train_backbone(
        backbone,
        recipe,
        splits.train,
        splits.validation,
        folder=request.out,
        resume=request.resume,
        options=config.train,
        fabric=fabric,
    )
    predictor = fit_predictor(
        run.backbone,
        splits.train,
        splits.validation,
        splits.calibration,
        relabelling=run.relabelling,
        detector=MapleDetector(**as_dict(config.detector)),
        fit=config.data.fit,
        fabric=fabric,
        workers=config.train.workers,
    )
    if not fabric.is_global_zero:
        return None
    return _finish_run(request, config, run, splits, predictor)


def _finish_run(request: TrainRequest, config: RunConfig, run: Run, splits: Splits, predictor: Predictor) -> Results:
    """Save, test, draw."""
    folder = request.out
    predictor.save(folder)
    save_json(folder / "classes.json", _classes(run, splits))
    _write_training_gallery(folder, run, splits, predictor)
    results = _evaluate(folder, predictor, splits.test, {}, _provenance(config, request.command), config.train.seed)
    (folder / "resume.safetensors").unlink(missing_ok=True)
    return results


def _resolve(request: TrainRequest) -> RunConfig:
    """The configuration of the request; when resuming, the one the run was started with."""
    if request.resume and (request.out / CONFIG).exists():
        _, sections = read_run_config(request.out)
        return resolve_config(request.flags, sections)
    return resolve_config(request.flags, request.file, request.preset)


def _recipe_options(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in as_dict(config.recipe).items() if key not in RECIPES["maple"]}


def _is_first_process() -> bool:
    """Before the processes know of each other: those that Fabric, torchrun or SLURM started carry their rank."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _check_folder(request: TrainRequest) -> None:
    folder = request.out
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"'{folder}' is a file: choose a folder for --out")
    finished, started = (folder / "detector.safetensors").exists(), (folder / CONFIG).exists()
    if request.resume and finished and not (folder / "resume.safetensors").exists():
        raise UsageError(f"'{folder}' is a finished run: there is nothing to resume; choose another --out")
    if started and not request.resume and not request.overwrite:
        raise UsageError(f"'{folder}' already holds a run: add --resume to continue it, --overwrite to replace it")
    if request.overwrite and started:
        for name in RUN_FILES:
            (folder / name).unlink(missing_ok=True)
        remove_examples(folder / GALLERY)


def _write_config(request: TrainRequest, config: RunConfig) -> None:
    if request.resume and (request.out / CONFIG).exists():
        return
    write_atomic(request.out / CONFIG, to_toml({"origin": request.origin(), **config.sections()}))


def read_run_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections of a run's ``config.toml``: where its images come from, and its options."""
    if not (folder / CONFIG).is_file():
        raise RunError(f"'{folder}' is not a run folder: it has no {CONFIG}")
    sections = read_toml(folder / CONFIG)
    origin = sections.pop("origin", {})
    check_format(origin, folder / CONFIG)
    return origin, sections


def _announce(splits: Splits, config: RunConfig) -> None:
    sizes = {name: len(getattr(splits, name)) for name in ("train", "validation", "calibration", "test")}
    console.print(
        f"{splits.train.name}: {len(splits.class_names)} classes, {splits.train.size} x {splits.train.size} pixels, "
        + ", ".join(f"{n} {name}" for name, n in sizes.items()),
        highlight=False,
        markup=False,
    )
    skipped = splits.skipped
    if skipped:
        warn(
            f"{len(skipped)} images could not be used, first '{skipped[0].file}' ({skipped[0].reason}); "
            "all are listed in classes.json of the run"
        )
    if splits.left_out:
        warn(f"{len(splits.left_out)} classes with fewer than {config.data.min_images} images are left out")


def _classes(run: Run, splits: Splits) -> dict[str, Any]:
    sizes = np.bincount(run.relabelling.cluster_ids, minlength=run.relabelling.n_clusters)
    return {
        "classes": list(run.class_names),
        "cluster_to_class": run.relabelling.cluster_to_class,
        "cluster_sizes": sizes,
        "skipped": [[item.file, item.reason] for item in splits.skipped],
        "left_out": list(splits.left_out),
    }


def _write_training_gallery(folder: Path, run: Run, splits: Splits, predictor: Predictor) -> None:
    """Exemplars of each cluster and the latent space before and after: what the report draws of the training."""
    rows = sample_rows(run.relabelling.cluster_ids, GALLERY_SAMPLE)
    outputs = embed(
        run.backbone,
        splits.train,
        indices=rows,
        cluster_ids=run.relabelling.cluster_ids,
        cluster_to_class=run.cluster_to_class,
    )
    distances = predictor.detector.squared_distances(outputs)
    assert outputs.cluster_ids is not None
    labels = splits.validation.labels[snapshot_rows(len(splits.validation))]
    write_gallery(
        folder / GALLERY,
        train=(splits.train.subset(rows), outputs),
        squared_distance=distances[np.arange(len(rows)), outputs.cluster_ids],
        cluster_sizes=np.bincount(run.relabelling.cluster_ids, minlength=run.relabelling.n_clusters),
        snapshots={name: Outputs(embeddings, labels=labels) for name, embeddings in run.snapshots.items()},
        class_names=run.class_names,
    )


def sample_rows(cluster_ids: np.ndarray, per_cluster: int) -> np.ndarray:
    """At most ``per_cluster`` rows of each cluster, evenly spread, in order.

    >>> sample_rows(np.array([0, 0, 0, 1]), 2)
    array([0, 1, 3])
    """
    order = np.argsort(cluster_ids, kind="stable")
    starts = np.flatnonzero(np.diff(cluster_ids[order], prepend=-1))
    parts = np.split(order, starts[1:])
    return np.sort(np.concatenate([part[:: -(-len(part) // per_cluster)] for part in parts]))


# --- evaluate --------------------------------------------------------------------------------------------------------


def evaluate_run(
    folder: Path,
    ind: str | None = None,
    ood: dict[str, str] | None = None,
    false_alarm: float | None = None,
    data_root: Path | None = None,
    command: str = "maple evaluate",
) -> Results:
    """Evaluate a run on its own test split, or on ``ind``, against named sources of unknown images."""
    origin, sections = read_run_config(folder)
    config = resolve_config(file=sections)
    predictor = load_predictor(folder)
    if false_alarm is not None:
        predictor.false_alarm = false_alarm
    root = data_root or (Path(origin["data_root"]) if origin.get("data_root") else None)
    test = _test_images(predictor, origin, config, ind, root)
    unknown = {name: _open_like(predictor, source, root) for name, source in (ood or {}).items()}
    return _evaluate(folder, predictor, test, unknown, _provenance(config, command), config.train.seed)


def _test_images(
    predictor: Predictor, origin: dict[str, Any], config: RunConfig, ind: str | None, data_root: Path | None
) -> ImageSet:
    if ind is not None:
        return _open_like(predictor, ind, data_root, labelled=True).with_class_names(predictor.class_names)
    options = dataclasses.replace(config.data, size=predictor.size)
    splits = load_splits(
        origin["source"],
        options,
        data_root=data_root,
        test=origin.get("test"),
        validation=origin.get("validation"),
        calibration=origin.get("calibration"),
    )
    return splits.test


def _open_like(predictor: Predictor, source: Any, data_root: Path | None, labelled: bool = False) -> ImageSet:
    """Images as the predictor wants them."""
    return open_images(source, size=predictor.size, fit=predictor.fit, data_root=data_root, labelled=labelled)


def _evaluate(
    folder: Path,
    predictor: Predictor,
    test: ImageSet,
    unknown: dict[str, ImageSet],
    provenance: dict[str, Any],
    seed: int,
) -> Results:
    """Run the network over all sets once, then write results, gallery and report."""
    sets = {"test": test, **{f"ood/{name}": images for name, images in unknown.items()}}
    outputs = {
        name: embed(predictor.backbone, images, cluster_to_class=predictor.cluster_to_class)
        for name, images in track(sets.items(), "evaluating", total=len(sets))
    }
    ood = {name: outputs[f"ood/{name}"] for name in unknown}
    latency = measure_latency(predictor, to_input(torch.from_numpy(test.read(0)[None])), repeats=20)
    results = evaluate(predictor, outputs["test"], ood, latency_ms=latency.median_ms, seed=seed, provenance=provenance)
    write_atomic(folder / "results.json", results.to_json())
    write_gallery(
        folder / GALLERY,
        test=(test, predictor.predict_outputs(outputs["test"])),
        ood={name: (unknown[name], predictor.predict_outputs(part)) for name, part in ood.items()},
    )
    console.print(f"report: {write_report(folder)}", highlight=False, markup=False, soft_wrap=True)
    return results


def _provenance(config: RunConfig, command: str) -> dict[str, Any]:
    return {
        "command": command,
        "config": config.sections(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
    }


# --- predict ---------------------------------------------------------------------------------------------------------


def predict_images(
    folder: Path,
    sources: list[str],
    out: str,
    false_alarm: float | None = None,
    all_probabilities: bool = False,
    batch_size: int = 256,
    data_root: Path | None = None,
) -> int:
    """Write one row per image to ``out``; the number of rows. Files that are not images are listed beside it."""
    predictor = load_predictor(folder)
    if false_alarm is not None:
        predictor.false_alarm = false_alarm
    images = _open_like(predictor, sources if len(sources) > 1 else sources[0], data_root)
    columns = [*PREDICTION_COLUMNS, *(f"p_{name}" for name in predictor.class_names if all_probabilities)]
    with _open_output(out) as file:
        write_row = _row_writer(file, columns, as_lines=out.endswith((".jsonl", ".ndjson")))
        chunks = range(0, len(images), PREDICT_CHUNK)
        for start in track(chunks, "predicting", total=len(chunks)):
            rows = np.arange(start, min(start + PREDICT_CHUNK, len(images)))
            outputs = embed(
                predictor.backbone,
                images,
                indices=rows,
                batch_size=batch_size,
                cluster_to_class=predictor.cluster_to_class,
            )
            prediction = predictor.predict_outputs(outputs)
            for row in prediction.rows([images.files[i] for i in rows], all_probabilities):
                write_row(row)
    _report_skipped(images.skipped, out)
    return len(images)


@contextmanager
def _open_output(out: str) -> Iterator[TextIO]:
    """Standard output, or a file that appears under its name only when it is complete."""
    if out == "-":
        yield sys.stdout
        return
    path = Path(out)
    if path.suffix not in PREDICTION_SUFFIXES:
        raise UsageError(f"--out '{out}': end the name in {' or '.join(PREDICTION_SUFFIXES)}, or use - to print")
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8", newline="") as file:
            yield file
        partial.replace(path)
    except OSError as error:
        raise RunError(
            f"cannot write '{path}': {error.strerror or error}; free some space or choose another --out"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def _row_writer(file: TextIO, columns: list[str], as_lines: bool) -> Callable[[dict[str, Any]], object]:
    if as_lines:
        return lambda row: file.write(json.dumps(_without_nan(row), ensure_ascii=False) + "\n")
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    return writer.writerow


def _without_nan(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value != value else value for key, value in row.items()}


def _report_skipped(skipped: tuple[Skipped, ...], out: str) -> None:
    if not skipped:
        return
    where = ""
    if out != "-":
        path = Path(out).with_suffix(".skipped.csv")
        lines = [["file", "reason"], *([item.file, item.reason] for item in skipped)]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        write_atomic(path, text.getvalue())
        where = f"; all are listed in '{path}'"
    warn(f"{len(skipped)} files could not be used, first '{skipped[0].file}' ({skipped[0].reason}){where}")


# --- demo and data ---------------------------------------------------------------------------------------------------


def run_demo(out: Path, seed: int = 0) -> Results:
    """The whole method on simulated diatoms, with unknown taxa that resemble the known ones and with debris."""
    train_run(
        TrainRequest(
            source=DEMO_SOURCE,
            out=out,
            flags={"epochs": DEMO_EPOCHS, "batch_size": 128, "relabel_every": 3, "hard_class_error": 0.1, "seed": seed},
            overwrite=True,
            command="maple demo",
        )
    )
    return evaluate_run(out, ood=DEMO_OOD, command="maple demo")


def list_sources(data_root: Path | None = None) -> list[dict[str, Any]]:
    """The built-in data sets and those under the data root."""
    return [{"source": name} for name in list_data_sets(data_root)]


def describe_source(source: str, data_root: Path | None = None) -> dict[str, Any]:
    """What is in a source."""
    images = open_images(source, data_root=data_root)
    counts = np.bincount(images.labels[images.labels >= 0], minlength=len(images.class_names))
    return {
        "source": images.name,
        "images": len(images),
        "classes": len(images.class_names),
        "per class": f"{counts.min()} to {counts.max()}" if len(counts) else "",
        "size": images.size,
        "skipped": len(images.skipped),
    }
