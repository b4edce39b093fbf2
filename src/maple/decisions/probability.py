"""Calibrated class probabilities from the Gaussians and the network together, fitted on validation images.

The class posterior of the Gaussians at temperature T is pooled with the softmax of the network, which counts with
weight a; then the odds of the most probable class are raised to the power b::

    log p = raise_odds(pool(log_posterior(d², T), log_softmax, a), b)

:class:`Probability` holds the fitted numbers; the functions do the algebra. Shapes: N images, C classes, M clusters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import log
from typing import Any, Literal, Protocol

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.special import logsumexp, softmax

from maple.errors import DataError, UsageError
from maple.stats.arrays import as_array
from maple.stats.gaussians import log_posterior

ClassRule = Literal["sum", "max"]
_TEMPERATURE_RANGE = (1e-3, 1e6)
# Standard deviation of the prior on log T: T lies within a factor of ten of 1. The prior weighs as much as one image,
# so it decides only where the images carry no information.
_LOG_TEMPERATURE_DEVIATION = log(10)
LOWEST = -1e300  # stands for log 0 where log probabilities are subtracted from each other
_LOG_EXPONENT_DEVIATION = log(2)  # of the prior on the logarithm of the exponent of the odds
_SMALLEST_EXPONENT = 0.05


# ------------------------------------------------------------------------------------------------------- the record


class Evidence(Protocol):
    """Input of class probabilities; a :class:`maple.detectors.description.Description` has all of it."""

    @property
    def squared_distances(self) -> np.ndarray:
        """Squared distance to each cluster (N, M)."""

    @property
    def log_weights(self) -> np.ndarray:
        """Log prior of each cluster (M,)."""

    @property
    def cluster_to_class(self) -> np.ndarray:
        """The class of each cluster (M,)."""

    @property
    def logits(self) -> np.ndarray | None:
        """Logits of the network (N, M); None without a head."""

    @property
    def log_softmax(self) -> np.ndarray:
        """Log class probabilities of the network (N, C); -inf for classes that its head has no column for."""


@dataclass(frozen=True)
class Probability:
    """How class probabilities follow from squared distances and logits.

    >>> from types import SimpleNamespace
    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(2000, 3))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    >>> found = SimpleNamespace(
    ...     squared_distances=-10 * logits, log_weights=np.zeros(3), cluster_to_class=np.arange(3), logits=None
    ... )
    >>> fitted = Probability().fit(found, labels)
    >>> round(fitted.temperature), fitted.network_weight
    (5, 0.0)
    >>> fitted.log_probabilities(found).shape
    (2000, 3)
    """

    temperature: float = 1.0  # of the class posterior of the Gaussians
    network_weight: float = 0.0  # of the network's own probabilities in the pool
    odds_exponent: float = 1.0  # of the odds of the most probable class; at most 1
    softmax_temperature: float = 1.0  # of the network alone, for comparison
    class_rule: ClassRule = "sum"  # class probability of the network from its clusters: their sum or the largest

    def fit(self, found: Evidence, labels: np.ndarray) -> Probability:
        """Fit all numbers to validation images of known class; the class rule stays.

        The temperature of the network alone is fitted to images of those classes that its head has a column for; it
        stays as it is where there are none.
        """
        network = None if found.logits is None else found.log_softmax  # (N, C)
        distances = (found.squared_distances, labels, found.log_weights, found.cluster_to_class)
        temperature, weight, exponent = fit_pool(*distances, network)
        alone = self.softmax_temperature
        if network is not None:
            known = _has_column(network)  # (C,)
            rows = np.isin(labels, np.flatnonzero(known))
            alone = fit_softmax_temperature(network[rows][:, known], labels[rows]) if rows.any() else alone
        return Probability(temperature, weight, exponent, alone, self.class_rule)

    def log_probabilities(self, found: Evidence) -> np.ndarray:
        """Log class probabilities (N, C)."""
        return raise_odds(self.log_pooled(found), self.odds_exponent)

    def log_pooled(self, found: Evidence) -> np.ndarray:
        """Log class probabilities (N, C) before the odds are raised."""
        alone = log_posterior(found.squared_distances, found.log_weights, found.cluster_to_class, self.temperature)
        return pool(alone, found.log_softmax, self.network_weight) if self.network_weight else alone

    def network_probabilities(self, found: Evidence) -> np.ndarray:
        """Class probabilities of the network alone (N, C), by the class rule."""
        if found.logits is None:
            raise UsageError("network probabilities need logits: use a backbone with a head")
        return class_probabilities(found.logits, found.cluster_to_class, self.class_rule)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Probability:
        """The inverse of :meth:`to_dict`; other keys are ignored.

        >>> values = Probability(temperature=2.0).to_dict()
        >>> Probability.from_dict({**values, "size": 32}) == Probability(temperature=2.0)
        True
        """
        values = {"odds_exponent": 1.0, **values}  # which the files of early runs lack
        return cls(**{field.name: values[field.name] for field in fields(cls)})


# ---------------------------------------------------------------------------------------------------------- fitting


def fit_temperature(
    squared_distances: np.ndarray, labels: np.ndarray, log_weights: np.ndarray, cluster_to_class: np.ndarray
) -> float:
    """The temperature T of the class posterior with the least negative log-likelihood on validation images.

    ``squared_distances`` (N, M), ``labels`` (N,) class ids, ``log_weights`` and ``cluster_to_class`` (M,) as for
    :func:`maple.stats.gaussians.log_posterior`. Images of unknown classes (-1, or without a cluster) are left out.
    Minimises

        sum over images of -log p(label | e, T) + (log T)² / 2 s²,  s = log 10

    in log T. The last term weighs less than one image; it keeps T finite where all images are classified correctly (the
    likelihood alone would choose T = 0) or none is (T = infinity). Logits work too: d² = -2 logits, weights 0.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(20000, 3))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)  # exactly softmax-distributed
    >>> bool(abs(fit_temperature(-2 * 5 * logits, labels, np.zeros(3), np.arange(3)) - 5) < 0.2)
    True
    """
    labels = as_array(labels)
    known = np.isin(labels, cluster_to_class)
    if not known.any():
        raise DataError("no validation image has a known class, which the temperature needs: add some")
    squared_distances, labels = as_array(squared_distances)[known], labels[known]
    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        posterior = log_posterior(squared_distances, log_weights, cluster_to_class, np.exp(log_temperature))
        return float(-posterior[rows, labels].sum() + (log_temperature / _LOG_TEMPERATURE_DEVIATION) ** 2 / 2)

    # A grid brackets the minimum, whatever the scale of the distances; Brent's method refines it.
    grid = np.log(np.geomspace(*_TEMPERATURE_RANGE, num=28))
    best = int(np.argmin([loss(point) for point in grid]))
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6}).x))


def fit_softmax_temperature(log_softmax: np.ndarray, labels: np.ndarray) -> float:
    """The temperature of the network's log class probabilities (N, C) (Guo et al. 2017): the case d² = -2 log p."""
    n_classes = log_softmax.shape[1]
    return fit_temperature(-2 * log_softmax, labels, np.zeros(n_classes), np.arange(n_classes))


