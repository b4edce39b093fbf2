"""A biologist's first hour: train on a small folder of plankton and sort new images, with the commands that she types.

    python benchmarks/plankton_trial.py --shared ../shared --seeds 0 1
    python benchmarks/plankton_trial.py --shared ../shared --half 1 --networks default "default, cross-entropy"

Of the 36 most common taxa of PlanktonSet every second one is taken: 15 known ones with 150 images each to learn from,
and 3 unknown ones. The others (``--half 1``) are for choices: what is chosen on them is shown on the first half. The
images to be sorted are up to 60 others of each of the 18 taxa. Everything is written to folders of PNG files, and only
commands run on them: ``maple train``, ``maple predict``. Figures of the new images come from the file of predictions
alone, those of softmax and energy from the run's own test.

- ``minutes``: of each command, on this machine as it is;
- ``false_alarms``: share of the new images of known taxa that are flagged at 1, 5, 10 and 20 %, and of unknown ones;
- ``ece``: of the new images, with a bootstrap interval, and the floor that a perfect model has;
- ``error_auroc``: how well an order of the images finds wrong classes: the report's (flagged images first, then the
  least probable class), ``probability`` alone, ``uncertainty`` alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from maple.evaluation.results import Results
from maple.stats import metrics

COMMON = 36  # taxa to choose from, the most common ones
EVERY = 2
UNKNOWN_EVERY = 6  # of the taxa chosen, every sixth is unknown
LEARNED, NEW = 150, 60  # images of each taxon
RATES = (0.01, 0.05, 0.1, 0.2)
SGD = "--optimizer sgd --learning-rate 0.1 --weight-decay 5e-4 --set train.momentum=0.9 --set train.schedule=triangular"
MUON = "--optimizer muon --learning-rate 0.24 --weight-decay 1e-3 --set train.momentum=0.6 --set train.schedule=linear"
NETWORKS = {  # options of ``maple train``
    "default": "",
    "default, cross-entropy": "--recipe cross-entropy",
    "default, triplets": "--recipe triplet --set triplet.prototype_weight=0",
    "default, prototypes": "--recipe triplet --set triplet.triplet_weight=0",
    "resnet9, SGD": f"--backbone resnet9 {SGD}",
    "resnet9, Muon": f"--backbone resnet9 {MUON}",
    "airbench-32, Muon": f"--backbone airbench-32-average {MUON}",
}
METHODS = ("maple", "softmax", "softmax-scaled", "energy")


def write_images(shared: Path, folder: Path, half: int) -> None:
    """The folders ``known``, ``unknown`` and ``new``, a folder per taxon in each; nothing if they exist."""
    if (folder / "new").is_dir():
        return
    files = [shared / "data" / "plankton_ndsb" / f"{split}.parquet" for split in ("train", "test")]
    table = pa.concat_tables([pq.read_table(file) for file in files])
    names = np.array(table["label_name"].to_pylist())
    taxa, counts = np.unique(names, return_counts=True)
    chosen = taxa[np.argsort(-counts, kind="stable")][half:COMMON:EVERY]
    for i, taxon in enumerate(chosen):
        rows = np.flatnonzero(names == taxon)
        is_unknown = i % UNKNOWN_EVERY == UNKNOWN_EVERY - 1
        learned = 0 if is_unknown else LEARNED
        _write(table, rows[:learned], folder / "known" / taxon)
        _write(table, rows[learned : learned + NEW], folder / "new" / taxon)
        if is_unknown:  # other images than those to be sorted, for the report
            _write(table, rows[NEW : 2 * NEW], folder / "unknown" / taxon)


def _write(table: pa.Table, rows: np.ndarray, folder: Path) -> None:
    if len(rows):
        folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        (folder / f"{row:05d}.png").write_bytes(table["image"][int(row)].as_py())


def maple(*arguments: str | Path) -> float:
    """Run a command; the minutes that it took."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "maple", *map(str, arguments)], check=True)
    return round((time.perf_counter() - start) / 60, 2)


