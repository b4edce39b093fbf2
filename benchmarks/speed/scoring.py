"""Scores from embeddings, against the two products that they need and against pytorch-ood's Mahalanobis."""

from __future__ import annotations

import tracemalloc
from functools import partial
from typing import Any

import numpy as np

from maple.detectors.maple import MapleDetector
from maple.stats.gaussians import Gaussians
from maple.types import Outputs
from speed.measure import Effort, Row, compare, fastest, take_turns

# images to score, embedding, components, classes; images for pytorch-ood, whose cost is per image; targets
CIFAR = ("CIFAR size", 50_000, 640, 12, 12, 10_000, 30.0)
IMAGENET = ("ImageNet size", 10_000, 2048, 66, 1223, 128, 1000.0)
MANY_CLASSES, MANY_IMAGES = 100_000, 2048
OF_PRODUCTS = 0.7


def run(effort: Effort) -> dict[str, Any]:
    rows: list[Row] = []
    for name, n, dimension, components, classes, few, target in (CIFAR, IMAGENET):
        if effort.quick:
            n, classes, few = n // 10, min(classes, 100), min(few, 64)
        outputs = simulated_outputs(max(n, 2 * classes), dimension, components, classes)
        rows += _compare(name, outputs, few, target, effort.repeats, components)
    return {"rows": [row.to_dict() for row in rows], "facts": many_classes(effort), "growth": growth(effort)}


def simulated_outputs(n: int, dimension: int, components: int, classes: int) -> Outputs:
    """Embeddings whose variance is in ``components`` directions, so that PCA keeps that many."""
    rng = np.random.default_rng(0)
    labels = np.arange(n) % classes
    basis = rng.standard_normal((components, dimension), dtype=np.float32) / np.float32(np.sqrt(components))
    latent = rng.standard_normal((n, components), dtype=np.float32)
    latent += 2 * rng.standard_normal((classes, components), dtype=np.float32)[labels]
    embeddings = latent @ basis + 2
    embeddings += 0.01 * rng.standard_normal((n, dimension), dtype=np.float32)
    return Outputs(embeddings, labels=labels)


