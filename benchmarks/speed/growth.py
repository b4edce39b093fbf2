"""Growth of relabelling and of the service; other parts measure the growth of what they time."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from speed.measure import Effort, fastest

SIZE, SECONDS, SERVED_CLASSES = 32, 4.0, (10, 100, 1000)


def run(effort: Effort) -> dict[str, Any]:
    curves = [*relabelling(effort), *service(effort)]
    return {"rows": [], "growth": curves}


def relabelling(effort: Effort) -> list[dict[str, Any]]:
    """Seconds of splitting hard classes by T-Means, the default, against images, dimensions and classes.

    Linear in images and in classes of equal size. In D the covariance of a class costs D² per image.
    """
    from maple.stats.clustering.splitting import Clustering, split_clusters
    from maple.types import Relabelling

    n, dimension, classes = effort.scale(1000, 200), effort.scale(640, 32), 3
    shapes = {
        "N": [(m, dimension // 2, classes) for m in (n // 2, n, 2 * n, 4 * n)],
        "D": [(2 * n, d, classes) for d in (dimension // 4, dimension // 2, dimension)],
        "classes": [(n // 2, dimension // 4, c) for c in (2, 4, 8, 16)],
    }
    how = Clustering(method="tmeans", space="normalised", min_cluster_size=20)
    theory, curves = {"N": 1.0, "D": 2.0, "classes": 1.0}, []
    for place, (letter, some) in enumerate(shapes.items()):
        costs = []
        for per_class, d, c in some:
            rng = np.random.default_rng(0)
            labels = np.repeat(np.arange(c), per_class)
            embeddings = rng.standard_normal((len(labels), d), dtype=np.float32)
            embeddings += (
                3 * rng.standard_normal((2 * c, d), dtype=np.float32)[2 * labels + rng.integers(0, 2, len(labels))]
            )
            start = Relabelling.initial(labels, c)
            work = (embeddings, np.arange(len(labels)), start, np.arange(c), how)
            costs.append(fastest(split_clusters, *work, repeats=1))
        sizes = [shape[place] * (shape[2] if letter == "N" else 1) for shape in some]
        curves.append(
            {
                "work": "relabelling",
                "over": letter,
                "sizes": sizes,
                "seconds": {"MAPLE": costs},
                "theory": theory[letter],
            }
        )
    return curves


def service(effort: Effort) -> list[dict[str, Any]]:
    """Seconds of the service per request at saturation, against images per request and classes.

    Linear in images once a request fills a batch; with classes only the head and the distances grow, which a network
    outweighs until there are thousands.
    """
    per_request, classes = (1, 4, 16), SERVED_CLASSES[: 2 if effort.quick else 3]
    seconds = min(SECONDS, 1.0) if effort.quick else SECONDS
    with tempfile.TemporaryDirectory() as name:
        models = {c: make_model(Path(name) / str(c), c) for c in classes}
        by_images = _serve(models[classes[0]], per_request, seconds)
        by_classes = [_serve(models[c], (4,), seconds)[0] for c in classes]
    return [
        {
            "work": "service",
            "over": "images per request",
            "sizes": list(per_request),
            "seconds": {"MAPLE": by_images},
            "theory": 1.0,
        },
        {
            "work": "service",
            "over": "classes",
            "sizes": list(classes),
            "seconds": {"MAPLE": by_classes},
            "theory": 0.0,
        },
    ]


def make_model(folder: Path, n_classes: int) -> Path:
    """A run of a network with random weights and that many classes."""
    import torch

    from maple.detectors.maple import MapleDetector
    from maple.networks import create_backbone
    from maple.prediction.predictor import Predictor
    from maple.types import Outputs

    torch.manual_seed(0)
    backbone = create_backbone("resnet9", n_classes=n_classes).eval()
    rng = np.random.default_rng(0)
    labels = np.arange(max(2000, 4 * n_classes)) % n_classes
    dim = backbone.embedding_size
    embeddings = rng.standard_normal((len(labels), dim), dtype=np.float32) + labels[:, None] % 7
    detector = MapleDetector().fit(Outputs(embeddings.astype(np.float32), labels=labels))
    folder.mkdir()
    Predictor(backbone, detector, [f"class {c}" for c in range(n_classes)], size=SIZE).save(folder)
    return folder


def _serve(model: Path, per_request: tuple[int, ...], seconds: float) -> list[float]:
    """Seconds per request at the saturating rate, for each number of images in a request."""
    from serve_load import SERVE, Connections, find_rate, make_requests

    async def rates(port: int) -> list[float]:
        found = []
        for n_images in per_request:
            connections, requests = Connections(port), make_requests(16, n_images)
            found.append(await find_rate(connections, requests, seconds))
        return found

    process = subprocess.Popen([sys.executable, "-c", SERVE, str(model), "5000"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"page: http://127\.0\.0\.1:(\d+)/", line):
                return [1 / rate for rate in asyncio.run(rates(int(found[1])))]
        sys.exit("the service did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
