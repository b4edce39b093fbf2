"""Contract of detectors: from the outputs of a backbone to a score, higher for images more out-of-distribution.

A detector learns from training outputs (``fit``) and ranks new ones (``score``). To add one, derive from
:class:`Detector`, implement ``_score`` (and ``_fit`` if it learns anything), and register it::

    @register_detector("norm")
    class NormDetector(Detector):
        def _score(self, outputs):
            return -np.linalg.norm(outputs.embeddings, axis=1)

Functions that take a detector accept its name or an instance (:func:`create_detector`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import numpy as np

from maple import notebook
from maple.errors import FitError, NotFittedError, UsageError
from maple.options import as_dict, validate_options
from maple.stats.arrays import ArrayRecord, add_prefix, as_embeddings, check_rows, with_prefix
from maple.text import plural
from maple.types import About, LinearHead, Outputs

if TYPE_CHECKING:
    from maple.detectors.description import Description

SumOverRanks = Callable[[np.ndarray], np.ndarray]
Name = TypeVar("Name", bound=str)
Record = TypeVar("Record")
State = tuple[dict[str, np.ndarray], dict[str, Any]]


class Total(Protocol):
    """What a detector accumulates over batches of training images: moments, or other sums."""

    def add(self, outputs: Outputs) -> Self:
        """Add a batch."""

    def merge(self, sum_over_ranks: SumOverRanks) -> Self:
        """The total of all processes, in each of them."""

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The total as arrays; those of one record share the part of their name before the last dot."""

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Self:
        """The inverse of ``to_arrays``."""


Sum = TypeVar("Sum", bound=Total)


class RemoteOutputs(ABC):
    """Training images whose outputs stay where they are computed, such as on a cluster: only totals come back."""

    @abstractmethod
    def accumulate(self, start: Callable[[Outputs], Sum]) -> Sum:
        """The total over all images; ``start`` makes one of no images, as wide as some outputs, and can be pickled."""


Source = Outputs | Iterable[Outputs] | Callable[[], Iterable[Outputs]] | RemoteOutputs


class Detector(ABC):
    """``fit(outputs)`` learns, ``score(outputs)`` ranks.

    Learned attributes end in ``_``: arrays, numbers and text are saved and restored by name, and so are the ``records``
    that a class declares. For other objects extend ``get_state`` and ``from_state``. Options are validated by ``fit``.
    """

    name: ClassVar[str] = ""
    about: ClassVar[About]
    needs_training_images: ClassVar[bool] = True  # False if it learns only the class of each logit
    needs_head: ClassVar[bool] = False  # whether it recomputes logits with the linear head
    records: ClassVar[dict[str, type[ArrayRecord]]] = {}  # learned records by name, without the underscore
    fitted_: bool = False
    head_: LinearHead  # if ``needs_head``

    def fit(
        self,
        outputs: Source,
        validation: Outputs | None = None,
        sum_over_ranks: SumOverRanks | None = None,
        head: LinearHead | None = None,
    ) -> Self:
        """Learn from the training images.

        ``outputs`` is one ``Outputs``, an iterable of batches, or a function that starts an iteration over batches (for
        detectors that read the images twice without holding them). ``validation`` holds images that the network was not
        trained on. With several processes, each passes its share of the training images, all validation images, and a
        function that sums an array over processes. ``head`` is required if ``needs_head``.
        """
        self._check_options()
        if self.needs_head:
            if head is None:
                raise UsageError(f"the '{self.name}' detector needs the head: fit it with head=linear_head(backbone)")
            self.head_ = head
        self.fitted_ = False
        self._fit(Batches(outputs, sum_over_ranks, self.name), validation)
        self.fitted_ = True
        return self

    def score(self, outputs: Outputs) -> np.ndarray:
        """One score per image (N,), float64; higher is more out-of-distribution."""
        self._check_fitted()
        scores = np.asarray(self._score(outputs), dtype=np.float64)
        if scores.shape != (len(outputs),):
            raise UsageError(
                f"the '{self.name or type(self).__name__}' detector gave scores of the shape {scores.shape} for "
                f"{plural(len(outputs), 'image')}: its _score must return one number per image"
            )
        return scores

    @abstractmethod
    def _score(self, outputs: Outputs) -> np.ndarray: ...

    def describe(self, outputs: Outputs) -> Description | None:
        """Distances, posterior and scores of the class Gaussians; None for detectors without Gaussians."""
        return None

    def __repr__(self) -> str:  # detectors with options have that of their dataclass
        return f"{type(self).__name__}({'fitted' if self.fitted_ else 'not fitted'})"

    def _repr_html_(self) -> str:
        about = f"{About.of(type(self)).title} · {'fitted' if self.fitted_ else 'not fitted: call fit'}"
        return notebook.card(type(self).__name__, about, notebook.facts(self._facts() | self._option_values()))

    def _facts(self) -> dict[str, Any]:
        """Learned values to display."""
        return {}

    def _option_values(self) -> dict[str, Any]:
        return as_dict(self) if is_dataclass(self) else {}

    def _check_options(self) -> None:
        """Validate the options; the constructor only stores them."""
        if is_dataclass(self):
            validate_options(type(self), as_dict(self), where=type(self).__name__)

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:  # noqa: B027
        """Learn from the batches; by default there is nothing to learn."""

    def _check_fitted(self) -> None:
        if not self.fitted_:
            raise NotFittedError(f"the '{self.name}' detector is not fitted: call fit first")

    def get_state(self) -> State:
        """Everything learned, as arrays and plain values: the input of :func:`restore_detector`."""
        self._check_fitted()
        arrays = add_prefix("head.", self.head_._asdict()) if self.needs_head else {}
        learned = {name[:-1]: value for name, value in vars(self).items() if name.endswith("_") and name not in _OWN}
        arrays |= pack_records({name: learned.pop(name) for name in self.records})
        arrays |= {name: value for name, value in learned.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in learned.items() if name not in arrays}
        return arrays, {"detector": self.name, "options": self._option_values(), **plain}

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        """The inverse of :meth:`get_state`."""
        detector = cls(**metadata["options"])
        values = {name: value for name, value in {**arrays, **metadata}.items() if name not in ("detector", "options")}
        for name in (name for name in values if "." not in name):
            setattr(detector, f"{name}_", values[name])
        for name, kind in cls.records.items():
            setattr(detector, f"{name}_", kind.from_arrays(with_prefix(arrays, f"{name}.")))
        if cls.needs_head:
            detector.head_ = LinearHead(**with_prefix(arrays, "head."))
        detector.fitted_ = True
        return detector


