"""What several of the detectors here share: learned numbers in the state, and what cannot be learned from or scored."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np

from maple.detectors.base import Detector, State
from maple.errors import DataError, FitError
from maple.stats.arrays import as_embeddings, count_broken
from maple.types import Outputs


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
