"""Run many tasks on a pool of stateful workers, each task to its end exactly once as far as its caller can see.

A task is an argument that a worker turns into a small result. What a task does must be the same if it is done twice:
a worker that dies takes its tasks with it, and they are given to another one. Workers that die are restarted by Ray;
one that does not start delays no task.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import OutOfDiskError, RayActorError, RayError, RayTaskError

from maple.deploy.ray.cluster import Resources
from maple.errors import DataError, MapleError, RunError
from maple.files import is_full
from maple.progress import warn

MAX_ATTEMPTS = 4  # at a task, if the machinery under it fails
START_SECONDS = 300.0  # in which one worker at least must be ready, whenever none is
_POLL_SECONDS = 1.0

Task = TypeVar("Task")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Shared(Generic[Value]):
    """A value in the object store, which workers fetch when they need it.

    It is an argument of each call, not of an actor's constructor: Ray warns that it may be gone when an actor restarts.
    """

    reference: Any  # inside a record: Ray would fetch an argument for every call

    @classmethod
    def put(cls, value: Value) -> Shared[Value]:
        return cls(ray.put(value))

    def get(self) -> Value:
        return ray.get(self.reference)


@dataclass(eq=False)
class _Worker:
    """An actor, and the results that it owes."""

    actor: Any
    owed: set[Any] = field(default_factory=set)


@dataclass(eq=False)
class _Attempt(Generic[Task]):
    task: Task
    number: int = 1
    worker: _Worker | None = None


class Pool(Generic[Task]):
    """Workers of the class ``kind``, made with ``arguments``.

    Each worker is given ``ahead`` tasks at a time, so that it never waits for the driver. The class has a method
    ``ready``, called with ``model`` if that is given, that loads what takes time.
    """

    def __init__(
        self, resources: Resources, kind: type, *arguments: Any, ahead: int = 2, model: Shared[Any] | None = None
    ) -> None:
        self._ahead = ahead
        self._to_load = () if model is None else (model,)
        options: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus}
        remote: Any = ray.remote(kind).options(**options, max_restarts=-1, max_task_retries=0)
        workers = [_Worker(remote.remote(*arguments)) for _ in range(resources.workers)]
        self._starting = {self._ask(worker): worker for worker in workers}
        self._ready: list[_Worker] = []
        self._since = time.monotonic()  # when there was last a worker

    def _ask(self, worker: _Worker) -> Any:
        return worker.actor.ready.remote(*self._to_load)

    def run(self, tasks: Iterator[Task], submit: Callable[[Any, Task], Any]) -> Iterator[tuple[Task, Any]]:
        """Tasks with their results, as they are done; ``submit(actor, task)`` starts one.

        A ``MapleError`` of a task is the caller's: it is raised at once if it is about the images, and after several
        attempts, on whichever workers, otherwise.
        """
        again: deque[_Attempt[Task]] = deque()
        under_way: dict[Any, _Attempt[Task]] = {}
        fresh, left = map(_Attempt, tasks), True
        while left or again or under_way:
            while (worker := self._free()) is not None:
                attempt = again.popleft() if again else next(fresh, None)
                if attempt is None:
                    left = False
                    break
                attempt.worker, answer = worker, submit(worker.actor, attempt.task)
                worker.owed.add(answer)
                under_way[answer] = attempt
            if not (under_way or again or left):
                return
            for answer in self._wait([*under_way]):
                attempt = under_way.pop(answer)
                assert attempt.worker is not None
                attempt.worker.owed.discard(answer)
                try:
                    yield attempt.task, ray.get(answer)
                except RayError as error:
                    self._fail(attempt, error)
                    again.append(_Attempt(attempt.task, attempt.number + 1))

    def _free(self) -> _Worker | None:
        """The ready worker that has least to do, if it can take more."""
        least = min(self._ready, key=lambda worker: len(worker.owed), default=None)
        return None if least is None or len(least.owed) >= self._ahead else least

    def _wait(self, answers: list[Any]) -> list[Any]:
        """The answers that have come; meanwhile workers may become ready."""
        done, _ = ray.wait([*answers, *self._starting], num_returns=1, timeout=_POLL_SECONDS)
        for answer in done:
            if answer in self._starting:
                self._welcome(answer)
        if self._ready:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > START_SECONDS:
            raise RunError(
                f"no Ray worker has started within {START_SECONDS:g} s; the cluster has {_describe_resources()}: ask "
                "for fewer or smaller workers, or wait until it is free"
            )
        return [answer for answer in done if answer in set(answers)]

    def _welcome(self, answer: Any) -> None:
        worker = self._starting.pop(answer)
        try:
            ray.get(answer)
        except RayActorError:  # it died while it started, or is being restarted
            time.sleep(0.2)
            self._starting[self._ask(worker)] = worker
        except RayTaskError as error:
            raise _own(error) or error from None
        else:
            self._ready.append(worker)

    def _fail(self, attempt: _Attempt[Task], error: RayError) -> None:
        """Raise what is not to be tried again; keep a worker that has died from new tasks until it is back."""
        _check_attempt(attempt.task, attempt.number, error)
        worker = attempt.worker
        if isinstance(error, RayActorError) and worker in self._ready:
            assert worker is not None
            warn(f"a Ray worker has died ({type(error).__name__}); what it had to do is done again")
            self._ready.remove(worker)
            self._starting[self._ask(worker)] = worker

    def close(self) -> None:
        """End the workers."""
        for worker in [*self._ready, *self._starting.values()]:
            ray.kill(worker.actor)


def in_order(tasks: Iterable[Task], submit: Callable[[Task], Any], ahead: int) -> Iterator[Any]:
    """The results of tasks without a worker, in their order, ``ahead`` of them under way; lost ones are done again."""
    under_way: deque[tuple[Task, Any]] = deque()
    left = iter(tasks)
    while True:
        under_way.extend((task, submit(task)) for task in islice(left, ahead - len(under_way)))
        if not under_way:
            return
        yield get_or_repeat(*under_way.popleft(), submit)


def get_or_repeat(task: Task, answer: Any, submit: Callable[[Task], Any]) -> Any:
    """The result behind ``answer``; where it is lost with its process or node, that of another attempt."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return ray.get(answer)
        except RayError as error:
            _check_attempt(task, attempt, error)
            answer = submit(task)
    raise AssertionError  # the last attempt returns or raises


