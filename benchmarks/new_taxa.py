"""Measure how well a taxon is recognised that ``maple update`` adds to a plankton run from a few images.

    python benchmarks/new_taxa.py --shared ../shared --cache ~/outputs --json results/new_taxa.json

The run is that of ``probability.py`` (``plankton``, trained if it is missing): 95 taxa, 26 left out. Each left-out
taxon with at least twice as many test images as are learned is added alone, from its first 5, 10 or 30 images; its
other images and all test images of the 95 taxa are then classified, without recalibration. Compared are two priors of
the new taxon: its share of all training images, and that of ``maple update``, an average taxon. Figures are means over
taxa.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from maple.data.image_set import ImageSet
from maple.decisions.probability import Probability
from maple.detectors.maple import MapleDetector
from maple.networks import use_fast_allocator
from maple.prediction.store import load_predictor
from maple.runs.folder import RunFolder
from maple.runs.setup.splits import reopen_splits
from maple.types import Outputs
from probability import train_plankton
from public import cached_outputs

NUMBERS = (5, 10, 30)
Row = dict[str, Any]


def classify(detector: MapleDetector, probability: Probability, outputs: Outputs, by_share: bool) -> np.ndarray:
    """The most probable class of each image (N,); ``by_share``: priors are shares of all training images."""
    found = detector.describe(outputs)
    if by_share:
        counts = detector.learned_.cluster_sizes
        gaussians = replace(detector.gaussians_, log_priors=np.log(counts / counts.sum()))
        densities = replace(found.learned.densities, given={detector.exponent_: gaussians})
        found = replace(found, learned=replace(found.learned, densities=densities))
    return probability.log_probabilities(found).argmax(axis=1)


def measure_taxon(
    detector: MapleDetector, probability: Probability, own: Outputs, known: Outputs, n: int
) -> dict[str, list[float]]:
    """Recall of the new taxon and accuracy of the known ones, with either prior."""
    new = int(detector.cluster_to_class_.max()) + 1
    grown = MapleDetector.from_state(*detector.get_state())
    grown.extend(Outputs(own.embeddings[:n], labels=np.full(n, new)))
    rest = replace(own[n:], labels=None)
    found = {}
    for name, by_share in (("share of images", True), ("average taxon", False)):
        recall = float((classify(grown, probability, rest, by_share) == new).mean())
        found[name] = [recall, float((classify(grown, probability, known, by_share) == known.labels).mean())]
    return found


def measure(folder: Path, cache: Path, data_root: Path) -> Row:
    predictor = load_predictor(folder)
    splits = reopen_splits(RunFolder(folder), predictor.size, data_root)
    assert splits.left_out_images is not None

    def read(role: str, images: ImageSet) -> Outputs:
        found = cached_outputs(cache / "run-plankton", role, lambda: predictor.backbone, images)
        return replace(found, cluster_to_class=predictor.cluster_to_class)

    validation, known = read("validation", splits.validation), read("test", splits.test)
    unknown = replace(read("left-out", splits.left_out_images), cluster_to_class=None)
    detector = predictor.detector
    probability = Probability().fit(detector.describe(validation), validation.labels)
    before = (probability.log_probabilities(detector.describe(known)).argmax(axis=1) == known.labels).mean()
    rows = []
    for n in NUMBERS:
        taxa = [taxon for taxon in np.unique(unknown.labels) if (unknown.labels == taxon).sum() >= 2 * n]
        found = [measure_taxon(detector, probability, unknown[unknown.labels == taxon], known, n) for taxon in taxa]
        for prior in found[0]:
            recall, accuracy = np.mean([row[prior] for row in found], axis=0)
            row = {"images": n, "taxa": len(taxa), "prior": prior, "recall_new": recall, "accuracy_known": accuracy}
            rows.append(row)
            print(f"{n:3d} images, {len(taxa):2d} taxa, {prior:16s} recall {recall:.3f}  known {accuracy:.4f}")
    images = int(detector.learned_.cluster_sizes.sum())
    return {"accuracy_before": float(before), "training_images": images, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/")
    parser.add_argument("--cache", type=Path, required=True, help="folder of outputs and runs, outside the project")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    arguments = parser.parse_args()
    use_fast_allocator()
    folder, data_root = arguments.cache / "runs" / "plankton", arguments.shared / "data"
    if not (folder / "results.json").exists():
        train_plankton(folder, data_root)
    arguments.json.write_text(json.dumps(measure(folder, arguments.cache, data_root), indent=1) + "\n")


if __name__ == "__main__":
    main()
