"""Detectors: from the outputs of a backbone to a score, higher for images more out-of-distribution.

A detector learns from training outputs (``fit``) and ranks new ones (``score``). To add one, derive from
:class:`Detector`, fill in ``_score`` and, where there is something to learn, ``_fit`` and the state, and register it::

    @register_detector("norm")
    class NormDetector(Detector):
        def _score(self, outputs):
            return -np.linalg.norm(outputs.embeddings, axis=1)

Whatever takes a detector takes its name or an instance (:func:`create_detector`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from maple import notebook
from maple.errors import DataError, FitError, NotFittedError, UsageError
from maple.options import as_dict
from maple.stats.arrays import as_embeddings, count_broken
from maple.types import About, LinearHead, Outputs

if TYPE_CHECKING:
    from maple.detectors.description import Description

Source = Outputs | Iterable[Outputs] | Callable[[], Iterable[Outputs]]
SumOverRanks = Callable[[np.ndarray], np.ndarray]
State = tuple[dict[str, np.ndarray], dict[str, Any]]


class Detector(ABC):
    """``fit(outputs)`` learns, ``score(outputs)`` ranks; learned attributes end in ``_``."""

    name: ClassVar[str] = ""
    about: ClassVar[About]
    needs_training_images: ClassVar[bool] = True  # whether it learns more of them than what the columns mean
    needs_head: ClassVar[bool] = False  # whether it recomputes logits, and has to be handed the linear head
    fitted_: bool = False
    head_: LinearHead | None = None

    def fit(
        self,
        outputs: Source,
        validation: Outputs | None = None,
        sum_over_ranks: SumOverRanks | None = None,
        head: LinearHead | None = None,
    ) -> Self:
        """Learn from the training images.

        ``outputs`` is one ``Outputs``, batches of them in any iterable, or a function that starts an iteration over
        batches (needed where a detector goes through the images twice and they should not all be held). What has to be
        learned from images that the network has not seen is learned from ``validation``. In several processes each
        gives its share of the training images, all validation images, and a function that sums an array over all.
        The few detectors that compute logits anew (``needs_head``) are handed the ``head``.
        """
        if self.needs_head and head is None:
            raise UsageError(
                f"the '{self.name}' detector needs the network's linear head: fit it with head=linear_head(backbone)"
            )
        self.fitted_ = False  # until it is again
        self.head_ = head if self.needs_head else None
        self._fit(Batches(outputs, sum_over_ranks), validation)
        self.fitted_ = True
        return self

    def score(self, outputs: Outputs) -> np.ndarray:
        """One score per image (N,), float64; higher is more out-of-distribution."""
        self._check_fitted()
        return np.asarray(self._score(outputs), dtype=np.float64)

    @abstractmethod
    def _score(self, outputs: Outputs) -> np.ndarray: ...

    def describe(self, outputs: Outputs) -> Description | None:
        """What Gaussians of classes say about images; None for detectors that have none."""
        return None

    def __repr__(self) -> str:  # of those without options
        return f"{type(self).__name__}({'fitted' if self.fitted_ else 'not fitted'})"

    def _repr_html_(self) -> str:
        about = f"{About.of(type(self)).title} · {'fitted' if self.fitted_ else 'not fitted: call fit'}"
        options: dict[str, Any] = as_dict(self) if is_dataclass(self) else {}
        return notebook.card(type(self).__name__, about, notebook.facts(self._facts() | options))

    def _facts(self) -> dict[str, Any]:
        """What was learned, for people."""
        return {}

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:  # noqa: B027
        """Learn; many scores need nothing."""

    def _check_fitted(self) -> None:
        if not self.fitted_:
            raise NotFittedError(f"the '{self.name}' detector has not learned anything yet: call fit first")

    def get_state(self) -> State:
        """All that was learned, as arrays and plain values: enough for :func:`restore_detector`."""
        self._check_fitted()
        return {}, {"detector": self.name, "options": as_dict(self) if is_dataclass(self) else {}}

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        """The inverse of :meth:`get_state`."""
        detector = cls(**metadata["options"])
        detector.fitted_ = True
        return detector


class Batches:
    """Outputs, batches of them, or a function that starts batches: one way to go through all three.

    In several processes each has its share of the batches; ``sum_over_ranks`` adds up what they found.
    """

    def __init__(self, source: Source, sum_over_ranks: SumOverRanks | None = None) -> None:
        self._source = source
        self.sum_over_ranks = sum_over_ranks or (lambda array: array)
        if not isinstance(source, Outputs | Iterable) and not callable(source):
            raise UsageError(f"a detector is fitted on Outputs or batches of them, not on {type(source).__name__}")
        self.repeatable = isinstance(source, Outputs) or callable(source) or iter(source) is not source

    def start(self) -> Iterator[Outputs]:
        if isinstance(self._source, Outputs):
            return iter([self._source])
        return iter(self._source() if callable(self._source) else self._source)


# ------------------------------------------------------------------------------------------------ shared by families


class LearnedNumbers(Detector):
    """A detector that learns a few numbers: ``numbers`` names them, without the underscore at the end.

    To be named in front of the class that knows the rest of the state.
    """

    numbers: ClassVar[tuple[str, ...]]

    def get_state(self) -> State:
        arrays, metadata = super().get_state()
        return arrays, metadata | {name: getattr(self, f"{name}_") for name in self.numbers}

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        detector = super().from_state(arrays, metadata)
        for name in cls.numbers:
            setattr(detector, f"{name}_", float(metadata[name]))
        return detector


def no_outputs(detector: Detector) -> FitError:
    """The error of a detector that was given no image."""
    return FitError(f"the '{detector.name}' detector got no outputs to learn from: add images")


def finite_embeddings(outputs: Outputs) -> np.ndarray:
    """The embeddings (N, D); an error if some hold NaN or infinity.

    >>> finite_embeddings(Outputs(np.array([[1.0, 2.0], [np.nan, 0.0]])))
    Traceback (most recent call last):
    ...
    maple.errors.DataError: 1 of 2 embeddings hold NaN or infinity: leave those images out
    """
    embeddings = as_embeddings(outputs.embeddings)
    if n_broken := count_broken(embeddings):
        raise DataError(f"{n_broken} of {len(embeddings)} embeddings hold NaN or infinity: leave those images out")
    return embeddings
