"""The paper's post-hoc rows on public networks, among them one of the paper's width: results/paper_width.json.

    python benchmarks/paper_width.py --shared ../shared --cache ~/outputs --networks wrn-cifar10 --precision bf16-mixed
    python benchmarks/paper_width.py table

The paper's network is a WRN-28-10 with embeddings of 640 dimensions. The WRN-20-10 has the same, with weights of one
bit. What of the paper needs no training of ours is measured on it: softmax, DNN+MD (with the ridge of 1e-20),
DNN+PCA+MD, DNN+PCA+ED, the marginal and the relative distance, the accuracy of confident predictions (Table 8), and the
Gaussian test (Table 9), on training images as in the paper and on test images. Next to them stand the distance of
normalised embeddings and our default.

The outputs are those of ``peers.py``: one half of the test images (seed 0) teaches what needs held-out known images,
the other half is measured, against the OOD sets. Networks that are measured already are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax

from maple.decisions.probability import Probability
from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.detectors.registry import create_detector
from maple.stats.chi_square import gaussian_test
from maple.stats.metrics import accuracy_above, expected_calibration_error
from peers import compare
from public import Study, parse_study, study_parser

CONFIDENCES = (0.5, 0.8, 0.9)  # of Table 8
GAUSSIANS: dict[str, tuple[str, dict[str, Any]]] = {  # row: detector and its options
    "DNN+MD": ("md", {"ridge": 1e-20}),
    "DNN+PCA+MD": ("pca-md", {}),
    "DNN+PCA+ED": ("pca-ed", {}),
    "DNN+PCA+MD, normalised": ("maple", {"norm_exponent": 1.0, "score_by": "normalised"}),
}
SCORES = {"Marginal MD": "marginal-md", "RMD": "rmd"}  # rows without a probability

Row = dict[str, Any]


def classify(probabilities: np.ndarray, right: np.ndarray) -> Row:
    """Accuracy, ECE, and accuracy and share of the predictions above each confidence."""
    above = {f"above {level:g}": accuracy_above(probabilities, right, level) for level in CONFIDENCES}
    return {
        "accuracy": float(right.mean()),
        "ece": expected_calibration_error(probabilities, right),
        **{level: accuracy for level, (accuracy, _) in above.items()},
        **{f"share {level}": share for level, (_, share) in above.items()},
    }


def read_as_paper(found: Description, labels: np.ndarray) -> Row:
    """P_MD as confidence, the class of the nearest cluster as class."""
    return {**classify(found.typicality, found.md_class_id == labels), "components": int(found.degrees_of_freedom)}


def error_of(found: Description) -> float:
    return gaussian_test(found.squared_distance, found.degrees_of_freedom)


def measure(study: Study) -> Iterator[Row]:
    """The rows of one network."""
    train, test = study.outputs["train"], study.measured["test"]
    labels, logs = test.labels, log_softmax(test.logits.astype(np.float64), axis=1)
    softmax = create_detector("softmax").fit(test)
    scores = {name: softmax.score(part) for name, part in study.measured.items()}
    yield {"row": "softmax", **classify(np.exp(logs.max(axis=1)), logs.argmax(axis=1) == labels), **compare(scores)}
    for name, (kind, options) in GAUSSIANS.items():
        detector = create_detector(kind, **options).fit(train)
        found = detector.describe(test)
        assert found is not None
        scores = {part: detector.score(of) for part, of in study.measured.items()}
        errors = {"Gaussian test, train": error_of(detector.describe(train)), "Gaussian test, test": error_of(found)}
        yield {"row": name, **read_as_paper(found, labels), **compare(scores), **errors}
    for name, kind in SCORES.items():
        detector = create_detector(kind).fit(train)
        yield {"row": name, **compare({part: detector.score(of) for part, of in study.measured.items()})}
    yield {"row": "MAPLE, default", **measure_default(study)}


def measure_default(study: Study) -> Row:
    """The default score and the calibrated probability of the same network."""
    test, validation = study.measured["test"], study.outputs["test"][study.halves[0]]
    detector = MapleDetector().fit(study.outputs["train"], validation)
    found = detector.describe(test)
    logs = Probability().fit(detector.describe(validation), validation.labels).log_probabilities(found)
    scores = {part: detector.score(of) for part, of in study.measured.items()}
    return {**classify(np.exp(logs.max(axis=1)), logs.argmax(axis=1) == test.labels), **compare(scores)}


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def print_table(networks: dict[str, Any]) -> None:
    columns = ["accuracy", "ece", "near", "svhn", "mean", "above 0.9", "share above 0.9", "components"]
    columns += ["Gaussian test, train", "Gaussian test, test"]
    for name, of in networks.items():
        print(f"\n{name}, {of['train images']} training images, {of['precision']}\n")
        print("| | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
        for row in of["rows"]:
            cells = [row.get(column, "") for column in columns]
            print(
                f"| {row['row']} | " + " | ".join(f"{x:.3f}" if isinstance(x, float) else f"{x}" for x in cells) + " |"
            )


def main() -> None:
    arguments = parse_study(study_parser(__doc__, "results/paper_width.json"))
    networks = read(arguments.json)
    if arguments.mode == "table":
        print_table(networks)
        return
    for name in arguments.networks:
        if name in networks:
            continue
        study = Study(name, arguments.shared, arguments.cache, arguments.precision)
        about = {"precision": arguments.precision, "train images": len(study.images["train"])}
        networks[name] = {**about, "rows": list(measure(study))}
        arguments.json.write_text(json.dumps(networks, indent=1) + "\n")


if __name__ == "__main__":
    main()
