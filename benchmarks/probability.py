"""Compare ``probability`` with the softmax of the same network at a fitted temperature, on many networks.

    python benchmarks/probability.py --shared ../shared --cache ~/outputs --settings digits demo plankton-225
    python benchmarks/probability.py --shared ../shared --cache ~/outputs      # all settings, the slow networks last
    python benchmarks/probability.py table

Gaussians are fitted on training images, both probabilities on the same validation images, and measured on test images
that were used for nothing else. Intervals are those of the difference, MAPLE less scaled softmax, over 1,000 bootstrap
samples of the test images (2.5 to 97.5 %). A network without a head has no softmax; its reference is the class
posterior of the Gaussians with a temperature.

Outputs of the networks are kept in ``--cache``, and runs (digits, demo, plankton) below it in ``runs``: what exists is
not computed again, and an interrupted command continues. ``strong`` needs a run of ``strength.py``: ``--strong RUN``.
Rows are written to ``--json`` as they come; those that exist are not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax

from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.decisions.pool_fit import fit_temperature
from maple.decisions.probability import Probability
from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.evaluation.paper.profiles import UNKNOWN_PLANKTON
from maple.networks import open_model, use_fast_allocator
from maple.options import read_names
from maple.prediction.store import load_predictor
from maple.runs.demo import run_demo
from maple.runs.folder import RunFolder
from maple.runs.requests import TrainRequest
from maple.runs.setup.splits import reopen_splits
from maple.runs.train import train_run
from maple.stats.metrics import expected_calibration_error
from maple.types import Outputs
from pretrained import MODEL
from public import Study, cached_outputs
from resnet20 import judge

SAMPLES = 1000  # of the bootstrap
FIGURES = ("accuracy", "nll", "ece")
PLANKTON = {"leave_out": read_names(f"@{UNKNOWN_PLANKTON}"), "size": 32, "augment": "flip-both"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Folders of the images, of cached outputs and runs, and of the strong network."""

    shared: Path
    cache: Path
    strong: Path | None = None


@dataclass(frozen=True)
class Case:
    """A detector fitted on ``n_fit`` training images, and outputs to fit probabilities on and to measure them on."""

    detector: MapleDetector
    n_fit: int
    validation: Outputs
    test: Outputs
    note: str = ""


Opener = Callable[[Place], Case]


# --- settings ---------------------------------------------------------------------------------------------------------


def open_public(name: str, n_fit: int, n_validation: int, n_test: int, precision: str = "32-true") -> Opener:
    """A public network; the first test images are for validation, those after them to measure on."""

    def opened(place: Place) -> Case:
        study = Study(name, place.shared, place.cache, precision, with_ood=False)
        train, test = study.first("train", n_fit), study.first("test", n_validation + n_test)
        validation = test[:n_validation]
        detector = MapleDetector().fit(train, validation)
        return Case(detector, n_fit, validation, test[n_validation:], "" if precision == "32-true" else "bfloat16")

    return opened


def open_run(name: str, train: Callable[[Path, Path], Any], n_validation: int | None = None) -> Opener:
    """A run of MAPLE, trained unless it exists, with its detector; ``n_validation`` images are drawn with seed 0."""

    def opened(place: Place) -> Case:
        folder = place.strong if name == "strong" else place.cache / "runs" / name
        if folder is None:
            raise SystemExit("the strong network is a run of benchmarks/strength.py: give its folder with --strong")
        if not (folder / "results.json").exists():
            train(folder, place.shared / "data")
        predictor = load_predictor(folder)
        splits = reopen_splits(RunFolder(folder), predictor.size, place.shared / "data")

        def read(role: str, images: ImageSet) -> Outputs:
            found = cached_outputs(place.cache / f"run-{name}", role, lambda: predictor.backbone, images)
            return replace(found, cluster_to_class=predictor.cluster_to_class)

        validation = read("validation", splits.validation)
        if n_validation is not None:
            rows = np.random.default_rng(0).permutation(len(validation))[:n_validation]
            validation = validation[np.sort(rows)]
        n_fit = int(predictor.detector.learned_.cluster_sizes.sum())
        return Case(predictor.detector, n_fit, validation, read("test", splits.test))

    return opened


