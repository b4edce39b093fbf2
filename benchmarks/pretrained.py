"""Use a network pretrained on ImageNet for other images: frozen, and fine-tuned with MAPLE.

    python benchmarks/pretrained.py --shared ../shared --json results/pretrained.json --part posthoc
    python benchmarks/pretrained.py --shared ../shared --json results/pretrained.json --part finetune --size 128
    python benchmarks/pretrained.py --json results/pretrained.json --table     # print the tables of the how-to page
    python benchmarks/pretrained.py --json results/pretrained.json --table --pictures docs/images
    python benchmarks/pretrained.py --shared ../shared --json trial.json --images 200 --size 64 --epochs 1    # a trial

The network is EfficientNet-Lite0 (``efficientnet_lite.py`` beside this file, the extra ``pretrained``). Run the script,
and later commands that open its runs, in the folder that contains ``benchmarks``. ``posthoc`` does the same as
``maple fit --drop-head``, ``finetune`` the same as ``maple train --init --preset finetune``, on

- plankton: the suite ``microorganisms``, 95 taxa known and 26 unknown;
- cifar10: 10,000 of the training images (8,000 of them for training) and 5,000 of the test images of CIFAR-10,
  against 2,000 images of SVHN and of CIFAR-100 each, drawn with seed 0 in the proportions of the classes.

Each of these is a run folder below ``--runs`` and a row of the JSON file. Existing rows are not measured again, and an
interrupted training resumes. Before each run, its time is estimated from a few batches. ``images_per_second`` is
measured in the same batches (no head, no decoding), ``minutes`` cover the whole command from decoding to the report,
``training_minutes`` the epochs alone; all three are meaningful only on an idle machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from baselines import markdown_row
from maple.data.shares import fold_shares, share_out
from maple.evaluation.paper.profiles import PROTOCOLS, Protocol
from maple.evaluation.results import Results
from maple.files import RunFile, load_json
from maple.networks import Backbone, embed, open_model, use_fast_allocator
from maple.progress import say
from maple.reporting.plots import BLUE, ORANGE, Line, plot_reliability, plot_scores, standalone_svg
from maple.runs.fit import GALLERY_SAMPLE, fit_run
from maple.runs.requests import FitRequest, TrainRequest
from maple.runs.setup.config import resolve_config
from maple.runs.setup.presets import read_preset
from maple.runs.train import train_run

MODEL = "python:benchmarks.efficientnet_lite:efficientnet_lite0"
PRESET = "finetune"
PARTS = {"posthoc": "frozen", "finetune": "fine-tuned"}
LAST_FILE = "report.html"  # of a run: where it is, everything is
FEWEST = 4  # images of a class in a sample, where there are so many: three splits need one each
SEED = 0  # of the samples
TIMED_IMAGES, WARM_UPS = 32, 2


@dataclass(frozen=True)
class Task:
    """What is known and what is unknown, and how many images are taken of each file; ``None`` means all."""

    protocol: Protocol
    files: dict[str, int | None]  # the first is the one to learn from


CIFAR10_OOD = {"svhn": "svhn/test", "cifar100": "cifar100/test"}  # Tiny ImageNet is what the network was trained on
TASKS = {
    "plankton": Task(PROTOCOLS["microorganisms"], {"plankton_ndsb/train": None, "plankton_ndsb/test": None}),
    "cifar10": Task(
        replace(PROTOCOLS["cifar10"], ood=CIFAR10_OOD),
        {"cifar10/train": 10_000, "cifar10/test": 5_000, "svhn/test": 2_000, "cifar100/test": 2_000},
    ),
}


@dataclass(frozen=True)
class Step:
    """One run of the study."""

    data: str
    part: str
    size: int  # of the images, in pixels
    images: int | None = None  # of each file at most, in a trial
    epochs: int | None = None  # of a training

    @property
    def task(self) -> Task:
        return TASKS[self.data]

    @property
    def name(self) -> str:
        """Of its folder.

        >>> Step("plankton", "finetune", 128, epochs=10).name
        'plankton-finetune-128px-10epochs'
        """
        parts = {"px": self.size, "epochs": self.epochs, "images": self.images}
        return "-".join([self.data, self.part, *(f"{n}{unit}" for unit, n in parts.items() if n is not None)])

    @property
    def key(self) -> dict[str, Any]:
        """What tells its row from others."""
        return {name: getattr(self, name) for name in ("data", "part", "size", "images", "epochs")}

    @property
    def flags(self) -> dict[str, Any]:
        """Options of the command; fitting has no use for augmentation."""
        flags = {**self.task.protocol.flags, "size": self.size}
        if self.epochs is None:
            flags.pop("augment", None)
            return flags
        return {**flags, "epochs": self.epochs}


# --- images ----------------------------------------------------------------------------------------------------------


def prepare_images(step: Step, runs: Path, data_root: Path) -> Path:
    """The data root for a step: the one given where all images are used, else one with samples of its files."""
    limit = step.images
    taken = {file: n if limit is None else min(limit, n or limit) for file, n in step.task.files.items()}
    if all(n is None for n in taken.values()):
        return data_root
    root = runs / "images" / (step.data if limit is None else f"{step.data}-{limit}")
    for file, n in taken.items():
        write_sample(data_root / f"{file}.parquet", root / f"{file}.parquet", n)
    return root


def write_sample(source: Path, target: Path, n: int | None) -> None:
    """Some rows of a Parquet file, as they are; the same ones whenever it is called."""
    table = pq.read_table(source)
    rows = choose_rows(table["label"].to_numpy(), len(table) if n is None else n)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".part")
    pq.write_table(table.take(rows), unfinished, compression="zstd")
    unfinished.replace(target)


def choose_rows(labels: np.ndarray, n: int) -> np.ndarray:
    """About ``n`` random rows in the proportions of the classes, but at least ``FEWEST`` of each that has so many.

    >>> labels = np.repeat([0, 1, 2], [60, 30, 5])
    >>> np.bincount(labels[choose_rows(labels, 19)])
    array([12,  6,  4])
    """
    rng = np.random.default_rng(SEED)
    classes, counts = np.unique(labels, return_counts=True)
    wanted = share_out(min(n, len(labels)), (counts / len(labels)).tolist())
    wanted = np.clip(wanted, np.minimum(FEWEST, counts), counts)
    drawn = [rng.permutation(np.flatnonzero(labels == c))[:k] for c, k in zip(classes, wanted)]
    return np.sort(np.concatenate(drawn))


# --- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """Seconds per image: to embed it, and to learn from it."""

    embed: float
    learn: float


def measure_speed(backbone: Backbone, size: int, learns: bool) -> Speed:
    """Time a few random images; the backbone is not fit for use afterwards."""
    images = torch.rand(TIMED_IMAGES, 3, size, size, generator=torch.Generator().manual_seed(0))

    def learn(x: torch.Tensor) -> None:
        backbone.train().embed(x).square().mean().backward()

    return Speed(_seconds(lambda x: embed(backbone, x), images), _seconds(learn, images) if learns else 0.0)


def _seconds(work: Callable[[torch.Tensor], Any], images: torch.Tensor) -> float:
    for _ in range(WARM_UPS):  # memory is touched for the first time
        work(images)
    started = time.perf_counter()
    work(images)
    return (time.perf_counter() - started) / len(images)


def count_passes(step: Step, root: Path) -> tuple[int, int]:
    """How often an image is embedded, and how often one is learned from."""
    options = resolve_config(step.flags, preset=PRESET).data
    first, *others = (root / f"{file}.parquet" for file in step.task.files)
    names = Counter(pq.read_table(first, columns=["label_name"])["label_name"].to_pylist())
    known = {name: n for name, n in names.items() if name not in options.leave_out}
    train, validation, *_ = fold_shares(options.splits, ["test"])
    learned = round(train * sum(known.values()))
    exemplars = sum(min(GALLERY_SAMPLE, round(train * n)) for n in known.values())
    tested = sum(pq.read_metadata(file).num_rows for file in others)
    epochs = step.epochs or 0
    embedded = sum(known.values()) + exemplars + tested + epochs * round(validation * sum(known.values()))
    return embedded, epochs * learned


def announce(step: Step, root: Path, speed: Speed) -> None:
    """Say how long it will take, decoding not counted."""
    embedded, learned = count_passes(step, root)
    minutes = (embedded * speed.embed + learned * speed.learn) / 60
    words = f"{embedded:,} images to embed at {1 / speed.embed:.0f} a second"
    words += f", {learned:,} to learn from at {1 / speed.learn:.0f} a second" if learned else ""
    say(f"{step.name}: about {minutes:.0f} minutes ({words})")


# --- runs ------------------------------------------------------------------------------------------------------------


def run_step(step: Step, runs: Path, data_root: Path) -> dict[str, Any]:
    """The row of a step, from a new run, a continued one or a finished one."""
    folder, root = runs / step.name, prepare_images(step, runs, data_root)
    backbone = open_model(MODEL, drop_head=True, size=step.size, trust=True)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    speed = measure_speed(backbone, step.size, learns=step.part == "finetune")
    minutes = None
    if not (folder / LAST_FILE).exists():
        announce(step, root, speed)
        minutes = run_command(step, folder, root)
    row = {**step.key, **read_results(folder), "parameters": parameters, "embedding": backbone.embedding_size}
    row["training_minutes"] = sum(read_seconds(folder)) / 60 if step.part == "finetune" else None
    return {**row, "images_per_second": 1 / speed.embed, "minutes": minutes}


def run_command(step: Step, folder: Path, root: Path) -> float:
    """Fit or fine-tune; the minutes that it took, with those of finished epochs of a training that is continued."""
    protocol = step.task.protocol
    started = (folder / RunFile.CHECKPOINT).exists()
    before = sum(read_seconds(folder)) if started else 0.0
    how: dict[str, Any] = {
        "source": protocol.source,
        "ood": protocol.ood,
        "out": folder,
        "data_root": root,
        "flags": step.flags,
        "trust": True,
        "overwrite": folder.exists() and not started,
        "command": f"benchmarks/pretrained.py ({step.name})",
    }
    clock = time.monotonic()
    if step.part == "posthoc":
        fit_run(FitRequest(model=MODEL, drop_head=True, **how))
    else:
        train_run(TrainRequest(init=MODEL, preset=PRESET, resume=started, **how))
    return (before + time.monotonic() - clock) / 60


def read_seconds(folder: Path) -> list[float]:
    """Of each epoch."""
    with (folder / "history.csv").open(encoding="utf-8", newline="") as file:
        return [float(row["seconds"]) for row in csv.DictReader(file)]


def read_results(folder: Path) -> dict[str, Any]:
    """What the tables need of the results of a run."""
    results = load_results(folder)
    judged = results.methods["maple"]
    assert judged.classification is not None
    softmax = results.methods.get("softmax")  # only where there is a head
    return {
        "classes": len(results.class_names),
        "train_images": int(sum(load_json(folder / RunFile.CLASSES)["cluster_sizes"])),
        "test_images": results.n_ind,
        "unknown_images": results.n_ood,
        "clusters": results.n_clusters,
        "components": results.n_components,
        **{name: getattr(judged.classification, name) for name in ("accuracy", "ece", "ece_floor", "nll")},
        "softmax_accuracy": softmax.classification.accuracy if softmax and softmax.classification else None,
        "false_alarm": results.false_alarm,
        "caught": {name: found.flagged for name, found in judged.detection.items()},
        "auroc": {name: found.auroc for name, found in judged.detection.items()},
        "score": results.provenance["score"],
        "scores": results.scores,
        "versions": results.provenance["versions"],
    }


def load_results(folder: Path) -> Results:
    return Results.from_json((folder / "results.json").read_bytes())


# --- table and pictures ----------------------------------------------------------------------------------------------


def format_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Two Markdown tables per data set: how good the runs are, and the AUROC of every score that they have."""
    tables = []
    for data in dict.fromkeys(row["data"] for row in rows):
        these = [row for row in rows if row["data"] == data]
        tables += [quality_table(data, these), score_table(data, these)]
    return "\n\n".join(tables)


