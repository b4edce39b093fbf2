"""State of a MAPLE detector: moments of clusters, the Gaussians that follow from them, and the score to rank by.

All are records. :class:`ClusterMoments` accumulate training images, :class:`Densities` derive Gaussians from them on
demand, :class:`Learned` adds the choices made on validation images.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np

from maple.detectors.base import Batches, State, SumOverRanks, pack_records, unpack_records
from maple.detectors.options import DetectorOptions
from maple.detectors.scores import FUSED, Part, Score, Surprise
from maple.errors import FitError, UsageError
from maple.stats.arrays import as_array, as_embeddings, with_prefix
from maple.stats.background import Background, fit_background
from maple.stats.conditioning import Conditioning, measure_conditioning
from maple.stats.gaussians import Gaussians, add_scatter, fit_gaussians, with_full_covariances
from maple.stats.moments import Moments
from maple.types import Outputs

_PCA = ("explained_variance", "pca", "standardise")

# ---------------------------------------------------------------------------------------------------------- moments


@dataclass(frozen=True, eq=False)
class ClusterMoments:
    """Moments of the training images by exponent of the norm, and of their responses in a shallow layer."""

    by_exponent: dict[float, Moments]
    cluster_to_class: np.ndarray  # (M,) int64
    shallow: Moments | None = None  # where the outputs have responses

    @classmethod
    def start(cls, outputs: Outputs, exponents: Iterable[float]) -> Self:
        """Moments of no images yet, as wide as these outputs."""
        dim = as_embeddings(outputs.embeddings).shape[1]
        shallow = None if outputs.shallow is None else Moments(1, outputs.shallow.shape[1])
        moments = {exponent: Moments(0, dim, norm_exponent=exponent) for exponent in exponents}
        return cls(moments, np.zeros(0, dtype=np.int64), shallow)

    def add(self, outputs: Outputs) -> Self:
        """Add a batch of training images to the moments, in place; the record of all images."""
        cluster_ids = _training_clusters(outputs)
        cluster_to_class = _agreed(self.cluster_to_class, _classes_of_clusters(outputs))
        embeddings = as_embeddings(outputs.embeddings)
        for moments in self.by_exponent.values():
            moments.grow(len(cluster_to_class)).update(embeddings, cluster_ids)
        if self.shallow is not None and outputs.shallow is not None:
            self.shallow.update(outputs.shallow, np.zeros(len(outputs), dtype=np.int64))
        return replace(self, cluster_to_class=cluster_to_class)

    def merge(self, sum_over_ranks: SumOverRanks) -> Self:
        """The moments of all processes, in each of them."""
        merged = {exponent: moments.merge(sum_over_ranks) for exponent, moments in self.by_exponent.items()}
        shallow = None if self.shallow is None else self.shallow.merge(sum_over_ranks)
        return replace(self, by_exponent=merged, shallow=shallow)

    def only(self, exponents: Iterable[float]) -> Self:
        """The moments of these exponents."""
        return replace(self, by_exponent={e: moments for e, moments in self.by_exponent.items() if e in exponents})

    def of(self, exponent: float) -> Moments:
        """The moments of an exponent, or an error."""
        if exponent not in self.by_exponent:
            raise UsageError("fitted on normalised embeddings only: use score_by 'auto', 'distance' or 'relative'")
        return self.by_exponent[exponent]

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The record as arrays, by name."""
        moments = {f"moments.{exponent:g}": moments for exponent, moments in self.by_exponent.items()}
        return {"cluster_to_class": self.cluster_to_class} | pack_records({**moments, "shallow": self.shallow})

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Self:
        """The inverse of :meth:`to_arrays`; other names are ignored."""
        named = sorted(name.removesuffix(".counts") for name in arrays if name.endswith(".counts"))
        found = unpack_records(Moments.from_arrays, arrays, named)
        shallow = found.pop("shallow", None)
        classes = arrays["cluster_to_class"].astype(np.int64)
        return cls({moments.norm_exponent: moments for moments in found.values()}, classes, shallow)


