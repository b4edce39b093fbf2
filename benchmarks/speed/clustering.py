"""X-Means against pyclustering's X-Means with its C++ core, and against K-Means of scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from sklearn.cluster import KMeans

from maple.stats.clustering.gmeans import GMeans
from maple.stats.clustering.xmeans import XMeans, bic
from speed.measure import Effort, Row, compare, fastest, take_turns

POINTS, DIMENSION, MAX_CLUSTERS = 5000, 640, 5
FURTHER_SEEDS = (1, 2, 3, 4)  # of draws whose criterion alone is compared
Cluster = Callable[[np.ndarray, int], np.ndarray]  # points, most clusters -> labels


def run(effort: Effort) -> dict[str, Any]:
    n, dimension = effort.scale(POINTS), effort.scale(DIMENSION, 32)
    methods: dict[str, Cluster] = {"X-Means": x_means, "K-Means": k_means, "G-Means": g_means}
    peer = pyclustering_x_means()
    if peer is not None:
        methods["pyclustering"] = peer
    rows: list[Row] = []
    for kind, points in simulated_classes(n, dimension).items():
        rows += _compare_methods(kind, points, methods, effort.repeats)
    found: dict[str, Any] = {"rows": [row.to_dict() for row in rows]}
    if peer is not None:
        found["facts"] = {"BIC less that of pyclustering, further ReLU embeddings": _further(peer, n, dimension)}
        found["growth"] = _growth(peer, effort)
    return found


def _further(peer: Cluster, n: int, dimension: int) -> dict[str, str]:
    """Differences of the criterion on other draws: one draw may be luck, for both."""
    gains = {}
    for seed in FURTHER_SEEDS:
        points = simulated_classes(n, dimension, seed=seed)["ReLU embeddings"]
        ours, theirs = (criterion(points, cluster(points, MAX_CLUSTERS)) for cluster in (x_means, peer))
        gains[f"seed {seed}"] = f"{ours - theirs:+,.0f}"
    return gains


def _compare_methods(kind: str, points: np.ndarray, methods: dict[str, Cluster], repeats: int) -> list[Row]:
    labels: dict[str, np.ndarray] = {}

    def cluster(name: str) -> None:
        labels[name] = methods[name](points, MAX_CLUSTERS)

    seconds = take_turns({name: partial(cluster, name) for name in methods}, repeats)
    criteria = {name: criterion(points, found) for name, found in labels.items()}
    rows = []
    for name, target in (("pyclustering", 15.0), ("K-Means", None)):
        if name in methods:
            clusters = f"{len(np.unique(labels['X-Means']))} and {len(np.unique(labels[name]))} clusters"
            gain = criteria["X-Means"] - criteria[name]
            peer = "X-Means of pyclustering (C++)" if name == "pyclustering" else "K-Means of scikit-learn, k = 5"
            note = f"{clusters}; BIC higher by {gain:,.0f}" if gain >= 0 else f"{clusters}; BIC LOWER by {-gain:,.0f}"
            rows.append(compare(f"X-Means, {kind}", peer, seconds["X-Means"], seconds[name], target=target, note=note))
    rows.append(compare(f"G-Means, {kind}", "K-Means of scikit-learn, k = 5", seconds["G-Means"], seconds["K-Means"]))
    return rows


def simulated_classes(n: int, dimension: int, n_clusters: int = MAX_CLUSTERS, seed: int = 0) -> dict[str, np.ndarray]:
    """Three classes (n, D): no structure, separate clusters, and embeddings as after a ReLU (correlated, skewed)."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((n, dimension), dtype=np.float32)
    centers = rng.standard_normal((n_clusters, dimension), dtype=np.float32)
    factors = rng.standard_normal((n, 20), dtype=np.float32) @ rng.standard_normal((20, dimension), dtype=np.float32)
    return {
        "one Gaussian": noise,
        "five clusters": centers[rng.integers(n_clusters, size=n)] + noise,
        "ReLU embeddings": np.maximum(factors, 0),
    }


def criterion(points: np.ndarray, labels: np.ndarray) -> float:
    """BIC (natural logs, higher is better) of a clustering with its own means, in float64."""
    wide = points.astype(np.float64)
    labels = np.unique(labels, return_inverse=True)[1]
    centers = np.stack([wide[labels == j].mean(axis=0) for j in range(labels.max() + 1)])
    return bic(wide, labels, centers)


def x_means(points: np.ndarray, max_clusters: int) -> np.ndarray:
    return XMeans(max_clusters, random_state=0).fit(points).labels_


def g_means(points: np.ndarray, max_clusters: int) -> np.ndarray:
    return GMeans(max_clusters, random_state=0).fit(points).labels_


def k_means(points: np.ndarray, max_clusters: int) -> np.ndarray:
    return KMeans(max_clusters, n_init=1, random_state=0).fit(points).labels_


def pyclustering_x_means() -> Cluster | None:
    """pyclustering's X-Means, started from one centre like ours; ``None`` where it is not installed."""
    np.warnings = warnings  # type: ignore[attr-defined]  # removed from NumPy 1.24, and pyclustering still asks for it
    try:
        from pyclustering.cluster.center_initializer import kmeans_plusplus_initializer
        from pyclustering.cluster.xmeans import xmeans
    except ImportError:
        return None

    def cluster(points: np.ndarray, max_clusters: int) -> np.ndarray:
        start = kmeans_plusplus_initializer(points, 1, random_state=0).initialize()
        found = xmeans(points, start, kmax=max_clusters, random_state=0, ccore=True).process().get_clusters()
        labels = np.zeros(len(points), dtype=np.int64)
        for j, members in enumerate(found):
            labels[members] = j
        return labels

    return cluster


def _growth(peer: Cluster, effort: Effort) -> list[dict[str, Any]]:
    """Seconds of both against points, dimensions and planted clusters; X-Means is linear in each."""
    n, dimension = effort.scale(POINTS), effort.scale(DIMENSION, 32)
    sizes = {
        "N": [(m, dimension, MAX_CLUSTERS) for m in (n // 4, n // 2, n, 2 * n)],
        "D": [(n // 2, d, MAX_CLUSTERS) for d in (dimension // 4, dimension // 2, dimension, 2 * dimension)],
        "clusters": [(n // 2, dimension // 2, k) for k in (2, 4, 8, 16)],
    }
    curves = []
    for letter, shapes in sizes.items():
        costs: dict[str, list[float]] = {"X-Means": [], "pyclustering": []}
        for shape in shapes:
            points, most = simulated_classes(*shape)["five clusters"], shape[2]
            x_means(points[:200], most)  # threads and buffers
            costs["X-Means"].append(fastest(x_means, points, most, repeats=3))
            costs["pyclustering"].append(fastest(peer, points, most, repeats=1))
        place = {"N": 0, "D": 1, "clusters": 2}[letter]
        theory = 1.0  # per point, dimension and cluster
        curves.append(
            {
                "work": "X-Means",
                "over": letter,
                "sizes": [shape[place] for shape in shapes],
                "seconds": costs,
                "theory": theory,
            }
        )
    return curves