_OWN = ("fitted_", "head_")  # attributes of all detectors


def pack_records(records: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of named records, each called ``record.array``; a record that is None is left out."""
    present = {name: record for name, record in records.items() if record is not None}
    return {f"{name}.{key}": array for name, record in present.items() for key, array in record.to_arrays().items()}


def unpack_records(
    read: Callable[[dict[str, np.ndarray]], Record], arrays: Mapping[str, np.ndarray], names: Iterable[Name]
) -> dict[Name, Record]:
    """The inverse of :func:`pack_records`: the records among ``names`` that are present."""
    saved = {name: with_prefix(arrays, f"{name}.") for name in names}
    return {name: read(found) for name, found in saved.items() if found}


class Batches:
    """Iterates over one ``Outputs``, an iterable of batches, or a function that starts batches.

    With several processes each holds its share of the batches; ``sum_over_ranks`` sums an array over processes.
    """

    def __init__(self, source: Source, sum_over_ranks: SumOverRanks | None = None, name: str = "") -> None:
        self._source = [source] if isinstance(source, Outputs) else source
        self._name = name  # of the detector
        self.sum_over_ranks = sum_over_ranks or (lambda array: array)
        self.repeatable = True
        if isinstance(self._source, RemoteOutputs) or callable(self._source):
            return
        if not isinstance(self._source, Iterable):
            raise UsageError(f"a detector is fitted on Outputs or batches of them, not on {type(source).__name__}")
        self.repeatable = iter(self._source) is not self._source

    def accumulate(self, start: Callable[[Outputs], Sum]) -> Sum:
        """The total over all images of all processes; ``start`` makes one of no images, as wide as some outputs."""
        if isinstance(self._source, RemoteOutputs):
            return self._source.accumulate(start)
        total: Sum | None = None
        for outputs in self.start():
            total = (start(outputs) if total is None else total).add(outputs)
        assert total is not None  # there is at least one batch
        return total.merge(self.sum_over_ranks)

    def start(self) -> Iterator[Outputs]:
        """The batches from the beginning, at least one."""
        batches = self.start_if_any()
        first = next(batches, None)
        if first is None:
            raise FitError(f"the '{self._name}' detector got no outputs to learn from: add images")
        return chain([first], batches)

    def start_if_any(self) -> Iterator[Outputs]:
        """The batches from the beginning, possibly none."""
        if isinstance(self._source, RemoteOutputs):
            raise UsageError(f"the '{self._name}' detector needs the outputs themselves: embed the images, then fit")
        return iter(self._source() if callable(self._source) else self._source)

    def held(self) -> Batches:
        """Itself if it is repeatable, else the same batches in memory."""
        return self if self.repeatable else Batches(list(self.start()), self.sum_over_ranks, self._name)


def finite_embeddings(outputs: Outputs, dim: int | None = None) -> np.ndarray:
    """The embeddings (N, D); an error if some hold NaN or infinity, or if D is not ``dim``."""
    return check_rows(as_embeddings(outputs.embeddings, dim), "embeddings")
