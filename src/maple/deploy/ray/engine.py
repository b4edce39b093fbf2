"""``--engine ray`` of fit, evaluate and monitor: decoding in tasks, the network in workers, results in this process.

What comes back is what the command holds in one process too: outputs or scores of the images that it evaluates. Of
training images only sums come back (:mod:`maple.deploy.ray.totals`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from maple.data.decode import Decoding
from maple.data.image_set import ImageSet, Progress
from maple.data.sources.decoder import decoding_by
from maple.data.stream import Decoded, Source, decode_stream
from maple.deploy.ray.cluster import Resources, connected
from maple.deploy.ray.jobs import Pool, Shared, in_order
from maple.deploy.ray.model import Model
from maple.deploy.ray.spans import can_cut, cut_spans
from maple.deploy.ray.totals import TrainingOnRay
from maple.deploy.ray.workers import Block, Decoder, NetworkWorker, Summing
from maple.detectors.base import RemoteOutputs
from maple.networks import Backbone
from maple.networks.embedding import BATCH_SIZE, EmbedOptions
from maple.options import as_dict
from maple.prediction.base import BasePredictor
from maple.prediction.engine import LOCAL, Engine
from maple.runs._engine import EngineFlags
from maple.types import Outputs


class RayEngine(Engine):
    """Runs networks on a Ray cluster, which it connects to when it first has something to do.

    Use it as a context; within it, sources are decoded on the cluster too. ``folder`` keeps the sums of a fit until the
    context ends without an error.
    """

    def __init__(self, request: EngineFlags, folder: Path | None = None, overwrite: bool = False) -> None:
        self.request, self.resources = request, Resources.of(request)
        self.folder, self.overwrite = folder, overwrite
        self._stack = ExitStack()
        self._is_connected = False
        self._owner: object = None  # whose model the workers have
        self._pool: Pool[Any] | None = None
        self._model: Model
        self._shared: Shared[Model]

    def __enter__(self) -> Self:
        self._stack.enter_context(decoding_by(self.decode))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end_workers()
        self._stack.close()
        if kind is None and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _connect(self) -> None:
        if not self._is_connected:
            self._stack.enter_context(connected(self.request, self.resources))
            self._is_connected = True

    # -- decoding

    def decode(self, source: Source, how: Decoding, *, chunk_size: int, workers: int, keep: bool) -> Generator[Decoded]:
        """Decode the images of a source in tasks, in order."""
        if source.is_decoded or not can_cut(source):
            yield from decode_stream(source, how, chunk_size=chunk_size, workers=workers)
            return
        self._connect()
        decoder = Decoder.beside(self.resources)
        spans = cut_spans(source, range(len(source)), how.size, chunk_size)
        for chunks in in_order(spans, lambda span: decoder.start(span, how, chunk_size, keep), 2 * decoder.n):
            yield from chunks

    # -- networks

    def embed(self, backbone: Backbone, images: ImageSet, **options: Unpack[EmbedOptions]) -> Outputs:
        indices = options.get("indices")
        chosen = images if indices is None else images.subset(indices)
        if not (len(chosen) and can_cut(chosen)):
            return LOCAL.embed(backbone, images, **options)
        logits, size = options.get("logits", True), options.get("batch_size", BATCH_SIZE)
        self._load(backbone, lambda: Model.of_network(backbone))
        call = lambda actor, chunks: actor.embed.remote(self._shared, chunks, logits)  # noqa: E731
        parts = self._run(chosen, size, call, options.get("progress"))
        ids = options.get("cluster_ids")
        if ids is not None:
            ids = np.asarray(ids)[slice(None) if indices is None else indices].astype(np.int64)
        outputs = Outputs.concatenate(parts)
        return replace(outputs, labels=chosen.labels, cluster_ids=ids, cluster_to_class=options.get("cluster_to_class"))

    def training(self, backbone: Backbone, images: ImageSet, **options: Unpack[EmbedOptions]) -> RemoteOutputs:
        assert self.folder is not None  # only a fit has training images
        self._load(backbone, lambda: Model.of_network(backbone))
        return TrainingOnRay(self, backbone, self._model, images, options)

    def scores(
        self, predictor: BasePredictor, images: ImageSet, *, batch_size: int, workers: int, progress: Progress | None
    ) -> np.ndarray:
        if not can_cut(images):
            return LOCAL.scores(predictor, images, batch_size=batch_size, workers=workers, progress=progress)
        request: Any = self.request
        self._load(predictor, lambda: Model.read(request.model, as_dict(predictor.options), request.trust))
        call = lambda actor, chunks: actor.score.remote(self._shared, chunks)  # noqa: E731
        return np.concatenate(self._run(images, batch_size, call, progress))

    def add_up(self, blocks: Iterator[Block], summing: Summing) -> Iterator[Block]:
        """Let the workers write the sums of blocks; the blocks as they are done."""
        shared = Shared.put(summing)
        assert self._pool is not None
        for block, _ in self._pool.run(blocks, lambda actor, block: actor.add_up.remote(self._shared, block, shared)):
            yield block

    def _run(
        self, images: ImageSet, batch_size: int, call: Callable[[Any, Any], Any], progress: Progress | None
    ) -> list[Any]:
        """The results of the workers, part by part, in the order of the images."""
        decoder, how = Decoder.beside(self.resources), Decoding(images.size, images.fit)
        spans = cut_spans(images, range(len(images)), images.size, batch_size, 4 * self.resources.workers)
        found: dict[int, Any] = {}
        done = 0
        submit = lambda actor, span: call(actor, decoder.start(span, how, batch_size))  # noqa: E731
        assert self._pool is not None
        for span, part in self._pool.run(spans, submit):
            found[span.first] = part
            done += len(span)
            if progress is not None:
                progress(done, len(images))
        return [found[first] for first in sorted(found)]

    def _load(self, owner: object, read: Callable[[], Model]) -> None:
        """Give the model of ``owner`` to workers; those of another one end."""
        self._connect()
        if self._pool is None or self._owner is not owner:
            self._end_workers()
            self._owner, self._model = owner, read()
            self._shared = Shared.put(self._model)
            self._pool = Pool(self.resources, NetworkWorker, self.resources.gpus)

    def _end_workers(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
