"""Fit of the Gaussians on a stream of embeddings, against the bare product E' E of the same stream."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from maple.detectors.maple import MapleDetector
from maple.types import Outputs
from speed.measure import Effort, compare, fastest, take_turns

IMAGES, DIMENSION, CLUSTERS, BATCH = 1_000_000, 640, 12, 4096
VALIDATION, WRONG = 2000, 0.1  # images that choose an exponent, and the share of them that get another label
DISTINCT = 8  # batches, which the stream repeats: reading a disk is not measured


def run(effort: Effort) -> dict[str, Any]:
    n, dimension = effort.scale(IMAGES), effort.scale(DIMENSION, 64)
    stream = make_stream(n, dimension, CLUSTERS)
    validation = validation_images(stream)
    sides = {
        "product": lambda: bare_product(stream),
        "one": lambda: MapleDetector(norm_exponent=1.0, score_by="normalised").fit(stream),
        "default": lambda: MapleDetector().fit(stream),
        "validated": lambda: MapleDetector().fit(stream, validation),
    }
    repeats = effort.few
    seconds = take_turns(sides, repeats, warm_up=False)
    peer = "float64 product E'E of the same batches"
    shape = f"{n:,} x {dimension}"
    rows = [
        compare(f"fit, {shape}, one exponent", peer, seconds["one"], seconds["product"], target=0.6),
        *(
            compare(f"fit, {shape}, default, {which}", peer, seconds[side], seconds["product"], target=0.35)
            for side, which in (
                ("default", "no validation images (two exponents)"),
                ("validated", "validation images (three exponents)"),
            )
        ),
    ]
    return {"rows": [row.to_dict() for row in rows], "facts": peak_memory(n // 16, dimension), "growth": growth(effort)}


def fit(stream: Callable[[], Iterator[Outputs]], validation: Outputs | None = None, **options: Any) -> MapleDetector:
    return MapleDetector(**options).fit(stream, validation)


def make_stream(n: int, dimension: int, n_clusters: int, batch: int = BATCH) -> Callable[[], Iterator[Outputs]]:
    """A function that starts a stream of n embeddings, float32, in batches."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((n_clusters, dimension), dtype=np.float32)
    scales = (1 / np.sqrt(1 + np.arange(dimension))).astype(np.float32)
    held = []
    for _ in range(DISTINCT):
        labels = rng.integers(0, n_clusters, size=batch)
        labels[: min(n_clusters, batch)] = np.arange(n_clusters)[:batch]
        embeddings = rng.standard_normal((batch, dimension), dtype=np.float32) * scales + centres[labels] + 1
        held.append(Outputs(embeddings, labels=labels))

    def stream() -> Iterator[Outputs]:
        for i, start in enumerate(range(0, n, batch)):
            yield held[i % DISTINCT][: min(batch, n - start)]

    return stream


def validation_images(stream: Callable[[], Iterator[Outputs]]) -> Outputs:
    """Images of the stream, some with the label of another class: these errors let a fit choose the exponent."""
    some = next(stream())[:VALIDATION]
    assert some.labels is not None
    wrong = np.random.default_rng(0).random(len(some)) < WRONG
    return Outputs(some.embeddings, labels=(some.labels + wrong) % CLUSTERS)


def bare_product(stream: Callable[[], Iterator[Outputs]]) -> np.ndarray:
    """The sum of E'E over the batches in float64: nothing but the product and the conversion that it needs."""
    total, wide = 0.0, np.empty(0)
    for outputs in stream():
        if wide.shape != outputs.embeddings.shape:
            wide = np.empty(outputs.embeddings.shape)
        np.copyto(wide, outputs.embeddings)
        total = total + wide.T @ wide
    return np.asarray(total)


def peak_memory(n: int, dimension: int) -> dict[str, Any]:
    """Peak bytes that a fit on a stream allocates, for n images and four times as many."""
    peaks = {}
    for images in (n, 4 * n):
        stream = make_stream(images, dimension, CLUSTERS)
        tracemalloc.start()
        MapleDetector().fit(stream)
        peaks[f"{images:,}"] = round(tracemalloc.get_traced_memory()[1] / 2**20, 1)
        tracemalloc.stop()
    return {"peak memory of a fit, MiB, by images": peaks}


def growth(effort: Effort) -> list[dict[str, Any]]:
    """Seconds of a default fit against N, D and clusters."""
    n, dimension = effort.scale(65_536), effort.scale(DIMENSION, 64)
    shapes = {
        "N": [(n // 4, dimension, 12), (n // 2, dimension, 12), (n, dimension, 12), (2 * n, dimension, 12)],
        "D": [(n // 2, dimension // 4, 12), (n // 2, dimension // 2, 12), (n // 2, dimension, 12)]
        + [(n // 2, 2 * dimension, 12)],
        "clusters": [(n // 2, dimension, m) for m in (10, 100, 1000)],
    }
    theory = {"N": 1.0, "D": 2.0, "clusters": 0.0}
    curves = []
    for place, (letter, some) in enumerate(shapes.items()):
        costs = []
        for images, d, m in some:
            stream = make_stream(images, d, m)
            costs.append(fastest(fit, stream))
        sizes = [shape[place] for shape in some]
        curves.append(
            {"work": "fit", "over": letter, "sizes": sizes, "seconds": {"MAPLE": costs}, "theory": theory[letter]}
        )
    return curves
