"""Do the promises hold on every network? False alarms, prediction sets and false discoveries over many splits.

    python benchmarks/false_alarms.py run --shared ../shared --cache ~/outputs
    python benchmarks/false_alarms.py run --shared ../shared --cache ~/outputs --networks plankton digits
    python benchmarks/false_alarms.py table

Test images that were used for nothing else are split 200 times into calibration and new images. Given the images the
splits are independent, and the mean over splits is known exactly: the level attainable with that many calibration
images (n), which is the largest below the nominal one,

- false alarms: (k + 1) / (n + 1), k scores above the threshold;
- prediction sets: r / (n + 1), the share of new images whose true class is at or below the threshold. The most probable
  class is always in the set, so that the sets cover more: ``covered``;
- false discoveries among the flagged of a batch: 0.1 times the share of known images, for batches of 0.1 (n + 1).

``within`` says whether the mean lies within 0.3 points or three standard errors, whichever is larger. Outputs of the
networks are kept in ``--cache``: an interrupted command continues. ``digits`` is to try the script.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from guarantees import BATCHES_PER_SPLIT, FDR, LEVELS, Scored, as_plain, count_false_alarms, measure_batch, print_table
from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.decisions.conformal import count_allowed, sort_scores
from maple.decisions.probability import Probability
from maple.decisions.sets import prediction_sets, true_class_scores
from maple.types import Outputs
from probability import PLANKTON, SETTINGS, Case, Place, open_public
from public import Study, cached_outputs

COVERAGES = (0.9, 0.95, 0.99)
SHARES = (0.5, 0.9)  # of known images in a batch
COLUMNS = ("what", "level", "attainable", "mean", "error", "covered", "caught", "within")
SLACK = 0.003
UNKNOWN_IMAGES = 1000

Row = dict[str, Any]
Split = tuple[np.ndarray, np.ndarray]


class Setting(NamedTuple):
    """How to open a network with its known images, and unknown images for it."""

    open: Callable[[Place], Case]
    unknown: Callable[[Place, Case], Outputs]


def public(name: str, n_fit: int, n_test: int, precision: str = "32-true") -> Setting:
    """A public network, and the first images of SVHN."""

    def unknown(place: Place, case: Case) -> Outputs:
        return Study(name, place.shared, place.cache, precision).first("svhn", UNKNOWN_IMAGES)

    return Setting(open_public(name, n_fit, 1000, n_test, precision), unknown)


def plankton_unknown(place: Place, case: Case) -> Outputs:
    """Images of the taxa that the plankton run has not learned."""
    from maple.prediction.store import load_predictor

    predictor = load_predictor(place.cache / "runs" / "plankton")
    images = open_images("plankton_ndsb/test", size=predictor.size, data_root=place.shared / "data")
    left_out = np.isin(np.array(images.class_names)[images.labels], PLANKTON["leave_out"])
    chosen: ImageSet = images.subset(np.flatnonzero(left_out)[:UNKNOWN_IMAGES])
    return cached_outputs(place.cache / "run-plankton", "unknown", lambda: predictor.backbone, chosen)


def shuffled(place: Place, case: Case) -> Outputs:
    """Embeddings whose features come from different images: unlike any, for lack of unknown images."""
    rng, known = np.random.default_rng(0), case.test[:UNKNOWN_IMAGES]
    assert known.logits is not None
    mixed = [rng.permuted(array, axis=0) for array in (known.embeddings, known.logits)]
    shallow = None if known.shallow is None else rng.permuted(known.shallow, axis=0)
    return Outputs(mixed[0], mixed[1], shallow=shallow)


NETWORKS: dict[str, Setting] = {
    "resnet20-cifar10": public("resnet20-cifar10", 10_000, 8_000),
    "densenet-cifar10": public("densenet-cifar10", 10_000, 8_000, "bf16-mixed"),
    "densenet-cifar100": public("densenet-cifar100", 10_000, 8_000, "bf16-mixed"),
    "wrn-cifar10": public("wrn-cifar10", 10_000, 8_000, "bf16-mixed"),
    "plankton": Setting(SETTINGS["plankton-2000"], plankton_unknown),
    "digits": Setting(SETTINGS["digits"], shuffled),
}


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_splits(n_images: int, n_splits: int, rng: np.random.Generator) -> list[Split]:
    """Calibration and new images: about half each; n + 1 is a multiple of 10, for batches of whole images."""
    n = 10 * (n_images // 20) - 1
    return [(order[:n], order[n:]) for order in (rng.permutation(n_images) for _ in range(n_splits))]


def judge(what: str, level: float, attainable: float, found: np.ndarray, **more: Any) -> Row:
    """One row: the mean of a figure over splits next to its expectation."""
    error = found.std(ddof=1) / np.sqrt(len(found))
    within = abs(found.mean() - attainable) <= max(SLACK, 3 * error)
    return {"what": what, "level": level, "attainable": attainable, "mean": found.mean(), "error": error, **more,
            "within": bool(within)}  # fmt: skip


def measure_false_alarms(images: Scored, splits: list[Split]) -> list[Row]:
    n, m = map(len, splits[0])
    return [
        judge("false alarms", a, (count_allowed(n, a) + 1) / (n + 1), count_false_alarms(images, splits, a) / m)
        for a in LEVELS
    ]


def measure_sets(images: Scored, splits: list[Split]) -> list[Row]:
    """Ties aside: scores of the true class are continuous."""
    rows, n = [], len(splits[0][0])
    own = true_class_scores(images.log_probabilities, images.labels)
    for coverage in COVERAGES:
        rank = int(np.ceil(coverage * (n + 1) - 1e-9))
        below, covered = [], []
        for calibration, new in splits:
            threshold = sort_scores(own[calibration])[rank - 1] if rank <= n else np.inf
            below.append((own[new] <= threshold).mean())
            sets = prediction_sets(images.log_probabilities[new], own[calibration], coverage)
            covered.append(sets[np.arange(len(new)), images.labels[new]].mean())
        rows.append(judge("sets", coverage, min(rank / (n + 1), 1.0), np.array(below), covered=np.mean(covered)))
    return rows


def measure_discoveries(images: Scored, unknown: Scored, splits: list[Split], rng: np.random.Generator) -> list[Row]:
    size, rows = round(FDR * (len(splits[0][0]) + 1)), []
    for share in SHARES:
        n_ind = round(share * size)
        found = [
            np.mean(
                [
                    measure_batch(images.at(calibration), images.at(new), unknown, n_ind, size - n_ind, rng)
                    for _ in range(BATCHES_PER_SPLIT)
                ],
                axis=0,
            )
            for calibration, new in splits
        ]
        false, caught = np.array(found).T
        what = f"false discoveries, {share:.0%} known"
        rows.append(judge(what, FDR, FDR * n_ind / size, false, caught=caught.mean()))
    return rows


def measure(setting: Setting, place: Place, n_splits: int, seed: int = 0) -> dict[str, Any]:
    case, rng = setting.open(place), np.random.default_rng(seed)
    assert case.validation.labels is not None
    probability = Probability().fit(case.detector.describe(case.validation), case.validation.labels)
    images, unknown = (score(case, probability, each) for each in (case.test, setting.unknown(place, case)))
    splits = draw_splits(len(images.scores), n_splits, rng)
    n, m = map(len, splits[0])
    rows = [
        *measure_false_alarms(images, splits),
        *measure_sets(images, splits),
        *measure_discoveries(images, unknown, splits, rng),
    ]
    about = {"splits": n_splits, "seed": seed, "calibration images": n, "new images": m}
    about |= {"training images": case.n_fit, "score": case.detector.score_} | ({"in": case.note} if case.note else {})
    return {"about": about, "rows": rows}


def score(case: Case, probability: Probability, outputs: Outputs) -> Scored:
    found = case.detector.describe(outputs)
    logs = probability.log_probabilities(found)
    labels = np.full(len(outputs), -1) if outputs.labels is None else outputs.labels
    return Scored(found.score, logs.argmax(axis=1), logs, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/ and weights/")
    parser.add_argument("--cache", type=Path, help="folder for outputs of networks and runs")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[n for n in NETWORKS if n != "digits"])
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--json", type=Path, default=Path("results/false_alarms.json"))
    arguments = parser.parse_args()
    results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    if arguments.command == "run":
        if arguments.cache is None:
            parser.error("give a folder for outputs and runs with --cache")
        place = Place(arguments.shared, arguments.cache)
        for name in arguments.networks:
            results[name] = as_plain(measure(NETWORKS[name], place, arguments.splits))
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    for name, found in results.items():
        about = ", ".join(f"{key} {value}" for key, value in found["about"].items())
        print_table(f"{name} ({about})", [{key: row.get(key, "") for key in COLUMNS} for row in found["rows"]])


if __name__ == "__main__":
    main()