def fit_pool(
    squared_distances: np.ndarray,
    labels: np.ndarray,
    log_weights: np.ndarray,
    cluster_to_class: np.ndarray,
    log_softmax: np.ndarray | None = None,
) -> tuple[float, float, float]:
    """Temperature T of the Gaussians, weight a of the network's own probabilities and exponent b of the odds.

    Arguments as for :func:`fit_temperature`; ``log_softmax`` (N, C) are log class probabilities of the network, without
    which a is 0. T and a >= 0 minimise the negative log-likelihood of their :func:`pool` on validation images. The
    search starts from the Gaussians alone (a = 0), so the pool is never less likely than they are. Then
    :func:`fit_odds` fits b.
    """
    known = np.isin(labels, cluster_to_class)
    alone = fit_temperature(squared_distances, labels, log_weights, cluster_to_class)
    squared_distances, labels = as_array(squared_distances)[known], as_array(labels)[known]
    if log_softmax is None:
        return alone, 0.0, fit_odds(log_posterior(squared_distances, log_weights, cluster_to_class, alone), labels)
    network, rows = as_array(log_softmax)[known], np.arange(len(labels))

    def logs(log_temperature: float, weight: float) -> np.ndarray:
        posterior = log_posterior(squared_distances, log_weights, cluster_to_class, np.exp(log_temperature))
        return pool(posterior, network, max(weight, 0.0))

    def loss(parameters: np.ndarray) -> float:
        # A prior of the weight of one image keeps both finite where all images are classified correctly.
        prior = (parameters[0] / _LOG_TEMPERATURE_DEVIATION) ** 2 / 2 + parameters[1] ** 2 / 2
        return float(-logs(*parameters)[rows, labels].sum() + prior)

    start = np.array([[np.log(alone), 0.0], [np.log(alone) + 0.7, 0.5], [np.log(alone) + 1.5, 1.0]])
    found = minimize(loss, start[0], method="Nelder-Mead", options={"initial_simplex": start, "xatol": 1e-4}).x
    temperature, weight = float(np.clip(np.exp(found[0]), *_TEMPERATURE_RANGE)), max(float(found[1]), 0.0)
    return temperature, weight, fit_odds(logs(log(temperature), weight), labels)


