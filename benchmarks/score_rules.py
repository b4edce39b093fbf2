"""Can known images tell whether energy or distances rank unknown images better? Two rules: results/score_rules.json.

    python benchmarks/score_rules.py --shared ../shared --cache ~/outputs --networks wrn-cifar10 --precision bf16-mixed
    python benchmarks/score_rules.py --shared ../shared --networks --trained runs/strength/trainings/*
    python benchmarks/score_rules.py table

For ``energy`` and ``spread`` of a fitted network, on validation images alone:

- *wrong*: AUROC of wrongly above rightly classified images, the rule that chooses the exponent of the norm;
- *left out*: AUROC of the images of a class above all others, if the logit and the cluster of that class are left out
  of the fitted detector (nothing is trained again), mean over the classes.

Beside them is what they should predict: the AUROC of near unknown images, CIFAR-100 (or CIFAR-10) and Tiny ImageNet for
public networks, the left-out classes for trainings of ``strength.py screen``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import peers
from maple.detectors.maple import MapleDetector
from maple.detectors.scores import energy_score, spread_score
from maple.networks import embed
from maple.prediction.store import load_predictor
from maple.runs.folder import RunFolder
from maple.runs.setup.splits import left_out_images, reopen_splits
from maple.stats.metrics import auroc
from maple.types import Outputs

SCORES = ("energy", "spread")
RULES = ("wrong", "left out", "near")

Row = dict[str, Any]


def rank_wrong(detector: MapleDetector, validation: Outputs) -> dict[str, float]:
    """AUROC of wrongly above rightly classified images, by score."""
    found = detector.describe(validation)
    wrong = validation.logits.argmax(1) != validation.labels
    return {name: auroc(found.score_named(name)[~wrong], found.score_named(name)[wrong]) for name in SCORES}


def rank_left_out(detector: MapleDetector, validation: Outputs) -> dict[str, float]:
    """AUROC of each class above all others without its own logit and cluster, mean over classes, by score."""
    distances = detector.gaussians_.squared_distances(validation.embeddings)  # (N, C)
    found: dict[str, list[float]] = {name: [] for name in SCORES}
    for class_id in range(distances.shape[1]):
        is_class = validation.labels == class_id
        logits, others = (np.delete(table, class_id, axis=1) for table in (validation.logits, distances))
        scores = {"energy": energy_score(logits), "spread": spread_score(others.min(1), others.mean(1))}
        for name, values in scores.items():
            found[name].append(auroc(values[~is_class], values[is_class]))
    return {name: float(np.mean(values)) for name, values in found.items()}


def measure(name: str, detector: MapleDetector, validation: Outputs, test: Outputs, near: list[Outputs]) -> Row:
    """Both rules and what they should predict."""
    known = detector.describe(test)
    unknown = [detector.describe(each) for each in near]
    truth = {
        score: float(np.mean([auroc(known.score_named(score), each.score_named(score)) for each in unknown]))
        for score in SCORES
    }
    rules = {"wrong": rank_wrong(detector, validation), "left out": rank_left_out(detector, validation)}
    return {"network": name, "validation": len(validation), **rules, "near": truth}


def measure_public(name: str, arguments: argparse.Namespace) -> Row:
    """A public network, from the outputs of ``peers.py``."""
    study = peers.Study(name, arguments.shared, arguments.cache, arguments.precision)
    validation = study.outputs["test"][study.halves[0]]
    detector = MapleDetector().fit(study.outputs["train"], validation)
    sets = dict(study.measured)
    test = sets.pop("test")
    return measure(name, detector, validation, test, [of for key, of in sets.items() if key not in peers.FAR])


def measure_run(folder: Path, arguments: argparse.Namespace) -> Row:
    """A training of ``strength.py screen``."""
    predictor = load_predictor(folder)
    splits = reopen_splits(RunFolder(folder), predictor.size, arguments.shared / "data")
    images = (splits.validation, splits.test, left_out_images(splits))
    validation, test, unknown = (embed(predictor.backbone, each) for each in images)
    assert predictor.class_names is not None
    known = ", ".join(predictor.class_names)
    return measure(f"airbench-32 of {known}", predictor.detector, validation, test, [unknown])


def print_table(rows: list[Row]) -> None:
    headings = [f"{rule}: {score}" for rule in RULES for score in SCORES]
    print("| network | " + " | ".join(headings) + " |\n|---|" + "---|" * len(headings))
    for row in rows:
        cells = [f"{row[rule][score]:.3f}" for rule in RULES for score in SCORES]
        print(f"| {row['network']} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=["measure", "table"], default="measure")
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/ and weights/")
    parser.add_argument("--cache", type=Path, help="folder of the outputs of peers.py")
    parser.add_argument("--networks", nargs="*", default=list(peers.NETWORKS), choices=list(peers.NETWORKS))
    parser.add_argument("--trained", nargs="*", type=Path, default=[], help="run folders of strength.py screen")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    parser.add_argument("--json", type=Path, default=Path("results/score_rules.json"), help="rows, read and written")
    arguments = parser.parse_args()
    rows = peers.read_rows(arguments.json)
    if arguments.mode == "measure":
        new = [measure_public(name, arguments) for name in arguments.networks]
        new += [measure_run(folder, arguments) for folder in arguments.trained]
        rows = [old for old in rows if old["network"] not in {row["network"] for row in new}] + new
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
