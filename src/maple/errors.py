"""The exception tree. Every error says what is wrong and what to do next, in one sentence.

MapleError            exit code 1: the work failed
├── UsageError        exit code 2: the request is wrong (unknown name, wrong option, wrong type)
│   └── ConfigError   a configuration file or key
├── DataError         images, labels or splits that cannot be used
├── FitError          arrays no Gaussian can be fitted to
├── NotFittedError    a detector or estimator used before ``fit``
├── TrainError        training that cannot go on (diverged, collapsed)
│   └── LostProcessError  another process of it was killed
└── RunError          a run folder that cannot be read or written
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import index
from typing import Any, SupportsIndex

EXTRAS = {  # which extra of the package installs a package that is imported only where it is needed
    "torch": "torch",
    "lightning_fabric": "torch",
    "timm": "timm",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "onnxscript": "onnx",
    "fastapi": "serve",
    "uvicorn": "serve",
    "h11": "serve",
    "python_multipart": "serve",
    "prometheus_client": "serve",
    "huggingface_hub": "hub",
    "mlflow": "mlflow",
    "pandas": "mlflow",
    "optuna": "tune",
    "gpytorch": "due",
    "ray": "ray",
}
_NO_MEMORY = (  # parts of errors of torch and others that are no MemoryError
    "can't allocate memory",
    "std::bad_alloc",
    "Cannot allocate memory",
    "could not create a primitive",  # oneDNN, whatever its reason, which is nearly always this
    "can't start new thread",
    "failed to map segment",  # of a shared library
)
MORE_MEMORY = "use a smaller --batch-size or fewer --workers, or free some memory, then try again"
LONGEST = 2_000  # characters of an error


class MapleError(Exception):
    """Base of all errors that the package raises on purpose.

    What a file holds may be part of the text, so that it is one line of bounded length without control characters.

    >>> str(DataError("no column 'a\\x1b[2J': found b\\nc"))
    "no column 'a?[2J': found b c"
    """

    exit_code = 1
    said_here = False  # whether each of several processes prints it, not the first one alone

    def __str__(self) -> str:
        text = super().__str__()
        if text.isprintable() and len(text) <= LONGEST:
            return text
        line = "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))
        return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


class UsageError(MapleError, ValueError):
    """The request itself is wrong: an unknown name, option or combination."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file or one of its keys is wrong."""


class DataError(MapleError):
    """Images, labels or splits that cannot be used."""


class FitError(MapleError, ValueError):
    """Arrays that no Gaussian can be fitted to."""


class NotFittedError(MapleError):
    """A detector was used before ``fit``."""


class TrainError(MapleError):
    """Training that cannot go on."""


class LostProcessError(TrainError):
    """Another process of the training has ended without a message."""


class RunError(MapleError):
    """A run folder that cannot be read or written."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one, or the list of them.

    >>> suggest("resnet90", ["resnet9", "resnet18"])
    "did you mean 'resnet9'?"
    >>> suggest("zzz", ["digits", "cifar10"])
    'known: cifar10, digits'
    """
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if nearest:
        return f"did you mean '{nearest[0]}'?"
    return f"known: {', '.join(known)}"


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """The whole number ``value``; :class:`UsageError` names the argument if it is another type or out of bounds.

    >>> check_integer("severity", 6, 1, 5)
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: severity is 6: give a whole number from 1 to 5
    """
    number = index(value) if isinstance(value, SupportsIndex) else None
    if number is None or number < low or (high is not None and number > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise UsageError(f"{name} is {value!r}: give a whole number {bounds}")
    return number


@contextmanager
def naming_extras() -> Iterator[None]:
    """Within it, a package that is missing because an extra was left out is an error that names the extra.

    >>> with naming_extras():
    ...     raise ModuleNotFoundError(name="torch")
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: this needs torch, which is not installed: pip install 'maple-uncertainty[torch]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        raise UsageError(
            f"this needs {error.name}, which is not installed: pip install 'maple-uncertainty[{extra}]'"
        ) from None


def describe_failure(error: BaseException) -> str | None:
    """The message for a failure of the machine that no module expected: no memory, or a file that cannot be used.

    None for every other error.

    >>> describe_failure(PermissionError(13, "Permission denied", "runs/a"))
    "'runs/a': Permission denied; check the path, its permissions and the space on its disk, then try again"
    >>> describe_failure(ValueError("a fault of the program"))
    """
    if is_out_of_memory(error):
        return f"out of memory ({_first_line(error)}); {MORE_MEMORY}"
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if error.errno in (errno.ENOMEM, errno.EAGAIN):  # no memory, or no room for another process or thread
        return f"{error.strerror}; {MORE_MEMORY}"
    place = f"'{error.filename}': " if error.filename else ""
    return f"{place}{error.strerror}; check the path, its permissions and the space on its disk, then try again"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was too small, whatever library says so.

    >>> is_out_of_memory(RuntimeError("can't start new thread"))
    True
    """
    text = str(error)
    is_forbidden = "Operation not permitted" in text  # a library in a place from which nothing may be run
    return isinstance(error, MemoryError) or (not is_forbidden and any(each in text for each in _NO_MEMORY))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def same_class(a: type, b: type) -> bool:
    """Whether two classes come from the same place, as they do when a module is loaded again."""
    return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)