def measure(folder: Path, network: str, seed: int, half: int) -> dict[str, Any]:
    """Train, sort the new images, and judge what was written."""
    name = network.replace(", ", "-")
    run, predictions = folder / f"{name}-{seed}", folder / f"{name}-{seed}.csv"
    unknown = f"unknown={folder / 'unknown'}"
    train = ["train", folder / "known", "--ood", unknown, "--out", run, "--seed", str(seed), "--overwrite"]
    minutes = {
        "train": maple(*train, *NETWORKS[network].split()),
        "predict": maple("predict", run, folder / "new", "--out", predictions, "--overwrite"),
    }
    with predictions.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    results = Results.from_json((run / "results.json").read_bytes())
    test = {row["method"]: row for row in results.rows()}
    return {
        "network": network,
        "half": half,
        "seed": seed,
        "options": NETWORKS[network],
        "minutes": minutes,
        **judge(rows, {path.name for path in (folder / "known").iterdir()}, seed),
        "test": {
            name: {key: test[name].get(key) for key in ("accuracy", "nll", "ece", "ece_floor", "auroc/unknown")}
            for name in METHODS
            if name in test
        },
    }


def judge(rows: list[dict[str, str]], known: set[str], seed: int) -> dict[str, Any]:
    """Figures of predictions of images whose folder is their true taxon."""
    truth = np.array([Path(row["file"]).parent.name for row in rows])
    found = np.array([row["class"] for row in rows])
    p_value, probability, uncertainty, score = (
        np.array([float(row[name]) for row in rows]) for name in ("p_value", "probability", "uncertainty", "score")
    )
    is_known = np.isin(truth, sorted(known))
    right = (found == truth)[is_known]
    sure = probability[is_known]
    flagged = np.array([row["is_ood"] == "True" or row["is_ood"] == "true" for row in rows])[is_known]
    order = np.where(flagged, 2 - p_value[is_known], 1 - sure)  # flagged ones first, the smallest p-value foremost
    errors = {"report's order": order, "probability": -sure, "uncertainty": uncertainty[is_known]}
    return {
        "new_images": {"known": int(is_known.sum()), "unknown": int((~is_known).sum())},
        "accuracy": float(right.mean()),
        "false_alarms": {str(rate): float((p_value[is_known] <= rate).mean()) for rate in RATES},
        "found_unknown": {str(rate): float((p_value[~is_known] <= rate).mean()) for rate in RATES},
        "auroc": metrics.auroc(score[is_known], score[~is_known]),
        "ece": metrics.expected_calibration_error(sure, right),
        "ece_interval": bootstrap(sure, right, seed),
        "ece_floor": metrics.calibration_floor(sure),
        "error_auroc": {name: metrics.auroc(values[right], values[~right]) for name, values in errors.items()},
    }


def bootstrap(confidence: np.ndarray, right: np.ndarray, seed: int, draws: int = 1000) -> list[float]:
    """The central 95 % of the calibration error of images drawn with replacement."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(right), (draws, len(right)))  # draws x n
    found = [metrics.expected_calibration_error(confidence[rows], right[rows]) for rows in drawn]
    return [float(value) for value in np.quantile(found, (0.025, 0.975))]


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows as Markdown."""
    yield (
        "| network | half | seed | minutes | accuracy | ECE (interval; floor) | false alarms at 1, 5, 10, 20 % | "
        "AUROC new | test: MAPLE / softmax / energy | errors found: report / probability / uncertainty |"
    )
    yield "|---" * 10 + "|"
    for row in rows:
        low, high = row["ece_interval"]
        alarms = ", ".join(f"{share:.3f}" for share in row["false_alarms"].values())
        test = " / ".join(f"{row['test'][name]['auroc/unknown']:.3f}" for name in METHODS if name in row["test"])
        errors = " / ".join(f"{value:.3f}" for value in row["error_auroc"].values())
        yield (
            f"| {row['network']} | {row['half']} | {row['seed']} | {sum(row['minutes'].values()):.1f} | "
            f"{row['accuracy']:.3f} | "
            f"{row['ece']:.3f} ({low:.3f} to {high:.3f}; {row['ece_floor']:.3f}) | {alarms} | {row['auroc']:.3f} | "
            f"{test} | {errors} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=["default"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--half", type=int, choices=[0, 1], default=0, help="of the common taxa; 1 is for choices")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/plankton_trial"), help="images and runs")
    parser.add_argument("--json", type=Path, default=Path("results/plankton_trial.json"), help="rows, read and written")
    arguments = parser.parse_args()
    folder = arguments.folder / f"half-{arguments.half}"
    write_images(arguments.shared, folder, arguments.half)
    rows = json.loads(arguments.json.read_text())["rows"] if arguments.json.exists() else []
    for seed in arguments.seeds:
        for network in arguments.networks:
            key = (network, arguments.half, seed)
            rows = [row for row in rows if (row["network"], row["half"], row["seed"]) != key]
            rows.append(measure(folder, network, seed, arguments.half))
            arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
