"""A Ray cluster of two nodes on this machine, its processes, and images and a run for it."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from commands import python_path
from maple.runs.requests import PredictRequest

STORE = 80 * 2**20  # bytes of shared memory of a node
BATCH, N = 8, 120  # images of the archive: 15 parts
HEAD: dict[str, Any] = {  # without processes that no test asks for
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,  # it would start and stop nodes elsewhere
    "_system_config": {"idle_worker_killing_time_threshold_ms": 60_000},  # decoders of one test serve the next
}
# A decoder whose image holds the name of a signal ends by it; other processes that start are left alone.
ENDING = """
import sys

if any("maple.data._decoder" in part for part in sys.orig_argv):
    import os, resource, signal
    import maple.data.decode

    def decode_bytes(data, *how, decode=maple.data.decode.decode_bytes):
        if data.startswith(b"SIG"):
            os.kill(os.getpid(), signal.Signals[data.decode()])
        return decode(data, *how)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    maple.data.decode.decode_bytes = decode_bytes
"""


class Nodes:
    """Two nodes of one processor each, to which this process is connected."""

    def __init__(self, site: Path) -> None:
        (site / "sitecustomize.py").write_text(ENDING)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *sys.path, python_path()])
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args=self._arguments(**HEAD))
        self.second = self.add()

    def _arguments(self, **more: Any) -> dict[str, Any]:
        return {"num_cpus": 1, "object_store_memory": STORE, **more}

    def add(self, **more: Any) -> Any:
        return self.cluster.add_node(**self._arguments(**more))

    def kill_second(self) -> None:
        """Kill all processes of a node, as a power cut does."""
        self.cluster.remove_node(self.second, allow_graceful=False)

    def workers(self, name: str) -> list[int]:
        """Processes of this cluster that Ray calls so."""
        raylets = {node.all_processes["raylet"][0].process.pid for node in self.cluster.list_all_nodes()}
        found = []
        for place in Path("/proc").iterdir():
            try:
                title = (place / "cmdline").read_bytes() if place.name.isdecimal() else b""
                parent = (place / "stat").read_text().rpartition(")")[2].split()[1] if title else "0"
            except OSError:
                continue
            if title.startswith(f"ray::{name}".encode()) and int(parent) in raylets:
                found.append(int(place.name))
        return sorted(found)


@contextmanager
def started(site: Path) -> Iterator[Nodes]:
    """The nodes, while they run; they share a token."""
    known = dict(os.environ)
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
    os.environ.update(quiet, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))
    import ray
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")  # Ray has read the environment when it was imported
    AuthenticationTokenLoader.instance().reset_cache()
    nodes = Nodes(site)
    ray.init(address=nodes.cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()
        os.environ.clear()
        os.environ.update(known)
        Config.initialize("")


@contextmanager
def when(condition: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Act once, in a thread, as soon as the condition holds; fail if it never does."""
    ended, acted = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            if condition():
                act()
                acted.set()
                return
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert acted.is_set()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def make_network() -> Any:
    """A small network that separates the classes of ``pictures`` by chance, the same in every process."""
    import torch
    from torch import nn

    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = [nn.Conv2d(3, 12, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10), nn.Tanh()]
        return nn.Sequential(*body, nn.Linear(10, 4))


def write_classes(folder: Path, n: int, seed: int) -> Path:
    """Images of four classes, one folder each."""
    from exported import pictures

    images = pictures(n, seed=seed)
    for i, (pixels, label) in enumerate(zip(images.pixels, images.labels, strict=True)):
        path = folder / images.class_names[label] / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


def write_images(folder: Path, n: int, size: int = 8) -> Path:
    """Images of random pixels; number 5 is broken."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for i in range(n):
        Image.fromarray(rng.integers(0, 255, (size, size, 3)).astype(np.uint8)).save(folder / f"{i:04}.png")
    (folder / "0005.png").write_bytes(b"not an image")
    return folder


def request(run: Path, source: Path | str, out: Path, **more: Any) -> PredictRequest:
    """Predictions of small batches by two workers."""
    return PredictRequest(run, [str(source)], str(out), **{"batch_size": BATCH, "workers": 2, **more})


def parts(out: Path) -> list[Path]:
    """The parts that are there."""
    return [*Path(f"{out}.partial").glob("*.part")]


def contents(out: Path) -> tuple[bytes, bytes]:
    """The rows, and the images skipped; nothing else is left."""
    assert {path.name for path in out.parent.iterdir()} == {"p.csv", "p.skipped.csv"}
    return out.read_bytes(), out.with_name("p.skipped.csv").read_bytes()