def _training_clusters(outputs: Outputs) -> np.ndarray:
    """The cluster of each training image (N,): its pseudo-label, or its label where no class is split."""
    ids = outputs.cluster_ids if outputs.cluster_ids is not None else outputs.labels
    if ids is None:
        raise FitError("the training images have neither labels nor cluster ids: give Outputs one of them")
    ids = as_array(ids)
    if (unknown := int((ids < 0).sum())) > 0:
        raise FitError(f"{unknown} of {len(ids)} training images have no label: leave them out of the fit")
    return ids


def _classes_of_clusters(outputs: Outputs) -> np.ndarray:
    """The class of each cluster (M,); the identity where no class is split."""
    if outputs.cluster_to_class is not None:
        return as_array(outputs.cluster_to_class).astype(np.int64)
    both = outputs.cluster_ids is not None and outputs.labels is not None
    if both and not np.array_equal(as_array(outputs.cluster_ids), as_array(outputs.labels)):
        raise FitError("cluster ids differ from labels, but their classes are missing: give Outputs cluster_to_class")
    ids = _training_clusters(outputs)
    return np.arange(int(ids.max()) + 1 if len(ids) else 0)


def _agreed(known: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The longer of two maps from clusters to classes, which must agree where both are defined."""
    shorter, longer = sorted((known, new), key=len)
    if not np.array_equal(shorter, longer[: len(shorter)]):
        raise FitError("batches disagree on the class of a cluster: fit on outputs of one relabelling")
    return longer


@dataclass(frozen=True, eq=False)
class Scatters:
    """Second moments of the training images around the centroid of their cluster (M, K, K), by exponent of the norm."""

    by_exponent: dict[float, np.ndarray]
    around: Mapping[float, Gaussians] = field(default_factory=dict)

    @classmethod
    def start(cls, outputs: Outputs, around: Mapping[float, Gaussians]) -> Self:
        """Those of no images yet."""
        sizes = {exponent: (g.n_clusters, g.n_components, g.n_components) for exponent, g in around.items()}
        return cls({exponent: np.zeros(size) for exponent, size in sizes.items()}, around)

    def add(self, outputs: Outputs) -> Self:
        """Add a batch of training images, in place. Returns itself."""
        for exponent, gaussians in self.around.items():
            projection = gaussians.project(outputs.embeddings)
            add_scatter(self.by_exponent[exponent], projection, _training_clusters(outputs), gaussians.centroids)
        return self

    def merge(self, sum_over_ranks: SumOverRanks) -> Self:
        """Those of all processes, in each of them."""
        return replace(self, by_exponent={e: sum_over_ranks(scatter) for e, scatter in self.by_exponent.items()})

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The record as arrays, by name."""
        return {f"{exponent:g}.scatter": scatter for exponent, scatter in self.by_exponent.items()}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Self:
        """The inverse of :meth:`to_arrays`."""
        return cls({float(name.removesuffix(".scatter")): scatter for name, scatter in arrays.items()})


# -------------------------------------------------------------------------------------------------------- densities


@dataclass(frozen=True, eq=False)
class Densities:
    """Gaussians of the clusters, and one Gaussian over all images; derived from moments on first use."""

    options: DetectorOptions
    moments: ClusterMoments
    exponent: float  # of the norm, for the Gaussians in use
    given: dict[float, Gaussians] = field(default_factory=dict)  # by exponent: full covariances, or read from a file
    appended: int = 0  # clusters, the last ones, of classes that were added after the fit

    def add(self, outputs: Outputs) -> Self:
        """The densities after one more batch of training images."""
        return replace(self, moments=self.moments.add(outputs), given={})

    @cached_property
    def gaussians(self) -> Gaussians:
        """The Gaussians in use."""
        return self.given.get(self.exponent) or self.fit_gaussians(self.exponent)

    @cached_property
    def plain_gaussians(self) -> Gaussians:
        """The Gaussians of raw embeddings."""
        return self.given.get(0.0) or self.fit_gaussians(0.0)

    @cached_property
    def plain_background(self) -> Background:
        """All images as one Gaussian, of raw embeddings."""
        return fit_background(self.moments.of(0.0), **self._chosen(*_PCA))

    @cached_property
    def background(self) -> Background:
        """All images as one Gaussian, of normalised embeddings."""
        return fit_background(self.moments.of(self.exponent), **self._chosen(*_PCA))

    @cached_property
    def shallow_background(self) -> Background:
        """All images as one Gaussian, of the responses of a shallow layer, in all directions."""
        if self.moments.shallow is None:
            raise UsageError("the fit had no shallow layer: fit with wrap_backbone(..., shallow=LAYER)")
        return fit_background(self.moments.shallow, pca=False)

    @property
    def is_derived(self) -> bool:
        """Whether the Gaussians in use have been computed."""
        return self.exponent in self.given or "gaussians" in self.__dict__

    @property
    def conditioning(self) -> Conditioning:
        """How well the images determine the covariance in use."""
        moments = self.moments.of(self.exponent)
        return measure_conditioning(moments, self.gaussians, self.options.standardise)

    def fit_gaussians(self, exponent: float) -> Gaussians:
        """Gaussians of one exponent, from the moments."""
        moments = self.moments.of(exponent)
        gaussians = fit_gaussians(moments, **self._chosen(*_PCA, "covariance", "distance"))
        if not self.appended:
            return gaussians
        n_classes = len(np.unique(self.moments.cluster_to_class[: -self.appended]))
        return replace(gaussians, log_priors=log_priors_of_update(moments.counts, self.appended, n_classes))

    def _chosen(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in names}

    def with_full_covariances(self, batches: Batches) -> Self:
        """The densities with one covariance per cluster, from another pass over the training images."""
        tied = {self.exponent: self.gaussians}
        if self.exponent != 0 and 0.0 in self.moments.by_exponent:
            tied[0.0] = self.plain_gaussians
        scatters = batches.accumulate(partial(Scatters.start, around=tied)).by_exponent
        counts = self.moments.of(self.exponent).counts
        full = {
            exponent: with_full_covariances(gaussians, scatters[exponent] / counts[:, None, None], counts)
            for exponent, gaussians in tied.items()
        }
        return replace(self, given=full)


def log_priors_of_update(counts: np.ndarray, appended: int, n_classes: int) -> np.ndarray:
    """Log prior of each cluster (M,) where the last ``appended`` ones are classes that were added after the fit.

    The images of a fit are a sample, so the share of a class estimates its frequency. Images of a new class are chosen
    by hand, and their number says nothing about its frequency. Before anything is known, all classes are alike: the
    expected share of a class is that of an average class. A new class therefore counts as an average class of the
    ``n_classes`` of the fit, or as its own images if they are more.

    >>> np.exp(log_priors_of_update(np.array([60, 20, 4]), appended=1, n_classes=2)).round(3)
    array([0.5  , 0.167, 0.333])
    """
    weights = counts.astype(np.float64)
    first = len(counts) - appended
    weights[first:] = np.maximum(weights[first:], weights[:first].sum() / n_classes)
    return np.log(weights / weights.sum())


# ---------------------------------------------------------------------------------------------------------- learned


@dataclass(frozen=True, eq=False)
class Learned:
    """The state of a fitted MAPLE detector."""

    densities: Densities
    score: Score = "normalised"  # that ranks images
    surprises: dict[Score, Surprise] = field(default_factory=dict)  # which ``fused`` adds up; from validation images
    parts: Mapping[Score, Part] = field(default_factory=lambda: FUSED)  # how ``fused`` counts them
    first: Gaussians | None = None  # those of ``fit``, by which ``extend`` assigns clusters; only after ``extend``

    @property
    def cluster_to_class(self) -> np.ndarray:
        """The class of each cluster (M,)."""
        return self.densities.moments.cluster_to_class

    @property
    def cluster_sizes(self) -> np.ndarray:
        """Training images of each cluster (M,)."""
        return self.densities.moments.of(self.densities.exponent).counts

    @property
    def appended(self) -> int:
        """Clusters, the last ones, of classes that the head of the network has no column for."""
        return self.densities.appended

    @property
    def n_columns(self) -> int:
        """Logits that the head of the network gives."""
        return len(self.cluster_to_class) - self.appended

    @property
    def head_classes(self) -> np.ndarray:
        """Whether the head of the network has columns for each class (C,), bool."""
        classes = np.arange(int(self.cluster_to_class.max()) + 1)
        return np.isin(classes, self.cluster_to_class[: self.n_columns])

    def complete(self, outputs: Outputs) -> Outputs:
        """The same outputs with one logit per cluster: -inf, probability 0, where the head has no column for it."""
        if not self.appended or outputs.logits is None:
            return outputs
        logits = as_array(outputs.logits)
        missing = len(self.cluster_to_class) - logits.shape[1]
        if missing not in (0, self.appended):
            columns = f"logits have {logits.shape[1]} columns instead of {self.n_columns}"
            raise UsageError(f"{columns}: use the backbone of the fit")
        logits = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
        return replace(outputs, logits=logits, cluster_to_class=self.cluster_to_class)

    def extend(self, batch: Outputs) -> Self:
        """The state after a batch of labelled images of known or new classes: see :meth:`MapleDetector.extend`."""
        first = self.first or self.densities.gaussians
        labels, known = _training_clusters(replace(batch, cluster_ids=None)), self.cluster_to_class
        classes = np.append(known, np.arange(known.max() + 1, labels.max() + 1))  # of each cluster, old and new
        own = nearest_of_class(first, batch.embeddings, labels, classes)
        densities = self.densities.add(replace(batch, cluster_ids=own, cluster_to_class=classes))
        appended = self.appended + len(classes) - len(known)
        return replace(self, densities=replace(densities, appended=appended), first=first)

    def to_state(self) -> State:
        """Arrays and plain values, for files."""
        densities = self.densities
        is_full = 0.0 in densities.given and densities.exponent != 0  # moments do not determine full covariances
        plain = densities.plain_gaussians if is_full else None
        surprises = {f"surprise.{name}": surprise for name, surprise in self.surprises.items()}
        records = {"gaussians": densities.gaussians, "plain": plain, **surprises, "first": self.first}
        parts = {name: [self.parts[name].weight, self.parts[name].beyond] for name in self.surprises}
        metadata = {"exponent": densities.exponent, "score": self.score, "appended": self.appended, "parts": parts}
        return densities.moments.to_arrays() | pack_records(records), metadata

    @classmethod
    def from_state(cls, options: DetectorOptions, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_state`."""
        exponent = float(metadata["exponent"])
        found = unpack_records(Gaussians.from_arrays, arrays, ("plain", "gaussians", "first"))
        first = found.pop("first", None)
        given = {0.0 if name == "plain" else exponent: gaussians for name, gaussians in found.items()}
        appended = int(metadata.get("appended", 0))
        densities = Densities(options, ClusterMoments.from_arrays(arrays), exponent, given, appended)
        parts = {name: Part(*values) for name, values in metadata["parts"].items()}
        surprises = unpack_records(Surprise.from_arrays, with_prefix(arrays, "surprise."), parts)
        return cls(densities, metadata["score"], surprises, parts, first)


def nearest_of_class(
    gaussians: Gaussians, embeddings: np.ndarray, labels: np.ndarray, cluster_to_class: np.ndarray
) -> np.ndarray:
    """For labelled images (N,), the nearest cluster of their class.

    Clusters beyond those of ``gaussians`` are each the only one of their class.
    """
    distances = np.zeros((len(labels), len(cluster_to_class)))  # (N, M)
    distances[:, : gaussians.n_clusters] = gaussians.squared_distances(embeddings)
    return np.where(cluster_to_class != labels[:, None], np.inf, distances).argmin(axis=1)
