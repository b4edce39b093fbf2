"""Detectors of the embeddings alone: distances to classes, to all images, or to the nearest images.

===============  =========================================================================================
``md``           squared Mahalanobis distance to the nearest class: the paper's ablation DNN+MD
``pca-md``       the same in the leading principal components: DNN+PCA+MD
``pca-ed``       Euclidean in those components: DNN+PCA+ED
``rmd``          ``md`` minus the squared distance to one Gaussian over all images
``md++``         ``md`` of embeddings on the unit sphere
``marginal-md``  squared Mahalanobis distance to one Gaussian over all images
``partial-md``   the same in some of its principal components
``knn``          distance to the k-th nearest training image on the unit sphere
===============  =========================================================================================

A split class is represented by its clusters. Only ``knn`` keeps embeddings; the others learn from moments, in one pass
and in memory independent of the number of images. The algebra is in :mod:`maple.stats.gaussians`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from maple.detectors.base import Batches, Detector, State, finite_embeddings
from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.detectors.registry import register_detector
from maple.errors import FitError
from maple.options import NonNegative, Positive, Seed, option
from maple.stats.arrays import BLOCK_ELEMENTS, as_embeddings, normalise, row_blocks
from maple.stats.background import Background, fit_background
from maple.stats.gaussians import fit_ridged_gaussians, squared_distances
from maple.stats.moments import Moments
from maple.types import About, Outputs

_PositiveShare = Annotated[float, Field(gt=0, le=1)]
_ABOUT = partial(About, needs="embeddings")
_LEE = ("Lee et al. 2018", "https://arxiv.org/abs/1807.03888")
_KAMOI = ("Kamoi & Kobayashi 2020", "https://arxiv.org/abs/2003.00402")
_REN = ("Ren et al. 2021", "https://arxiv.org/abs/2106.09022")
_MUELLER = ("Müller & Hein 2025", "https://arxiv.org/abs/2505.18032")
_SUN = ("Sun et al. 2022", "https://arxiv.org/abs/2204.06507")
_MAPLE = "Venkataramanan et al. 2023"
_TIED_GAUSSIANS, _ONE_GAUSSIAN = "a mean per class, one covariance", "one mean, one covariance"

# ---------------------------------------------------------------------------------------- distances to the classes


class _ClassDistanceDetector(Detector):
    """Wraps a :class:`~maple.detectors.maple.MapleDetector` with fixed ``settings``: ablations of MAPLE."""

    settings: ClassVar[dict[str, Any]]
    maple_: MapleDetector

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:
        self.maple_ = MapleDetector(**self._settings())
        self.maple_.fit(batches.start, sum_over_ranks=batches.sum_over_ranks)

    def _settings(self) -> dict[str, Any]:
        """The options of the wrapped detector."""
        return {**self.settings, **self._option_values()}

    def _score(self, outputs: Outputs) -> np.ndarray:
        return self.maple_.score(outputs)

    def describe(self, outputs: Outputs) -> Description:
        self._check_fitted()
        return self.maple_.describe(outputs)

    def get_state(self) -> State:
        _, metadata = super().get_state()
        arrays, metadata["maple"] = self.maple_.get_state()
        return arrays, metadata

    @classmethod
    def from_state(cls, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Self:
        detector = super().from_state({}, metadata)
        detector.maple_ = MapleDetector.from_state(arrays, metadata["maple"])
        return detector


@dataclass(frozen=True, kw_only=True, eq=False)
class PcaOptions:
    """Options of PCA."""

    explained_variance: _PositiveShare = option(0.95, "share of variance that PCA keeps")


@dataclass(frozen=True, kw_only=True, eq=False)
class RidgeOptions:
    """Options of the plain Mahalanobis distance."""

    ridge: NonNegative = option(
        0.0, "added to the diagonal of the covariance (1e-20 in the paper); 0 leaves out directions without variance"
    )


@register_detector("md")
class MahalanobisDetector(RidgeOptions, _ClassDistanceDetector):
    """Squared Mahalanobis distance to the nearest class: min_c (e - m_c)' S^-1 (e - m_c) (Lee et al. 2018).

    S is the covariance around the class means, shared by all classes, in all directions. This is the paper's
    DNN+MD, exactly so with ``ridge=1e-20``; with 0 directions without variance drop out.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(300) % 3
    >>> train = Outputs(rng.normal(size=(300, 4)) + 6 * np.eye(3, 4)[labels], labels=labels)
    >>> detector = MahalanobisDetector().fit(train)
    >>> detector.score(Outputs(np.array([[6.0, 0, 0, 0], [6.0, 0, 0, 5.0]]))).round(-1)
    array([ 0., 30.])
    """

    about = _ABOUT("squared Mahalanobis distance to the nearest class", *_LEE, adds=_TIED_GAUSSIANS)
    settings = {"pca": False, "norm_exponent": 0.0, "score_by": "distance"}

    def _settings(self) -> dict[str, Any]:
        return self.settings

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:
        super()._fit(batches, validation)
        if self.ridge:
            moments = self.maple_.learned_.densities.moments.of(0.0)
            self.maple_.replace_gaussians(fit_ridged_gaussians(moments, self.ridge))


@register_detector("pca-md")
class PcaMahalanobisDetector(PcaOptions, _ClassDistanceDetector):
    """``md`` in the principal components that explain ``explained_variance``: the paper's DNN+PCA+MD.

    >>> PcaMahalanobisDetector(explained_variance=0.9).settings
    {'norm_exponent': 0.0, 'score_by': 'distance'}
    """

    about = _ABOUT("squared Mahalanobis distance to the nearest class, after PCA", _MAPLE, adds=_TIED_GAUSSIANS)
    settings = {"norm_exponent": 0.0, "score_by": "distance"}


@register_detector("pca-ed")
class PcaEuclideanDetector(PcaOptions, _ClassDistanceDetector):
    """Squared Euclidean distance to the nearest class in the same components: the paper's DNN+PCA+ED.

    >>> x = np.array([[0.0, 1.0], [0.0, -1.0], [3.0, 0.0], [-3.0, 0.0]])
    >>> PcaEuclideanDetector().fit(Outputs(x, labels=np.zeros(4, int))).score(Outputs(x)).round(9)  # standardised
    array([2., 2., 2., 2.])
    """

    about = _ABOUT("squared Euclidean distance to the nearest class, after PCA", _MAPLE, adds="a mean per class")
    settings = {"distance": "euclidean", "norm_exponent": 0.0, "score_by": "distance"}


@register_detector("rmd")
class RelativeMahalanobisDetector(_ClassDistanceDetector):
    """``md`` minus the squared Mahalanobis distance to one Gaussian over all images (Ren et al. 2021).

    The score ``relative`` of MAPLE, in all directions. Both covariances are divided by the number of images.

    >>> RelativeMahalanobisDetector().settings["score_by"]
    'relative'
    """

    about = _ABOUT(
        "distance to the nearest class minus the distance to one Gaussian over all images",
        *_REN,
        adds="a mean per class, two covariances",
    )
    settings = {"pca": False, "norm_exponent": 0.0, "score_by": "relative"}


@register_detector("md++")
class MahalanobisPlusPlusDetector(_ClassDistanceDetector):
    """``md`` of embeddings divided by their norm: Mahalanobis++ (Müller & Hein 2025).

    >>> x = np.random.default_rng(0).normal(size=(200, 3)) + 3
    >>> detector = MahalanobisPlusPlusDetector().fit(Outputs(x, labels=np.arange(200) % 2))
    >>> bool(np.allclose(detector.score(Outputs(x)), detector.score(Outputs(7 * x))))
    True
    """

    about = _ABOUT(
        "squared Mahalanobis distance to the nearest class, on the unit sphere", *_MUELLER, adds=_TIED_GAUSSIANS
    )
    settings = {"pca": False, "norm_exponent": 1.0, "score_by": "normalised"}


# ------------------------------------------------------------------------------- distance to all images, class-free


def moments_of_all(batches: Batches, dim: int | None = None) -> Moments:
    """Moments of all training images as one cluster; labels are ignored. ``dim`` is the expected number of columns."""
    moments: Moments | None = None
    for outputs in batches.start():
        embeddings = as_embeddings(outputs.embeddings, dim)
        moments = moments or Moments(1, embeddings.shape[1])
        moments.update(embeddings, np.zeros(len(embeddings), dtype=np.int64))
    assert moments is not None  # there is at least one batch
    return moments.merge(batches.sum_over_ranks)


class _ClassFreeDetector(Detector):
    """Squared distance to one Gaussian over all images; subclasses choose its principal components."""

    records = {"background": Background}
    background_: Background

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:
        self.background_ = self._fit_background(moments_of_all(batches))

    @abstractmethod
    def _fit_background(self, moments: Moments) -> Background: ...

    def _score(self, outputs: Outputs) -> np.ndarray:
        return self.background_.squared_distances(outputs.embeddings)


@register_detector("marginal-md")
class MarginalMahalanobisDetector(_ClassFreeDetector):
    """Squared Mahalanobis distance to one Gaussian over all images: Marginal MD (Kamoi & Kobayashi 2020).

    Ignores classes and labels.

    >>> x = np.array([[0.0, 1.0], [0.0, -1.0], [3.0, 0.0], [-3.0, 0.0]])
    >>> MarginalMahalanobisDetector().fit(Outputs(x)).score(Outputs(2 * x)).round(9)
    array([8., 8., 8., 8.])
    """

    about = _ABOUT("squared Mahalanobis distance to all images as one Gaussian", *_KAMOI, adds=_ONE_GAUSSIAN)

    def _fit_background(self, moments: Moments) -> Background:
        return fit_background(moments, pca=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialOptions(PcaOptions):
    """Options of Partial MD."""

    components: Literal["trailing", "leading"] = option(
        "trailing", "'leading': those that explain explained_variance; 'trailing': the others, at least one"
    )


@register_detector("partial-md")
class PartialMahalanobisDetector(PartialOptions, _ClassFreeDetector):
    """``marginal-md`` in some principal components: Partial MD (Kamoi & Kobayashi 2020).

    With p_k the components of the standardised embedding and v_k their variances, sum of p_k² / v_k over

    - ``trailing`` components, which explain the last 1 - ``explained_variance``: training spreads known classes over
      the leading ones, and the paper finds that the components that separate OOD images are useless for classification;
    - ``leading`` components: dimension reduction by PCA, as the MAPLE paper summarises the method.

    The sum of both is ``marginal-md``, except for the shrinkage of variances with few images.

    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(500, 3)) @ np.array([[1.0, 1.0, 0.0], [0.0, 0.2, 0.0], [0.0, 0.0, 1.0]])
    >>> trailing = PartialMahalanobisDetector().fit(Outputs(x))
    >>> trailing.background_.variances.round(2)  # of 3, a correlation of 0.98 leaves 0.02 to the difference
    array([0.02])
    """

    about = _ABOUT(
        "squared Mahalanobis distance to all images in the trailing principal components", *_KAMOI, adds=_ONE_GAUSSIAN
    )

    def _fit_background(self, moments: Moments) -> Background:
        leading = fit_background(moments, explained_variance=self.explained_variance)
        if self.components == "leading":
            return leading
        whole = fit_background(moments, pca=False)
        cut = min(len(leading.variances), len(whole.variances) - 1)
        return replace(whole, matrix=whole.matrix[:, cut:], variances=whole.variances[cut:])


# -------------------------------------------------------------------------------------------- distance to the images

_QUERIES = 256  # images compared with the training images at a time


def kth_neighbour_distances(queries: np.ndarray, neighbours: np.ndarray, k: int) -> np.ndarray:
    """Euclidean distance of each of N queries to its k-th nearest neighbour (N,), exact, float64.

    Neighbours are read in blocks, keeping the k nearest so far: memory is independent of their number.

    >>> kth_neighbour_distances(np.array([[0.0], [5.0]]), np.array([[1.0], [2.0], [4.0]]), k=2)
    array([2., 3.])
    """
    distances = np.empty(len(queries))
    for rows in row_blocks(len(queries), 1, elements=_QUERIES, min_rows=1):
        nearest = np.empty((rows.stop - rows.start, 0))
        for columns in row_blocks(len(neighbours), _QUERIES, elements=BLOCK_ELEMENTS):
            found = _smallest(squared_distances(queries[rows], neighbours[columns]), k)
            nearest = _smallest(np.concatenate([nearest, found], axis=1), k)
        distances[rows] = np.sqrt(nearest.max(axis=1))
    return distances


def _smallest(values: np.ndarray, k: int) -> np.ndarray:
    """The k smallest values of each row, in any order; all if there are fewer."""
    return values if values.shape[1] <= k else np.partition(values, k - 1, axis=1)[:, :k]


@dataclass(frozen=True, kw_only=True, eq=False)
class KnnOptions:
    """Options of k nearest neighbours."""

    k: Positive = option(50, "the score is the distance to the k-th nearest training image")
    share: _PositiveShare = option(1.0, "share of the training images to keep, drawn at random")
    seed: Seed = option(0, "seed of the random draw")


@register_detector("knn")
class KnnDetector(KnnOptions, Detector):
    """Distance to the k-th nearest training image, embeddings divided by their norm (Sun et al. 2022).

    Exact, by matrix products, in float32. Training embeddings are kept, all or a random ``share`` of them.

    >>> rng = np.random.default_rng(0)
    >>> detector = KnnDetector(k=5).fit(Outputs(rng.normal(size=(100, 3)) + [9.0, 0.0, 0.0]))
    >>> detector.score(Outputs(np.array([[1.0, 0, 0], [-1.0, 0, 0]]))).round()
    array([0., 2.])
    """

    about = _ABOUT(
        "distance to the k-th nearest training image, on the unit sphere", *_SUN, adds="embeddings of training images"
    )
    neighbours_: np.ndarray  # (N, D) float32, of norm 1

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:
        if batches.sum_over_ranks(np.ones(1))[0] > 1:
            raise FitError("the 'knn' detector does not gather embeddings over processes: fit it in one process")
        rng = np.random.default_rng(self.seed)
        kept = []
        for outputs in batches.start():
            embeddings = finite_embeddings(outputs)
            drawn = rng.random(len(embeddings)) < self.share  # independent of the batch size
            kept.append(_on_sphere(embeddings[drawn]))
        n_kept = sum(map(len, kept))
        if n_kept < self.k:
            raise FitError(f"k is {self.k}, but only {n_kept} training images are kept: add images or lower k")
        self.neighbours_ = np.concatenate(kept)

    def _score(self, outputs: Outputs) -> np.ndarray:
        embeddings = finite_embeddings(outputs, self.neighbours_.shape[1])
        return kth_neighbour_distances(_on_sphere(embeddings), self.neighbours_, self.k)


def _on_sphere(embeddings: np.ndarray) -> np.ndarray:
    """Embeddings of norm 1 (N, D), float32; zero vectors stay zero."""
    return normalise(embeddings).astype(np.float32, copy=False)
