"""Dynamic batching: a bounded queue between many small requests and one thread that predicts large batches.

A network predicts 32 images at once much faster than one by one. Images of all requests wait in one queue; whenever the
thread is free, it takes as many as fit into a batch.

Requests that would miss their deadline get 503 at once (:class:`Busy`, with a time to retry): if the queue is full, or
if the expected time at the recent pace is too close to the deadline. Accepted requests are answered, also during
shutdown, unless the client disconnects or the deadline passes before the first image is computed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from maple.errors import MapleError

Item = TypeVar("Item")  # an encoded image: the argument of ``decode``
Result = TypeVar("Result")  # of ``predict`` for one image

BusyReason = Literal["closing", "deadline", "decoder", "expired", "full", "uploads"]

PROMISE = 0.7  # share of the deadline that an accepted request may be expected to take; the rest is a margin
MEMORY = 0.9  # decay of the weight of earlier batches in the moving average
LONGEST_WAIT = 60  # seconds: upper bound of Retry-After


class Busy(MapleError):
    """A request that is refused for now, with its ``reason`` and the time ``retry_after`` (s)."""

    def __init__(self, reason: BusyReason, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.reason: BusyReason = reason
        self.retry_after = min(max(1, math.ceil(retry_after)), LONGEST_WAIT)


class Pace:
    """Recent seconds per image: a ratio of two decaying sums, so that large batches weigh more.

    >>> pace = Pace()
    >>> pace.seconds_per_image
    0.0
    >>> pace.note(0.5, 10)
    >>> pace.seconds_per_image
    0.05
    """

    def __init__(self) -> None:
        self._seconds = self._images = 0.0

    def note(self, seconds: float, n_images: int) -> None:
        """Add a batch and its time."""
        self._seconds = MEMORY * self._seconds + seconds
        self._images = MEMORY * self._images + n_images

    @property
    def seconds_per_image(self) -> float:
        return self._seconds / self._images if self._images else 0.0


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a :class:`Batcher`."""

    max_batch: int = 32  # images
    max_wait: float = 0.005  # seconds that a batch waits for images that are being decoded
    max_queue: int = 256  # images from acceptance to answer
    deadline: float = 10.0  # seconds of a request
    decoders: int = 2  # threads


@dataclass(eq=False)
class _Request(Generic[Result]):
    """The decoded images of one request: when they arrived and expire, and the answer for each image."""

    arrived: float
    expires: float
    answers: list[asyncio.Future[Result]]
    begun: bool = False  # whether an image is in a batch already

    def fail(self, error: Exception) -> None:
        """Give this error to the client, unless it has disconnected."""
        for answer in self.answers:
            if not answer.done():
                answer.set_exception(error)


class _Image(NamedTuple):
    """A decoded image that waits for its batch."""

    pixels: np.ndarray
    answer: asyncio.Future[Any]
    request: _Request[Any]


