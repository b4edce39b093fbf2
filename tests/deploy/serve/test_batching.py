"""Batches across requests: nothing is lost or mixed up, and requests that would miss their deadline are refused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from maple.deploy.serve.batching import LONGEST_WAIT, PROMISE, Batcher, BatchLimits, Busy, Pace


class Doubler:
    """Decodes a number into an image and predicts its double; remembers the batches, and can be held up."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.batches: list[list[float]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()

    def decode(self, value: float) -> np.ndarray:
        if value < 0:
            raise ValueError(f"{value} is not an image")
        return np.full((1, 1, 3), value)

    def predict(self, batch: np.ndarray) -> list[float]:
        assert threading.current_thread().name.startswith("predict")
        self.started.set()
        assert self.gate.wait(20)
        time.sleep(self.seconds)
        self.batches.append(batch[:, 0, 0, 0].tolist())
        if 13 in batch:
            raise ArithmeticError("thirteen")
        return (2 * batch[:, 0, 0, 0]).tolist()

    def batcher(self, clock: Callable[[], float] = time.monotonic, **limits: Any) -> Batcher[float, float]:
        return Batcher(self.decode, self.predict, BatchLimits(**limits), clock)


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def play(scene: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            return await scene()

    return asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def outcome(asked: Awaitable[list[float]]) -> list[float] | Exception:
    try:
        return await asked
    except Exception as error:
        return error


def flat(lists: list[list[float]]) -> list[float]:
    return [value for values in lists for value in values]


def test_requests_share_batches_and_get_their_own_results():
    machine = Doubler()
    requests = [[1.0], [2.0, 3.0], [4.0, 5.0, 6.0, 7.0, 8.0, 9.0], [10.0]]

    async def scene() -> list[list[float]]:
        async with machine.batcher(max_batch=5, max_wait=5) as batcher:
            return await asyncio.gather(*(batcher.submit(values) for values in requests))

    assert play(scene) == [[2 * value for value in values] for values in requests]
    assert [len(batch) for batch in machine.batches] == [5, 5]  # the third request is in both
    assert sorted(flat(machine.batches)) == sorted(flat(requests))


def test_one_who_is_alone_does_not_wait():
    machine = Doubler()

    async def scene() -> list[float]:
        async with machine.batcher(max_wait=100) as batcher:
            return await batcher.submit([1.0])

    assert play(scene) == [2.0]


def test_no_images_need_no_batch():
    async def scene() -> list[float]:
        async with Doubler().batcher() as batcher:
            return await batcher.submit([])

    assert play(scene) == []


def test_a_full_queue_is_refused_at_the_door():
    machine = Doubler()
    machine.gate.clear()

    async def scene() -> tuple[list[Busy], list[list[float]]]:
        async with machine.batcher(max_queue=6) as batcher:
            waiting = [asyncio.create_task(batcher.submit([1.0, 2.0])) for _ in range(2)]
            await until(lambda: batcher.n_accepted == 4)
            with pytest.raises(Busy) as three:
                await batcher.submit([1.0, 2.0, 3.0])
            assert batcher.is_open
            waiting.append(asyncio.create_task(batcher.submit([3.0, 4.0])))  # which just fits
            await until(lambda: batcher.n_accepted == 6)
            assert not batcher.is_open
            with pytest.raises(Busy) as one:
                await batcher.submit([1.0])
            machine.gate.set()
            answers = await asyncio.gather(*waiting)
            assert batcher.n_accepted == 0 and batcher.is_open
            return [three.value, one.value], answers

    refused, answers = play(scene)
    assert answers == [[2.0, 4.0], [2.0, 4.0], [6.0, 8.0]]
    assert all(busy.reason == "full" and busy.retry_after >= 1 for busy in refused)


def test_what_would_come_too_late_is_refused_at_the_door():
    machine, clock = Doubler(), Clock()

    def compute() -> None:
        clock.now += 1.0

    async def scene() -> tuple[int, Busy]:
        async with machine.batcher(deadline=2.05, max_wait=0.0, clock=clock) as batcher:
            await batcher.warm_up(compute, 10)  # a tenth of a second per image
            machine.gate.clear()
            waiting = []
            try:
                while True:
                    batcher.check(1)
                    waiting.append(asyncio.create_task(batcher.submit([1.0])))
                    await until(lambda: batcher.n_accepted == len(waiting))
            except Busy as busy:
                machine.gate.set()
                assert await asyncio.gather(*waiting) == [[2.0]] * len(waiting)
                return len(waiting), busy

    accepted, busy = play(scene)
    assert accepted == int(PROMISE * 2.05 / 0.1)
    assert busy.reason == "deadline" and busy.retry_after == 1


def test_one_slow_batch_does_not_shut_the_door_for_good():
    machine, clock = Doubler(), Clock()

    def compute() -> None:
        clock.now += 1000.0

    async def scene() -> list[float]:
        async with machine.batcher(deadline=1.0, clock=clock) as batcher:
            await batcher.warm_up(compute, 1)
            assert batcher.expected_seconds(1) > 100
            return await batcher.submit([1.0, 2.0])

    assert play(scene) == [2.0, 4.0]


def test_the_time_that_requests_take_beyond_their_work_counts():
    machine, clock = Doubler(), Clock()

    async def scene() -> list[float]:
        async with machine.batcher(deadline=10.0, max_wait=0.0, clock=clock) as batcher:
            expected = [batcher.expected_seconds(1)]
            for _ in range(2):
                machine.gate.clear()
                machine.started.clear()
                asked = asyncio.create_task(batcher.submit([1.0]))
                await until(machine.started.is_set)
                clock.now += 4.0
                machine.gate.set()
                await asked
                expected.append(batcher.expected_seconds(1))
            return expected

    assert play(scene) == pytest.approx([0.0, 4 + 0.4, 4 + 0.36])  # a tenth of what was beyond; the second was expected


def test_what_expires_before_it_is_computed_is_told_so_and_not_computed():
    machine, clock = Doubler(), Clock()
    machine.gate.clear()

    async def scene() -> list[Any]:
        async with machine.batcher(deadline=1.0, clock=clock, max_batch=2) as batcher:
            early = asyncio.create_task(outcome(batcher.submit([1.0, 2.0, 3.0])))  # in two batches
            await until(machine.started.is_set)
            late = asyncio.create_task(outcome(batcher.submit([4.0])))
            await until(lambda: batcher.n_accepted == 4)
            await asyncio.sleep(0.05)  # it is decoded
            clock.now = 1.5
            machine.gate.set()
            return await asyncio.gather(early, late)

    early, late = play(scene)
    assert early == [2.0, 4.0, 6.0]  # what was begun is finished
    assert isinstance(late, Busy) and late.reason == "expired"
    assert sorted(flat(machine.batches)) == [1.0, 2.0, 3.0]


def test_what_takes_too_long_to_decode_is_told_so_and_the_door_knows():
    def decode(value: float) -> np.ndarray:
        time.sleep(0.2)
        return np.full((1, 1, 3), value)

    async def scene() -> None:
        async with Batcher(
            decode, lambda batch: batch.mean((1, 2, 3)), BatchLimits(deadline=0.5, decoders=1)
        ) as batcher:
            slow = asyncio.create_task(outcome(batcher.submit([float(i) for i in range(10)])))
            await until(lambda: batcher.expected_seconds(1) > 0.5)  # after its first image, not its last
            refused = await outcome(batcher.submit([1.0]))
            assert isinstance(refused, Busy) and refused.reason == "deadline"
            late = await slow
            assert isinstance(late, Busy) and late.reason == "expired"
            assert batcher.n_accepted == 0

    play(scene)


def test_the_time_of_images_that_cannot_be_decoded_counts():
    clock = Clock()

    def decode(value: float) -> np.ndarray:
        clock.now += 5.0
        raise ValueError(f"{value} is not an image")

    async def scene() -> list[float]:
        async with Batcher(decode, lambda batch: [0.0], BatchLimits(max_wait=0.0, decoders=1), clock) as batcher:
            expected = [batcher.expected_seconds(1)]
            assert isinstance(await outcome(batcher.submit([1.0, 2.0])), ValueError)  # the second is not begun
            return [*expected, batcher.expected_seconds(1)]

    assert play(scene) == [0.0, 5.0]


def test_the_door_knows_of_images_that_are_decoded_for_nobody():
    clock, gate, begun = Clock(), threading.Event(), threading.Event()

    def decode(value: float) -> np.ndarray:
        if value == 7:
            begun.set()
            assert gate.wait(20)
            clock.now += 5.0
        return np.full((1, 1, 3), value)

    async def leave(batcher: Batcher[float, float]) -> None:
        begun.clear()
        leaving = asyncio.create_task(batcher.submit([7.0, 8.0]))
        await until(begun.is_set)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert batcher.n_accepted == 0

    async def scene() -> list[float]:
        limits = BatchLimits(max_wait=0.0, deadline=4.0, decoders=1)
        async with Batcher(decode, lambda batch: batch.mean((1, 2, 3)), limits, clock) as batcher:
            await leave(batcher)
            gate.set()
            await until(lambda: batcher.expected_seconds(1) == 5.0)  # though nobody heard how long it took
            gate.clear()
            await leave(batcher)
            assert batcher.expected_seconds(1) == 10.0
            refused = await outcome(batcher.submit([1.0]))
            assert isinstance(refused, Busy) and refused.reason == "deadline"
            gate.set()
            await until(lambda: batcher.is_open)
            return await batcher.submit([1.0])

    assert play(scene) == [1.0]


def test_nothing_is_computed_for_those_who_left():
    machine = Doubler()
    machine.gate.clear()

    async def scene() -> list[float]:
        async with machine.batcher(max_batch=1) as batcher:
            first = asyncio.create_task(batcher.submit([1.0]))
            await until(machine.started.is_set)
            leaving = [asyncio.create_task(batcher.submit([7.0, 8.0])) for _ in range(3)]
            staying = asyncio.create_task(batcher.submit([2.0]))
            await until(lambda: batcher.n_accepted == 8)
            await asyncio.sleep(0.05)
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving)
            assert batcher.n_accepted == 2  # their places are free at once
            machine.gate.set()
            return await first + await staying

    assert play(scene) == [2.0, 4.0]
    assert machine.batches == [[1.0], [2.0]]


