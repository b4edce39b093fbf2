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
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from scipy.special import logsumexp

from maple.config import DetectorOptions, as_dict, build_options
from maple.errors import FitError, NotFittedError, UsageError, suggest
from maple.gaussian import (
    Gaussians,
    Moments,
    add_scatter,
    as_array,
    as_embeddings,
    class_logsumexp,
    class_maximum,
    fit_gaussians,
    log_chi_square_tail,
    log_posterior,
    with_full_covariances,
)
from maple.types import Outputs

Source = Outputs | Iterable[Outputs] | Callable[[], Iterable[Outputs]]
State = tuple[dict[str, np.ndarray], dict[str, Any]]


# ------------------------------------------------------------------------------------------------------- contract


class Detector(ABC):
    """``fit(outputs)`` learns, ``score(outputs)`` ranks; learned attributes end in ``_``."""

    name: ClassVar[str] = ""
    fitted_: bool = False

    def fit(self, outputs: Source) -> Self:
        """Learn from the training images.

        ``outputs`` is one ``Outputs``, batches of them in any iterable, or a function that starts an iteration over
        batches (needed where a detector goes through the images twice and they should not all be held).
        """
        self._fit(_Batches(outputs))
        self.fitted_ = True
        return self

    def score(self, outputs: Outputs) -> np.ndarray:
        """One score per image (N,), float64; higher is more out-of-distribution."""
        self._check_fitted()
        return np.asarray(self._score(outputs), dtype=np.float64)

    @abstractmethod
    def _score(self, outputs: Outputs) -> np.ndarray: ...

    def _fit(self, batches: _Batches) -> None:  # noqa: B027
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


AnyDetector = TypeVar("AnyDetector", bound=type[Detector])
_REGISTRY: dict[str, type[Detector]] = {}


def register_detector(name: str) -> Callable[[AnyDetector], AnyDetector]:
    """Class decorator that makes a detector known by ``name``."""

    def register(detector: AnyDetector) -> AnyDetector:
        if name in _REGISTRY:
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
    return sorted(_REGISTRY)


def create_detector(detector: str | Detector, **options: Any) -> Detector:
    """A detector by name, with its options; an instance is returned as it is.

    >>> create_detector("maple", covariance="global")
    MapleDetector(explained_variance=0.95, pca=True, covariance='global', distance='mahalanobis', norm_exponent=1.0)
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
    if name not in _REGISTRY:
        raise UsageError(f"unknown detector '{name}': {suggest(name, _REGISTRY)}")
    return _REGISTRY[name]


class _Batches:
    """Outputs, batches of them, or a function that starts batches: one way to go through all three."""

    def __init__(self, source: Source) -> None:
        self._source = source
        if not isinstance(source, Outputs | Iterable) and not callable(source):
            raise UsageError(f"a detector is fitted on Outputs or batches of them, not on {type(source).__name__}")
        self.repeatable = isinstance(source, Outputs) or callable(source) or iter(source) is not source

    def start(self) -> Iterator[Outputs]:
        if isinstance(self._source, Outputs):
            return iter([self._source])
        return iter(self._source() if callable(self._source) else self._source)


def _cluster_ids(outputs: Outputs) -> np.ndarray:
    """The cluster of each training image (N,): its pseudo-label, or its label where no class is split."""
    ids = outputs.cluster_ids if outputs.cluster_ids is not None else outputs.labels
    if ids is None:
        raise FitError("the training images have neither labels nor cluster ids: give Outputs one of them")
    ids = as_array(ids)
    if (unknown := int((ids < 0).sum())) > 0:
        raise FitError(f"{unknown} of {len(ids)} training images have no label: leave them out of the fit")
    return ids


def _cluster_to_class(outputs: Outputs) -> np.ndarray:
    """The class of each cluster (M,); the identity where no class is split."""
    if outputs.cluster_to_class is not None:
        return as_array(outputs.cluster_to_class).astype(np.int64)
    both = outputs.cluster_ids is not None and outputs.labels is not None
    if both and not np.array_equal(as_array(outputs.cluster_ids), as_array(outputs.labels)):
        raise FitError(
            "cluster ids differ from labels, but the class of each cluster is missing: give Outputs cluster_to_class"
        )
    ids = _cluster_ids(outputs)
    return np.arange(int(ids.max()) + 1 if len(ids) else 0)


# ---------------------------------------------------------------------------------------------------------- MAPLE


@dataclass(frozen=True, eq=False)
class Description:
    """All that the Gaussians say about N images; the distances are computed once, the rest when asked for."""

    squared_distances: np.ndarray  # (N, M)
    cluster_to_class: np.ndarray  # (M,)
    log_weights: np.ndarray  # (M,) log prior of each cluster, less half its log determinant where covariances differ
    degrees_of_freedom: int  # K

    def __len__(self) -> int:
        return len(self.squared_distances)

    @cached_property
    def cluster(self) -> np.ndarray:
        """The nearest cluster (N,)."""
        return self.squared_distances.argmin(axis=1)

    @cached_property
    def squared_distance(self) -> np.ndarray:
        """Squared distance to the nearest cluster (N,): the score."""
        return self.squared_distances.min(axis=1)

    @cached_property
    def md_class_id(self) -> np.ndarray:
        """The class of the nearest cluster (N,): the paper's rule."""
        return self.cluster_to_class[self.cluster]

    @cached_property
    def log_typicality(self) -> np.ndarray:
        """Log chi-square tail of the nearest cluster (N,): the paper's P_MD in logs, finite however far out."""
        return log_chi_square_tail(self.squared_distance, self.degrees_of_freedom)

    @cached_property
    def typicality(self) -> np.ndarray:
        """Chi-square tail of the nearest cluster (N,), in [0, 1]."""
        return np.exp(self.log_typicality)

    @cached_property
    def uncertainty(self) -> np.ndarray:
        """1 - typicality (N,): the paper's u, to the last digit where it is small."""
        return -np.expm1(self.log_typicality)

    @cached_property
    def log_typicality_per_class(self) -> np.ndarray:
        """Log chi-square tail of the nearest cluster of each class (N, C): the paper's P_MD^c in logs."""
        nearest = -class_maximum(-self.squared_distances, self.cluster_to_class)  # (N, C)
        return log_chi_square_tail(nearest, self.degrees_of_freedom)

    def log_posterior(self, temperature: float = 1.0) -> np.ndarray:
        """Log class probabilities (N, C): see :func:`maple.gaussian.log_posterior`."""
        return log_posterior(self.squared_distances, self.log_weights, self.cluster_to_class, temperature)

    def posterior(self, temperature: float = 1.0) -> np.ndarray:
        """Class probabilities (N, C); rows sum to 1."""
        return np.exp(self.log_posterior(temperature))


