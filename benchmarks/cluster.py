"""Time the clustering of one class: X-Means and G-Means relative to scikit-learn's K-Means in the same run.

    python benchmarks/cluster.py [--points 5000] [--dimension 640] [--repeats 7] [--threads 1] [--json FILE]

Every method clusters the same float32 points, alternately, ``repeats`` times. The table has the median, minimum and
maximum of the elapsed time, of the processor time (less affected by other processes), and of the ratio of processor
times to K-Means with k = 5 and one start in the same repeat. If pyclustering is installed (not a dependency; use a
separate environment), its X-Means with the C++ core is timed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy
import sklearn
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from maple.stats.gmeans import GMeans
from maple.stats.xmeans import XMeans

MAX_CLUSTERS = 5
Cluster = Callable[[np.ndarray, int], int]  # points, seed -> number of clusters


def make_points(n: int, dimension: int, seed: int) -> dict[str, np.ndarray]:
    """Three classes: no structure, five separate clusters, and embeddings as after a ReLU (correlated, skewed)."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((n, dimension), dtype=np.float32)
    centers = rng.standard_normal((MAX_CLUSTERS, dimension), dtype=np.float32)
    factors = rng.standard_normal((n, 20), dtype=np.float32) @ rng.standard_normal((20, dimension), dtype=np.float32)
    return {
        "one Gaussian": noise,
        "five clusters": centers[rng.integers(MAX_CLUSTERS, size=n)] + noise,
        "ReLU embeddings": np.maximum(factors, 0),
    }


def k_means(points: np.ndarray, seed: int) -> int:
    return KMeans(MAX_CLUSTERS, n_init=1, random_state=seed).fit(points).n_clusters


def x_means(points: np.ndarray, seed: int) -> int:
    return XMeans(MAX_CLUSTERS, random_state=seed).fit(points).n_clusters_


def g_means(points: np.ndarray, seed: int) -> int:
    return GMeans(MAX_CLUSTERS, random_state=seed).fit(points).n_clusters_


def pyclustering_x_means() -> Cluster | None:
    """pyclustering's X-Means, started from one centre like ours; ``None`` where it is not installed."""
    np.warnings = warnings  # type: ignore[attr-defined]  # removed from NumPy 1.24, and pyclustering still asks for it
    try:
        from pyclustering.cluster.center_initializer import kmeans_plusplus_initializer
        from pyclustering.cluster.xmeans import xmeans
    except ImportError:
        return None

    def cluster(points: np.ndarray, seed: int) -> int:
        start = kmeans_plusplus_initializer(points, 1, random_state=seed).initialize()
        return len(xmeans(points, start, kmax=MAX_CLUSTERS, random_state=seed).process().get_clusters())

    return cluster


def measure(methods: dict[str, Cluster], points: np.ndarray, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Elapsed and processor seconds and clusters of each method in each turn. A first, small call is not counted."""
    rows: dict[str, dict[str, list[float]]] = {
        name: {"elapsed": [], "processor": [], "clusters": []} for name in methods
    }
    for cluster in methods.values():
        cluster(points[:200], 0)
    for turn in range(repeats):
        for name, cluster in methods.items():
            elapsed, processor = time.perf_counter(), time.process_time()
            n_clusters = cluster(points, turn)
            rows[name]["elapsed"].append(time.perf_counter() - elapsed)
            rows[name]["processor"].append(time.process_time() - processor)
            rows[name]["clusters"].append(n_clusters)
    return rows


def describe(values: np.ndarray) -> str:
    return f"{np.median(values):.2f} ({values.min():.2f}-{values.max():.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=5_000)
    parser.add_argument("--dimension", type=int, default=640)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    methods: dict[str, Cluster] = {"K-Means (k=5)": k_means, "X-Means": x_means, "G-Means": g_means}
    if (other := pyclustering_x_means()) is not None:
        methods["pyclustering"] = other
    versions = {"numpy": np.__version__, "scipy": scipy.__version__, "scikit-learn": sklearn.__version__}
    print(f"{options.points} x {options.dimension} float32, {options.repeats} turns, {options.threads} thread(s)")
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {versions}")
    results = {}
    with threadpool_limits(options.threads):
        for kind, points in make_points(options.points, options.dimension, options.seed).items():
            rows = results[kind] = measure(methods, points, options.repeats)
            baseline = np.array(rows["K-Means (k=5)"]["processor"])
            print(f"\n{kind:18}{'elapsed s':22}{'processor s':22}{'ratio to K-Means':22}clusters")
            for name, row in rows.items():
                elapsed, processor = np.array(row["elapsed"]), np.array(row["processor"])
                columns = "".join(f"{describe(values):22}" for values in (elapsed, processor, processor / baseline))
                print(f"  {name:16}{columns}{sorted(set(map(int, row['clusters'])))}")
    if options.json:
        options.json.write_text(
            json.dumps({"options": vars(options), "versions": versions, "results": results}, default=str)
        )


if __name__ == "__main__":
    main()