def test_closing_finishes_what_was_accepted_and_refuses_the_rest():
    machine = Doubler(seconds=0.01)

    async def scene() -> list[Any]:
        batcher = machine.batcher(max_batch=2)
        async with batcher:
            waiting = [asyncio.create_task(batcher.submit([100.0 + i])) for i in range(20)]
            await until(lambda: batcher.n_accepted == 20)
            batcher.refuse_all()
            refused = await outcome(batcher.submit([99.0]))
        assert all(task.done() for task in waiting)
        return [refused, await outcome(batcher.submit([99.0])), await asyncio.gather(*waiting)]

    during, after, answers = play(scene)
    assert answers == [[200.0 + 2 * i] for i in range(20)]
    assert during.reason == after.reason == "closing" and during.retry_after == LONGEST_WAIT


def test_nothing_is_accepted_before_it_runs():
    async def scene() -> None:
        with pytest.raises(Busy):
            await Doubler().batcher().submit([1.0])

    play(scene)


def test_a_failure_reaches_those_it_concerns_and_nobody_else():
    machine = Doubler()

    async def scene() -> list[Any]:
        async with machine.batcher(max_batch=2, max_wait=5) as batcher:
            both = await asyncio.gather(outcome(batcher.submit([1.0])), outcome(batcher.submit([13.0, 2.0, 3.0])))
            return [*both, await batcher.submit([4.0])]

    first, second, third = play(scene)
    assert isinstance(first, ArithmeticError) and isinstance(second, ArithmeticError) and third == [8.0]
    assert machine.batches == [[1.0, 13.0], [4.0]]  # the other images of a request that failed are not computed


