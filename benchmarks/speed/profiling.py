"""Where processor time goes, with one thread: functions that take most of it, and stages of predictions and training.

Processor seconds hardly depend on what else the machine does.
"""

from __future__ import annotations

import cProfile
import pstats
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from maple.types import Outputs
from speed.clustering import DIMENSION, MAX_CLUSTERS, POINTS, simulated_classes, x_means
from speed.fitting import CLUSTERS, bare_product, fit, make_stream, validation_images
from speed.measure import Effort
from speed.scoring import CIFAR, simulated_outputs, two_products, with_components

LISTED = 7  # functions
FILES = 2000  # images to predict
TRAINED = 2048  # images of an epoch


def run(effort: Effort) -> dict[str, Any]:
    n, dimension = effort.scale(POINTS), effort.scale(DIMENSION, 32)
    stream = make_stream(effort.scale(65_536), dimension, CLUSTERS)
    works: dict[str, Callable[[], object]] = {
        f"X-Means, {kind}, {n:,} x {dimension}": partial(x_means, points, MAX_CLUSTERS)
        for kind, points in simulated_classes(n, dimension).items()
    }
    works |= scores(effort)
    works["bare product"] = partial(bare_product, stream)
    works["fit, one exponent"] = partial(fit, stream, norm_exponent=1.0, score_by="normalised")
    works["fit, default, no validation images"] = partial(fit, stream)
    works["fit, default, validation images"] = partial(fit, stream, validation_images(stream))
    import torch

    torch.set_num_threads(1)
    with threadpool_limits(1):
        facts = {name: profile(work) for name, work in works.items()}
        return {"rows": [], "facts": facts | predictions(effort) | trainings(effort)}


def scores(effort: Effort) -> dict[str, Callable[[], object]]:
    """The score of CIFAR size and the two products that it needs."""
    name, n, dimension, components, classes, *_ = CIFAR
    outputs = simulated_outputs(effort.scale(n), dimension, components, classes)
    detector = with_components(outputs, components, {"norm_exponent": 1.0, "score_by": "normalised"})
    gaussians, embeddings = detector.gaussians_, outputs.embeddings
    matrix, centroids = gaussians.matrix.astype("float32"), gaussians.centroids.astype("float32").T
    return {
        f"the two products, {name}": partial(two_products, embeddings, matrix, centroids),
        f"score, {name}, normalised": partial(detector.score, Outputs(embeddings)),
    }


# --- stages -----------------------------------------------------------------------------------------------------------

Place = tuple[str, str]  # module and function


def predictions(effort: Effort) -> dict[str, dict[str, str]]:
    """``maple predict`` and the loop by hand: the network, the rest of the process, and the decoding processes."""
    from maple.runs.predicting.predict import predict_images
    from maple.runs.requests import PredictRequest
    from predict_stream import make_run, write_files
    from speed.predicting import BATCH, DECODERS, predict_by_hand

    n = effort.scale(FILES, 300)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, place = make_run(folder / "run"), write_files(folder / "images", n)

        def predict() -> None:
            out = folder / "p.parquet"
            out.unlink(missing_ok=True)
            predict_images(PredictRequest(model, [str(place)], str(out), workers=DECODERS, batch_size=BATCH))

        network: Mapping[str, Place] = {"network": ("backbone", "forward")}
        described = {"distances and decisions": ("predictor", "predict_usable")}
        by_hand = stages(partial(predict_by_hand, model, place), network)
        ours = stages(predict, {**network, **described})
    ours["distances and decisions"] -= ours["network"]
    return {
        f"predictions by hand, {n:,} files": _as_text(by_hand),
        f"maple predict, {n:,} files": _as_text(ours),
    }


def trainings(effort: Effort) -> dict[str, dict[str, str]]:
    """Two epochs of either recipe, with an event between those of MAPLE."""
    from maple.data.image_set import ImageSet
    from maple.networks import create_backbone
    from maple.training.loop import train_backbone
    from maple.training.recipe import create_recipe
    from speed.training import BATCH, NETWORK, SIZE, VALIDATION, training_images

    n, m = effort.scale(TRAINED), effort.scale(VALIDATION // 2, 100)
    pixels, labels = training_images(n + m)
    names = [str(c) for c in range(10)]
    both = (slice(None, n), slice(n, None))
    train, held = (ImageSet.from_arrays(pixels[i], labels[i], names, name="bench", size=SIZE) for i in both)
    recipes = {
        "cross-entropy": create_recipe("cross-entropy"),
        "MAPLE, all classes hard": create_recipe("maple", relabel_every=1, hard_class_error=0.0),
    }
    places = {
        "training steps": ("step", "__call__"),
        "of which loss": ("maple", "loss"),
        "backward": ("fabric", "backward"),
        "validation": ("loop", "_embed_validation"),
        "event": ("relabel", "propose"),
        "of which embedding": ("loop", "_embed_training_rows"),
        "clustering": ("splitting", "split_clusters"),
    }
    found = {}
    for name, recipe in recipes.items():
        work = partial(train_backbone, recipe=recipe, train=train, validation=held, epochs=2, batch_size=BATCH)
        run = lambda work=work: work(create_backbone(NETWORK, 10), augment="crop,flip", show_progress=False)  # noqa: E731
        found[f"two epochs of {n:,} images, {name}"] = _as_text(stages(run, places))
    return found


def stages(work: Callable[[], object], places: Mapping[str, Place]) -> dict[str, float]:
    """Processor seconds of the second call: of the process and its children, and in the functions at ``places``."""
    work()
    before, children = time.process_time(), _children()
    profiler = cProfile.Profile(time.thread_time)
    profiler.runcall(work)
    found = {"this process": time.process_time() - before, "its children": _children() - children}
    taken = {
        (Path(file).stem, function): values[3]
        for (file, _, function), values in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    }
    return found | {name: taken[place] for name, place in places.items() if place in taken}


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _as_text(seconds: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{value:.3f} s" for name, value in seconds.items() if value >= 5e-4}


def profile(work: Callable[[], object]) -> dict[str, str]:
    """Processor seconds of a call, and the shares of the functions that take most of it by themselves."""
    work()
    start = time.process_time()
    work()
    seconds = time.process_time() - start
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(work)
    own = [
        (values[2], place)
        for place, values in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    ]
    whole = sum(taken for taken, _ in own)
    most = sorted(own, reverse=True)[:LISTED]
    found = {"processor seconds": f"{seconds:.3f}"}
    return found | {_describe(place): f"{100 * taken / whole:.0f} %" for taken, place in most}


def _describe(place: tuple[str, int, str]) -> str:
    file, _, function = place
    name = function.strip("<>").replace("method ", "")
    return f"`{name}`" if file == "~" else f"`{Path(file).stem}.{name}`"