def open_headless(
    place: Place, size: int = 64, n_fit: int = 5000, n_validation: int = 1200, n_test: int = 2500
) -> Case:
    """EfficientNet-Lite0 from ImageNet without its head, on the 95 known taxa of plankton."""
    backbone = open_model(MODEL, drop_head=True, size=size, trust=True)

    def read(role: str) -> ImageSet:
        images = open_images(f"plankton_ndsb/{role}", size=size, data_root=place.shared / "data")
        known = [name for name in images.class_names if name not in PLANKTON["leave_out"]]
        is_known = np.isin(np.array(images.class_names)[images.labels], known)
        rows = np.random.default_rng(0).permutation(np.flatnonzero(is_known))
        return images.subset(rows[: n_fit + n_validation if role == "train" else n_test]).with_class_names(known)

    folder = place.cache / f"efficientnet-lite0-{size}px"
    train, test = (cached_outputs(folder, role, lambda: backbone, read(role)) for role in ("train", "test"))
    validation = train[n_fit:]
    detector = MapleDetector().fit(train[:n_fit], validation)
    return Case(detector, n_fit, validation, test, "no head: against Gaussians with a temperature")


def train_digits(folder: Path, data_root: Path) -> None:
    train_run(TrainRequest(source="digits", out=folder))


def train_plankton(folder: Path, data_root: Path) -> None:
    flags = {**PLANKTON, "splits": [0.79, 0.105, 0.105, 0.0], "backbone": "resnet9", "epochs": 6}
    train_run(TrainRequest(source="plankton_ndsb", out=folder, data_root=data_root, flags=flags))


def train_demo(folder: Path, data_root: Path) -> None:
    run_demo(folder)


def refuse(folder: Path, data_root: Path) -> None:
    raise SystemExit(f"'{folder}' is not a finished run: train it with benchmarks/strength.py")


SETTINGS: dict[str, Opener] = {
    "demo": open_run("demo", train_demo),
    "digits": open_run("digits", train_digits),
    "plankton-225": open_run("plankton", train_plankton, 225),
    "plankton-2000": open_run("plankton", train_plankton, 2000),
    "plankton-headless": open_headless,
    "resnet20-cifar10": open_public("resnet20-cifar10", 20_000, 5_000, 5_000),
    "resnet20-cifar10-225": open_public("resnet20-cifar10", 20_000, 225, 5_000),
    "densenet-cifar10": open_public("densenet-cifar10", 3_000, 2_000, 2_000),
    "densenet-cifar100": open_public("densenet-cifar100", 4_000, 2_000, 2_000),
    "strong": open_run("strong", refuse),
    "wrn-cifar10": open_public("wrn-cifar10", 10_000, 5_000, 5_000, "bf16-mixed"),
    "wrn-cifar100": open_public("wrn-cifar100", 10_000, 5_000, 5_000, "bf16-mixed"),
}


# --- figures ----------------------------------------------------------------------------------------------------------


def measure(case: Case) -> Row:
    """The figures of a row."""
    labels = case.test.labels
    assert labels is not None and case.validation.labels is not None
    taught, found = case.detector.describe(case.validation), case.detector.describe(case.test)
    fitted = Probability().fit(taught, case.validation.labels)
    distances = (taught.squared_distances, case.validation.labels, taught.log_weights, taught.cluster_to_class)
    reference = replace(fitted, temperature=fit_temperature(*distances))
    logs = {"maple": fitted.log_probabilities(found), **references(reference, found)}
    return {
        "n_fit": case.n_fit,
        "n_validation": len(case.validation),
        "n_test": len(case.test),
        "classes": len(found.class_log_priors),
        "note": case.note,
        "fitted": fitted.to_dict(),
        **{name: judge(values, labels) for name, values in logs.items()},
        "difference": bootstrap(logs["maple"], logs["scaled"], labels),
    }


def references(fitted: Probability, found: Description) -> dict[str, np.ndarray]:
    """Log class probabilities (N, C) to compare with: softmax and softmax at its temperature, or the Gaussians'."""
    if found.logits is None:
        return {"scaled": found.log_posterior(fitted.temperature)}
    network = found.log_softmax
    return {"softmax": network, "scaled": log_softmax(network / fitted.softmax_temperature, axis=1)}


