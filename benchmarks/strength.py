"""Accuracy against minutes on CIFAR-10, and the effect of training on detection: rows of ``results/strength.json``.

    python benchmarks/strength.py final --shared ../shared --network airbench --epochs 12
    python benchmarks/strength.py screen --shared ../shared --network airbench-32 --recipes cross-entropy maple
    python benchmarks/strength.py table
    python benchmarks/strength.py curve --picture docs/images/strength.svg

``final`` trains on 40,000 images of all ten classes and tests on all 10,000 test images, against CIFAR-100 and Tiny
ImageNet (near) and SVHN (far). Choices are never made on these: ``screen`` leaves out three classes, trains on the
seven others, and takes the test images of the three as unknown.

Trainings are stored like those of ``maple benchmark``: finished ones are reused, interrupted ones are resumed after
their last epoch, and rows that exist are not measured again. ``minutes`` are CPU seconds divided by two, the time on
two idle cores, which makes trainings on a busy machine comparable. On a busy machine set OMP_NUM_THREADS=1: threads
then do not wait for each other; with two threads on two idle cores the minutes agree within a few per cent. FLOPs are
those of convolutions and matrix products in the forward pass, times three. ``curve`` draws the accuracy of the
rows of cross-entropy and of rotations against their minutes, all on the machine of the first rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from figures import STYLE
from maple.evaluation.paper.profiles import PROFILES, Profile, Protocol
from maple.evaluation.paper.rows import Training
from maple.evaluation.results import Results
from maple.networks import create_backbone
from maple.reporting.plots import LIGHT
from maple.runs.benchmark.jobs import Job
from maple.runs.benchmark.trainings import ensure_evaluated
from maple.runs.setup.request import LEFT_OUT

CORES = 2  # that the minutes are for
FAR = ("svhn",)  # CIFAR-100 and Tiny ImageNet are near
FOLDS = {  # left-out classes of CIFAR-10, the unknown images when recipes are compared
    "a": ["cat", "deer", "truck"],
    "b": ["airplane", "dog", "frog"],
    "c": ["automobile", "bird", "horse"],
    "d": ["bird", "dog", "ship"],
}
MUON: dict[str, Any] = {
    "optimizer": "muon",
    "learning_rate": 0.24,
    "momentum": 0.6,
    "weight_decay": 1e-3,
    "schedule": "linear",
    "batch_size": 500,
    "augment": "alternate-flip,translate",
    "sampler": "shuffle",
}
TRAIN_OPTIONS = ("learning_rate", "momentum", "weight_decay", "batch_size", "augment", "embedding_size")
MIX, CUTOUT = (f"{MUON['augment']},{further}" for further in ("mix", "cutout"))
ONE_LENGTH = {  # T2FNorm: cross-entropy of embeddings of equal norm
    "recipe": "triplet",
    "triplet_weight": 0.0,
    "prototype_weight": 0.0,
    "cross_entropy_norm": 10.0,
}
RECIPES: dict[str, dict[str, Any]] = {
    "cross-entropy": {"recipe": "cross-entropy"},
    "cross-entropy, label smoothing": {"recipe": "cross-entropy", "label_smoothing": 0.2},
    "maple": {"recipe": "maple"},
    "triplet": {"recipe": "triplet", "prototype_weight": 0.0},
    "all triplets": {"recipe": "triplet", "prototype_weight": 0.0, "triplet_mining": "all"},
    "all triplets, raw": {
        "recipe": "triplet",
        "prototype_weight": 0.0,
        "triplet_mining": "all",
        "triplet_space": "raw",
    },
    "prototypes": {"recipe": "triplet", "triplet_weight": 0.0},
    "one length": ONE_LENGTH,
    "logit length": {"recipe": "cross-entropy", "logit_norm": "length"},
    "logit boundary": {"recipe": "cross-entropy", "logit_norm": "boundary"},
    "cutout": {"recipe": "cross-entropy", "augment": CUTOUT},
    "outliers": {"recipe": "cross-entropy", "outlier_share": 0.2},
    "outliers, logit length": {"recipe": "cross-entropy", "outlier_share": 0.2, "logit_norm": "length"},
    "outliers, prototypes": {"recipe": "triplet", "triplet_weight": 0.0, "outlier_share": 0.2},
    "rotations": {"recipe": "cross-entropy", "rotation_share": 0.25},
    "rotations, half": {"recipe": "cross-entropy", "rotation_share": 0.5},
    "mix, rotations": {"recipe": "cross-entropy", "augment": MIX, "rotation_share": 0.25},
    "cutout, rotations": {"recipe": "cross-entropy", "augment": CUTOUT, "rotation_share": 0.25},
    "prototypes, rotations": {"recipe": "triplet", "triplet_weight": 0.0, "rotation_share": 0.25},
    "maple, rotations": {"recipe": "maple", "rotation_share": 0.25},
    "all triplets, rotations": {
        "recipe": "triplet",
        "prototype_weight": 0.0,
        "triplet_mining": "all",
        "rotation_share": 0.25,
    },
    "one length, rotations": {**ONE_LENGTH, "rotation_share": 0.25},
    "logit boundary, rotations": {"recipe": "cross-entropy", "logit_norm": "boundary", "rotation_share": 0.25},
    "outliers, rotations": {"recipe": "cross-entropy", "outlier_share": 0.2, "rotation_share": 0.25},
    "mix": {"recipe": "cross-entropy", "augment": MIX},
    "mix, logit boundary": {"recipe": "cross-entropy", "logit_norm": "boundary", "augment": MIX},
    "mix, logit length": {"recipe": "cross-entropy", "logit_norm": "length", "augment": MIX},
    "mix, one length": {**ONE_LENGTH, "augment": MIX},
    "mix, maple": {"recipe": "maple", "augment": MIX},
}


def make_profile(arguments: argparse.Namespace) -> Profile:
    """Options of the trainings, and the images they are tested on."""
    flags: dict[str, Any] = {"backbone": arguments.network, "precision": arguments.precision}
    if arguments.network.startswith("airbench"):
        flags |= MUON
    for key in TRAIN_OPTIONS:
        if getattr(arguments, key) is not None:
            flags[key] = getattr(arguments, key)
    base = PROFILES["cpu"].protocols["cifar10"]
    folds = {
        f"fold-{name}": Protocol("cifar10", {"unknown": LEFT_OUT}, flags={"leave_out": classes})
        for name, classes in FOLDS.items()
    }
    return replace(PROFILES["cpu"], name="strength", flags=flags, protocols={"cifar10": base, **folds})


def identity(mode: str, name: str, seed: int, arguments: argparse.Namespace, flags: dict[str, Any]) -> dict[str, Any]:
    """The part of a row that identifies it."""
    return {
        "mode": mode,
        "recipe": name,
        "network": arguments.network,
        "seed": seed,
        "epochs": arguments.epochs,
        "augmentation": flags.get("augment", "crop,flip"),
        "precision": arguments.precision,
        "options": {key: flags[key] for key in sorted(flags) if key not in ("backbone", "augment", "precision")},
    }


def measure(job: Job) -> dict[str, Any]:
    """The figures of a row, from a new training or from a finished one."""
    results = ensure_evaluated(job)
    probabilities = {name: classify(results, name) for name in ("maple", "softmax", "softmax-scaled", "maple-paper")}
    scores = {**{score: dict(by_set) for score, by_set in results.scores.items()}}
    scores["softmax"] = {name: found.auroc for name, found in results.methods["softmax"].detection.items()}
    default = {name: found.auroc for name, found in results.methods["maple"].detection.items()}
    return {
        **read_costs(job),
        **probabilities["maple"],
        **summarise(default),
        "scores": {name: {**by_set, "mean": mean(by_set.values())} for name, by_set in scores.items()},
        "probabilities": probabilities,
        "components": results.n_components,
        "clusters": results.n_clusters,
        "commit": find_commit(),
    }


def find_commit() -> str:
    """The commit of this code; in a copy without git, the content of its file COMMIT."""
    root = Path(__file__).resolve().parents[1]
    if (root / "COMMIT").exists():
        return (root / "COMMIT").read_text().strip()
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()


def classify(results: Results, name: str) -> dict[str, float]:
    found = results.methods[name].classification
    assert found is not None
    return {key: getattr(found, key) for key in ("accuracy", "nll", "ece", "ece_floor")}


def summarise(default: dict[str, float]) -> dict[str, float]:
    """AUROC of the default score; in screening, left-out classes count as near."""
    near = [value for name, value in default.items() if name not in FAR]
    far = [value for name, value in default.items() if name in FAR]
    return {"near": mean(near), **({"far": mean(far)} if far else {}), "mean": mean(default.values())}


def mean(values: Any) -> float:
    return float(np.mean(list(values)))


def read_costs(job: Job) -> dict[str, Any]:
    """Minutes, images per second and FLOPs of a finished training."""
    with (job.folder / "history.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    seconds = sum(float(row["cpu_seconds"]) for row in rows) / CORES
    wall = sum(float(row["seconds"]) for row in rows)
    images = sum(int(row["images"]) for row in rows)
    config = job.config
    backbone = create_backbone(config.model.backbone, 10, embedding_size=config.model.embedding_size).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        backbone(torch.zeros(1, 3, 32, 32))
    return {
        "minutes": round(seconds / 60, 2),
        "minutes_are": f"cpu seconds / {CORES} cores",
        "wall_minutes": round(wall / 60, 2),
        "threads": torch.get_num_threads(),
        "images_per_second": round(images / seconds, 1),
        "training_images": images // len(rows),
        "parameters": sum(p.numel() for p in backbone.parameters()),
        "petaflop": round(3 * counter.get_total_flops() * images / 1e15, 4),
        "validation_accuracy": float(rows[-1]["validation_accuracy"]),
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = ["mode", "recipe", "network", "seed", "epochs", "minutes"]
    columns += ["accuracy", "nll", "ece", "near", "far", "mean", "components"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in sorted(rows, key=lambda row: (row["mode"], row["minutes"])):
        cells = [row.get(name, "") for name in columns]
        print("| " + " | ".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |")


LINES = {  # of the curve: kind of network, recipe, colour
    "airbench": ("airbench", "cross-entropy", LIGHT["c0"]),
    "airbench, rotations": ("airbench", "rotations", LIGHT["c2"]),
    "resnet9": ("resnet9", "cross-entropy", LIGHT["c4"]),
}


def on_one_machine(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the minutes that they take on the machine of the first row of the same network and recipe.

    A row whose images per second differ from that row's by more than a fifth was measured on another machine; it counts
    with the speed of the first.

    >>> kind = {"network": "resnet9", "recipe": "cross-entropy"}
    >>> slow, fast = {"minutes": 3.0, "images_per_second": 600.0}, {"minutes": 9.0, "images_per_second": 1200.0}
    >>> [row["minutes"] for row in on_one_machine([kind | slow, kind | fast])]
    [3.0, 18.0]
    """
    first: dict[Any, float] = {}
    found = []
    for row in rows:
        speed = row["images_per_second"]
        ratio = speed / first.setdefault((row["network"], row["recipe"]), speed)
        found.append(row if 0.8 <= ratio <= 1.2 else {**row, "minutes": row["minutes"] * ratio})
    return found