class Batcher(Generic[Item, Result]):
    """Decode and predict the images of concurrent requests in shared batches.

    ``decode`` turns one image into an array (S, S, 3), in a few threads; ``predict`` turns a batch (N, S, S, 3) into
    one result per image, in a thread of its own.

    >>> async def ask() -> list[list[float]]:
    ...     async with Batcher(lambda value: np.full((1, 1, 3), value), lambda batch: batch.mean((1, 2, 3))) as batcher:
    ...         return await asyncio.gather(batcher.submit([1.0, 2.0]), batcher.submit([3.0]))
    >>> [[float(value) for value in said] for said in asyncio.run(ask())]
    [[1.0, 2.0], [3.0]]
    """

    def __init__(
        self,
        decode: Callable[[Item], np.ndarray],
        predict: Callable[[np.ndarray], Sequence[Result]],
        limits: BatchLimits = BatchLimits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decode, self._predict, self.limits, self._clock = decode, predict, limits, clock
        self.n_accepted = 0  # images without an answer yet
        self._n_decoding = 0
        self._left: list[Future[np.ndarray]] = []  # decoding of cancelled requests
        self._waiting: deque[_Image] = deque()
        self._closing = False
        self._changed = asyncio.Event()  # wakes the loop that makes the batches
        self._decoders = ThreadPoolExecutor(limits.decoders, "decode")
        self._worker = ThreadPoolExecutor(1, "predict")
        self._decode_pace, self._predict_pace = Pace(), Pace()
        self._lag = 0.0  # recent seconds of requests beyond the expected time
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Batcher[Item, Result]:
        self._work = asyncio.create_task(self._make_batches())
        return self

    async def warm_up(self, compute: Callable[[], object], n_images: int) -> None:
        """Compute twice: once to load everything, once to measure the pace."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._worker, compute)
        start = self._clock()
        await loop.run_in_executor(self._worker, compute)
        self._predict_pace.note(self._clock() - start, n_images)

    async def __aexit__(self, *_: object) -> None:
        """Refuse new requests, finish accepted ones."""
        self.refuse_all()
        if self._work is not None:
            await self._work
        self._decoders.shutdown()
        self._worker.shutdown()

    def refuse_all(self) -> None:
        """Accept nothing from now on."""
        self._closing = True
        self._changed.set()

    # --- the door -----------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a request of one image would be accepted now."""
        try:
            self.check(1)
        except Busy:
            return False
        return True

    def expected_seconds(self, n_images: int) -> float:
        """The expected time of a request of ``n_images``, after all accepted images, at the recent pace."""
        return self._lag + self._work_seconds(n_images)

    def _work_seconds(self, n_images: int) -> float:
        """The same without the recent lag, which other load on the cores causes."""
        per_image = self._predict_pace.seconds_per_image + self._decode_pace.seconds_per_image / self.limits.decoders
        return self.limits.max_wait + (self._n_ahead + n_images) * per_image

    @property
    def _n_ahead(self) -> int:
        """Images ahead of a new request: accepted ones, and those of cancelled requests that are still decoded."""
        return self.n_accepted + sum(not work.done() for work in self._left)

    def check(self, n_images: int) -> None:
        """Refuse a request that cannot be served in time.

        An idle server always accepts: one slow batch must not block it for good.
        """
        if self._closing or self._work is None:
            raise Busy("closing", "the service is shutting down: try another one, or try again later", LONGEST_WAIT)
        expected = self.expected_seconds(n_images)
        if self.n_accepted + n_images > self.limits.max_queue:
            raise Busy("full", "the queue is full: try again later, or send fewer images", expected / 2)
        if self._n_ahead and expected > PROMISE * self.limits.deadline:
            raise Busy(
                "deadline", "the answer would come too late: try again later, or send fewer images", expected / 2
            )

    def _late(self) -> Busy:
        return Busy("expired", "the answer took too long: try again later", self.expected_seconds(0) / 2)

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """One result per image, in order; :class:`Busy` if the request is refused, or the error of decoding."""
        self.check(len(items))
        if not items:
            return []
        arrived, expected = self._clock(), self._work_seconds(len(items))
        self.n_accepted += len(items)
        try:
            try:
                async with asyncio.timeout(self.limits.deadline):
                    images = await self._decode_all(items)
            except TimeoutError:
                raise self._late() from None
            results = await asyncio.gather(*self._enqueue(images, arrived + self.limits.deadline))
            beyond = max(0.0, self._clock() - arrived - expected)
            self._lag = MEMORY * self._lag + (1 - MEMORY) * beyond
            return results
        finally:  # also if the client has disconnected: cancel its work
            self._waiting = deque(image for image in self._waiting if not image.answer.done())
            self.n_accepted -= len(items)
            self._changed.set()

    def _enqueue(self, images: list[np.ndarray], expires: float) -> list[asyncio.Future[Result]]:
        """Let the decoded images of a request wait for a batch; the answer for each."""
        loop = asyncio.get_running_loop()
        request = _Request[Result](self._clock(), expires, [loop.create_future() for _ in images])
        self._waiting.extend(_Image(*pair, request) for pair in zip(images, request.answers, strict=True))
        self._changed.set()
        return request.answers

    async def _decode_all(self, items: Sequence[Item]) -> list[np.ndarray]:
        """All images decoded, or the error of the first failure, which stops the others."""
        self._n_decoding += len(items)
        failed: list[int] = []  # positions
        tasks = [asyncio.create_task(self._decode_one(i, item, failed)) for i, item in enumerate(items)]
        try:
            return [await task for task in tasks]
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # does not wait for threads
            raise
        finally:
            self._n_decoding -= len(items)

    async def _decode_one(self, i: int, item: Item, failed: list[int]) -> np.ndarray:
        loop = asyncio.get_running_loop()
        work = self._decoders.submit(self._timed_decode, i, item, failed, loop)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:  # does not stop the thread
            self._left = [other for other in (*self._left, work) if not other.done()]
            raise

    def _timed_decode(self, i: int, item: Item, failed: list[int], loop: asyncio.AbstractEventLoop) -> np.ndarray:
        if min(failed, default=i) < i:  # the thread gets here before the loop could cancel it
            raise RuntimeError("an image before it in the request failed")  # that error is the answer
        start = self._clock()
        try:
            return self._decode(item)
        except Exception:
            failed.append(i)
            raise
        finally:
            # Immediately, also on failure or cancellation, so that slow images lower the pace while more wait.
            loop.call_soon_threadsafe(self._decode_pace.note, self._clock() - start, 1)

    # --- the batches --------------------------------------------------------------------------------------------------

    async def _make_batches(self) -> None:
        while await self._wait_for_company():
            if batch := self._take():
                await self._compute(batch)

    async def _wait_for_company(self) -> bool:
        """Wait until there is a batch to compute; False at the end.

        Waits up to ``max_wait`` for images that are being decoded, never for requests that have not arrived: while a
        batch is computed, the next one fills by itself.
        """
        while not self._waiting:
            if self._closing and not self.n_accepted:
                return False
            self._changed.clear()
            await self._changed.wait()
        until = self._waiting[0].request.arrived + self.limits.max_wait
        while self._n_decoding and len(self._waiting) < self.limits.max_batch:
            if (left := until - self._clock()) <= 0:
                break
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
        return True

    def _take(self) -> list[_Image]:
        """The images of the next batch; expired requests, and images of failed ones, are dropped."""
        batch: list[_Image] = []
        while self._waiting and len(batch) < self.limits.max_batch:
            image = self._waiting.popleft()
            if not image.request.begun and self._clock() > image.request.expires:
                image.request.fail(self._late())
            if not image.answer.done():
                image.request.begun = True
                batch.append(image)
        return batch

    async def _compute(self, batch: list[_Image]) -> None:
        start, pixels = self._clock(), [image.pixels for image in batch]
        try:
            loop = asyncio.get_running_loop()
            results = await loop.run_in_executor(self._worker, lambda: list(self._predict(np.stack(pixels))))
            if len(results) != len(batch):
                raise RuntimeError(f"{len(results)} results for {len(batch)} images")
        except Exception as error:
            for image in batch:
                image.request.fail(error)
            return
        self._predict_pace.note(self._clock() - start, len(batch))
        for image, result in zip(batch, results, strict=True):
            if not image.answer.done():  # unless the client has disconnected
                image.answer.set_result(result)
