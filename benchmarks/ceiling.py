"""Measure a supervised upper bound for OOD scores: how much could a better combination of scores gain?

    python benchmarks/ceiling.py --shared ../shared --recipes cross-entropy maple --json results/ceiling.json

A detector is fitted without unknown images. This script fits one logistic regression per unknown set on half of its
images and half of the test images, and evaluates it on the other halves; mean over ``--repeats`` halvings. Features:

- scores: energy, and the logarithms of the distances on the sphere, nearest, nearest over mean, and shallow;
- scores and class: the predicted class as well, which tells to which classes unknown images are assigned.

The table also has the best single score, by its mean over the sets, and the fused score, on the same images. Weights
fitted on known images alone cannot be expected to exceed this bound; a higher AUROC needs another network or other
scores. The networks are those of ``benchmarks/recipes.py`` (found in ``--runs``, or trained).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from maple.detectors.description import Description
from maple.networks import embed
from maple.prediction.store import load_predictor
from maple.runs.benchmark.trainings import ensure_trained
from maple.stats.metrics import auroc
from recipes import RECIPES, make_job
from split_study import Study, load_cifar10

SINGLE = ("distance", "relative", "normalised", "residual", "spread", "energy", "shallow")

Told = dict[str, np.ndarray]  # what a judge is told (N, F), by set


def tell(found: Description, with_class: bool) -> np.ndarray:
    """What a judge is told about images (N, F)."""
    scores = [found.energy, *(np.log(found.score_named(name)) for name in ("normalised", "spread", "shallow"))]
    columns = np.stack(scores, axis=1)  # (N, 4)
    if not with_class:
        return columns
    assert found.logits is not None
    return np.hstack([columns, np.eye(found.logits.shape[1])[found.logits.argmax(1)]])


def halve(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    order = rng.permutation(n)
    return order[: n // 2], order[n // 2 :]


def judge(known: np.ndarray, unknown: np.ndarray, repeats: int) -> float:
    """AUROC of a logistic regression on the halves that it has not seen; known (N, F), unknown (U, F)."""
    values = []
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        (seen, new), (seen_unknown, new_unknown) = halve(len(known), rng), halve(len(unknown), rng)
        rows = np.concatenate([known[seen], unknown[seen_unknown]])
        is_unknown = np.arange(len(rows)) >= len(seen)
        model = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, is_unknown)
        values.append(auroc(model.decision_function(known[new]), model.decision_function(unknown[new_unknown])))
    return float(np.mean(values))


def with_mean(by_set: dict[str, float]) -> dict[str, float]:
    return {**by_set, "mean": float(np.mean(list(by_set.values())))}


def measure(folder: Path, study: Study, repeats: int) -> dict[str, Any]:
    """One network: its single and fused scores, and the judges."""
    predictor = load_predictor(folder)
    known, *others = (
        predictor.detector.describe(embed(predictor.backbone, images)) for images in (study.test, *study.ood.values())
    )
    unknown = dict(zip(study.ood, others))

    def compare(name: Any) -> dict[str, float]:
        ranks = known.score_named(name)
        return with_mean({each: auroc(ranks, found.score_named(name)) for each, found in unknown.items()})

    def ask(with_class: bool) -> dict[str, float]:
        told = tell(known, with_class)
        return with_mean({name: judge(told, tell(found, with_class), repeats) for name, found in unknown.items()})

    best = max(SINGLE, key=lambda name: compare(name)["mean"])
    return {
        "best": best,
        "best single": compare(best),
        "fused": compare("fused"),
        "judge, scores": ask(with_class=False),
        "judge, scores and class": ask(with_class=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/")
    parser.add_argument("--recipes", nargs="*", default=["cross-entropy", "maple"], choices=list(RECIPES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="--out of maple benchmark")
    parser.add_argument("--json", type=Path, required=True, help="file of the rows, read and written")
    arguments = parser.parse_args()
    data_root = arguments.shared / "data"
    study = load_cifar10(data_root)
    rows = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    for seed in arguments.seeds:
        for name in arguments.recipes:
            about = {"recipe": name, "seed": seed, "epochs": arguments.epochs}
            if any(row.items() >= about.items() for row in rows):
                continue
            job = make_job(name, seed, arguments.epochs, arguments.runs, data_root)
            ensure_trained(job)
            rows.append(about | measure(job.folder, study, arguments.repeats))
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(f"{row['recipe']}, seed {row['seed']}, {row['epochs']} epochs; best single score: {row['best']}")
        for kind in ("best single", "fused", "judge, scores", "judge, scores and class"):
            print(f"  {kind:26}" + "  ".join(f"{name} {value:.4f}" for name, value in row[kind].items()))


if __name__ == "__main__":
    main()
