"""Test the guarantees of calibration on real embeddings: the public CIFAR-10 ResNet-20, post-hoc.

    python benchmarks/guarantees.py --shared ../shared --json results/guarantees.json [--splits 200]

Gaussians are fitted on the 50,000 training images; a fifth of the 10,000 test images is validation (score,
temperature), and the others are split repeatedly at random into calibration and test halves. Guaranteed and tested:

- false alarms: mean and deviation of the rate at 1, 5 and 10 %, compared with the beta-binomial distribution, and
  the p-value of a Kolmogorov-Smirnov test of the counts against it (randomised, since counts are discrete);
- confidence 0.95: how often the level is exceeded. Among the images of a finite half this is more than 5 %, even if the
  rate itself keeps its level: ``predicted`` is the expected share. Calibration halves are therefore also drawn with
  replacement from all images; the rate among all of them is then the rate itself, and at most 5 % may exceed it;
- per class: the rate among images of each predicted class, with a single threshold and with one per class;
- batches: the mean false-discovery rate at 0.1 of in/out mixtures, compared with 0.1 times the in-distribution share;
- sets: how often the prediction set contains the true class, and its mean size;
- drift: how often ``maple monitor`` reports drift where there is none, in a batch and along a stream.

Reported but not guaranteed: the false-alarm rate of noisy, blurred, low-contrast or bright images.

Halves of one file are exchangeable: this tests the code, ties included, on real scores. It does not test whether future
images resemble the calibration images; the corruptions show the effect if they do not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy
from scipy.ndimage import gaussian_filter
from scipy.stats import betabinom, kstest

from maple.data.sources import open_images
from maple.decisions.calibration import Calibration
from maple.decisions.conformal import benjamini_hochberg, conformal_threshold, count_allowed
from maple.decisions.drift import StreamMonitor, compare_scores
from maple.decisions.probability import Probability
from maple.decisions.sets import prediction_sets, true_class_scores
from maple.detectors.maple import MapleDetector
from maple.networks import embed
from maple.types import Outputs
from resnet20 import OOD, embed_all, public_resnet20

LEVELS = (0.01, 0.05, 0.1)
CONFIDENCE = 0.95
FDR = 0.1
IND_SHARES = (0.5, 0.9)
BATCHES_PER_SPLIT = 5
DRAWS_PER_SPLIT = 10
COVERAGES = (0.9, 0.95)
MONITORED = 200  # images in a batch that is compared with the calibration images
VALIDATION_SHARE = 0.2
CORRUPTIONS = {  # from hardly visible to strong
    "noise": (0.02, 0.05, 0.1),  # deviation, of a range of 1
    "blur": (0.5, 0.75, 1.0),  # deviation in pixels
    "contrast": (0.75, 0.5, 0.25),  # that is left
    "brightness": (0.1, 0.2, 0.3),  # added
}

Row = dict[str, Any]
Splits = list[tuple[np.ndarray, np.ndarray]]


class Scored(NamedTuple):
    """What is said about N images."""

    scores: np.ndarray  # (N,)
    class_ids: np.ndarray  # (N,) predicted
    log_probabilities: np.ndarray  # (N, C)
    labels: np.ndarray  # (N,)

    def at(self, rows: np.ndarray) -> Scored:
        return Scored(*(array[rows] for array in self))

    def calibrate(self) -> Calibration:
        set_scores = true_class_scores(self.log_probabilities, self.labels)
        return Calibration(self.scores, self.class_ids, self.log_probabilities.shape[1], set_scores)


# --- outputs and scores ----------------------------------------------------------------------------------------------


def embed_first(shared: Path, limit: int) -> dict[str, Outputs]:
    """As ``embed_all``, the first ``limit`` images of each set only."""
    backbone, outputs = public_resnet20(shared), {}
    for name, source in {"train": "cifar10/train", "test": "cifar10/test", **OOD}.items():
        images = open_images(source, size=32, data_root=shared / "data")
        outputs[name] = embed(backbone, images, indices=np.arange(min(limit, len(images))))
    return outputs


def corrupt(images: np.ndarray, kind: str, strength: float, seed: int = 0) -> np.ndarray:
    """Images (N, S, S, 3) uint8, corrupted."""
    x = images / 255
    if kind == "noise":
        x = x + strength * np.random.default_rng(seed).standard_normal(x.shape)
    elif kind == "blur":
        x = gaussian_filter(x, (0, strength, strength, 0))
    elif kind == "contrast":
        mean = x.mean(axis=(1, 2, 3), keepdims=True)
        x = mean + strength * (x - mean)
    else:
        x = x + strength
    return np.round(255 * np.clip(x, 0, 1)).astype(np.uint8)


def embed_corrupted(shared: Path, rows: np.ndarray) -> dict[tuple[str, float], Outputs]:
    """Outputs for these test images under each corruption."""
    backbone = public_resnet20(shared)
    pixels = open_images("cifar10/test", size=32, data_root=shared / "data").subset(rows).pixels
    assert pixels is not None
    return {
        (kind, strength): embed(backbone, corrupt(pixels, kind, strength))
        for kind, strengths in CORRUPTIONS.items()
        for strength in strengths
    }


def score(
    detector: MapleDetector, probability: Probability, outputs: Outputs, labels: np.ndarray | None = None
) -> Scored:
    found = detector.describe(outputs)
    log_probabilities = probability.log_probabilities(found)
    labels = outputs.labels if labels is None else labels
    assert labels is not None
    return Scored(found.score, log_probabilities.argmax(axis=1), log_probabilities, labels)


# --- promises --------------------------------------------------------------------------------------------------------


def measure_false_alarms(images: Scored, splits: Splits, rng: np.random.Generator) -> list[Row]:
    """One row per level: the marginal promise."""
    n, m = map(len, splits[0])
    rows = []
    for level in LEVELS:
        counts = count_false_alarms(images, splits, level)
        k = count_allowed(n, level)
        expected = betabinom(m, k + 1, n - k)
        cdf = np.r_[0.0, np.cumsum(expected.pmf(np.arange(m + 1)))]  # (m + 2,) of -1, 0, ..., m
        uniform = cdf[counts] + rng.uniform(size=len(counts)) * (cdf[counts + 1] - cdf[counts])
        rows.append(
            {
                "level": level,
                "mean": np.mean(counts / m),
                "expected": expected.mean() / m,
                "deviation": np.std(counts / m, ddof=1),
                "expected deviation": expected.std() / m,
                "KS p-value": kstest(uniform, "uniform").pvalue,
                "exceeded": np.mean(counts > level * m),
            }
        )
    return rows


def measure_confidence(images: Scored, splits: Splits, rng: np.random.Generator) -> list[Row]:
    """One row per level: how often it is exceeded in spite of the confidence."""
    n, m = map(len, splits[0])
    rows = []
    for level in LEVELS:
        counts = count_false_alarms(images, splits, level, CONFIDENCE)
        k = count_allowed(n, level, CONFIDENCE)
        drawn = (rng.choice(images.scores, size=n) for _ in range(DRAWS_PER_SPLIT * len(splits)))
        rates = [np.mean(images.scores > conformal_threshold(row, level, CONFIDENCE)) for row in drawn]
        rows.append(
            {
                "level": level,
                "mean": np.mean(counts / m),
                "exceeded in halves": np.mean(counts > level * m),
                "predicted": betabinom(m, k + 1, n - k).sf(np.floor(level * m + 1e-9)),
                "exceeded": np.mean(np.array(rates) > level),
                "at most": 1 - CONFIDENCE,
            }
        )
    return rows


def measure_per_class(images: Scored, splits: Splits, level: float = 0.05) -> list[Row]:
    """One row per predicted class: its false-alarm rate with the threshold of all and with its own."""
    n_classes = images.log_probabilities.shape[1]
    rates = np.full((2, len(splits), n_classes), np.nan)
    own = np.zeros(n_classes)
    for s, (calibration, test) in enumerate(splits):
        taught, new = images.at(calibration).calibrate(), images.at(test)
        for per_class in (False, True):
            decision = taught.decide(level, per_class=per_class)
            flagged = decision.is_ood(new.scores, new.class_ids)
            for c in np.unique(new.class_ids):
                rates[int(per_class), s, c] = flagged[new.class_ids == c].mean()
        own += decision.group_of_class > 0
    return [
        {
            "class": c,
            "level": level,
            "one for all": np.nanmean(rates[0, :, c]),
            "per class": np.nanmean(rates[1, :, c]),
            "error": np.nanstd(rates[1, :, c], ddof=1) / np.sqrt(len(splits)),
            "has its own": own[c] / len(splits),
        }
        for c in range(n_classes)
        if np.isfinite(rates[:, :, c]).any()
    ]


def measure_batches(images: Scored, ood: dict[str, Scored], splits: Splits, rng: np.random.Generator) -> list[Row]:
    """One row per OOD set and in-distribution share: the false-discovery rate of batches.

    With fdr (n + 1) / m = 1 the rate is fdr times the share, however many images are caught; larger batches only lose.
    """
    size = int(FDR * (len(splits[0][0]) + 1))
    rows = []
    for name, unknown in ood.items():
        for share in IND_SHARES:
            n_ind = round(share * size)
            found = np.array(
                [
                    measure_batch(images.at(calibration), images.at(test), unknown, n_ind, size - n_ind, rng)
                    for calibration, test in splits
                    for _ in range(BATCHES_PER_SPLIT)
                ]
            ).reshape(len(splits), BATCHES_PER_SPLIT, 2)
            per_split = found.mean(axis=1)  # batches of one split share their calibration images
            rows.append(
                {
                    "ood": name,
                    "in-distribution": share,
                    "images": size,
                    "rate": per_split[:, 0].mean(),
                    "error": per_split[:, 0].std(ddof=1) / np.sqrt(len(splits)),
                    "expected": FDR * share,
                    "at most": FDR,
                    "caught": per_split[:, 1].mean(),
                }
            )
    return rows


def measure_batch(
    calibration: Scored, known: Scored, unknown: Scored, n_ind: int, n_ood: int, rng: np.random.Generator
) -> tuple[float, float]:
    """False share of the flagged, and caught share of the OOD images, of one mixture."""
    ind = known.at(rng.choice(len(known.scores), n_ind, replace=False))
    ood = unknown.at(rng.choice(len(unknown.scores), n_ood, replace=False))
    scores, class_ids = np.r_[ind.scores, ood.scores], np.r_[ind.class_ids, ood.class_ids]
    flagged = benjamini_hochberg(calibration.calibrate().decide().p_values(scores, class_ids), FDR)
    return flagged[:n_ind].sum() / max(flagged.sum(), 1), flagged[n_ind:].mean()


def measure_sets(images: Scored, splits: Splits) -> list[Row]:
    """One row per coverage."""
    rows = []
    for coverage in COVERAGES:
        covered, sizes, alone = [], [], []
        for calibration, test in splits:
            new = images.at(test)
            sets = prediction_sets(new.log_probabilities, images.at(calibration).calibrate().set_scores, coverage)
            covered.append(sets[np.arange(len(sets)), new.labels].mean())
            sizes.append(sets.sum(axis=1).mean())
            alone.append((sets.sum(axis=1) == 1).mean())
        rows.append(
            {
                "coverage": coverage,
                "mean": np.mean(covered),
                "deviation": np.std(covered, ddof=1),
                "classes": np.mean(sizes),
                "one class": np.mean(alone),
            }
        )
    return rows


def measure_drift(images: Scored, ood: dict[str, Scored], splits: Splits, rng: np.random.Generator) -> list[Row]:
    """How often ``monitor`` sees drift: where there is none, and in batches of 200 with a tenth of unknown images."""
    rows = []
    for level in LEVELS:
        verdicts, alarms = [], []
        for calibration, test in splits:
            batch = images.scores[rng.choice(test, MONITORED, replace=False)]
            verdicts.append(compare_scores(batch, images.scores[calibration], level=level).drift)
            stream = StreamMonitor(images.scores[calibration], level=level, seed=len(alarms))
            stream.update(rng.permutation(images.scores[test]))
            alarms.append(stream.alarm_at_ is not None)
        row = {"level": level, "batch, no drift": np.mean(verdicts), "stream, no drift": np.mean(alarms)}
        for name, unknown in ood.items():
            found = []
            for calibration, test in splits:
                known = images.scores[rng.choice(test, MONITORED - MONITORED // 10, replace=False)]
                batch = np.concatenate([known, rng.choice(unknown.scores, MONITORED // 10, replace=False)])
                found.append(compare_scores(batch, images.scores[calibration], level=level).drift)
            row[f"batch, a tenth {name}"] = np.mean(found)
        rows.append(row)
    return rows


def measure_corruption(
    images: Scored, corrupted: dict[tuple[str, float], Scored], splits: Splits, level: float = 0.05
) -> list[Row]:
    """One row per corruption: the false-alarm rate at 5 %. The corrupted images are the first of ``images``."""
    rows = []
    for (kind, strength), changed in corrupted.items():
        rates = []
        for calibration, test in splits:
            new = changed.at(test[test < len(changed.scores)])
            decision = images.at(calibration).calibrate().decide(level)
            rates.append(decision.is_ood(new.scores, new.class_ids).mean())
        rows.append(
            {
                "corruption": kind,
                "strength": strength,
                "level": level,
                "rate": np.mean(rates),
                "accuracy": np.mean(changed.class_ids == changed.labels),
            }
        )
    return rows


def count_false_alarms(images: Scored, splits: Splits, level: float, confidence: float | None = None) -> np.ndarray:
    """How many images of each test half are flagged (n_splits,)."""

    def flagged() -> Iterator[int]:
        for calibration, test in splits:
            new = images.at(test)
            decision = images.at(calibration).calibrate().decide(level, confidence)
            yield int(decision.is_ood(new.scores, new.class_ids).sum())

    return np.array(list(flagged()))


# --- the table -------------------------------------------------------------------------------------------------------


def print_table(title: str, rows: list[Row]) -> None:
    cells = [list(rows[0]), *([f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        print("  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))


def measure(outputs: dict[str, Outputs], shared: Path, n_splits: int, n_corrupted: int, seed: int) -> dict[str, Any]:
    """Everything; tables by name, and what they were made from."""
    rng = np.random.default_rng(seed)
    n_validation = int(VALIDATION_SHARE * len(outputs["test"]))
    order = rng.permutation(len(outputs["test"]))
    validation, others = outputs["test"][order[:n_validation]], outputs["test"][order[n_validation:]]

    detector = MapleDetector().fit(outputs["train"], validation)
    found = detector.describe(validation)
    assert validation.labels is not None
    probability = Probability().fit(found, validation.labels)
    images = score(detector, probability, others)
    ood = {name: score(detector, probability, outputs[name]) for name in OOD}
    corrupted = {
        which: score(detector, probability, changed, images.labels[:n_corrupted])
        for which, changed in embed_corrupted(shared, order[n_validation:][:n_corrupted]).items()
    }
    halves = [np.array_split(rng.permutation(len(others)), 2) for _ in range(n_splits)]
    splits = [(calibration, test) for calibration, test in halves]
    about = {
        "splits": n_splits,
        "seed": seed,
        "training images": len(outputs["train"]),
        "validation images": n_validation,
        "calibration images": len(splits[0][0]),
        "test images": len(splits[0][1]),
        "corrupted images": min(n_corrupted, len(others)),
        "score": detector.score_,
        "temperature": probability.temperature,
        "network weight": probability.network_weight,
        "odds exponent": probability.odds_exponent,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
    return {
        "about": about,
        "false alarms": measure_false_alarms(images, splits, rng),
        f"confidence {CONFIDENCE}": measure_confidence(images, splits, rng),
        "per class": measure_per_class(images, splits),
        f"batches, false-discovery rate {FDR}": measure_batches(images, ood, splits, rng),
        "prediction sets": measure_sets(images, splits),
        "drift": measure_drift(images, ood, splits, rng),
        "false alarms under corruption": measure_corruption(images, corrupted, splits),
    }


def as_plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/ and weights/")
    parser.add_argument("--splits", type=int, default=200, help="how often calibration and test halves are drawn")
    parser.add_argument("--corrupted", type=int, default=2000, help="how many test images are corrupted")
    parser.add_argument("--limit", type=int, help="only the first images of each set, to try the script")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the tables")
    arguments = parser.parse_args()
    shared = arguments.shared
    outputs = embed_all(shared) if arguments.limit is None else embed_first(shared, arguments.limit)
    results = as_plain(measure(outputs, shared, arguments.splits, arguments.corrupted, arguments.seed))
    print(", ".join(f"{key} {value}" for key, value in results["about"].items()))
    for title, rows in results.items():
        if title != "about":
            print_table(title, rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
