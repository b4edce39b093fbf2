"""Trainings of the length of ``maple demo``, which its options are chosen by: rows of ``results/demo.json``.

    python benchmarks/demo.py --recipes demo cross-entropy --seeds 1 2

The demo's own images are not looked at. Its eight known taxa are drawn from other seeds, 4,900 images to train on as in
the demo and 2,700 to test on, and the unknown images that decide are four taxa that the demo never shows (``taxa``).
``near`` and ``far``, also drawn from other seeds, are measured for the record. ``seconds`` are CPU seconds of the
training divided by two, the time on two idle cores, also on a busy machine. Existing rows are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maple.evaluation.results import Results
from maple.options import Values
from maple.runs.demo import MAPLE, TRAINING
from maple.runs.folder import RunFolder
from maple.runs.requests import TrainRequest
from maple.runs.setup.request import LEFT_OUT
from maple.runs.train import train_run

CORES = 2  # that the seconds are for
NEVER_SHOWN = ["Pinnularia", "Achnanthidium", "Epithemia", "Surirella"]
IMAGES = 13_500  # of twelve taxa
SPLITS = (0.545, 0.078, 0.078, 0.299)  # 4,900 training images of eight taxa, 700 for validation and for calibration
RESNET9: Values = {"backbone": "resnet9", "epochs": 14, "batch_size": 64}
RECIPES: dict[str, Values] = {
    "demo": {**TRAINING, **MAPLE},
    "cross-entropy": {**TRAINING, "recipe": "cross-entropy"},
    "prototypes": {**TRAINING, "recipe": "triplet", "triplet_weight": 0.0},
    "no forced clusters": {**TRAINING, "recipe": "maple"},
    "resnet9": {**RESNET9, "relabel_every": 8, "hard_class_error": 0.1},
    "resnet9, cross-entropy": {**RESNET9, "recipe": "cross-entropy"},
}
METHODS = ("maple", "softmax", "softmax-scaled")
FIGURES = ("accuracy", "ece", "ece_floor", "nll", "auroc/taxa", "auroc/near", "auroc/far")


def train(name: str, seed: int, runs: Path) -> RunFolder:
    """Train and evaluate a recipe on images that the demo does not show."""
    folder = RunFolder(runs / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}")
    drawn = 1000 + seed
    ood = {kind: f"simulated-diatoms/{kind}?n=1000&size=32&seed={drawn}" for kind in ("near", "far")}
    train_run(
        TrainRequest(
            source=f"simulated-diatoms?n={IMAGES}&size=32&taxa=12&seed={drawn}",
            out=folder.path,
            ood={"taxa": LEFT_OUT, **ood},
            flags={**RECIPES[name], "seed": seed, "leave_out": NEVER_SHOWN, "splits": SPLITS},
            overwrite=folder.holds_run(),
        )
    )
    return folder


def measure(name: str, seed: int, folder: RunFolder) -> dict[str, Any]:
    """A row: the figures of MAPLE and of the softmax of the same network."""
    results = Results.from_json((folder.path / "results.json").read_bytes())
    found = {row["method"]: row for row in results.rows()}
    with (folder.path / "history.csv").open() as file:
        epochs = list(csv.DictReader(file))
    return {
        "recipe": name,
        "seed": seed,
        "options": RECIPES[name],
        "seconds": round(sum(float(epoch["cpu_seconds"]) for epoch in epochs) / CORES, 1),
        "clusters": results.n_clusters,
        "test_images": results.n_ind,
        "figures": {method: {figure: found[method][figure] for figure in FIGURES} for method in METHODS},
        "gains": json.loads(results.to_json())["gains"],
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows as Markdown: MAPLE / softmax / scaled softmax in each cell."""
    yield "| recipe | seed | s | clusters | accuracy | ECE (floor) | NLL | AUROC taxa | near | far |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        figures = row["figures"]
        cells = []
        for figure in (each for each in FIGURES if each != "ece_floor"):
            methods = METHODS[:2] if figure == "accuracy" else METHODS
            text = " / ".join(f"{figures[method][figure]:.3f}" for method in methods)
            cells.append(f"{text} ({figures['maple']['ece_floor']:.3f})" if figure == "ece" else text)
        yield f"| {row['recipe']} | {row['seed']} | {row['seconds']:.0f} | {row['clusters']} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=["demo", "cross-entropy"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmarks/demo"))
    parser.add_argument("--json", type=Path, default=Path("results/demo.json"))
    arguments = parser.parse_args()
    rows = json.loads(arguments.json.read_text())["rows"] if arguments.json.exists() else []
    for seed in arguments.seeds:
        for name in arguments.recipes:
            known = {(row["recipe"], row["seed"]): row["options"] for row in rows}
            if known.get((name, seed)) != json.loads(json.dumps(RECIPES[name])):
                row = measure(name, seed, train(name, seed, arguments.runs))
                rows = [each for each in rows if (each["recipe"], each["seed"]) != (name, seed)] + [row]
                arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
