"""Where the processor time of X-Means and fit goes: the functions that take most of it, with one thread."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from speed.clustering import DIMENSION, MAX_CLUSTERS, POINTS, simulated_classes, x_means
from speed.fitting import CLUSTERS, bare_product, fit, make_stream
from speed.measure import Effort

LISTED = 7  # functions


def run(effort: Effort) -> dict[str, Any]:
    n, dimension = effort.scale(POINTS), effort.scale(DIMENSION, 32)
    stream = make_stream(effort.scale(65_536), dimension, CLUSTERS)
    works: dict[str, Callable[[], object]] = {
        f"X-Means, {kind}, {n:,} x {dimension}": partial(x_means, points, MAX_CLUSTERS)
        for kind, points in simulated_classes(n, dimension).items()
    }
    works["bare product"] = partial(bare_product, stream)
    works["fit, one exponent"] = partial(fit, stream, norm_exponent=1.0, score_by="normalised")
    works["fit, default"] = partial(fit, stream)
    with threadpool_limits(1):
        facts = {name: profile(work) for name, work in works.items()}
    return {"rows": [], "facts": facts}


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
