"""Time fit and score of the Gaussians, relative to the matrix products that they require.

    python benchmarks/gaussian.py [--images 50000] [--dim 640] [--clusters 12] [--repeats 7]
        [--spectrum decaying|flat|both] [--no-memory] [--json FILE]

- fit: all of ``MapleDetector.fit`` on one float32 ``Outputs`` (moments, eigenvectors, tied covariance, folding),
  divided by the float64 product ``E.T @ E``. Target: at most 1.5.
- score: squared distances to all clusters, divided by the two float32 products that they require, (N, D) x (D, K) and
  (N, K) x (K, M). Target: at most 1.5.
- memory: peak of a fit on a generator of batches, for N / 4 and for N images. Target: equal.

A decaying spectrum gives few components K, as for a trained network; a flat one gives nearly all, the worst case. Each
repeat times the work and then its reference. ``best`` is the ratio of the best times of both; the median and range of
the ratios indicate the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from maple.detectors.maple import MapleDetector
from maple.types import Outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=640)
    parser.add_argument("--clusters", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--spectrum", choices=("decaying", "flat", "both"), default="both")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()

    threads = {pool["prefix"]: pool["num_threads"] for pool in threadpool_info()}
    shape = {"images": arguments.images, "dim": arguments.dim, "clusters": arguments.clusters}
    print(f"{shape}, NumPy {np.__version__}, threads {threads}")
    rows = []
    for spectrum in ("decaying", "flat") if arguments.spectrum == "both" else (arguments.spectrum,):
        outputs = simulated_outputs(arguments.images, arguments.dim, arguments.clusters, spectrum)
        for exponent in (0.0, 1.0):
            rows += time_fit_and_score(outputs, exponent, spectrum, arguments.repeats)
    memory = peak_memory(arguments.images, arguments.dim, arguments.clusters) if arguments.memory else {}
    for n, peak in memory.items():
        print(f"peak memory of a fit on a generator of {n:,} images: {peak / 2**20:.1f} MB")
    if arguments.json:
        results = {"shape": shape, "numpy": np.__version__, "threads": threads, "ratios": rows, "peak_bytes": memory}
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def simulated_outputs(n_images: int, dim: int, n_clusters: int, spectrum: str) -> Outputs:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, n_clusters, size=n_images)
    scales = 1 / (1 + np.arange(dim)) if spectrum == "decaying" else np.ones(dim)
    rotation = np.linalg.qr(rng.normal(size=(dim, dim)))[0] * scales[:, None]
    centres = rng.normal(size=(n_clusters, dim)) @ rotation
    embeddings = rng.standard_normal((n_images, dim), dtype=np.float32) @ rotation.astype(np.float32)
    embeddings += centres[labels]
    return Outputs(embeddings=embeddings + embeddings.std(), labels=labels)


def time_fit_and_score(outputs: Outputs, exponent: float, spectrum: str, repeats: int) -> list[dict[str, Any]]:
    embeddings = outputs.embeddings
    wide = embeddings.astype(np.float64)
    detector = MapleDetector(norm_exponent=exponent, score_by="normalised").fit(outputs)
    fitted = detector.gaussians_
    matrix, centroids = fitted.matrix.astype(np.float32), fitted.centroids.astype(np.float32)
    about = {"spectrum": spectrum, "norm_exponent": exponent, "components": fitted.n_components}
    fit = ratio(
        lambda: MapleDetector(norm_exponent=exponent, score_by="normalised").fit(outputs),
        lambda: wide.T @ wide,
        repeats,
    )
    score = ratio(lambda: detector.squared_distances(embeddings), lambda: (embeddings @ matrix) @ centroids.T, repeats)
    rows = [{"work": "fit", **about, **fit}, {"work": "score", **about, **score}]
    for row in rows:
        print(
            f"{row['work']:5}  {spectrum:8}  exponent {exponent:.0f}  K {fitted.n_components:3}  "
            f"{row['seconds']:.3f} s  best {row['best']:.2f}  median {row['median']:.2f}  "
            f"range {row['range'][0]:.2f} to {row['range'][1]:.2f}"
        )
    return rows


def ratio(work: Callable[[], object], yardstick: Callable[[], object], repeats: int) -> dict[str, Any]:
    times = np.array([[seconds(work), seconds(yardstick)] for _ in range(repeats)])
    ratios = times[:, 0] / times[:, 1]
    best = times.min(axis=0)
    return {
        "seconds": round(float(best[0]), 4),
        "best": round(float(best[0] / best[1]), 3),
        "median": round(float(np.median(ratios)), 3),
        "range": [round(float(ratios.min()), 3), round(float(ratios.max()), 3)],
    }


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_memory(n_images: int, dim: int, n_clusters: int) -> dict[int, int]:
    def batches(n: int) -> Iterator[Outputs]:
        rng = np.random.default_rng(0)
        for _ in range(0, n, 512):
            yield Outputs(rng.standard_normal((512, dim), dtype=np.float32), labels=np.arange(512) % n_clusters)

    peaks = {}
    for n in (n_images // 4, n_images):
        tracemalloc.start()
        MapleDetector().fit(batches(n))
        peaks[n] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peaks


if __name__ == "__main__":
    main()
