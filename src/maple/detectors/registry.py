"""Detectors by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from maple.detectors.base import Detector
from maple.errors import UsageError
from maple.registry import Method, Registry
from maple.types import About

AnyDetector = TypeVar("AnyDetector", bound=type[Detector])
DETECTORS: Registry[Detector] = Registry(
    "detector", ("maple.detectors", "maple.detectors.gradients", "maple.baselines")
)


def register_detector(name: str, about: About | None = None) -> Callable[[AnyDetector], AnyDetector]:
    """Class decorator that makes a detector known by ``name``."""
    return DETECTORS.register(name, about)


def list_detectors() -> list[str]:
    """The names that :func:`create_detector` knows.

    >>> [name for name in list_detectors() if name in ("energy", "knn", "maple")]
    ['energy', 'knn', 'maple']
    """
    return DETECTORS.names()


def find_detector(name: str) -> Method[Detector]:
    """The detector called ``name``: its class, description and options.

    >>> find_detector("knn").kind.__name__, list(find_detector("knn").options)[:1]
    ('KnnDetector', ['k'])
    """
    return DETECTORS.find(name)


def create_detector(detector: str | Detector, **options: Any) -> Detector:
    """A detector by name, with its options; an instance is returned as it is.

    >>> create_detector("maple", covariance="global")  # doctest: +ELLIPSIS
    MapleDetector(explained_variance=0.95, pca=True, standardise=True, covariance='global', ...)
    >>> create_detector("mapel")
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: unknown detector 'mapel': did you mean 'maple'?
    """
    if isinstance(detector, Detector):
        if options:
            raise UsageError(f"options {', '.join(options)} need the name of a detector, not an instance of one")
        return detector
    return find_detector(detector).create(options, f"options of detector '{detector}'")


def restore_detector(arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Detector:
    """The detector whose ``get_state`` gave ``arrays`` and ``metadata``."""
    return find_detector(metadata["detector"]).kind.from_state(arrays, metadata)
