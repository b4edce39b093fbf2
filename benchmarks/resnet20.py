"""Fit MAPLE post-hoc on the public CIFAR-10 ResNet-20, and measure every score and probability.

    python benchmarks/resnet20.py --shared ../shared                      # the table
    python benchmarks/resnet20.py --shared ../shared --write-sample FILE  # also a small sample of the outputs, float16

Gaussians are fitted on the 50,000 training images; the 10,000 test images are tested against all images of each OOD
file, larger ones resized to 32 x 32. Prints AUROC per OOD set, accuracies and calibration errors, and the number of
components. A second table has the quantities that need held-out images: every score and the class probabilities, fitted
on a random half of the test images and measured on the other half, mean and deviation over ten such splits.

The public weights expect ImageNet's mean and deviation. Only the halves (seeds 0 to 9) and the sample (seed 0) are
random.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from scipy.special import logsumexp

from maple.data.sources import open_images
from maple.decisions.pool_fit import fit_softmax_temperature, fit_temperature
from maple.decisions.probability import Probability
from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.detectors.registry import create_detector
from maple.files import save_arrays
from maple.networks import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Backbone,
    create_backbone,
    embed,
    load_weights,
    use_fast_allocator,
)
from maple.stats.metrics import accuracy, auroc, calibration_floor, expected_calibration_error, negative_log_likelihood
from maple.types import Outputs

OOD = {"cifar100": "cifar100/test", "tiny_imagenet": "tiny_imagenet/val", "svhn": "svhn/test"}
GAUSSIANS = {
    "tied": {"covariance": "tied", "norm_exponent": 0.0},
    "global": {"covariance": "global", "norm_exponent": 0.0},
    "tied, normalised": {"covariance": "tied", "norm_exponent": 1.0},
}


def public_resnet20(shared: Path) -> Backbone:
    backbone = create_backbone("resnet20", 10, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    return load_weights(backbone, shared / "weights" / "resnet20-12fca82f.th").eval()


def embed_all(shared: Path) -> dict[str, Outputs]:
    """Outputs of the network for every set."""
    use_fast_allocator()
    backbone = public_resnet20(shared)
    sources = {"train": "cifar10/train", "test": "cifar10/test", **OOD}
    return {name: embed(backbone, open_images(s, size=32, data_root=shared / "data")) for name, s in sources.items()}


def measure(outputs: dict[str, Outputs]) -> dict[str, dict[str, float]]:
    """The table: one row per method."""
    test, labels = outputs["test"], outputs["test"].labels
    assert test.logits is not None and labels is not None
    rows = {}
    for name in ("softmax", "energy"):
        detector = create_detector(name).fit(test)
        rows[name] = {ood: auroc(detector.score(test), detector.score(outputs[ood])) for ood in OOD}
    confidence = 1 - create_detector("softmax").fit(test).score(test)
    correct = test.logits.argmax(1) == labels
    rows["softmax"] |= {"accuracy": correct.mean(), "ece": expected_calibration_error(confidence, correct)}
    for name, options in GAUSSIANS.items():
        detector = MapleDetector(**options).fit(outputs["train"])
        found = detector.describe(test)
        posterior = found.posterior()
        rows[name] = {
            **{ood: auroc(found.squared_distance, detector.describe(outputs[ood]).squared_distance) for ood in OOD},
            "accuracy": accuracy(found.md_class_id, labels),
            "ece": expected_calibration_error(found.typicality, found.md_class_id == labels),
            "posterior_ece": expected_calibration_error(posterior.max(1), posterior.argmax(1) == labels),
            "components": found.degrees_of_freedom,
        }
    return {name: {key: float(value) for key, value in row.items()} for name, row in rows.items()}


def measure_halves(outputs: dict[str, Outputs], splits: int = 10) -> dict[str, dict[str, list[float]]]:
    """What is learned from one half of the test images, measured on the other: one value per split in every cell."""
    rows: dict[str, dict[str, list[float]]] = {}
    for seed in range(splits):
        halves = np.split(np.random.default_rng(seed).permutation(len(outputs["test"])), 2)
        validation, test = (outputs["test"][np.sort(half)] for half in halves)
        detector = MapleDetector().fit(outputs["train"], validation)
        found, unknown = detector.describe(test), {ood: detector.describe(outputs[ood]) for ood in OOD}
        for name in found.available_scores:
            values = {ood: auroc(found.score_named(name), unknown[ood].score_named(name)) for ood in OOD}
            _append(rows.setdefault(name, {}), values | {"mean": float(np.mean(list(values.values())))})
        for name, logs in probabilities(detector.describe(validation), found, validation.labels).items():
            _append(rows.setdefault(name, {}), judge(logs, test.labels))
    return rows


def probabilities(taught: Description, found: Description, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Log class probabilities (N, C) of ``found``, in four ways that ``taught`` and its labels teach."""
    distances = (taught.squared_distances, labels, taught.log_weights, taught.cluster_to_class)
    scaled = found.log_softmax / fit_softmax_temperature(taught.log_softmax, labels)
    return {
        "softmax": found.log_softmax,
        "softmax, scaled": scaled - logsumexp(scaled, axis=1, keepdims=True),
        "Gaussians": found.log_posterior(fit_temperature(*distances)),
        "Gaussians and softmax": Probability().fit(taught, labels).log_probabilities(found),
    }


def judge(logs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    confidence, correct = np.exp(logs.max(axis=1)), logs.argmax(axis=1) == labels
    return {
        "accuracy": float(correct.mean()),
        "ece": expected_calibration_error(confidence, correct),
        "ece_floor": calibration_floor(confidence),
        "nll": negative_log_likelihood(logs, labels, log=True),
    }


def _append(row: dict[str, list[float]], values: dict[str, float]) -> None:
    for key, value in values.items():
        row.setdefault(key, []).append(float(value))


def sample(outputs: dict[str, Outputs], rows: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """A few rows of each set in float16, small enough to keep with the tests."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, n in rows.items():
        part = outputs[name]
        chosen = np.sort(rng.choice(len(part), n, replace=False))
        arrays[f"{name}.embeddings"] = part.embeddings[chosen].astype(np.float16)
        arrays[f"{name}.logits"] = part.logits[chosen].astype(np.float16)
        arrays[f"{name}.labels"] = part.labels[chosen].astype(np.uint8)
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/ and weights/")
    parser.add_argument("--write-sample", type=Path, help="safetensors file for a sample of the outputs")
    parser.add_argument("--json", type=Path, help="file for the table")
    arguments = parser.parse_args()
    outputs = embed_all(arguments.shared)
    table = measure(outputs)
    for name, row in table.items():
        print(f"{name:18s}", "  ".join(f"{key} {value:.4f}" for key, value in row.items()))
    halves = measure_halves(outputs)
    print()
    for name, columns in halves.items():
        cells = (f"{key} {np.mean(values):.4f} ± {np.std(values):.4f}" for key, values in columns.items())
        print(f"{name:22s}", "  ".join(cells))
    if arguments.json:
        arguments.json.write_text(json.dumps({"whole": table, "halves": halves}, indent=1) + "\n")
    if arguments.write_sample:
        rows = {"train": 1200, "test": 800, "cifar100": 500, "svhn": 500}
        save_arrays(arguments.write_sample, sample(outputs, rows), {"source": "public ResNet-20 on CIFAR-10, seed 0"})


if __name__ == "__main__":
    main()