def bootstrap(ours: np.ndarray, theirs: np.ndarray, labels: np.ndarray, seed: int = 0) -> dict[str, list[float]]:
    """2.5 and 97.5 % quantiles of each figure of ``ours`` minus that of ``theirs``, over samples of the images."""
    rng, n = np.random.default_rng(seed), len(labels)
    each = [by_image(logs, labels) for logs in (ours, theirs)]
    differences = np.empty((SAMPLES, len(FIGURES)))
    for sample in differences:
        rows = rng.integers(0, n, n)
        one, other = (summarise(*(values[rows] for values in of_images)) for of_images in each)
        sample[:] = np.subtract(one, other)
    low, high = np.quantile(differences, [0.025, 0.975], axis=0)
    return {name: [float(low[i]), float(high[i])] for i, name in enumerate(FIGURES)}


def by_image(logs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence, whether the most probable class is correct, and negative log-likelihood of each image (N,)."""
    return np.exp(logs.max(axis=1)), logs.argmax(axis=1) == labels, -logs[np.arange(len(labels)), labels]


def summarise(confidence: np.ndarray, correct: np.ndarray, losses: np.ndarray) -> tuple[float, float, float]:
    """The figures of ``FIGURES``."""
    return float(correct.mean()), float(losses.mean()), expected_calibration_error(confidence, correct)


def verdict(row: Row) -> str:
    """Where MAPLE is worse: the mean for the likelihood, the interval for accuracy and calibration error."""
    worse = {
        "NLL": row["maple"]["nll"] > row["scaled"]["nll"] + 1e-12,
        "ECE": row["difference"]["ece"][0] > 0,
        "accuracy": row["difference"]["accuracy"][1] < 0,
    }
    return ", ".join(name for name, is_worse in worse.items() if is_worse) or "not worse"


# --- rows -------------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def print_table(rows: Iterable[Row]) -> None:
    """Markdown; MAPLE, then scaled softmax."""
    columns = [
        "setting",
        "fit, validation, test",
        "accuracy",
        "NLL",
        "ECE (floor)",
        "interval of NLL",
        "interval of ECE",
    ]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        ours, theirs, difference = row["maple"], row["scaled"], row["difference"]
        cells = [
            row["setting"] + (f" ({row['note']})" if row["note"] else ""),
            ", ".join(f"{row[key]:,}" for key in ("n_fit", "n_validation", "n_test")),
            *(f"{ours[key]:.4f}, {theirs[key]:.4f}" for key in ("accuracy", "nll")),
            f"{ours['ece']:.4f} ({ours['ece_floor']:.4f}), {theirs['ece']:.4f}",
            *(f"{difference[key][0]:+.4f} to {difference[key][1]:+.4f}" for key in ("nll", "ece")),
        ]
        print("| " + " | ".join(cells) + " |")
        if (found := verdict(row)) != "not worse":
            print(f"<!-- {row['setting']}: {found} -->")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=["measure", "table"], default="measure")
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/ and weights/")
    parser.add_argument("--cache", type=Path, help="folder of outputs and runs, outside the project")
    parser.add_argument("--strong", type=Path, help="run of strength.py, for the setting 'strong'")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--json", type=Path, default=Path("results/probability.json"), help="rows, read and written")
    arguments = parser.parse_args()
    if arguments.mode == "measure":
        if arguments.cache is None:
            parser.error("--cache is needed: a folder outside the project for outputs and runs")
        use_fast_allocator()
        place = Place(arguments.shared, arguments.cache, arguments.strong)
        done = {row["setting"] for row in read_rows(arguments.json)}
        for name in [name for name in arguments.settings if name not in done]:
            row = {"setting": name, **measure(SETTINGS[name](place))}
            rows = sorted([*read_rows(arguments.json), row], key=lambda row: list(SETTINGS).index(row["setting"]))
            arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
            print(f"{name}: {verdict(row)}", flush=True)
    print_table(read_rows(arguments.json))


if __name__ == "__main__":
    main()
