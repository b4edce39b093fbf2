"""The MAPLE detector: Gaussians over embeddings, and the scores that follow from them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np

from maple.detectors.base import Batches, Detector, Source, State
from maple.detectors.description import Description
from maple.detectors.learned import ClusterMoments, Densities, Learned
from maple.detectors.options import DetectorOptions
from maple.detectors.registry import register_detector
from maple.detectors.scores import FUSED, NEEDS_PLAIN, Score, Surprise, fit_surprise
from maple.errors import FitError, UsageError
from maple.options import as_dict
from maple.stats.conditioning import Conditioning
from maple.stats.gaussians import Gaussians
from maple.stats.metrics import auroc
from maple.types import About, Outputs

_EXPONENTS = (0.0, 0.5, 1.0)  # of the norm, to choose from
_DEFAULT_EXPONENT = 1.0  # where validation images do not decide
_MIN_VALIDATION = 50  # validation images, at least, to estimate tails and fuse scores
_MIN_ERRORS = 20  # validation images on each side, wrong and right, for a choice


@register_detector("maple")
class MapleDetector(DetectorOptions, Detector):
    """Gaussians over embeddings: squared Mahalanobis distances to clusters, and the scores that follow from them.

    ``fit`` reads the images once, in memory that does not grow with their number (``covariance="full"`` reads them
    twice). Cluster ids come from ``Outputs.cluster_ids``, or ``labels`` where no class is split. Validation images
    choose the exponent of the norm and calibrate the fused score; without them, or with few, ``auto`` means exponent 1
    and score ``normalised``. The learned state is one record, ``learned_``.

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

    about = About(
        "Gaussians over the embeddings, fused with logits and a shallow layer",
        "Venkataramanan et al. 2023",
        needs="embeddings; validation images, and logits, for its best score",
        adds="a mean per cluster, one covariance",
    )
    _learned: Learned | None = None

    # Options are compared and hashed by value; detectors by identity, since their learned state differs.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    # -- learning

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:
        if self._is_full and not batches.repeatable:
            remedy = "give Outputs, a list, or a function that starts a generator"
            raise FitError(f"covariance='full' reads the images twice, but a generator ends after one pass: {remedy}")
        self._learned = None
        moments = batches.accumulate(partial(ClusterMoments.start, exponents=self._exponents(validation)))
        densities = self._learn_densities(moments, validation)
        if self._is_full:
            densities = densities.with_full_covariances(batches)
        self._learned = self._learn_score(Learned(densities), validation)

    def partial_fit(self, outputs: Outputs) -> Self:
        """Add a batch of training images; the Gaussians are derived on next use.

        Exponent and score stay.
        """
        self._check_one_pass()
        learned = self._learned
        if learned is None:
            self._check_options()
            exponent = self._default_exponent
            moments = ClusterMoments.start(outputs, self._exponents(None))
            learned = self._learn_score(Learned(Densities(self._options(), moments, exponent)), None)
        self._learned = replace(learned, densities=learned.densities.add(outputs))
        self.fitted_ = True
        return self

    def extend(self, outputs: Source) -> Self:
        """Add labelled images of known or new classes, without the images of earlier fits.

        An image of a known class joins the nearest cluster of that class, by the Gaussians of ``fit``: the order of the
        images, and the parts they come in, make no difference. A class id beyond those known is a new class of one
        cluster, for which the head of the network has no column (:meth:`complete`). Deviation, PCA and covariance
        follow from all moments, as in a fit on all images; exponent and score stay until :meth:`learn_score`.

        >>> rng = np.random.default_rng(0)
        >>> labels = np.arange(400) % 4
        >>> outputs = Outputs(rng.normal(size=(400, 8)) + 6 * np.eye(4, 8)[labels], labels=labels)
        >>> grown = MapleDetector(norm_exponent=0).fit(outputs[labels < 3]).extend(outputs[labels == 3])
        >>> whole = MapleDetector(norm_exponent=0).fit(outputs)
        >>> bool(np.allclose(grown.squared_distances(outputs), whole.squared_distances(outputs), rtol=1e-8))
        True
        """
        self._check_one_pass()
        for batch in Batches(outputs).start_if_any():
            if len(batch):
                self._learned = self.learned_.extend(batch)
        _ = self.gaussians_  # images that cannot be fitted raise an error now
        return self

    def learn_score(self, validation: Outputs) -> Self:
        """Fit the score again to validation images used for nothing else; fewer than 50 leave it unchanged."""
        learned = self.learned_
        if validation.logits is not None and len(validation) >= _MIN_VALIDATION:
            self._learned = self._learn_score(learned, validation)
        return self

    def complete(self, outputs: Outputs) -> Outputs:
        """The same outputs with one logit per cluster: see :meth:`maple.detectors.learned.Learned.complete`."""
        return self.learned_.complete(outputs)

    def replace_gaussians(self, gaussians: Gaussians) -> None:
        """Use these Gaussians of the same clusters instead of those that follow from the moments, until more images."""
        densities = self.learned_.densities
        self._learned = replace(self.learned_, densities=replace(densities, given={densities.exponent: gaussians}))

    @property
    def _is_full(self) -> bool:
        """Whether each cluster has its own covariance, which takes a second pass."""
        return self.covariance == "full" and self.distance == "mahalanobis"

    def _check_one_pass(self) -> None:
        if self._is_full:
            raise UsageError("covariance='full' needs all images at once: call fit, or use covariance='tied'")

    def _options(self) -> DetectorOptions:
        return DetectorOptions(**as_dict(self))

    def _exponents(self, validation: Outputs | None) -> tuple[float, ...]:
        """The exponents of the norm to accumulate: those to choose from, and 0 where a score needs it."""
        if self.norm_exponent == "auto":
            return _EXPONENTS if _may_choose(validation) else (0.0, _DEFAULT_EXPONENT)
        plain = self.score_by in ("auto", "fused", *NEEDS_PLAIN)
        return tuple(sorted({float(self.norm_exponent), 0.0} if plain else {float(self.norm_exponent)}))

    def _learn_densities(self, moments: ClusterMoments, validation: Outputs | None) -> Densities:
        exponent = self._choose_exponent(moments, validation)
        densities = Densities(self._options(), moments.only({0.0, exponent}), exponent)
        _ = densities.gaussians  # images that cannot be fitted raise an error now
        return densities

    @property
    def _default_exponent(self) -> float:
        return _DEFAULT_EXPONENT if self.norm_exponent == "auto" else float(self.norm_exponent)

    def _choose_exponent(self, moments: ClusterMoments, validation: Outputs | None) -> float:
        """The exponent whose distance ranks wrong above right validation images best.

        Misclassified images are the only in-distribution stand-in for unknown ones. On real networks, the order of the
        exponents by this criterion is their order in detecting unknown images.
        """
        if self.norm_exponent != "auto" or not _may_choose(validation):
            return self._default_exponent
        assert validation is not None
        assert validation.labels is not None
        densities, classes = Densities(self._options(), moments, _DEFAULT_EXPONENT), moments.cluster_to_class
        known = validation[np.isin(validation.labels, classes)]
        separation = {}
        for exponent in moments.by_exponent:
            nearest = densities.fit_gaussians(exponent).nearest(known.embeddings)
            wrong = classes[nearest.cluster] != known.labels
            if min(wrong.sum(), (~wrong).sum()) < _MIN_ERRORS:
                return _DEFAULT_EXPONENT
            separation[exponent] = auroc(nearest.squared_distance[~wrong], nearest.squared_distance[wrong])
        return max(separation, key=separation.__getitem__)

    def _learn_score(self, learned: Learned, validation: Outputs | None) -> Learned:
        """The state with the score to rank by, and the surprises that ``fused`` adds up."""
        surprises: dict[Score, Surprise] = {}
        if validation is not None and len(validation) >= (_MIN_VALIDATION if self.score_by == "auto" else 1):
            surprises = _fit_surprises(Description.of(learned, validation))
        if self.score_by == "fused" and not surprises:
            needs = "validation images, and logits or several clusters"
            raise UsageError(f"score_by 'fused' needs {needs}: give fit(outputs, validation), or use 'normalised'")
        automatic: Score = "fused" if surprises else "normalised"
        score = automatic if self.score_by == "auto" else self.score_by
        return replace(learned, score=score, surprises=surprises, parts=FUSED)

    def _facts(self) -> dict[str, Any]:
        if self._learned is None:
            return {}
        densities, classes = self._learned.densities, self._learned.cluster_to_class
        n_images, dim = int(self._learned.cluster_sizes.sum()), densities.moments.of(densities.exponent).dim
        facts: dict[str, Any] = {"images": n_images, "classes": len(np.unique(classes)), "clusters": len(classes)}
        facts["embedding size"] = dim
        if densities.is_derived:  # not yet after partial_fit
            facts |= {"components": densities.gaussians.n_components, "exponent of the norm": densities.exponent}
        return facts | {"score": self._learned.score}

    # -- learned state

    @property
    def learned_(self) -> Learned:
        """The learned state, in one record."""
        self._check_fitted()
        assert self._learned is not None
        return self._learned

    @property
    def gaussians_(self) -> Gaussians:
        """The Gaussians in use."""
        return self.learned_.densities.gaussians

    @property
    def cluster_to_class_(self) -> np.ndarray:
        """The class of each cluster (M,), int64."""
        return self.learned_.cluster_to_class

    @property
    def exponent_(self) -> float:
        """The exponent of the norm by which embeddings are divided."""
        return self.learned_.densities.exponent

    @property
    def conditioning_(self) -> Conditioning:
        """How well the training images determine the covariance: condition number, shrinkage, smallest cluster."""
        return self.learned_.densities.conditioning

    @property
    def score_(self) -> Score:
        """The score that ranks images."""
        return self.learned_.score

    # -- description of images: all take Outputs or plain embeddings

    def _score(self, outputs: Outputs) -> np.ndarray:
        return self.describe(outputs).score

    def describe(self, outputs: Outputs | np.ndarray) -> Description:
        """Everything at once, from one computation of the distances."""
        return Description.of(self.learned_, outputs)

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
        _, metadata = super().get_state()
        arrays, learned = self.learned_.to_state()
        return arrays, metadata | learned

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        detector = super().from_state({}, {"options": metadata["options"]})
        detector._learned = Learned.from_state(detector._options(), arrays, metadata)
        return detector


def _may_choose(validation: Outputs | None) -> bool:
    """Whether validation images may decide on the exponent: if not, those that are not in use need no moments."""
    return validation is not None and validation.labels is not None and len(validation) >= 2 * _MIN_ERRORS


def _fit_surprises(found: Description) -> dict[Score, Surprise]:
    """The surprises of the scores that are available; none where all count far out only, so that most images would tie.

    The spread of a single cluster is constant.
    """
    one = len(found.cluster_to_class) == 1
    names = [name for name in FUSED if name in found.available_scores and not (one and name == "spread")]
    if all(FUSED[name].beyond for name in names):
        return {}
    return {name: fit_surprise(found.score_named(name)) for name in names}
