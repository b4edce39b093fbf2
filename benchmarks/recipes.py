"""Compare recipes as training for detectors, at the same budget on CIFAR-10 with a ResNet-9, seed by seed.

    python benchmarks/recipes.py --shared ../shared --recipes cross-entropy maple --json results/recipes.json

Trainings are stored like those of ``maple benchmark`` and shared with them: a finished one is not repeated, an
interrupted one resumes. Each row of the JSON file is one training, with accuracies, calibration, AUROC of every score
against CIFAR-100, Tiny ImageNet and SVHN, the share of the time spent on relabelling, the validation accuracy before
and after every relabelling, and the seconds of all epochs (comparable only between trainings that ran alone on the
machine). Existing rows are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from maple.evaluation.paper.profiles import PROFILES, Profile
from maple.evaluation.paper.rows import Training
from maple.evaluation.results import Results
from maple.runs.benchmark.jobs import Job
from maple.runs.benchmark.trainings import ensure_evaluated

CPU = PROFILES["resnet9"]
PAPER = replace(CPU, as_paper=True, flags={**CPU.flags, "batch_size": 128, "precision": "32-true"})
X_MEANS = {"cluster_method": "xmeans", "cluster_space": "raw", "relabel_every": 4}  # early and often, as a suite has it
RECIPES: dict[str, tuple[Profile, dict[str, Any]]] = {
    "cross-entropy": (CPU, {"recipe": "cross-entropy"}),
    "triplet": (CPU, {"recipe": "triplet", "prototype_weight": 0.0}),
    "prototypes": (CPU, {"recipe": "triplet", "triplet_weight": 0.0}),
    "maple": (CPU, {"recipe": "maple"}),
    "one length": (CPU, {"recipe": "maple", "cross_entropy_norm": 10.0, "prototype_weight": 0.0}),
    "one length, no triplets": (
        CPU,
        {"recipe": "triplet", "cross_entropy_norm": 10.0, "prototype_weight": 0.0, "triplet_weight": 0.0},
    ),
    "maple, raw X-Means": (CPU, {"recipe": "maple", "cluster_method": "xmeans", "cluster_space": "raw"}),
    "X-Means, rows kept": (CPU, {"recipe": "maple", **X_MEANS}),
    "X-Means, fresh head": (CPU, {"recipe": "maple", **X_MEANS, "head_growth": "fresh"}),
    "batch-hard": (CPU, {"recipe": "triplet", "prototype_weight": 0.0, "triplet_softness": 0.0}),
    "duq": (CPU, {"recipe": "duq"}),
    "duq, no penalty": (CPU, {"recipe": "duq", "gradient_penalty": 0.0}),
    "paper": (PAPER, {}),
    "paper, triangular schedule": (PAPER, {"schedule": "triangular"}),
}


def make_job(name: str, seed: int, epochs: int, runs: Path, data_root: Path) -> Job:
    """The training of a recipe, which may be finished."""
    profile, flags = RECIPES[name]
    return Job(Training.of("cifar10", **flags), profile, seed, runs, data_root, {"epochs": epochs})


def train_and_evaluate(job: Job, name: str, seed: int, epochs: int) -> dict[str, Any]:
    """One row, from a new training or from a finished one."""
    results = ensure_evaluated(job)
    return {"recipe": name, "seed": seed, "epochs": epochs, **summarise(results), **read_history(job.folder)}


def summarise(results: Results) -> dict[str, Any]:
    """What the table shows of the results of a run."""
    row: dict[str, Any] = {"clusters": results.n_clusters, "false_alarm": results.false_alarm}
    for name in ("softmax", "softmax-scaled", "maple", "maple-paper"):
        found = results.methods[name].classification
        assert found is not None
        row[name] = {key: getattr(found, key) for key in ("accuracy", "ece", "ece_floor", "nll")}
    row["auroc"] = {
        score: {**by_set, "mean": float(np.mean(list(by_set.values())))} for score, by_set in results.scores.items()
    }
    return row


def read_history(folder: Path) -> dict[str, Any]:
    with (folder / "history.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    seconds = sum(float(row["seconds"]) for row in rows)
    relabelling = sum(float(row.get("relabel_seconds") or 0) for row in rows)
    return {
        "seconds": round(seconds),
        "relabel_share": relabelling / seconds,
        "relabel_shift": max((float(row["relabel_shift"]) for row in rows if row["relabel_shift"]), default=None),
        "validation_accuracy": float(rows[-1]["validation_accuracy"]),
        "events": [
            {
                "epoch": int(row["epoch"]),
                "clusters": int(row["clusters"]),
                "accuracy_before": float(row["validation_accuracy"]),
                "accuracy_after": float(after["validation_accuracy"]),  # an epoch later
            }
            for row, after in pairwise(rows)
            if row["relabelled"]
        ],
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Mean over seeds; the deviation where there are several."""
    columns = {
        "softmax acc.": lambda row: row["softmax"]["accuracy"],
        "maple acc.": lambda row: row["maple"]["accuracy"],
        "MD acc.": lambda row: row["maple-paper"]["accuracy"],
        **{score: (lambda row, score=score: row["auroc"][score]["mean"]) for score in rows[0]["auroc"]},
    }
    print(f"{'recipe':28s} {'epochs':>6s} {'seeds':>5s} " + " ".join(f"{name:>14s}" for name in columns))
    for key in dict.fromkeys((row["recipe"], row["epochs"]) for row in rows):
        these = [row for row in rows if (row["recipe"], row["epochs"]) == key]
        cells = [[read(row) for row in these] for read in columns.values()]
        text = (f"{np.mean(c):.4f} ± {np.std(c):.3f}" if len(c) > 1 else f"{c[0]:.4f}" for c in cells)
        print(f"{key[0]:28s} {key[1]:6d} {len(these):5d} " + " ".join(f"{cell:>14s}" for cell in text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/")
    parser.add_argument("--recipes", nargs="*", default=["cross-entropy", "maple"], choices=list(RECIPES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="--out of maple benchmark")
    parser.add_argument("--json", type=Path, required=True, help="file of the rows, read and written")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        for name in arguments.recipes:
            rows = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
            if any((row["recipe"], row["seed"], row["epochs"]) == (name, seed, arguments.epochs) for row in rows):
                continue
            job = make_job(name, seed, arguments.epochs, arguments.runs, arguments.shared / "data")
            row = train_and_evaluate(job, name, seed, arguments.epochs)
            rows = json.loads(arguments.json.read_text()) if arguments.json.exists() else []  # others may have written
            arguments.json.write_text(json.dumps([*rows, row], indent=1) + "\n")
    print_table(json.loads(arguments.json.read_text()))


if __name__ == "__main__":
    main()
