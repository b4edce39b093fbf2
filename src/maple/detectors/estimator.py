"""scikit-learn estimator: Gaussian classes over features or embeddings. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from scipy.special import logsumexp
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from maple.decisions.conformal import conformal_p_values
from maple.detectors.base import Batches
from maple.detectors.learned import ClusterMoments, Densities
from maple.detectors.options import DetectorOptions
from maple.errors import FitError, UsageError
from maple.options import build_options
from maple.stats.chi_square import log_chi_square_tail
from maple.stats.clustering.splitting import Clustering, ClusterMethod, ClusterSpace, split_clusters
from maple.stats.gaussians import Gaussians, log_posterior
from maple.stats.moments import Moments
from maple.types import Outputs, Relabelling


@dataclass(eq=False, repr=False)
class MahalanobisClassifier(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClassifierMixin, BaseEstimator):
    r"""Classifier with one Gaussian per class, or per cluster of a class: probabilities and typicality.

    With squared Mahalanobis distances d_m² to clusters m of share w_m, in the K principal components of the
    standardised features,

    .. math:: p(c \mid x) \propto \sum_{m \in c} w_m \exp(-d_m^2 / 2T), \qquad
              \mathrm{typicality}(x) = P(\chi_K^2 > \min_m d_m^2).

    Features may be embeddings of any network or tabular data. The sufficient statistics (counts, sums and products)
    are additive: ``partial_fit`` over parts of the data, in any order, equals ``fit`` on the whole. New classes may be
    added at any time.

    Args:
        explained_variance: share of the variance that PCA keeps.
        pca: reduce the features by PCA first.
        covariance: ``tied`` (around cluster means), ``global`` (around the common mean) or ``full`` (one per cluster).
        norm_exponent: power of the norm by which features are divided; 1 (unit sphere) suits embeddings.
        cluster_method: algorithm that splits each class: ``xmeans``, ``gmeans``, ``tmeans`` or ``kmeans``; ``None`` for
            one Gaussian per class. Used by ``fit`` only.
        cluster_space: space for clustering; see :func:`maple.stats.clustering.splitting.map_class`.
        max_clusters: largest number of clusters per class.
        min_cluster_size: smallest number of points per cluster.
        temperature: T; values above 1 make probabilities more uniform.
        random_state: seed of the clustering.

    Attributes:
        classes_: (C,) labels, sorted.
        cluster_to_class_: (M,) position in ``classes_`` of each cluster's class.
        means_: (M, D) mean of each cluster.
        n_components_: K.
        n_features_in_: D.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = MahalanobisClassifier().fit(X, y)
    >>> round(model.score(X, y), 2), model.n_components_
    (0.93, 2)
    >>> model.typicality([[5.0, 3.4, 1.5, 0.2], [50.0, 0.0, 90.0, 30.0]]).round(2)
    array([1., 0.])
    """

    explained_variance: float = 0.95
    pca: bool = True
    covariance: str = "tied"
    norm_exponent: float = 0.0
    cluster_method: ClusterMethod | None = None
    cluster_space: ClusterSpace = "raw"
    max_clusters: int = 5
    min_cluster_size: int = 20
    temperature: float = 1.0
    random_state: Any = None

    # -- learning

    def fit(self, X: Any, y: Any, cluster_ids: Any = None) -> Self:
        """Fit to ``X`` (n, D) and ``y`` (n,); ``cluster_ids`` (n,) are known clusters within classes.

        Equal ids in different classes are different clusters.
        """
        self._read_options()
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32), ensure_min_samples=2)
        classes, labels = self._read_labels(y)
        if cluster_ids is None and self.cluster_method is not None:
            cluster_ids = self._find_clusters(X, labels, self.cluster_method)
        cluster_ids = self._read_clusters(X, cluster_ids)
        self.classes_ = classes
        clusters = self._add(X, labels, cluster_ids, first=True)
        if self.covariance == "full":
            again = Batches(Outputs(X, cluster_ids=clusters))
            self._densities: Densities = self._densities.with_full_covariances(again)
        _ = self.gaussians_  # data that cannot be fitted raise an error now
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, cluster_ids: Any = None) -> Self:
        """Add data, also of new classes; ``classes`` lists further classes, as in scikit-learn.

        Does not search for clusters: without ``cluster_ids`` there is one Gaussian per class.
        """
        self._read_options()
        if self.covariance == "full":
            raise UsageError("covariance='full' needs all data at once: call fit, or use covariance='tied'")
        first = not self.__sklearn_is_fitted__()
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32), reset=first)
        present, labels = self._read_labels(y)
        lists = [present, *([] if first else [self.classes_]), *([] if classes is None else [np.asarray(classes)])]
        known = np.unique(np.concatenate(lists))
        if not first:  # positions of known classes may have changed
            self.cluster_keys_[:, 0] = np.searchsorted(known, self.classes_)[self.cluster_keys_[:, 0]]
        self.classes_ = known
        self._add(X, np.searchsorted(known, present)[labels], self._read_clusters(X, cluster_ids), first)
        return self

    def _read_options(self) -> DetectorOptions:
        if not self.temperature > 0:
            raise UsageError(f"temperature is {self.temperature}: give a number above 0")
        names = ("explained_variance", "pca", "covariance", "norm_exponent")
        return build_options(DetectorOptions, {name: getattr(self, name) for name in names}, type(self).__name__)

    @staticmethod
    def _read_labels(y: Any) -> tuple[np.ndarray, np.ndarray]:
        check_classification_targets(y)
        return np.unique(column_or_1d(y, warn=True), return_inverse=True)

    @staticmethod
    def _read_clusters(X: np.ndarray, cluster_ids: Any) -> np.ndarray:
        if cluster_ids is None:
            return np.zeros(len(X), dtype=np.int64)
        cluster_ids = column_or_1d(cluster_ids)
        check_consistent_length(X, cluster_ids)
        if not np.issubdtype(cluster_ids.dtype, np.integer):
            raise FitError(f"cluster_ids has type {cluster_ids.dtype}: give integers")
        return cluster_ids.astype(np.int64)

    def _find_clusters(self, X: np.ndarray, labels: np.ndarray, method: ClusterMethod) -> np.ndarray:
        n_classes = int(labels.max()) + 1
        seed = int(check_random_state(self.random_state).randint(2**31))
        size = self.min_cluster_size
        how = Clustering(
            method, space=self.cluster_space, max_clusters=self.max_clusters, min_cluster_size=size, seed=seed
        )
        start = Relabelling.initial(labels, n_classes)
        return split_clusters(X, np.arange(len(X)), start, np.arange(n_classes), how).cluster_ids

    def _add(self, X: np.ndarray, labels: np.ndarray, cluster_ids: np.ndarray, first: bool) -> np.ndarray:
        """Add points to the moments, or start them if ``first``; returns the cluster of each point (n,).

        ``cluster_keys_`` (M, 2) are the position of the class and the id within it of each cluster, sorted.
        """
        keys = np.column_stack([labels, cluster_ids])
        before = keys[:0] if first else self.cluster_keys_
        all_keys, places = np.unique(np.concatenate([before, keys]), axis=0, return_inverse=True)
        self.cluster_keys_: np.ndarray = all_keys
        places = places.ravel()
        moments = Moments(len(self.cluster_keys_), X.shape[1], norm_exponent=self.norm_exponent)
        if len(before):
            moments.shift, moments.second = self.moments_.shift, self.moments_.second
            moments.counts[places[: len(before)]] = self.moments_.counts
            moments.sums[places[: len(before)]] = self.moments_.sums
        clusters = places[len(before) :]
        self.moments_: Moments = moments.update(X, clusters)
        exponent, options = float(self.norm_exponent), self._read_options()
        held = ClusterMoments({exponent: self.moments_}, self.cluster_to_class_)
        self._densities = Densities(options, held, exponent)  # Gaussians are derived on first use
        self.calibration_scores_: np.ndarray | None = None  # (n,) squared distances to the nearest cluster
        return clusters

    # -- fitted attributes

    @property
    def gaussians_(self) -> Gaussians:
        """The Gaussians derived from the moments."""
        return self._densities.gaussians

    @property
    def cluster_to_class_(self) -> np.ndarray:
        return self.cluster_keys_[:, 0]

    @property
    def means_(self) -> np.ndarray:
        return self.moments_.means

    @property
    def n_components_(self) -> int:
        return self.gaussians_.n_components

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "moments_")

    # -- predictions

    def _check_new(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return validate_data(self, X, dtype=(np.float64, np.float32), reset=False)

    def squared_distances(self, X: Any) -> np.ndarray:
        """Squared Mahalanobis distance to each cluster (n, M)."""
        X = self._check_new(X)
        return self.gaussians_.squared_distances(X)

    def _nearest_distances(self, X: Any) -> np.ndarray:
        return self.gaussians_.nearest(self._check_new(X)).squared_distance

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Log probability of each class (n, C); -inf for classes without data."""
        squared = self.squared_distances(X)
        present, compact = np.unique(self.cluster_to_class_, return_inverse=True)
        logs = np.full((len(squared), len(self.classes_)), -np.inf)
        logs[:, present] = log_posterior(squared, self.gaussians_.log_weights, compact, self.temperature)
        return logs

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class (n, C); rows sum to 1."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class (n,)."""
        logs = self.predict_log_proba(X)
        return self.classes_[logs.argmax(axis=1)]

    def decision_function(self, X: Any) -> np.ndarray:
        """Log probabilities (n, C); with two classes, the log odds (n,) of the second."""
        logs = self.predict_log_proba(X)
        return logs[:, 1] - logs[:, 0] if logs.shape[1] == 2 else logs

    def score_samples(self, X: Any) -> np.ndarray:
        """Log density (n,) of the whole mixture in the space of :meth:`transform`; higher is more typical."""
        squared = self.squared_distances(X)
        logs = logsumexp(self.gaussians_.log_weights - squared / 2, axis=1)
        return logs - self.n_components_ / 2 * np.log(2 * np.pi)

    def typicality(self, X: Any) -> np.ndarray:
        """Chi-square tail (n,) of the squared distance to the nearest cluster: near 0 far from all classes."""
        return np.exp(log_chi_square_tail(self._nearest_distances(X), self.n_components_))

    def transform(self, X: Any) -> np.ndarray:
        """The projection (n, K) in which squared distances are Euclidean, unless ``covariance`` is ``full``."""
        X = self._check_new(X)
        leading = np.abs(self.gaussians_.matrix).argmax(axis=0)  # fix the sign of each direction
        signs = np.sign(self.gaussians_.matrix[leading, np.arange(self.n_components_)])
        return self.gaussians_.project(X) * signs

    # -- decisions

    def calibrate(self, X: Any) -> Self:
        """Store scores of calibration data (n, D): known classes, not used in ``fit``. Required by :meth:`p_values`."""
        self.calibration_scores_ = self._nearest_distances(X)
        return self

    def p_values(self, X: Any) -> np.ndarray:
        """Conformal p-values (n,): P(p <= a) <= a for data exchangeable with that of :meth:`calibrate`."""
        check_is_fitted(self)
        if self.calibration_scores_ is None:
            raise UsageError("p_values needs calibration data: call calibrate(X) with data not used in fit")
        return conformal_p_values(self._nearest_distances(X), self.calibration_scores_)