def _compare(name: str, outputs: Outputs, few: int, target: float, repeats: int, components: int) -> list[Row]:
    rows, embeddings = [], outputs.embeddings
    new = Outputs(embeddings)
    theirs = pytorch_ood_scorer(outputs, few)
    for exponent, kind in ((0.0, "plain"), (1.0, "normalised")):
        options = {"norm_exponent": exponent, "score_by": "normalised"}
        detector = with_components(outputs, components, options)
        gaussians = detector.gaussians_
        matrix, centroids = gaussians.matrix.astype(np.float32), gaussians.centroids.astype(np.float32).T
        work = f"score, {name} ({gaussians.dim:,} x {gaussians.n_components} x {gaussians.n_clusters:,}), {kind}"
        sides: dict[str, Any] = {
            "score": partial(detector.score, new),
            "products": partial(two_products, embeddings, matrix, centroids),
        }
        seconds = take_turns(sides, 2 * repeats)
        peer = "the two float32 products"
        rows.append(compare(work, peer, seconds["score"], seconds["products"], target=OF_PRODUCTS))
        if theirs is not None:
            few_seconds = [fastest(theirs, repeats=1) * len(new) / few for _ in range(max(2, repeats // 2))]
            ours = seconds["score"][: len(few_seconds)]
            note = f"pytorch-ood timed on {few:,} images"
            rows.append(compare(work, "Mahalanobis of pytorch-ood 0.4.0", ours, few_seconds, target=target, note=note))
    return rows


def two_products(embeddings: np.ndarray, matrix: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    return (embeddings @ matrix) @ centroids


def with_components(outputs: Outputs, components: int, options: dict[str, Any]) -> MapleDetector:
    """A detector that keeps about ``components`` components."""
    for share in (0.95, 0.97, 0.98, 0.99, 0.995, 0.998):
        detector = MapleDetector(explained_variance=share, **options).fit(outputs)
        if detector.gaussians_.n_components >= components:
            break
    return detector


def pytorch_ood_scorer(outputs: Outputs, few: int) -> Any:
    """A call of pytorch-ood's Mahalanobis on the first ``few`` embeddings; None where it is not installed."""
    try:
        import torch

        from maple.networks._torchvision import import_torchvision

        import_torchvision()  # repaired if it was built for another torch
        from pytorch_ood.detector import Mahalanobis
    except ImportError:
        return None
    fitted = Mahalanobis(None)
    n = min(len(outputs), 4 * outputs.embeddings.shape[1])  # its covariance; the cost of a score does not depend on n
    n = max(n, 2 * int(outputs.labels.max() + 1))
    fitted.fit_features(torch.from_numpy(outputs.embeddings[:n]), torch.from_numpy(outputs.labels[:n]))
    some = torch.from_numpy(outputs.embeddings[:few])
    fitted.predict_features(some[:2])
    return lambda: fitted.predict_features(some)


def many_classes(effort: Effort) -> dict[str, Any]:
    """Nearest of 100,000 classes in 640 dimensions: memory beside the model, and equality with explicit distances."""
    classes, n, dimension = effort.scale(MANY_CLASSES), effort.scale(MANY_IMAGES), 640
    gaussians = simulated_gaussians(classes, dimension)
    rng = np.random.default_rng(1)
    embeddings = rng.standard_normal((n, dimension), dtype=np.float32)
    tracemalloc.start()
    found = gaussians.nearest(embeddings)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    seconds = fastest(gaussians.nearest, embeddings, repeats=1)
    rows = np.arange(0, n, max(1, n // 16))
    projection = gaussians.project(embeddings[rows])
    exact = np.stack([((gaussians.centroids - z) ** 2).sum(axis=1) for z in projection])  # one row at a time
    return {
        f"score with {classes:,} classes x {dimension}": {
            "images": n,
            "images/s": round(n / seconds, 1),
            "peak MiB beside the model": round(peak / 2**20, 1),
            "MiB of a table of all distances": round(8 * n * classes / 2**20, 1),
            "same nearest class as explicit distances": bool((found.cluster[rows] == exact.argmin(axis=1)).all()),
            "largest relative difference": float(
                f"{np.max(np.abs(found.squared_distance[rows] / exact.min(axis=1) - 1)):.2g}"
            ),
        }
    }


def simulated_gaussians(classes: int, dimension: int) -> Gaussians:
    """Gaussians of that many classes, all components kept."""
    rng = np.random.default_rng(0)
    return Gaussians(
        matrix=np.linalg.qr(rng.standard_normal((dimension, dimension)))[0],
        offset=np.zeros(dimension),
        centroids=rng.standard_normal((classes, dimension)),
        log_priors=np.full(classes, -np.log(classes)),
    )


def growth(effort: Effort) -> list[dict[str, Any]]:
    """Seconds of the nearest of M centroids against images, dimensions and classes; linear in each, D² if K = D."""
    n, dimension, classes = effort.scale(8192), effort.scale(640, 64), 1000
    shapes = {
        "N": [(m, dimension, classes) for m in (n // 4, n // 2, n, 2 * n)],
        "D": [(n // 2, d, 10 * dimension) for d in (dimension // 4, dimension // 2, dimension)],
        "classes": [(n // 4, dimension, m) for m in (100, 1000, 10_000, effort.scale(100_000, 20_000))],
    }
    curves = []
    for place, (letter, some) in enumerate(shapes.items()):
        costs = []
        for images, d, m in some:
            gaussians = simulated_gaussians(m, d)
            embeddings = np.random.default_rng(1).standard_normal((images, d), dtype=np.float32)
            gaussians.nearest(embeddings[:256])
            costs.append(fastest(gaussians.nearest, embeddings))
        sizes = [shape[place] for shape in some]
        curves.append({"work": "score", "over": letter, "sizes": sizes, "seconds": {"MAPLE": costs}, "theory": 1.0})
    return curves