def fit_odds(log_probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The exponent b of :func:`raise_odds`, at most 1, that calibrates the most probable class on validation images.

    With z its log odds, the most probable class is correct with probability 1 / (1 + exp(-b z)); b minimises the
    negative log-likelihood of that model plus a prior of the weight of one image. It is 1 unless the gain exceeds
    log(N) / 2, the price of one more parameter by the Bayesian information criterion: with few images, chance would
    decide. Probabilities (N, C) in logs, labels (N,).

    >>> rng = np.random.default_rng(0)
    >>> logs = np.log(rng.dirichlet(np.ones(3), size=20000))
    >>> labels = (raise_odds(logs, 0.7) + rng.gumbel(size=logs.shape)).argmax(axis=1)
    >>> bool(abs(fit_odds(logs, labels) - 0.7) < 0.05)
    True
    """
    if log_probabilities.shape[1] == 1:
        return 1.0
    odds = _log_odds(log_probabilities)[0]
    signs = np.where(log_probabilities.argmax(axis=1) == labels, 1.0, -1.0)

    def loss(log_exponent: float) -> float:
        prior = (log_exponent / _LOG_EXPONENT_DEVIATION) ** 2 / 2
        return float(np.logaddexp(0, -signs * np.exp(log_exponent) * odds[:, 0]).sum() + prior)

    found = minimize_scalar(loss, bounds=(log(_SMALLEST_EXPONENT), 0.0), method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x)) if loss(0.0) - found.fun > log(max(len(labels), 1)) / 2 else 1.0


def _log_odds(log_probabilities: np.ndarray, first: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Log odds (N, 1) of the most probable class, log probability (N, 1) of all others, mask of that class (N, C)."""
    first = (log_probabilities.argmax(axis=1) if first is None else first)[:, None]  # (N, 1)
    is_first = np.arange(log_probabilities.shape[1]) == first  # (N, C)
    rest = logsumexp(np.where(is_first, -np.inf, log_probabilities), axis=1, keepdims=True)  # (N, 1)
    rest = np.maximum(rest, LOWEST)
    return np.take_along_axis(log_probabilities, first, 1) - rest, rest, is_first


def pool(log_posterior: np.ndarray, log_softmax: np.ndarray, weight: float) -> np.ndarray:
    """Log class probabilities (N, C) of Gaussians and network together: a logarithmic opinion pool.

    log p(c) = log p_Gaussians(c) + weight log p_network(c), normalised.

    The network lacks classes that were added to the Gaussians later: -inf in ``log_softmax``. Let O be the classes that
    it has. By the law of total probability,

        p(c) = p_Gaussians(O) pool(c | O)  for c in O,    p(c) = p_Gaussians(c)  for all others:

    the network helps decide which of its own classes an image belongs to, not whether it belongs to one of them.

    >>> np.exp(pool(np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]]), 1.0)).round(3)
    array([[0.9, 0.1]])
    >>> np.exp(pool(np.log([[0.2, 0.2, 0.6]]), np.array([[np.log(0.9), np.log(0.1), -np.inf]]), 1.0)).round(3)
    array([[0.36, 0.04, 0.6 ]])
    """
    known = _has_column(log_softmax)  # (C,)
    if not known.all():
        logs = log_posterior.copy()
        inside = logsumexp(logs[:, known], axis=1, keepdims=True)  # (N, 1) log p_Gaussians(O)
        logs[:, known] = inside + pool(logs[:, known], log_softmax[:, known], weight)
        return logs
    pooled = log_posterior + weight * log_softmax
    return pooled - logsumexp(pooled, axis=1, keepdims=True)


def _has_column(log_softmax: np.ndarray) -> np.ndarray:
    """For which classes the head of the network has a column (C,), bool."""
    return np.asarray(~np.isneginf(log_softmax).any(axis=0))


def raise_odds(log_probabilities: np.ndarray, exponent: float, first: np.ndarray | None = None) -> np.ndarray:
    """Log class probabilities (N, C) with the odds of the most probable class raised to a power.

    With p the largest probability of an image,

        p' / (1 - p') = (p / (1 - p)) ** exponent,

    and the other classes keep their proportions, unlike with a temperature. An exponent below 1 moves p towards 1/2 and
    keeps the most probable class (above 1 need not). ``first`` (N,) names the class to raise where several tie.

    >>> np.exp(raise_odds(np.log([[0.8, 0.15, 0.05]]), 0.5)).round(3)
    array([[0.667, 0.25 , 0.083]])
    """
    if exponent == 1 or log_probabilities.shape[1] == 1:
        return log_probabilities
    odds, rest, is_first = _log_odds(log_probabilities, first)
    odds = exponent * odds
    return np.where(is_first, -np.logaddexp(0, -odds), log_probabilities - rest - np.logaddexp(0, odds))


def class_probabilities(logits: np.ndarray, cluster_to_class: np.ndarray, rule: ClassRule = "sum") -> np.ndarray:
    """Class probabilities (N, C) from cluster logits (N, M).

    ``sum`` adds the softmax over the clusters of a class. ``max`` takes the largest of them, the paper's rule, which
    under-counts split classes and does not sum to 1.

    >>> logits = np.log([[0.3, 0.3, 0.4]])
    >>> class_probabilities(logits, np.array([0, 0, 1])).round(2)
    array([[0.6, 0.4]])
    >>> class_probabilities(logits, np.array([0, 0, 1]), rule="max").round(2)
    array([[0.3, 0.4]])
    """
    probabilities = softmax(logits.astype(np.float64), axis=1)  # (N, M)
    order = np.argsort(cluster_to_class, kind="stable")
    starts = np.flatnonzero(np.diff(cluster_to_class[order], prepend=-1))
    reduce = np.add if rule == "sum" else np.maximum
    return reduce.reduceat(probabilities[:, order], starts, axis=1)  # (N, C)