def quality_table(data: str, rows: Sequence[dict[str, Any]]) -> str:
    sets = list(rows[0]["auroc"])
    heading = [data, "pixels", "epochs", "accuracy", "ECE (by chance)", "false alarms"]
    heading += [*(f"AUROC {name}" for name in sets), *(f"caught {name}" for name in sets), "images/s", "minutes"]
    lines = [
        [
            describe(row),
            str(row["size"]),
            str(row["epochs"] or "–"),
            f"{row['accuracy']:.3f}",
            f"{row['ece']:.3f} ({row['ece_floor']:.3f})",
            f"{row['false_alarm']:.3f}",
            *(f"{row[key][name]:.3f}" for key in ("auroc", "caught") for name in sets),
            f"{row['images_per_second']:.0f}",
            "–" if row["minutes"] is None else f"{row['minutes']:.0f}",
        ]
        for row in rows
    ]
    return _markdown(heading, lines)


def score_table(data: str, rows: Sequence[dict[str, Any]]) -> str:
    """One line per run and set of unknown images; a dash where a score needs what the network lacks."""
    scores = list(dict.fromkeys(score for row in rows for score in row["scores"]))
    lines = [
        [
            f"{describe(row)}, {row['size']} pixels: {name}",
            *(f"{row['scores'][score][name]:.3f}" if score in row["scores"] else "–" for score in scores),
        ]
        for row in rows
        for name in row["auroc"]
    ]
    return _markdown([f"AUROC, {data}", *scores], lines)


