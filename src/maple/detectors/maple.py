"""The MAPLE detector: Gaussians over embeddings."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from maple.detectors.base import Batches, Detector, Source, State, SumOverRanks
from maple.detectors.description import Description
from maple.detectors.options import DetectorOptions
from maple.detectors.registry import register_detector
from maple.detectors.scores import FUSED, NEEDS_PLAIN, Score, Surprise, fit_surprise
from maple.errors import FitError, UsageError
from maple.options import as_dict, build_options
from maple.stats.arrays import as_array, as_embeddings
from maple.stats.background import Background, fit_background
from maple.stats.gaussians import Gaussians, add_scatter, fit_gaussians, with_full_covariances
from maple.stats.metrics import auroc
from maple.stats.moments import Moments
from maple.types import About, Outputs

EXPONENTS = (0.0, 0.5, 1.0)  # of the norm, to choose from
DEFAULT_EXPONENT = 1.0  # where nothing tells them apart
MIN_VALIDATION = 50  # validation images from which on tails can be told, and scores fused
MIN_ERRORS = 20  # validation images on each side, wrong and right, for a choice


@register_detector("maple")
class MapleDetector(DetectorOptions, Detector):
    """Gaussians over embeddings: squared Mahalanobis distances to clusters, and the scores that follow from them.

    ``fit`` goes through the images once, in memory that does not grow with their number (``covariance="full"`` goes
    twice). Cluster ids come from ``Outputs.cluster_ids``, or ``labels`` where no class is split. Validation images
    choose the exponent of the norm and teach the fused score; without them, or with few, ``auto`` means exponent 1 and
    score ``normalised``.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(300) % 3
    >>> embeddings = rng.normal(size=(300, 8)) + 6 * np.eye(3, 8)[labels]
    >>> detector = MapleDetector(norm_exponent=0).fit(Outputs(embeddings, labels=labels))
    >>> new = detector.describe(np.vstack([embeddings[:3], np.full((1, 8), 40.0)]))
    >>> new.md_class_id[:3]
    array([0, 1, 2])
    >>> bool(new.score[3] > new.score[:3].max())
    True
    """

    about: ClassVar[About] = About(
        "Gaussians over the embeddings, fused with logits and a shallow layer",
        "Venkataramanan et al. 2023",
        needs="embeddings; validation images, and logits, for its best score",
        adds="a mean per cluster, one covariance",
    )
    moments_: dict[float, Moments]  # by exponent of the norm
    shallow_moments_: Moments  # of the responses of a shallow layer; only where the outputs have them
    exponent_: float  # of the Gaussians in use
    gaussians_: Gaussians
    score_: Score
    surprises_: dict[Score, Surprise]  # of the scores that ``fused`` adds up; empty without validation images
    cluster_to_class_: np.ndarray  # (M,) int64
    appended_: int = 0  # clusters, the last ones, of classes that the head of the network does not know
    first_gaussians_: Gaussians  # those of ``fit``, by which ``extend`` tells clusters; only after ``extend``

    # Options are compared and hashed by value, detectors are not: what they have learned differs.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    # -- learning

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:
        two_passes = self.covariance == "full" and self.distance == "mahalanobis"
        if two_passes and not batches.repeatable:
            raise FitError(
                "covariance='full' goes through the images twice, but a generator ends after one pass: "
                "give Outputs, a list, or a function that starts the generator"
            )
        self._reset()
        for outputs in batches.start():
            self._add(outputs)
        self._merge(batches.sum_over_ranks)
        self._learn(validation)
        if two_passes:
            self._learn_full_covariances(batches)
        self._learn_score(validation)

    def partial_fit(self, outputs: Outputs) -> Self:
        """Add a batch of training images to what was learned; the Gaussians follow when they are next used.

        Exponent and score stay what they are.
        """
        self._check_one_pass()
        self._add(outputs)
        self.__dict__.pop("gaussians_", None)
        self.fitted_ = True
        return self

    def extend(self, outputs: Source) -> Self:
        """Add labelled images of known or new classes to what was learned, without the images learned from before.

        An image of a known class goes to the nearest cluster of that class, as told by the Gaussians of ``fit``: in how
        many parts images are added, and in which order, makes no difference. A class id beyond those known is a new
        class of one cluster, for which the head of the network has no column (:meth:`complete`). Deviation, PCA and
        covariance follow from all moments, as if all images had been there from the start; exponent and score stay
        what validation images chose, until :meth:`learn_score`.

        >>> rng = np.random.default_rng(0)
        >>> labels = np.arange(400) % 4
        >>> outputs = Outputs(rng.normal(size=(400, 8)) + 6 * np.eye(4, 8)[labels], labels=labels)
        >>> grown = MapleDetector(norm_exponent=0).fit(outputs[labels < 3]).extend(outputs[labels == 3])
        >>> whole = MapleDetector(norm_exponent=0).fit(outputs)
        >>> bool(np.allclose(grown.squared_distances(outputs), whole.squared_distances(outputs), rtol=1e-8))
        True
        """
        self._check_fitted()
        self._check_one_pass()
        for batch in Batches(outputs).start():
            if len(batch) == 0:
                continue
            if not hasattr(self, "first_gaussians_"):
                self.first_gaussians_ = self.gaussians_
            labels, known = _cluster_ids(replace(batch, cluster_ids=None)), self.cluster_to_class_
            classes = np.append(known, np.arange(known.max() + 1, labels.max() + 1))  # of each cluster, old and new
            own = nearest_of_class(self.first_gaussians_, batch.embeddings, labels, classes)
            self.partial_fit(replace(batch, cluster_ids=own, cluster_to_class=classes))
            self.appended_ += len(classes) - len(known)
        self._check_fitted()
        return self

    def learn_score(self, validation: Outputs) -> Self:
        """Learn anew from images that taught nothing else how to rank; few of them leave the score as it is."""
        self._check_fitted()
        if validation.logits is not None and len(validation) >= MIN_VALIDATION:
            self._learn_score(validation)
        return self

    @property
    def head_classes_(self) -> np.ndarray:
        """Whether the head of the network has columns for each class (C,), bool."""
        n_columns = len(self.cluster_to_class_) - self.appended_
        return np.isin(np.arange(int(self.cluster_to_class_.max()) + 1), self.cluster_to_class_[:n_columns])

    def complete(self, outputs: Outputs) -> Outputs:
        """The same outputs with one logit per cluster: -inf, probability 0, where the head has no column for it."""
        if not self.appended_ or outputs.logits is None:
            return outputs
        logits, n_clusters = as_array(outputs.logits), len(self.cluster_to_class_)
        missing = n_clusters - logits.shape[1]
        if missing not in (0, self.appended_):
            raise UsageError(
                f"logits have {logits.shape[1]} columns, but the detector expects {n_clusters - self.appended_}: "
                "use the same backbone"
            )
        logits = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
        return replace(outputs, logits=logits, cluster_to_class=self.cluster_to_class_)

    def _merge(self, sum_over_ranks: SumOverRanks) -> None:
        """The moments of all processes in each of them."""
        if hasattr(self, "moments_"):
            self.moments_ = {exponent: each.merge(sum_over_ranks) for exponent, each in self.moments_.items()}
        if hasattr(self, "shallow_moments_"):
            self.shallow_moments_ = self.shallow_moments_.merge(sum_over_ranks)

    def _exponents(self) -> tuple[float, ...]:
        """The exponents of the norm to go by: those to choose from, and 0 where a score needs it."""
        if self.norm_exponent == "auto":
            return EXPONENTS
        plain = self.score_by in ("auto", "fused", *NEEDS_PLAIN)
        return tuple(sorted({float(self.norm_exponent), 0.0} if plain else {float(self.norm_exponent)}))

    def _check_one_pass(self) -> None:
        if self.covariance == "full" and self.distance == "mahalanobis":
            raise UsageError("covariance='full' needs all images at once: call fit, or use covariance='tied'")

    def _reset(self) -> None:
        build_options(DetectorOptions, as_dict(self), where=type(self).__name__)  # constructors only remember
        for learned in [name for name in self.__dict__ if name.endswith("_")]:
            del self.__dict__[learned]

    def _add(self, outputs: Outputs) -> None:
        cluster_ids, cluster_to_class = _cluster_ids(outputs), _cluster_to_class(outputs)
        embeddings = as_embeddings(outputs.embeddings)
        if not hasattr(self, "moments_"):
            dim = embeddings.shape[1]
            self.moments_ = {exponent: Moments(0, dim, norm_exponent=exponent) for exponent in self._exponents()}
            self.cluster_to_class_ = cluster_to_class
            if outputs.shallow is not None:
                self.shallow_moments_ = Moments(1, outputs.shallow.shape[1])
        self.cluster_to_class_ = _agreed(self.cluster_to_class_, cluster_to_class)
        for moments in self.moments_.values():
            moments.grow(len(self.cluster_to_class_))
            moments.update(embeddings, cluster_ids)
        if hasattr(self, "shallow_moments_") and outputs.shallow is not None:
            self.shallow_moments_.update(outputs.shallow, np.zeros(len(outputs), dtype=np.int64))

    def _learn(self, validation: Outputs | None = None) -> None:
        """The exponent, where it is still open, and the Gaussians."""
        if not hasattr(self, "moments_"):
            raise FitError("the detector got no outputs to learn from: add images")
        for lazy in ("plain_gaussians_", "plain_background_", "background_", "shallow_background_"):
            self.__dict__.pop(lazy, None)
        if not hasattr(self, "exponent_"):
            self.exponent_ = self._choose_exponent(validation)
            keep = {0.0, self.exponent_}
            self.moments_ = {exponent: each for exponent, each in self.moments_.items() if exponent in keep}
        self.gaussians_ = self._fit_gaussians(self.exponent_)

    def _fit_gaussians(self, exponent: float) -> Gaussians:
        return fit_gaussians(
            self._moments(exponent),
            explained_variance=self.explained_variance,
            pca=self.pca,
            covariance=self.covariance,
            distance=self.distance,
        )

    def _choose_exponent(self, validation: Outputs | None) -> float:
        """The exponent whose distance ranks wrong above right validation images best.

        Images that a network gets wrong are the strangest of those it knows: the only in-distribution stand-in for
        unknown ones. On real networks this order of the exponents is their order in detecting unknown images.
        """
        if self.norm_exponent != "auto":
            return float(self.norm_exponent)
        if validation is None or validation.labels is None:
            return DEFAULT_EXPONENT
        known = validation[np.isin(validation.labels, self.cluster_to_class_)]
        separation = {}
        for exponent in self.moments_:
            distances = self._fit_gaussians(exponent).squared_distances(known.embeddings)
            wrong = self.cluster_to_class_[distances.argmin(axis=1)] != known.labels
            if min(wrong.sum(), (~wrong).sum()) < MIN_ERRORS:
                return DEFAULT_EXPONENT
            nearest = distances.min(axis=1)
            separation[exponent] = auroc(nearest[~wrong], nearest[wrong])
        return max(separation, key=lambda exponent: separation[exponent])

    def _learn_full_covariances(self, batches: Batches) -> None:
        """One covariance per cluster, from a second pass."""
        tied = {"gaussians_": self.gaussians_}
        if self.exponent_ != 0 and 0.0 in self.moments_:
            tied["plain_gaussians_"] = self._fit_gaussians(0.0)
        scatters = {name: np.zeros((g.n_clusters, g.n_components, g.n_components)) for name, g in tied.items()}
        for outputs in batches.start():
            for name, gaussians in tied.items():
                projection = gaussians.project(outputs.embeddings)
                add_scatter(scatters[name], projection, _cluster_ids(outputs), gaussians.centroids)
        counts = self.moments_[self.exponent_].counts
        for name, gaussians in tied.items():
            scatter = batches.sum_over_ranks(scatters[name])
            self.__dict__[name] = with_full_covariances(gaussians, scatter / counts[:, None, None], counts)

    def _learn_score(self, validation: Outputs | None) -> None:
        """Which score to rank by, and the surprises that ``fused`` adds up."""
        self.surprises_ = {}
        n_validation = 0 if validation is None else len(validation)
        can_fuse = n_validation >= (MIN_VALIDATION if self.score_by == "auto" else 1)
        if can_fuse:
            assert validation is not None
            self.surprises_ = self._learn_surprises(self._describe(validation))
        if self.score_by == "fused" and not self.surprises_:
            raise UsageError(
                "score_by 'fused' needs validation images, and logits, several clusters or a shallow layer: give "
                "fit(outputs, validation) both, or use score_by 'normalised'"
            )
        self.score_ = ("fused" if self.surprises_ else "normalised") if self.score_by == "auto" else self.score_by

    def _learn_surprises(self, found: Description) -> dict[Score, Surprise]:
        """Those of the scores that there are; none where only the distance is left, which speaks far out alone."""
        one = len(self.cluster_to_class_) == 1  # cluster, which has no spread
        names = [name for name in FUSED if name in found.available_scores and not (one and name == "spread")]
        if set(names) <= {"distance"}:
            return {}
        return {name: fit_surprise(found.score_named(name)) for name in names}

    def _check_fitted(self) -> None:
        super()._check_fitted()
        if not hasattr(self, "gaussians_"):  # after partial_fit
            self._learn()
        if not hasattr(self, "score_"):
            self._learn_score(None)

    def _facts(self) -> dict[str, Any]:
        if not self.fitted_:
            return {}
        moments = next(iter(self.moments_.values()))
        found: dict[str, Any] = {
            "images": int(moments.counts.sum()),
            "classes": len(np.unique(self.cluster_to_class_)),
            "clusters": len(self.cluster_to_class_),
            "embedding size": moments.dim,
        }
        if hasattr(self, "gaussians_"):  # not yet after partial_fit
            found |= {"components": self.gaussians_.n_components, "exponent of the norm": self.exponent_}
        return found | ({"score": self.score_} if hasattr(self, "score_") else {})

    # -- what follows from the moments when a score asks for it

    @cached_property
    def plain_gaussians_(self) -> Gaussians:
        """The Gaussians of embeddings as they are."""
        return self._fit_gaussians(0.0)

    @cached_property
    def plain_background_(self) -> Background:
        """All images as one Gaussian, of embeddings as they are."""
        return self._fit_background(0.0)

    @cached_property
    def background_(self) -> Background:
        """All images as one Gaussian, of normalised embeddings."""
        return self._fit_background(self.exponent_)

    @cached_property
    def shallow_background_(self) -> Background:
        """All images as one Gaussian, of the responses of a shallow layer: all directions of them."""
        if not hasattr(self, "shallow_moments_"):
            raise UsageError("the detector was fitted without a shallow layer: name one in wrap_backbone and fit again")
        return fit_background(self.shallow_moments_, pca=False)

    def _fit_background(self, exponent: float) -> Background:
        return fit_background(self._moments(exponent), explained_variance=self.explained_variance, pca=self.pca)

    def _moments(self, exponent: float) -> Moments:
        if exponent not in self.moments_:
            raise UsageError(
                "the detector was fitted on normalised embeddings only: use score_by 'auto', 'distance' or 'relative'"
            )
        return self.moments_[exponent]

    # -- what it says about images: all take Outputs or plain embeddings

    def _score(self, outputs: Outputs) -> np.ndarray:
        return self.describe(outputs).score

    def describe(self, outputs: Outputs | np.ndarray) -> Description:
        """Everything at once, from one computation of the distances."""
        self._check_fitted()
        return self._describe(outputs)

    def _describe(self, outputs: Outputs | np.ndarray) -> Description:
        if not isinstance(outputs, Outputs):
            outputs = Outputs(as_embeddings(outputs))
        outputs = self.complete(outputs)
        distances = self.gaussians_.squared_distances(outputs.embeddings)
        return Description(self, as_embeddings(outputs.embeddings), outputs.logits, outputs.shallow, distances)

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
        for exponent, moments in self.moments_.items():
            arrays |= _add_prefix(f"moments.{exponent:g}.", moments.to_arrays())
        if hasattr(self, "shallow_moments_"):
            arrays |= _add_prefix("shallow.", self.shallow_moments_.to_arrays())
        arrays |= _add_prefix("gaussians.", self.gaussians_.to_arrays())
        if self.gaussians_.whitenings is not None and 0.0 in self.moments_:
            arrays |= _add_prefix("plain.", self.plain_gaussians_.to_arrays())  # moments do not tell them
        for name, surprise in self.surprises_.items():
            arrays |= _add_prefix(f"surprise.{name}.", surprise.to_arrays())
        if hasattr(self, "first_gaussians_"):
            arrays |= _add_prefix("first.", self.first_gaussians_.to_arrays())
        return arrays, metadata | {"exponent": self.exponent_, "score": self.score_, "appended": self.appended_}

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        detector = super().from_state(arrays, metadata)
        detector.cluster_to_class_ = np.asarray(arrays["cluster_to_class"], dtype=np.int64)
        by_exponent = _with_prefix(arrays, "moments.")
        prefixes = sorted(name.removesuffix("counts") for name in by_exponent if name.endswith(".counts"))
        moments = [Moments.from_arrays(_with_prefix(by_exponent, prefix)) for prefix in prefixes]
        detector.moments_ = {each.norm_exponent: each for each in moments}
        if shallow := _with_prefix(arrays, "shallow."):
            detector.shallow_moments_ = Moments.from_arrays(shallow)
        detector.exponent_, detector.score_ = float(metadata["exponent"]), metadata["score"]
        detector.appended_ = int(metadata.get("appended", 0))
        detector.gaussians_ = Gaussians.from_arrays(_with_prefix(arrays, "gaussians."))
        if first := _with_prefix(arrays, "first."):
            detector.first_gaussians_ = Gaussians.from_arrays(first)
        if plain := _with_prefix(arrays, "plain."):
            detector.__dict__["plain_gaussians_"] = Gaussians.from_arrays(plain)
        detector.surprises_ = {
            name: Surprise.from_arrays(saved) for name in FUSED if (saved := _with_prefix(arrays, f"surprise.{name}."))
        }
        return detector


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


def nearest_of_class(
    gaussians: Gaussians, embeddings: np.ndarray, labels: np.ndarray, cluster_to_class: np.ndarray
) -> np.ndarray:
    """For labelled images (N,), the nearest cluster of the class that each belongs to.

    Clusters beyond those of ``gaussians`` are each the only one of their class.
    """
    distances = np.zeros((len(labels), len(cluster_to_class)))  # (N, M)
    distances[:, : gaussians.n_clusters] = gaussians.squared_distances(embeddings)
    return np.where(cluster_to_class != labels[:, None], np.inf, distances).argmin(axis=1)


def _agreed(known: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The longer of two maps from clusters to classes, which must agree where both speak."""
    shorter, longer = sorted((known, new), key=len)
    if not np.array_equal(shorter, longer[: len(shorter)]):
        raise FitError("batches disagree on the class of a cluster: fit on outputs of one relabelling")
    return longer


def _add_prefix(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {prefix + name: array for name, array in arrays.items()}


def _with_prefix(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