def test_the_first_image_that_cannot_be_decoded_is_the_error():
    async def scene() -> list[Any]:
        async with Doubler().batcher(max_queue=3) as batcher:
            failed = await outcome(batcher.submit([1.0, -2.0, -3.0]))
            return [failed, await batcher.submit([1.0, 2.0, 3.0])]  # the places are free again

    failed, answer = play(scene)
    assert str(failed) == "-2.0 is not an image" and answer == [2.0, 4.0, 6.0]


def test_nothing_more_is_decoded_or_awaited_for_a_request_that_failed():
    begun: list[float] = []
    gate = threading.Event()

    def decode(value: float) -> np.ndarray:
        begun.append(value)
        if value < 0:
            raise ValueError(f"{value} is not an image")
        assert value != 7 or gate.wait(20)  # decodes for a long time
        return np.full((1, 1, 3), value)

    async def scene() -> list[Any]:
        async with Batcher(decode, lambda batch: batch.mean((1, 2, 3)), BatchLimits(decoders=2)) as batcher:
            said = [await outcome(batcher.submit([1.0, -2.0, 7.0, *[-3.0] * 50]))]
            assert not gate.is_set() and batcher.n_accepted == 0
            said.append(await batcher.submit([5.0]))  # by the other thread
            gate.set()
            return said

    failed, answer = play(scene)
    assert str(failed) == "-2.0 is not an image" and answer == [5.0]
    assert set(begun) - {7.0} == {1.0, -2.0, 5.0} and len(begun) <= 4


