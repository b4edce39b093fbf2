"""Sums over training images, computed by workers: one row of sums per block, merged on the cluster.

A block is read once, by one worker; only its sums, under ``SHARE`` of the bytes that it reads, are written, into a
folder that all nodes share (:mod:`maple.deploy.ray.tree`). A block of a worker that dies is read again and written
under its own name, so that it counts once. If the command is killed, the same command resumes from the sums that are
there.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from maple import __version__
from maple.data.decode import Decoding
from maple.data.image_set import ImageSet
from maple.data.sources.tables import Table, Tables
from maple.data.stream import Source
from maple.deploy.ray.jobs import get_or_repeat
from maple.deploy.ray.model import Model
from maple.deploy.ray.spans import cut_spans
from maple.deploy.ray.tree import Node, Store, Tree, by_record, count_bytes, open_plan
from maple.deploy.ray.workers import Block, Decoder, Summing
from maple.detectors.base import RemoteOutputs, Sum
from maple.networks import Backbone, embed_batches
from maple.networks.embedding import BATCH_SIZE, EmbedOptions
from maple.progress import say
from maple.types import Outputs

if TYPE_CHECKING:
    from maple.deploy.ray.engine import RayEngine

SHARE = 0.05  # of the bytes read, at most, are sums
BLOCKS_PER_WORKER = 64  # at most: enough to share the work, and little lost with a worker
_MEASURED_FILES = 200


def plan_step(n_images: int, bytes_read: int, bytes_of_sums: int, batch_size: int, workers: int) -> int:
    """Images of a block: whole batches, whose sums are under ``SHARE`` of the bytes read.

    Each worker gets a block in any case, and at most ``BLOCKS_PER_WORKER``.

    >>> plan_step(20_000, bytes_read=44_000_000, bytes_of_sums=424_000, batch_size=128, workers=2)
    4096
    >>> plan_step(1_000, bytes_read=2_200_000, bytes_of_sums=424_000, batch_size=128, workers=2)
    512
    """
    least = bytes_of_sums / (SHARE * bytes_read / n_images)
    n_blocks = max(workers, min(int(n_images / least), BLOCKS_PER_WORKER * workers))
    n_batches = -(-n_images // batch_size)
    return -(-n_batches // n_blocks) * batch_size


def count_read(images: Source) -> int:
    """Bytes that reading all images takes; of files, from the sizes of some evenly spread ones."""
    if isinstance(images, ImageSet) and images.pixels is not None:
        return images.pixels.nbytes
    n = len(images)
    source = images.store if isinstance(images, ImageSet) else images
    if isinstance(source, Table | Tables):
        return max(source.n_bytes * n // len(source), 1)
    sizes = []
    for i in range(0, n, -(-n // _MEASURED_FILES)):
        item = images.item(i)
        path = Path(item) if isinstance(item, str) else None
        sizes.append(len(item) if isinstance(item, bytes) else path.stat().st_size if path and path.exists() else 1)
    return round(float(np.mean(sizes)) * n)


@dataclass(frozen=True, eq=False)
class TrainingOnRay(RemoteOutputs):
    """Training images whose sums workers take."""

    engine: RayEngine
    backbone: Backbone
    model: Model
    images: ImageSet
    options: EmbedOptions

    def accumulate(self, start: Callable[[Outputs], Sum]) -> Sum:
        known = self._measure(start)
        arrays = known.to_arrays()
        assert self.engine.folder is not None
        folder = self.engine.folder.resolve() / type(known).__name__.lower()
        size, workers = self._batch_size, self.engine.resources.workers
        step = plan_step(len(self.images), count_read(self.images), count_bytes(arrays.values()), size, workers)
        step = open_plan(folder, self._identify(start, arrays), step, self.engine.overwrite)
        total = self._sum(Store(folder, tuple(by_record(arrays))), step, start)
        common = {name: array for name, array in arrays.items() if "." not in name}
        return type(known).from_arrays(common | total)

    @property
    def _batch_size(self) -> int:
        return self.options.get("batch_size", BATCH_SIZE)

    def _measure(self, start: Callable[[Outputs], Sum]) -> Sum:
        """The sums of one image, which are as large as those of many."""
        ids, classes = self.options.get("cluster_ids"), self.options.get("cluster_to_class")
        one = embed_batches(
            self.backbone,
            self.images,
            indices=np.array([0]),
            cluster_ids=ids,
            cluster_to_class=classes,
            logits=False,
        )
        outputs = next(iter(one))
        return start(outputs).add(outputs)

    def _identify(self, start: Callable[[Outputs], Sum], arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
        """Everything that sums which are added must share."""
        ids = np.asarray(self.options.get("cluster_ids"))
        shapes = repr([(name, array.shape) for name, array in arrays.items()])
        return {
            "the network": self.model.digest(),
            "the images": self.images.digest(),
            "the classes of the images": _digest(self.images.labels.tobytes() + ids.tobytes()),
            "the options of the detector": _digest((shapes + describe_call(start)).encode()),
            "the version of maple": __version__,
        }

    def _sum(self, store: Store, step: int, start: Callable[[Outputs], Sum]) -> dict[str, np.ndarray]:
        """Let the workers add up all blocks that are missing, and merge."""
        bounds = [*range(0, len(self.images), step), len(self.images)]
        tree = Tree(len(bounds) - 1)
        merging = _Merging(tree, store, self.engine.resources.workers)
        merging.start(*tree.resume(store))
        missing = tree.missing()
        done = len(self.images) - sum(bounds[i + 1] - bounds[i] for i in missing)
        if done:
            say(f"resuming after {done:,} images, from '{store.folder.parent}'")
        how = Decoding(self.images.size, self.images.fit)
        decoder, classes = Decoder.beside(self.engine.resources), self.options.get("cluster_to_class")
        summing = Summing(start, store, how, decoder, self._batch_size, classes)
        blocks = (self._block(i, bounds[i], bounds[i + 1]) for i in missing)
        progress = self.options.get("progress")
        for block in self.engine.add_up(blocks, summing):
            merging.finish(Node(block.number, block.number + 1))
            done += len(block.labels)
            if progress is not None:
                progress(done, len(self.images))
        merging.wait()
        return store.read(tree.root)

    def _block(self, number: int, first: int, stop: int) -> Block:
        spans = [*cut_spans(self.images, range(first, stop), self.images.size, self._batch_size)]
        ids = self.options.get("cluster_ids")
        own = None if ids is None else np.asarray(ids)[first:stop]
        return Block(number, spans, self.images.labels[first:stop], own)


@dataclass(eq=False)
class _Merging:
    """Merges that run, at most as many at a time as there are workers."""

    tree: Tree
    store: Store
    limit: int

    def __post_init__(self) -> None:
        self._waiting: deque[Node] = deque()
        self._running: dict[Any, Node] = {}

    def start(self, *nodes: Node) -> None:
        self._waiting.extend(nodes)
        while self._waiting and len(self._running) < self.limit:
            node = self._waiting.popleft()
            self._running[self._submit(node)] = node

    def _submit(self, node: Node) -> Any:
        return _merge_node.remote(self.store, node)

    def finish(self, node: Node) -> None:
        """Note a finished block, and the merges that have ended meanwhile."""
        parent = self.tree.add(node)
        self.start(*([] if parent is None else [parent]))
        self._collect(timeout=0)

    def wait(self) -> None:
        while self._running:
            self._collect(timeout=None)

    def _collect(self, timeout: float | None) -> None:
        if not self._running:
            return
        for answer in ray.wait([*self._running], num_returns=1, timeout=timeout)[0]:
            node = self._running.pop(answer)
            get_or_repeat(node, answer, self._submit)
            parent = self.tree.add(node)
            self.start(*([] if parent is None else [parent]))


@ray.remote(num_cpus=0, max_retries=2, scheduling_strategy="SPREAD")
def _merge_node(store: Store, node: Node) -> None:
    """The task that merges two nodes."""
    store.merge(node)


def describe_call(call: Callable[..., Any]) -> str:
    """A function and the arguments bound to it as JSON, the same in every process; arrays by their digest.

    >>> describe_call(partial(np.full, shape=(2, 3)))
    '["full", [], {"shape": [2, 3]}]'
    """
    if not isinstance(call, partial):
        return json.dumps(call.__qualname__)
    return json.dumps([call.func.__qualname__, call.args, call.keywords], default=_describe)


def _describe(value: Any) -> Any:
    """An array by its digest, a record by its fields."""
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, _digest(value.tobytes())]
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