def _check_attempt(task: Any, number: int, error: RayError) -> None:
    """Raise the error of a task that is about the images, or that it met in its last attempt."""
    own = _own(error) if isinstance(error, RayTaskError) else None
    if isinstance(own, DataError) or number >= MAX_ATTEMPTS:
        cause = _cause(error)
        remedy = "see the logs of its workers, in /tmp/ray/session_latest/logs"
        if isinstance(cause, OutOfDiskError):
            remedy = "free some space in Ray's folder, /tmp/ray, on all nodes, or remove the node that is full"
        raise own or RunError(
            f"{task} failed {number} times on Ray, the last time with {type(cause).__name__}: {remedy}; rerun the same "
            "command to resume"
        ) from None


def _cause(error: BaseException) -> BaseException:
    """What a task raised, or the error of Ray itself."""
    while isinstance(error, RayTaskError):
        error = error.cause
    return error


def _own(error: RayTaskError) -> MapleError | None:
    """The error that a task raised on purpose; any other is a ``RunError``."""
    cause = _cause(error)
    if isinstance(cause, MapleError):
        return cause
    if isinstance(cause, RayError):
        return None
    lines = str(cause).strip().splitlines()
    return RunError(f"a Ray worker failed with {type(cause).__name__}: {lines[-1] if lines else 'no message'}")


def _describe_resources() -> str:
    found = ray.cluster_resources()
    return f"{found.get('CPU', 0):g} processors and {found.get('GPU', 0):g} GPUs on {len(ray.nodes())} nodes"


@contextmanager
def naming_disk(path: Path) -> Iterator[None]:
    """Within it a file that cannot be written is an error that names the file, this machine and the remedy."""
    try:
        yield
    except OSError as error:
        remedy = "free some space" if is_full(error) else "let all nodes write there"
        failed = f"cannot write '{path}': {error.strerror or error} on {socket.gethostname()}"
        raise RunError(f"{failed}; {remedy}, then rerun the same command to resume") from None
