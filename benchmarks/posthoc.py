"""Analyse weak post-hoc detectors: their components and settings, one by one, on two networks.

    python benchmarks/posthoc.py --shared ../shared --json results/posthoc.json

The networks are the cross-entropy ResNet-9 of ``maple benchmark cifar10`` (trained for 16 epochs; found in ``--runs``,
or trained) and the public, fully trained CIFAR-10 ResNet-20. For each, AUROC of CIFAR-10 against CIFAR-100, Tiny
ImageNet and SVHN:

- of every detector that uses outputs, with its defaults;
- of ``react`` by the quantile at which it clips;
- of ``vim`` by the size of its principal space, and of its two parts alone, the energy and the norm outside the space;
- of ``lee-md`` by its layers, without a step on the image, for the first 2,000 images of each set;

and the mean norm of embeddings of each set, relative to that of the test images.

The network of ``mc-dropout`` is evaluated as well, on the first 1,000 images of each set: without dropout, with its ten
samples, whose masks all images share, and with ten samples whose masks are drawn for every image.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baselines import DETERMINISTIC, find_jobs
from maple.baselines.base import average_logits
from maple.baselines.mc_dropout import dropout_layers
from maple.data.batches import to_input
from maple.detectors.base import Detector
from maple.detectors.gradients.base import ImageDetector, ImageReader
from maple.detectors.gradients.lee import LeeDetector
from maple.detectors.registry import create_detector, list_detectors
from maple.networks import Backbone, embed, linear_head, use_fast_allocator
from maple.prediction.store import load_predictor
from maple.runs.benchmark.trainings import ensure_trained
from maple.stats.metrics import auroc, negative_log_likelihood
from maple.types import Outputs
from resnet20 import public_resnet20
from split_study import Study, load_cifar10

QUANTILES = (0.9, 0.95, 0.99, 0.999)
LEE_IMAGES, DROPOUT_IMAGES = 2000, 1000

Row = dict[str, float]  # AUROC by OOD set, and their mean


def compare(known: np.ndarray, unknown: dict[str, np.ndarray]) -> Row:
    """AUROC of scores (N,) of known images against those of each unknown set."""
    row = {name: auroc(known, scores) for name, scores in unknown.items()}
    return row | {"mean": float(np.mean(list(row.values())))}


def measure_network(backbone: Backbone, study: Study) -> dict[str, Any]:
    """All parts for one network."""
    train, test = embed(backbone, study.train), embed(backbone, study.test)
    unknown = {name: embed(backbone, images) for name, images in study.ood.items()}
    head = linear_head(backbone)

    def judge(detector: Detector) -> Row:
        detector.fit(train, test, head=head)
        return compare(detector.score(test), {name: detector.score(part) for name, part in unknown.items()})

    names = [name for name in list_detectors() if name != "maple"]
    on_outputs = [name for name in names if not isinstance(create_detector(name), ImageDetector)]
    vim_sizes = [size for size in (8, 16, 32, 64, 96, 112) if size < train.embeddings.shape[1]]
    lengths = {name: mean_length(part) / mean_length(test) for name, part in unknown.items()}
    return {
        "accuracy": float((test.logits.argmax(1) == test.labels).mean()),
        "share_of_negative_activations": float((train.embeddings < 0).mean()),
        "relative_length": lengths,
        "detectors": {name: judge(create_detector(name)) for name in on_outputs},
        "react by quantile": {str(q): judge(create_detector("react", quantile=q)) for q in QUANTILES},
        "vim by components": {str(size): judge(create_detector("vim", components=size)) for size in vim_sizes},
        "vim, length alone": {str(size): length_alone(size, train, test, unknown, head) for size in vim_sizes},
        "lee-md by layer": measure_layers(backbone, study),
    }


def mean_length(outputs: Outputs) -> float:
    return float(np.linalg.norm(outputs.embeddings, axis=1).mean())


def length_alone(size: int, train: Outputs, test: Outputs, unknown: dict[str, Outputs], head: Any) -> Row:
    """What ViM's virtual logit is worth without the energy."""
    detector = create_detector("vim", components=size).fit(train, head=head)
    read = lambda outputs: detector.space_.residuals(outputs.embeddings.astype(np.float64))  # noqa: E731
    return compare(read(test), {name: read(part) for name, part in unknown.items()})


