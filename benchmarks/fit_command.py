"""Compare ``maple fit`` with the same steps in Python, on the public CIFAR-10 ResNet-20.

    python benchmarks/fit_command.py --shared ../shared --json results/fit_command.json

Gaussians are fitted on the 50,000 training images; one half of the test images (seed 0, as the first of the ten halves
of ``resnet20.py``) is for calibration, the other half is tested against all images of each OOD file. The command runs
in a separate process; in Python, the network is opened, all sets are embedded and ``fit_predictor`` and ``evaluate``
are called. The JSON file has both columns and the largest difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from maple.data.shares import split_indices
from maple.data.sources import open_images
from maple.evaluation.results import Results
from maple.networks import IMAGENET_MEAN, IMAGENET_STD, embed, use_fast_allocator
from maple.prediction.fit import fit_predictor
from maple.stats.metrics import accuracy, auroc, expected_calibration_error, negative_log_likelihood
from resnet20 import OOD, public_resnet20

Figures = dict[str, float]


def write_halves(shared: Path, folder: Path) -> dict[str, Path]:
    """The test images as two files: what calibrates, and what is tested."""
    table = pq.read_table(shared / "data" / "cifar10" / "test.parquet")
    halves = np.split(np.random.default_rng(0).permutation(len(table)), 2)
    files = {name: folder / f"{name}.parquet" for name in ("unseen", "test")}
    for file, half in zip(files.values(), halves):
        pq.write_table(table.take(np.sort(half)), file)
    return files


def by_command(shared: Path, halves: dict[str, Path], out: Path) -> Figures:
    """What ``maple fit`` says."""
    command = ["fit", "resnet20", "--weights", shared / "weights" / "resnet20-12fca82f.th"]
    for flag, values in (("--mean", IMAGENET_MEAN), ("--std", IMAGENET_STD)):
        command += [flag, ",".join(map(str, values))]
    command += ["--data", "cifar10/train", "--calibrate", halves["unseen"], "--test", halves["test"]]
    command += [argument for name, source in OOD.items() for argument in ("--ood", f"{name}={source}")]
    command += ["--data-root", shared / "data", "--out", out]
    subprocess.run([sys.executable, "-m", "maple", *map(str, command)], check=True)
    results = Results.from_json((out / "results.json").read_bytes())
    judged = results.methods["maple"].classification
    softmax = results.methods["softmax"].classification
    assert judged is not None and softmax is not None
    return {
        "softmax accuracy": softmax.accuracy,
        "accuracy": judged.accuracy,
        "ECE": judged.ece,
        "NLL": judged.nll,
        "false alarms": results.false_alarm or 0.0,
        **{f"{score}, {name}": value for score, row in results.scores.items() for name, value in row.items()},
    }


def in_python(shared: Path, halves: dict[str, Path]) -> Figures:
    """The same from its pieces."""
    use_fast_allocator()
    backbone = public_resnet20(shared)
    how: dict[str, Any] = {"size": 32, "data_root": shared / "data"}
    unseen = open_images(str(halves["unseen"]), **how)
    validation, calibration = (unseen.subset(rows) for rows in split_indices(unseen.labels, unseen.keys, (0.5, 0.5), 0))
    predictor = fit_predictor(backbone, open_images("cifar10/train", **how), validation, calibration)
    test = embed(backbone, open_images(str(halves["test"]), **how))
    found, said = predictor.detector.describe(test), predictor.predict_outputs(test)
    unknown = {
        name: predictor.detector.describe(embed(backbone, open_images(source, **how))) for name, source in OOD.items()
    }
    assert test.labels is not None
    return {
        "softmax accuracy": accuracy(said.softmax_class_id, test.labels),
        "accuracy": accuracy(said.class_id, test.labels),
        "ECE": expected_calibration_error(said.probability, said.class_id == test.labels),
        "NLL": negative_log_likelihood(said.log_probabilities, test.labels, log=True),
        "false alarms": float(said.is_ood.mean()),
        **{
            f"{score}, {name}": auroc(found.score_named(score), other.score_named(score))
            for score in found.available_scores
            for name, other in unknown.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/ and weights/")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        halves = write_halves(arguments.shared, Path(folder))
        command = by_command(arguments.shared, halves, Path(folder) / "run")
        python = in_python(arguments.shared, halves)
    for name, value in command.items():
        print(f"{name:26s} {value:.6f} {python[name]:.6f}")
    largest = max(abs(value - python[name]) for name, value in command.items())
    print(f"largest difference {largest:.1e}")
    found = {"command": command, "python": python, "largest_difference": largest}
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