def draw_curve(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy against minutes in float32: one line per kind of network and recipe, one dot per row."""
    finals = on_one_machine([row for row in rows if row["mode"] == "final" and row["precision"] == "32-true"])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.0), layout="constrained")
        axes = figure.subplots()
        for label, (kind, recipe, colour) in LINES.items():
            own = [row for row in finals if row["network"].startswith(kind) and row["recipe"] == recipe]
            own.sort(key=lambda row: row["minutes"])
            minutes = [row["minutes"] for row in own]
            axes.plot(minutes, [row["accuracy"] for row in own], "o-", color=colour, lw=1.5, ms=4, label=label)
        axes.set(xscale="log", xlabel="minutes of training on two cores", ylabel="accuracy, CIFAR-10 test")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xticks([1, 2, 5, 10, 20, 40, 75], minor=False)
        axes.minorticks_off()
        axes.legend(loc="lower right")
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["final", "screen", "table", "curve"])
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/")
    parser.add_argument("--network", default="airbench")
    parser.add_argument("--recipes", nargs="*", default=["cross-entropy"], choices=list(RECIPES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folds", nargs="*", default=["a"], choices=list(FOLDS), help="of screen")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--momentum", type=float)
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--augment")
    parser.add_argument("--embedding-size", type=int)
    parser.add_argument("--runs", type=Path, default=Path("runs/strength"), help="folder of the trainings")
    parser.add_argument("--json", type=Path, default=Path("results/strength.json"), help="rows, read and written")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/strength.svg"), help="of curve")
    arguments = parser.parse_args()
    if arguments.mode == "table":
        print_table(read_rows(arguments.json))
        return
    if arguments.mode == "curve":
        draw_curve(read_rows(arguments.json), arguments.picture)
        return
    profile = make_profile(arguments)
    protocols = ["cifar10"] if arguments.mode == "final" else [f"fold-{name}" for name in arguments.folds]
    for seed in arguments.seeds:
        for protocol in protocols:
            for name in arguments.recipes:
                mode = "final" if protocol == "cifar10" else f"screen {protocol}"
                key = identity(mode, name, seed, arguments, {**profile.flags, **RECIPES[name]})
                if any(all(row.get(k) == value for k, value in key.items()) for row in read_rows(arguments.json)):
                    continue
                training = Training.of(protocol, **RECIPES[name])
                job = Job(
                    training, profile, seed, arguments.runs, arguments.shared / "data", {"epochs": arguments.epochs}
                )
                row = {**key, **measure(job)}
                rows = [*read_rows(arguments.json), row]  # read again: another process may have written meanwhile
                arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
                print_table([row])


if __name__ == "__main__":
    main()