def measure_layers(backbone: Backbone, study: Study) -> dict[str, Row]:
    """Each layer of Lee et al. alone, then all of them as ``lee-md`` weighs them; no step on the image."""
    study = Study(study.train, study.validation, *_first(study))
    detector = LeeDetector(magnitude=0.0).fit_images(backbone, study.train, study.validation)
    reader = ImageReader(backbone, 128, 0, None)

    def distances(images: Any) -> np.ndarray:  # (N, L)
        return np.concatenate([detector.layer_distances(backbone, x)[0] for x, _ in reader.batches(images)])

    known, unknown = distances(study.test), {name: distances(images) for name, images in study.ood.items()}
    rows = {
        layer: compare(known[:, i], {name: part[:, i] for name, part in unknown.items()})
        for i, layer in enumerate(detector.layers_)
    }
    weighed = {name: part @ detector.weights_ for name, part in unknown.items()}
    weights = {layer: float(w) for layer, w in zip(detector.layers_, detector.weights_ * known.std(axis=0))}
    return {**rows, "weighed": compare(known @ detector.weights_, weighed), "weights per deviation": weights}


def measure_dropout(backbone: Backbone, study: Study) -> dict[str, Row]:
    """Dropout switched off, averaged over its samples, and over masks of each image's own; read by max softmax."""
    sets = {"test": study.test, **study.ood}
    images = {name: first_images(part, DROPOUT_IMAGES) for name, part in sets.items()}
    with torch.no_grad():
        ways = {
            "off": lambda x: Backbone.forward(backbone, x)[1],
            "samples": lambda x: backbone(x)[1],
            "masks of their own": lambda x: sample_freely(backbone, x),
        }
        logs = {
            way: {
                name: torch.cat([read(x) for x in part.split(250)]).log_softmax(1).numpy()
                for name, part in images.items()
            }
            for way, read in ways.items()
        }
    labels = study.test.labels[:DROPOUT_IMAGES]
    return {
        way: {
            "accuracy": float((found["test"].argmax(1) == labels).mean()),
            "nll": negative_log_likelihood(found["test"], labels, log=True),
            **compare(-found["test"].max(1), {name: -part.max(1) for name, part in found.items() if name != "test"}),
        }
        for way, found in logs.items()
    }


def first_images(images: Any, n: int) -> torch.Tensor:
    return to_input(torch.from_numpy(np.stack([images.read(i) for i in range(n)])))


def sample_freely(backbone: Backbone, x: torch.Tensor) -> torch.Tensor:
    """Logits of the average over ten passes in which torch draws the masks."""
    layers = dropout_layers(backbone)
    for layer in layers:
        layer.train()
    try:
        return average_logits(torch.stack([Backbone.forward(backbone, x)[1] for _ in range(10)]))
    finally:
        for layer in layers:
            layer.eval()


def _first(study: Study) -> tuple[Any, dict[str, Any]]:
    rows = np.arange(LEE_IMAGES)
    return study.test.subset(rows), {name: images.subset(rows) for name, images in study.ood.items()}


def format_row(values: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:.3f}" for key, value in values.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/ and weights/")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="--out of maple benchmark")
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    arguments = parser.parse_args()
    use_fast_allocator()
    study = load_cifar10(arguments.shared / "data")
    jobs = find_jobs(0, arguments.runs, arguments.shared / "data")
    load = lambda recipe: load_predictor(ensure_trained(jobs[recipe])).backbone  # noqa: E731
    networks = {
        "resnet9, 16 epochs": lambda: load(DETERMINISTIC),
        "public resnet20": lambda: public_resnet20(arguments.shared),
    }
    found: dict[str, Any] = {}
    for name, network in networks.items():
        found[name] = measure_network(network(), study)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    torch.manual_seed(0)
    dropout = measure_dropout(load("mc-dropout"), study)
    arguments.json.write_text(json.dumps({**found, "mc-dropout": dropout}, indent=1) + "\n")
    for name, parts in found.items():
        print(f"\n{name}: accuracy {parts['accuracy']:.4f}")
        for part, rows in parts.items():
            if part == "detectors" or " " in part:
                for row, values in rows.items():
                    print(f"  {part:20s} {row:12s}", format_row(values))
    print("\nmc-dropout")
    for way, values in dropout.items():
        print(f"  {way:12s}", format_row(values))


if __name__ == "__main__":
    main()