def test_a_predictor_that_loses_images_is_found_out():
    def lose(batch: np.ndarray) -> Sequence[float]:
        return [0.0] * (len(batch) - 1)

    async def scene() -> Any:
        async with Batcher(Doubler().decode, lose) as batcher:
            return await outcome(batcher.submit([1.0, 2.0]))

    assert str(play(scene)) == "1 results for 2 images"


@pytest.mark.parametrize("seed", range(3))
def test_in_a_crowd_everybody_is_answered_rightly_or_refused(seed: int):
    rng = np.random.default_rng(seed)
    machine = Doubler(seconds=0.001)
    requests = [rng.uniform(14, 1000, rng.integers(1, 9)).tolist() for _ in range(300)]
    leaves = rng.random(300) < 0.2

    async def ask(batcher: Batcher[float, float], values: list[float], pause: float, leave: bool) -> Any:
        await asyncio.sleep(pause)
        task = asyncio.create_task(outcome(batcher.submit(values)))
        if leave:
            await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.wait([task])
            return None
        return await task

    async def scene() -> list[Any]:
        async with machine.batcher(max_batch=8, max_queue=40, max_wait=0.002) as batcher:
            pauses = rng.uniform(0, 0.2, len(requests))
            said = await asyncio.gather(*(ask(batcher, *request) for request in zip(requests, pauses, leaves)))
            assert batcher.n_accepted == 0
            return said

    said = play(scene)
    answered = [i for i, answer in enumerate(said) if isinstance(answer, list)]
    assert all(said[i] == [2 * value for value in requests[i]] for i in answered)
    assert all(isinstance(answer, list | Busy) for answer, leave in zip(said, leaves) if not leave)
    assert len(answered) > 20 and max(map(len, machine.batches)) <= 8
    computed = flat(machine.batches)
    assert len(computed) == len(set(computed))  # once each


def test_the_pace_follows_large_batches_and_forgets():
    pace = Pace()
    pace.note(1.0, 1)  # a slow start
    pace.note(1.0, 100)
    assert pace.seconds_per_image == pytest.approx((0.9 + 1.0) / (0.9 + 100))
    for _ in range(200):
        pace.note(0.2, 1)
    assert pace.seconds_per_image == pytest.approx(0.2)
