"""The worker of fitting, evaluating and monitoring: one network, which runs over images that tasks have decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from maple.data.decode import Decoding
from maple.data.image_set import ImageSet, no_labels
from maple.data.stream import Decoded
from maple.deploy.ray.cluster import Resources
from maple.deploy.ray.jobs import Shared, in_order
from maple.deploy.ray.model import Model
from maple.deploy.ray.spans import Span
from maple.deploy.ray.tree import Node, Store
from maple.detectors.base import Total
from maple.errors import DataError
from maple.types import Outputs

if TYPE_CHECKING:
    from maple.networks import Backbone
    from maple.prediction.base import BasePredictor


# --- decoding ---------------------------------------------------------------------------------------------------------


@ray.remote(max_retries=2)
def _decode_span(span: Span, how: Decoding, batch_size: int, keep: bool = True) -> list[Decoded]:
    """The task that reads and decodes some images; ``keep`` is false if only names and keys are used."""
    decoded = span.decode(how, batch_size)
    return decoded if keep else [chunk._replace(pixels=chunk.pixels[:0]) for chunk in decoded]


@dataclass(frozen=True)
class Decoder:
    """How decoding tasks are started, and how many run at a time."""

    options: dict[str, Any]
    n: int

    @classmethod
    def beside(cls, resources: Resources) -> Decoder:
        """One task on each processor that workers leave, or beside them where they leave none."""
        free = int(ray.cluster_resources().get("CPU", 0) - resources.workers * resources.cpus)
        where: dict[str, Any] = {"num_cpus": 1} if free >= 1 else {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        return cls(where, max(free, resources.workers))

    def start(self, span: Span, how: Decoding, batch_size: int, keep: bool = True) -> Any:
        """Start the task; a reference to its result."""
        return _decode_span.options(**self.options).remote(span, how, batch_size, keep)


# --- blocks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Block:
    """Training images that become one row of sums."""

    number: int
    spans: Sequence[Span]
    labels: np.ndarray  # (n,)
    cluster_ids: np.ndarray | None  # (n,)

    def __str__(self) -> str:
        return f"block {self.number} (images {self.spans[0].first:,} to {self.spans[-1].stop - 1:,})"


@dataclass(frozen=True, eq=False)
class Summing:
    """What all blocks share."""

    start: Callable[[Outputs], Total]
    store: Store
    how: Decoding
    decoder: Decoder
    batch_size: int
    cluster_to_class: np.ndarray | None


class Worker:
    """A worker of one model, which each call brings, and which the first one loads."""

    def __init__(self, gpus: float = 0.0) -> None:
        self._gpus = gpus
        self._loaded: Any = None

    def _network(self, model: Shared[Model]) -> Backbone:
        if self._loaded is None:
            self._loaded = model.get().open_network(self._gpus)
        return self._loaded

    def _predictor(self, model: Shared[Model]) -> BasePredictor:
        if self._loaded is None:
            self._loaded = model.get().open(self._gpus)
        return self._loaded


class NetworkWorker(Worker):
    """A worker of one network, or of one predictor that only scores."""

    def ready(self) -> None:
        """Load nothing: the first call says whether a network or a predictor is needed."""

    def embed(self, model: Shared[Model], chunks: list[Decoded], logits: bool) -> Outputs:
        """Outputs for the images of a part, in the batches of ``chunks``."""
        from maple.networks import embed

        network = self._network(model)
        parts = [embed(network, as_set(chunk), batch_size=len(chunk.files), logits=logits) for chunk in chunks]
        return Outputs.concatenate(parts)

    def score(self, model: Shared[Model], chunks: list[Decoded]) -> np.ndarray:
        """The scores of the images of a part."""
        predictor = self._predictor(model)
        said = [predictor.predict_batches(as_set(chunk), batch_size=len(chunk.files)) for chunk in chunks]
        return np.concatenate([prediction.score for predictions in said for prediction in predictions])

    def add_up(self, model: Shared[Model], block: Block, summing: Shared[Summing]) -> None:
        """Write the sums of a block; if it is there already, it is written again alike."""
        shared = summing.get()
        node = Node(block.number, block.number + 1)
        if shared.store.has(node):
            return
        total: Total | None = None
        for outputs in self._outputs(self._network(model), block, shared):
            total = (shared.start(outputs) if total is None else total).add(outputs)
        assert total is not None  # a block has images
        shared.store.write_block(block.number, total.to_arrays())

    @staticmethod
    def _outputs(network: Backbone, block: Block, shared: Summing) -> Iterator[Outputs]:
        """Outputs of a block, batch by batch; two spans are decoded ahead."""
        from maple.networks import embed_batches

        how, size = shared.how, shared.batch_size
        at = 0
        for chunks in in_order(block.spans, lambda span: shared.decoder.start(span, how, size), ahead=2):
            for chunk in chunks:
                rows = slice(at, at + len(chunk.files))
                ids = None if block.cluster_ids is None else block.cluster_ids[rows]
                images = as_set(chunk, block.labels[rows])
                yield from embed_batches(
                    network,
                    images,
                    batch_size=size,
                    cluster_ids=ids,
                    cluster_to_class=shared.cluster_to_class,
                    logits=False,
                )
                at += len(chunk.files)


def as_set(chunk: Decoded, labels: np.ndarray | None = None) -> ImageSet:
    """Decoded images as a set in memory; ``DataError`` if one of them, which could be decoded before, is broken now."""
    for entry in chunk.skipped:
        raise DataError(f"cannot use '{entry.file}': {entry.reason}; restore or remove the file")
    n = len(chunk.files)
    known = no_labels(n)[0] if labels is None else labels
    return ImageSet(known, (), tuple(chunk.files), chunk.pixels.shape[1], np.zeros(n, "S32"), chunk.pixels)
