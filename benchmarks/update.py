"""Measure how well a class is recognised that ``maple update`` adds to a run.

    python benchmarks/update.py --shared ../shared --json results/update.json

The network is trained on CIFAR-10 without one class (``--new``): the run of ``--run``, or MAPLE's recipe for
``--epochs``, stored like the trainings of ``maple benchmark``: a finished one is not repeated, an interrupted one
resumes. The images of the new class are split like the others, and its training images are added to the Gaussians; the
network does not change. All ten classes are then tested, against CIFAR-100, Tiny ImageNet and SVHN:

- before: nine classes; the new one is one more set of unknown images;
- added: all training images of the new class, without recalibration;
- calibrated: temperature, score and thresholds from validation and calibration images of all ten classes;
- by number: the same, from the first 10, 30, ... training images of the new class;
- learned: a network that was trained on all ten classes, if ``--runs`` holds one.

``equal`` compares a detector that was fitted on nine classes and extended by the tenth, at once or in two parts, with
one that was fitted on all ten, on the same embeddings in float64: the largest relative difference of a squared
distance, and the largest difference of a class probability.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from maple.data.shares import fold_shares, split_indices
from maple.data.sources import open_images
from maple.detectors.learned import nearest_of_class
from maple.detectors.maple import MapleDetector
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.rows import Training
from maple.networks import embed, use_fast_allocator
from maple.options import as_dict
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor
from maple.prediction.update import update_from_outputs
from maple.runs.benchmark.jobs import Job
from maple.runs.benchmark.trainings import ensure_trained
from maple.runs.folder import RunFolder
from maple.runs.setup.config import resolve_config
from maple.runs.setup.splits import reopen_splits
from maple.stats.metrics import auroc, expected_calibration_error, negative_log_likelihood
from maple.types import Outputs
from resnet20 import OOD

NUMBERS = (10, 30, 100, 300, 1000)


@dataclass(frozen=True)
class Study:
    """Outputs of the network; labels count the classes that it knows, then the new one."""

    class_names: tuple[str, ...]
    train: Outputs  # of the classes that the network knows
    new: Outputs  # training images of the new class
    validation: Outputs
    calibration: Outputs
    test: Outputs
    ood: dict[str, Outputs]


def load_study(folder: Path, new: str, data_root: Path) -> tuple[Predictor, Study]:
    """The predictor of a run that left out ``new``, and what its network says about all images."""
    predictor = load_predictor(folder)
    run = RunFolder(folder)
    config = resolve_config({}, run.read_config().sections)
    splits = reopen_splits(run, predictor.size, data_root)
    names = (*splits.class_names, new)
    how: dict[str, Any] = {"size": predictor.size, "fit": predictor.fit, "data_root": data_root}
    whole = open_images("cifar10/train", **how)
    added = whole.subset(whole.labels == whole.class_names.index(new))
    shares = fold_shares(config.data.splits, ["test"])[:3]
    cut = [added.subset(part) for part in split_indices(added.labels, added.keys, shares, config.data.split_seed)]

    def read(images: Any) -> Outputs:
        return embed(predictor.backbone, images.with_class_names(names))

    return predictor, Study(
        names,
        train=read(splits.train),
        new=read(cut[0]),
        validation=Outputs.concatenate([read(splits.validation), read(cut[1])]),
        calibration=Outputs.concatenate([read(splits.calibration), read(cut[2])]),
        test=read(open_images("cifar10/test", **how)),
        ood={name: embed(predictor.backbone, open_images(source, **how)) for name, source in OOD.items()},
    )


# --- figures ---------------------------------------------------------------------------------------------------------


def measure(predictor: Predictor, test: Outputs, ood: dict[str, Outputs], new: int) -> dict[str, Any]:
    """How well ten classes are told apart and from unknown images, number ``new`` being the one to look at."""
    said, labels = predictor.predict_outputs(test), test.labels
    right, old = said.class_id == labels, labels != new
    unknown = {name: predictor.predict_outputs(part).score for name, part in ood.items()}
    row: dict[str, Any] = {
        "accuracy": right.mean(),
        "accuracy_old": right[old].mean(),
        **_judge_class(said.class_id, labels, new),
        "nearest_cluster": {"accuracy": (said.md_class_id == labels).mean()}
        | _judge_class(said.md_class_id, labels, new),
        "ece": expected_calibration_error(said.probability, right),
        "nll": negative_log_likelihood(said.log_probabilities, labels, log=True),
        "auroc": _compare(said.score, unknown),
        "auroc_old": _compare(said.score[old], unknown),
    }
    if len(predictor.calibration):
        row |= {"false_alarm_old": said.is_ood[old].mean(), "false_alarm_new": said.is_ood[~old].mean()}
    return row


def measure_before(predictor: Predictor, study: Study) -> dict[str, Any]:
    """The run as it was, for which the new class is unknown."""
    new = len(predictor.class_names)
    old = study.test.labels != new
    said, unknown = predictor.predict_outputs(study.test[old]), predictor.predict_outputs(study.test[~old])
    scores = {name: predictor.predict_outputs(part).score for name, part in study.ood.items()}
    return {
        "accuracy_old": (said.class_id == study.test.labels[old]).mean(),
        "auroc_old": _compare(said.score, scores),
        "auroc_new": auroc(said.score, unknown.score),
        "false_alarm_old": said.is_ood.mean(),
        "new_caught": unknown.is_ood.mean(),
    }


def _judge_class(class_ids: np.ndarray, labels: np.ndarray, new: int) -> dict[str, float]:
    hits = ((class_ids == new) & (labels == new)).sum()
    return {
        "recall": hits / max(1, (labels == new).sum()),
        "precision": hits / max(1, (class_ids == new).sum()),
    }


def _compare(known: np.ndarray, unknown: dict[str, np.ndarray]) -> dict[str, float]:
    values = {name: auroc(known, scores) for name, scores in unknown.items()}
    return values | {"mean": float(np.mean(list(values.values())))}


def compare_with_fit(detector: MapleDetector, study: Study) -> dict[str, Any]:
    """A detector of nine classes that is extended, beside one that is fitted on all ten."""
    cluster_to_class = detector.cluster_to_class_
    wide = {name: _widen(getattr(study, name)) for name in ("train", "new", "test")}
    own = nearest_of_class(detector.gaussians_, wide["train"].embeddings, wide["train"].labels, cluster_to_class)
    nine = replace(wide["train"], cluster_ids=own, cluster_to_class=cluster_to_class)
    grown_to_class = np.append(cluster_to_class, len(study.class_names) - 1)
    last = np.full(len(wide["new"]), len(cluster_to_class))
    ten = [
        replace(nine, cluster_to_class=grown_to_class),
        replace(wide["new"], cluster_ids=last, cluster_to_class=grown_to_class),
    ]
    options = {**as_dict(detector), "norm_exponent": detector.exponent_}
    expected = MapleDetector(**options).fit(ten).describe(wide["test"])
    half = len(wide["new"]) // 2
    ways = {"at_once": [wide["new"]], "in_two_parts": [wide["new"][:half], wide["new"][half:]]}
    differences: dict[str, Any] = {"clusters": len(grown_to_class), "components": expected.degrees_of_freedom}
    for name, parts in ways.items():
        grown = MapleDetector(**options).fit(nine)
        for part in parts:
            grown.extend(part)
        found = grown.describe(wide["test"])
        relative = np.abs(found.squared_distances / expected.squared_distances - 1)
        differences[name] = {
            "squared_distance": relative.max(),
            "probability": np.abs(found.posterior() - expected.posterior()).max(),
        }
    return differences


def _widen(outputs: Outputs) -> Outputs:
    return replace(outputs, embeddings=outputs.embeddings.astype(np.float64), logits=None)


def measure_learned(folder: Path, new: str, data_root: Path) -> dict[str, Any]:
    """A network that was trained on all classes."""
    predictor = load_predictor(folder)
    how: dict[str, Any] = {"size": predictor.size, "fit": predictor.fit, "data_root": data_root}
    test = open_images("cifar10/test", **how).with_class_names(predictor.class_names)
    ood = {name: embed(predictor.backbone, open_images(source, **how)) for name, source in OOD.items()}
    return measure(predictor, embed(predictor.backbone, test), ood, predictor.class_names.index(new))


def measure_all(predictor: Predictor, study: Study) -> dict[str, Any]:
    """The table, but for networks that learned all classes."""
    new = len(predictor.class_names)

    def update(images: Outputs, **taught: Outputs) -> dict[str, Any]:
        updated = update_from_outputs(predictor, images, study.class_names, **taught)
        row = measure(updated, study.test, study.ood, new)
        return {
            "images": len(images),
            "temperature": updated.probability.temperature,
            "weight": updated.probability.network_weight,
            "odds_exponent": updated.probability.odds_exponent,
            **row,
        }

    held = {"calibration": study.calibration, "validation": study.validation}
    numbers = [n for n in NUMBERS if n < len(study.new)]
    return {
        "equal": compare_with_fit(predictor.detector, study),
        "before": measure_before(predictor, study),
        "added": update(study.new),
        "calibrated": update(study.new, **held),
        "by_number": [update(study.new[:n], **held) for n in numbers],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()


def print_table(found: dict[str, Any]) -> None:
    """What the page shows."""
    for name, way in found["equal"].items():
        if isinstance(way, dict):
            print(f"equal {name:14s}", "  ".join(f"{key} {value:.1e}" for key, value in way.items()))
    rows = {name: found[name] for name in ("before", "added", "calibrated", "learned") if name in found}
    rows |= {f"{row['images']} images": row for row in found["by_number"]}
    for name, row in rows.items():
        cells = {key: value for key, value in row.items() if isinstance(value, float)}
        cells |= {key: row[key]["mean"] for key in ("auroc", "auroc_old") if key in row}
        print(f"{name:12s}", "  ".join(f"{key} {value:.4f}" for key, value in cells.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/")
    parser.add_argument("--new", default="truck", help="the class that the network does not learn")
    parser.add_argument(
        "--run", type=Path, help="a run that left it out; without it, one is trained, or found in --runs"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="--out of maple benchmark")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    arguments = parser.parse_args()
    use_fast_allocator()
    data_root = arguments.shared / "data"

    def job(**flags: Any) -> Job:
        training = Training.of("cifar10", recipe="maple", **flags)
        changes = {"epochs": arguments.epochs}
        return Job(training, PROFILES["resnet9"], arguments.seed, arguments.runs, data_root, changes)

    folder = arguments.run or ensure_trained(job(leave_out=(arguments.new,)))
    predictor, study = load_study(folder, arguments.new, data_root)
    found = {"new": arguments.new, "epochs": arguments.epochs, **measure_all(predictor, study)}
    if (whole := job()).is_finished:
        found["learned"] = measure_learned(whole.folder, arguments.new, data_root)
    found = _plain(found)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print_table(found)


if __name__ == "__main__":
    main()