@register_detector("maple")
class MapleDetector(DetectorOptions, Detector):
    """Squared Mahalanobis distance to the nearest cluster, in the standardised principal components.

    ``fit`` goes through the images once, in memory that does not grow with their number (``covariance="full"`` goes
    twice). Cluster ids come from ``Outputs.cluster_ids``, or ``labels`` where no class is split.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(300) % 3
    >>> embeddings = rng.normal(size=(300, 8)) + 6 * np.eye(3, 8)[labels]
    >>> detector = MapleDetector(norm_exponent=0).fit(Outputs(embeddings, labels=labels))
    >>> new = detector.describe(np.vstack([embeddings[:3], np.full((1, 8), 40.0)]))
    >>> new.md_class_id[:3]
    array([0, 1, 2])
    >>> bool(new.squared_distance[3] > new.squared_distance[:3].max())
    True
    """

    moments_: Moments
    gaussians_: Gaussians
    cluster_to_class_: np.ndarray  # (M,) int64

    # Options are compared and hashed by value, detectors are not: what they have learned differs.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    # -- learning

    def _fit(self, batches: _Batches) -> None:
        two_passes = self.covariance == "full" and self.distance == "mahalanobis"
        if two_passes and not batches.repeatable:
            raise FitError(
                "covariance='full' goes through the images twice, but a generator ends after one pass: "
                "give Outputs, a list, or a function that starts the generator"
            )
        self._reset()
        for outputs in batches.start():
            self._add(outputs)
        self._learn()
        if two_passes:
            self.gaussians_ = self._with_full_covariances(batches.start())

    def partial_fit(self, outputs: Outputs) -> Self:
        """Add a batch of training images to what was learned; the Gaussians follow when they are next used."""
        self._check_one_pass()
        self._add(outputs)
        self.__dict__.pop("gaussians_", None)
        self.fitted_ = True
        return self

    def fit_moments(self, moments: Moments, cluster_to_class: np.ndarray | None = None) -> Self:
        """Learn from moments accumulated elsewhere, with the same ``norm_exponent``.

        This is the distributed fit: each process updates its own ``Moments``, ``Moments.merge`` adds them up.
        """
        self._check_one_pass()
        if moments.norm_exponent != self.norm_exponent:
            raise UsageError(
                f"these moments have norm_exponent {moments.norm_exponent}, the detector {self.norm_exponent}: "
                "give both the same"
            )
        self._reset()
        identity = np.arange(moments.n_clusters)
        self.moments_ = moments
        self.cluster_to_class_ = identity if cluster_to_class is None else as_array(cluster_to_class).astype(np.int64)
        self._learn()
        self.fitted_ = True
        return self

    def _check_one_pass(self) -> None:
        if self.covariance == "full" and self.distance == "mahalanobis":
            raise UsageError("covariance='full' needs all images at once: call fit, or use covariance='tied'")

    def _reset(self) -> None:
        build_options(DetectorOptions, as_dict(self), where=type(self).__name__)  # constructors only remember
        for learned in ("fitted_", "moments_", "gaussians_", "cluster_to_class_"):
            self.__dict__.pop(learned, None)

    def _add(self, outputs: Outputs) -> None:
        cluster_ids, cluster_to_class = _cluster_ids(outputs), _cluster_to_class(outputs)
        embeddings = as_embeddings(outputs.embeddings)
        if not hasattr(self, "moments_"):
            self.moments_ = Moments(0, embeddings.shape[1], norm_exponent=self.norm_exponent)
            self.cluster_to_class_ = cluster_to_class
        self.cluster_to_class_ = _agreed(self.cluster_to_class_, cluster_to_class)
        self.moments_.grow(len(self.cluster_to_class_))
        self.moments_.update(embeddings, cluster_ids)

    def _learn(self) -> None:
        if not hasattr(self, "moments_"):
            raise FitError("the detector got no outputs to learn from: add images")
        self.gaussians_ = fit_gaussians(
            self.moments_,
            explained_variance=self.explained_variance,
            pca=self.pca,
            covariance=self.covariance,
            distance=self.distance,
        )

    def _with_full_covariances(self, batches: Iterator[Outputs]) -> Gaussians:
        tied, counts = self.gaussians_, self.moments_.counts
        scatter = np.zeros((tied.n_clusters, tied.n_components, tied.n_components))
        for outputs in batches:
            add_scatter(scatter, tied.project(outputs.embeddings), _cluster_ids(outputs), tied.centroids)
        return with_full_covariances(tied, scatter / counts[:, None, None], counts)

    def _check_fitted(self) -> None:
        super()._check_fitted()
        if not hasattr(self, "gaussians_"):  # after partial_fit
            self._learn()

    # -- what it says about images: all take Outputs or plain embeddings

    def _score(self, outputs: Outputs) -> np.ndarray:
        return self.describe(outputs).squared_distance

    def describe(self, outputs: Outputs | np.ndarray) -> Description:
        """Everything at once, from one computation of the distances."""
        self._check_fitted()
        embeddings = outputs.embeddings if isinstance(outputs, Outputs) else outputs
        return Description(
            squared_distances=self.gaussians_.squared_distances(embeddings),
            cluster_to_class=self.cluster_to_class_,
            log_weights=self.gaussians_.log_weights,
            degrees_of_freedom=self.gaussians_.n_components,
        )

    def squared_distances(self, outputs: Outputs | np.ndarray) -> np.ndarray:
        """Squared distance to each cluster (N, M)."""
        return self.describe(outputs).squared_distances

    def cluster(self, outputs: Outputs | np.ndarray) -> np.ndarray:
        """The nearest cluster (N,)."""
        return self.describe(outputs).cluster

    def md_class(self, outputs: Outputs | np.ndarray) -> np.ndarray:
        """The class of the nearest cluster (N,)."""
        return self.describe(outputs).md_class_id

    def log_typicality(self, outputs: Outputs | np.ndarray) -> np.ndarray:
        """Log chi-square tail of the nearest cluster (N,)."""
        return self.describe(outputs).log_typicality

    def log_typicality_per_class(self, outputs: Outputs | np.ndarray) -> np.ndarray:
        """Log chi-square tail of the nearest cluster of each class (N, C)."""
        return self.describe(outputs).log_typicality_per_class

    def typicality_per_class(self, outputs: Outputs | np.ndarray) -> np.ndarray:
        """Chi-square tail of the nearest cluster of each class (N, C): the paper's P_MD^c."""
        return np.exp(self.log_typicality_per_class(outputs))

    def log_posterior(self, outputs: Outputs | np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Log class probabilities (N, C)."""
        return self.describe(outputs).log_posterior(temperature)

    def posterior(self, outputs: Outputs | np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Class probabilities (N, C)."""
        return self.describe(outputs).posterior(temperature)

    # -- state

    def get_state(self) -> State:
        arrays, metadata = super().get_state()
        arrays["cluster_to_class"] = self.cluster_to_class_
        arrays |= {f"moments.{name}": array for name, array in self.moments_.to_arrays().items()}
        for field in fields(Gaussians):
            value = getattr(self.gaussians_, field.name)
            if isinstance(value, np.ndarray):
                arrays[f"gaussians.{field.name}"] = value
            elif value is not None:
                metadata[field.name] = value
        return arrays, metadata

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        detector = super().from_state(arrays, metadata)
        detector.cluster_to_class_ = np.asarray(arrays["cluster_to_class"], dtype=np.int64)
        detector.moments_ = Moments.from_arrays(_with_prefix(arrays, "moments."))
        learned: dict[str, Any] = _with_prefix(arrays, "gaussians.")
        learned |= {key: metadata[key] for key in ("norm_exponent", "float32")}
        detector.gaussians_ = Gaussians(**learned)
        return detector


def _agreed(known: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The longer of two maps from clusters to classes, which must agree where both speak."""
    shorter, longer = sorted((known, new), key=len)
    if not np.array_equal(shorter, longer[: len(shorter)]):
        raise FitError("batches disagree on the class of a cluster: fit on outputs of one relabelling")
    return longer


def _with_prefix(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


# --------------------------------------------------------------------------------------------------------- logits


class LogitDetector(Detector):
    """A score of the logits alone; learned is only which class each of their columns belongs to."""

    cluster_to_class_: np.ndarray  # (M,) int64

    def _fit(self, batches: _Batches) -> None:
        first = next(batches.start(), None)
        if first is None:
            raise FitError(f"the '{self.name}' detector got no outputs to learn from: add images")
        n_clusters = self._read(first).shape[1]
        given = first.cluster_to_class
        self.cluster_to_class_ = np.arange(n_clusters) if given is None else as_array(given).astype(np.int64)

    def _read(self, outputs: Outputs) -> np.ndarray:
        """The logits (N, M), in float64."""
        if outputs.logits is None:
            raise UsageError(f"the '{self.name}' detector needs logits: embed with a backbone that has a head")
        return as_array(outputs.logits).astype(np.float64)

    def _score(self, outputs: Outputs) -> np.ndarray:
        logits = self._read(outputs)
        if logits.shape[1] != len(self.cluster_to_class_):
            raise UsageError(
                f"logits have {logits.shape[1]} columns, but the '{self.name}' detector was fitted on "
                f"{len(self.cluster_to_class_)}: use the same backbone"
            )
        return self._score_logits(logits)

    @abstractmethod
    def _score_logits(self, logits: np.ndarray) -> np.ndarray: ...

    def get_state(self) -> State:
        arrays, metadata = super().get_state()
        return arrays | {"cluster_to_class": self.cluster_to_class_}, metadata

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        detector = super().from_state(arrays, metadata)
        detector.cluster_to_class_ = np.asarray(arrays["cluster_to_class"], dtype=np.int64)
        return detector


@register_detector("softmax")
class SoftmaxDetector(LogitDetector):
    """1 - probability of the most probable class (Hendrycks & Gimpel 2017); a class sums over its clusters.

    Computed as the probability of all *other* classes, so that confident images do not tie at 0.

    >>> logits = np.log([[0.5, 0.25, 0.25]])
    >>> outputs = Outputs(np.zeros((1, 2)), logits, cluster_to_class=np.array([0, 1, 1]))
    >>> SoftmaxDetector().fit(outputs).score(outputs)
    array([0.5])
    """

    def _score_logits(self, logits: np.ndarray) -> np.ndarray:
        log_class = class_logsumexp(logits, self.cluster_to_class_)  # (N, C)
        log_total = logsumexp(log_class, axis=1)
        log_class[np.arange(len(log_class)), log_class.argmax(axis=1)] = -np.inf
        return np.exp(logsumexp(log_class, axis=1) - log_total)


@register_detector("energy")
class EnergyDetector(LogitDetector):
    """Negative log-sum-exp of the logits (Liu et al. 2020).

    >>> outputs = Outputs(np.zeros((1, 2)), np.array([[0.0, 0.0]]))
    >>> EnergyDetector().fit(outputs).score(outputs).round(3)
    array([-0.693])
    """

    def _score_logits(self, logits: np.ndarray) -> np.ndarray:
        return -logsumexp(logits, axis=1)