def describe(row: dict[str, Any]) -> str:
    return PARTS[row["part"]] + (f" ({row['images']} images)" if row["images"] else "")


def _markdown(heading: list[str], lines: list[list[str]]) -> str:
    return "\n".join(map(markdown_row, [heading, ["---"] * len(heading), *lines]))


def draw_pictures(rows: Sequence[dict[str, Any]], runs: Path, out: Path) -> None:
    """Of the runs that are there: scores of known and unknown images, and how far probabilities can be trusted."""
    out.mkdir(parents=True, exist_ok=True)
    reliability: dict[str, list[Any]] = {}
    for row in rows:
        step = Step(**{name: row[name] for name in ("data", "part", "size", "images", "epochs")})
        if not (runs / step.name / "results.json").exists():
            continue
        results = load_results(runs / step.name)
        judged = results.methods["maple"]
        threshold = results.threshold if math.isfinite(results.threshold) else None  # as after few calibration images
        for name, counts in judged.histogram.ood.items():
            plot = plot_scores(name, judged.histogram.edges, judged.histogram.ind, counts, threshold)
            path = out / f"pretrained_{step.data}_{step.part}_{step.size}_{name}.svg"
            path.write_text(standalone_svg(plot), encoding="utf-8")
        assert judged.classification is not None
        style = (BLUE, "-") if step.part == "finetune" else (ORANGE, "--")
        line = Line(f"{describe(row)}, {step.size} pixels", *style)
        reliability.setdefault(step.data, []).append((line, judged.classification.reliability))
    for data, curves in reliability.items():
        path = out / f"pretrained_{data}_reliability.svg"
        path.write_text(standalone_svg(plot_reliability(curves)), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------


def list_steps(arguments: argparse.Namespace) -> list[Step]:
    epochs = {"posthoc": None, "finetune": arguments.epochs}
    return [
        Step(data, part, arguments.size, arguments.images, epochs[part])
        for data in arguments.data
        for part in arguments.part
    ]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, help="folder with data/")
    parser.add_argument("--data", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--part", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--size", type=int, default=224, help="side of the images, in pixels")
    parser.add_argument("--images", type=int, help="about so many of each file at most: for a trial")
    parser.add_argument("--epochs", type=int, default=read_preset(PRESET)["train"]["epochs"], help="of fine-tuning")
    parser.add_argument("--runs", type=Path, default=Path("runs/pretrained"), help="folder for the runs")
    parser.add_argument("--json", type=Path, required=True, help="file of the rows, read and written")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is in the file")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the runs that are there")
    arguments = parser.parse_args()
    if arguments.shared is None and not arguments.table:
        parser.error("--shared is needed, unless --table is given")
    use_fast_allocator()
    for step in [] if arguments.table else list_steps(arguments):
        if any(row.items() >= step.key.items() for row in read_rows(arguments.json)):
            continue
        row = run_step(step, arguments.runs, arguments.shared / "data")
        others = read_rows(arguments.json)  # which may have been written meanwhile
        in_order = sorted(
            [*others, row], key=lambda row: (list(TASKS).index(row["data"]), list(PARTS).index(row["part"]))
        )
        arguments.json.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
    rows = read_rows(arguments.json)
    if arguments.pictures is not None:
        draw_pictures(rows, arguments.runs, arguments.pictures)
    print(format_tables(rows))


if __name__ == "__main__":
    main()
