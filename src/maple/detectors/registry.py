"""Detectors by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from maple.detectors.base import Detector
from maple.errors import UsageError, same_class, suggest

AnyDetector = TypeVar("AnyDetector", bound=type[Detector])
_REGISTRY: dict[str, type[Detector]] = {}


def register_detector(name: str) -> Callable[[AnyDetector], AnyDetector]:
    """Class decorator that makes a detector known by ``name``."""

    def register(detector: AnyDetector) -> AnyDetector:
        if not same_class(_REGISTRY.get(name, detector), detector):
            raise UsageError(f"there is a detector '{name}' already: choose another name")
        detector.name = name
        _REGISTRY[name] = detector
        return detector

    return register


def list_detectors() -> list[str]:
    """The names that :func:`create_detector` knows.

    >>> [name for name in list_detectors() if name in ("energy", "maple", "softmax")]
    ['energy', 'maple', 'softmax']
    """
    _load()
    return sorted(_REGISTRY)


def create_detector(detector: str | Detector, **options: Any) -> Detector:
    """A detector by name, with its options; an instance is returned as it is.

    >>> create_detector("maple", covariance="global")  # doctest: +ELLIPSIS
    MapleDetector(explained_variance=0.95, pca=True, covariance='global', distance='mahalanobis', ...)
    >>> create_detector("mapel")
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: unknown detector 'mapel': did you mean 'maple'?
    """
    if isinstance(detector, Detector):
        if options:
            raise UsageError(f"options {', '.join(options)} come too late for a detector that exists: give its name")
        return detector
    kind = _find(detector)
    known: list[str] = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    for option in options:
        if option not in known:
            hint = suggest(option, known) if known else "it has no options"
            raise UsageError(f"unknown option '{option}' of the detector '{detector}': {hint}")
    return kind(**options)


def restore_detector(arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Detector:
    """The detector whose ``get_state`` gave ``arrays`` and ``metadata``."""
    return _find(metadata["detector"]).from_state(arrays, metadata)


def _find(name: str) -> type[Detector]:
    _load()
    if name not in _REGISTRY:
        raise UsageError(f"unknown detector '{name}': {suggest(name, _REGISTRY)}")
    return _REGISTRY[name]


def _load() -> None:
    """Import the modules that register detectors."""
    for module in ("logits", "maple"):
        import_module(f"maple.detectors.{module}")
