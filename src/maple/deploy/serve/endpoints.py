"""The endpoints of ``maple serve``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi import Path as PathParameter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from maple import __version__
from maple.data.decode import Decoding
from maple.data.decoders import DecoderPool
from maple.deploy.serve.batching import Batcher, BatchLimits, Busy
from maple.deploy.serve.metrics import ServeMetrics
from maple.deploy.serve.options import ServeOptions
from maple.deploy.serve.schema import (
    ImageAnswer,
    ModelAnswer,
    ModelName,
    PredictAnswer,
    StatusAnswer,
    describe_images,
    describe_model,
)
from maple.deploy.serve.uploads import Upload, decode_upload, read_uploads
from maple.deploy.serve.watch import refusal
from maple.errors import DataError, RunError
from maple.prediction.base import BasePredictor
from maple.prediction.onnx import draw_strip

Model = tuple[BasePredictor, Mapping[int, np.ndarray]]  # with thumbnails (n, S, S, 3) of its clusters

UPLOAD_SECONDS = 60  # within which the body of a request must arrive
N_BODIES = 8  # bodies of the largest size held at the same time
DECODERS = 2  # processes
DECODE_SECONDS = 5.0  # per image, at most
CLIENT_GONE = 499  # status counted for a client that has disconnected


class Endpoints:
    """The endpoints, and their shared state: predictor, batches and metrics."""

    def __init__(self, predictor: BasePredictor, options: ServeOptions, exemplars: Mapping[int, np.ndarray]) -> None:
        self.predictor, self.options, self.exemplars = predictor, options, exemplars
        self.metrics = ServeMetrics(predictor.calibration_scores, lambda: self._batcher.n_accepted)
        self._decoders: DecoderPool | None = None  # while the service runs
        self._batcher = self._new_batcher()
        self._n_bytes = 0  # of the bodies held now

    def _new_batcher(self) -> Batcher[Upload, ImageAnswer | None]:
        options = self.options
        wait, deadline = options.max_wait_ms / 1000, options.deadline_ms / 1000
        return Batcher(
            self._decode, self._predict, BatchLimits(options.max_batch, wait, options.queue, deadline, DECODERS)
        )

    def _decode(self, upload: Upload) -> np.ndarray:
        assert self._decoders is not None
        return decode_upload(upload, self._decoders, self.options)

    def _predict(self, pixels: np.ndarray) -> list[ImageAnswer | None]:
        """One answer per image; None where the network gives NaN or infinity, which must not fail the others."""
        try:
            prediction = self.predictor.predict_pixels(pixels)
        except DataError:
            if len(pixels) == 1:
                return [None]
            return [answer for one in pixels for answer in self._predict(one[None])]
        self.metrics.note_batch(prediction)
        return [*describe_images(prediction)]

    @asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        """Warm up at the start; finish accepted requests at the end."""
        size, n = self.predictor.size, self.options.max_batch
        blank = np.zeros((n, size, size, 3), dtype=np.uint8)
        how = Decoding(
            size,
            self.predictor.fit,
            self.options.max_pixels,
            DECODE_SECONDS,
            formats=tuple(each.upper() for each in self.options.formats),
        )
        self._decoders = decoders = DecoderPool(how, DECODERS)  # its processes start while the model warms up
        try:
            self._batcher = self._new_batcher()
            async with self._batcher as batcher:
                await batcher.warm_up(lambda: describe_images(self.predictor.predict_pixels(blank)), n)
                yield
        finally:
            self._decoders = None
            decoders.close()

    async def reload(self, load: Callable[[], Model]) -> None:
        """Load another model while the present one answers, and then let it answer; on an error nothing changes."""
        predictor, exemplars = await asyncio.to_thread(load)
        if change := _find_change(self.predictor, predictor):
            raise RunError(f"it has another {change}: restart the service to serve it")
        blank = np.zeros((1, predictor.size, predictor.size, 3), dtype=np.uint8)
        await asyncio.to_thread(predictor.predict_pixels, blank)
        self.predictor, self.exemplars = predictor, exemplars
        self.metrics.follow(predictor.calibration_scores)

    def refuse_all(self) -> None:
        """Accept nothing from now on."""
        self._batcher.refuse_all()

    async def predict(self, request: Request) -> Response:
        """Class, probability, uncertainty and in/out decision for each image."""
        self._batcher.check(1)
        with self._holding(request.stream()) as body:
            try:
                async with asyncio.timeout(UPLOAD_SECONDS):
                    uploads = await read_uploads(request.headers, body, self.options)
            except TimeoutError:
                raise HTTPException(408, f"the body took longer than {UPLOAD_SECONDS} s: send less at a time") from None
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            answers = await self._submit(uploads, request)
        if answers is None:
            return Response(status_code=CLIENT_GONE)
        named = [name_answer(answer, upload) for answer, upload in zip(answers, uploads, strict=True)]
        model = ModelName(name=self.predictor.network, version=__version__)
        return _json(PredictAnswer(model=model, predictions=named))

    @contextmanager
    def _holding(self, stream: AsyncIterator[bytes]) -> Iterator[AsyncIterator[bytes]]:
        """The same chunks, accounted for until the end of the request; the sum over all requests is bounded."""
        n_bytes = 0

        async def held() -> AsyncIterator[bytes]:
            nonlocal n_bytes
            async for chunk in stream:
                if self._n_bytes + len(chunk) > N_BODIES * self.options.max_bytes:
                    raise Busy("uploads", "too many uploads at the same time: try again later", 1)
                self._n_bytes += len(chunk)
                n_bytes += len(chunk)
                yield chunk

        try:
            yield held()
        finally:
            self._n_bytes -= n_bytes

    async def _submit(self, uploads: list[Upload], request: Request) -> list[ImageAnswer | None] | None:
        """The answers; None if the client has disconnected, which cancels the work."""
        work = asyncio.create_task(self._batcher.submit(uploads))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            work.cancel()
            gone.cancel()

    def model(self) -> Response:
        """The model, its decision, and the limits of requests."""
        return _json(describe_model(self.predictor, self.exemplars, self.options))

    def cluster_exemplars(self, cluster: Annotated[int, PathParameter(ge=0)]) -> Response:
        """The training images nearest to the mean of a cluster, side by side."""
        thumbnails = self.exemplars.get(cluster, ())
        if not len(thumbnails):
            raise HTTPException(404, f"there are no exemplars of cluster {cluster}: see n_exemplars in /v1/model")
        return Response(draw_strip(np.asarray(thumbnails)), media_type="image/png")

    async def healthz(self) -> Response:
        """Alive: the process answers."""
        return _json(StatusAnswer(status="alive"))

    async def readyz(self) -> Response:
        """Ready: the model is loaded and warmed up, the queue is not full, and the service is not shutting down."""
        self._batcher.check(1)
        return _json(StatusAnswer(status="ready"))

    def prometheus(self) -> Response:
        """Counts for Prometheus."""
        return Response(self.metrics.to_text(), media_type=CONTENT_TYPE_LATEST)


def name_answer(answer: ImageAnswer | None, upload: Upload) -> ImageAnswer:
    """The answer with the name of its image; :class:`UploadError` names an image without an answer."""
    if answer is None:
        raise refusal(upload.name, "the network gives NaN or infinity for it: leave it out")
    return answer.model_copy(update={"file": upload.name})


def _find_change(before: BasePredictor, after: BasePredictor) -> str | None:
    """What decoders and metrics were set up for, and differs."""
    if before.size != after.size:
        return f"image size ({after.size}, not {before.size})"
    if before.fit != after.fit:
        return f"way to make images square ({after.fit}, not {before.fit})"
    if bool(len(before.calibration_scores)) != bool(len(after.calibration_scores)):
        return "state of calibration, on which the metrics of drift depend"
    return None


async def _disconnected(request: Request) -> None:
    """Return once the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(answer: PredictAnswer | ModelAnswer | StatusAnswer) -> Response:
    return Response(answer.to_json(), media_type="application/json")
