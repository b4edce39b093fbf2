"""Calibrated class probabilities from the Gaussians and the network together, fitted on validation images.

The class posterior of the Gaussians at temperature T, mixed with a share s of the class frequencies, the softmax of the
network and these frequencies are pooled with weights g, a and c; then the odds of the most probable class are raised to
the power b::

    log p = raise_odds(pool(mix_frequencies(log_posterior(d², T), s), a log_softmax + c log_priors, g), b)

The softmax at its own temperature, g = c = 0 and b = 1, is one case; the others are used where cross-validation finds
them more likely. :class:`Probability` holds the fitted numbers; :mod:`maple.decisions.pool` has the algebra,
:mod:`maple.decisions.pool_fit` the fits. Shapes: N images, C classes, M clusters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol

import numpy as np

from maple.decisions.pool import (
    ClassRule,
    class_probabilities,
    has_column,
    mix_frequencies,
    pool,
    raise_odds,
    weigh_network,
)
from maple.decisions.pool_fit import (
    choose_gaussians,
    choose_network,
    choose_odds,
    choose_share,
    fit_softmax_temperature,
)
from maple.errors import UsageError
from maple.stats.arrays import as_array
from maple.stats.gaussians import log_posterior

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
    def class_log_priors(self) -> np.ndarray:
        """Log share of each class in the training images (C,)."""

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
    ...     squared_distances=-10 * logits, log_weights=np.zeros(3), cluster_to_class=np.arange(3), logits=None,
    ...     class_log_priors=np.log(np.full(3, 1 / 3)),
    ... )
    >>> fitted = Probability().fit(found, labels)
    >>> round(fitted.temperature), fitted.network_weight
    (5, 0.0)
    >>> fitted.log_probabilities(found).shape
    (2000, 3)
    """

    temperature: float = 1.0  # of the class posterior of the Gaussians
    network_weight: float = 0.0  # of the network's own log probabilities in the pool
    odds_exponent: float = 1.0  # of the odds of the most probable class; at most 1
    softmax_temperature: float = 1.0  # of the network alone
    class_rule: ClassRule = "sum"  # class probability of the network from its clusters: their sum or the largest
    gaussian_weight: float = 1.0  # of the log posterior of the Gaussians in the pool; 0: the network alone
    prior_weight: float = 0.0  # of the log frequencies of the classes, which a balanced training hides from the network
    frequency_share: float = 0.0  # of class frequencies in the posterior of the Gaussians

    def fit(self, found: Evidence, labels: np.ndarray) -> Probability:
        """Fit all numbers to validation images of known class; the class rule stays.

        Each model is calibrated by itself: :func:`~maple.decisions.pool_fit.choose_gaussians` the Gaussians,
        :func:`~maple.decisions.pool_fit.choose_network` the network. :func:`~maple.decisions.pool_fit.choose_share`
        divides the weight among them, :func:`~maple.decisions.pool_fit.choose_odds` fits the exponent. What concerns
        the network is fitted to images of the classes that its head has a column for, and stays without such images.
        """
        labels = as_array(labels)
        distances = (found.squared_distances, labels, found.log_weights, found.cluster_to_class)
        temperature, share = choose_gaussians(*distances, found.class_log_priors)
        fitted = replace(self, temperature=temperature, frequency_share=share)
        if found.logits is None:
            fitted = replace(fitted, network_weight=0.0, gaussian_weight=1.0, prior_weight=0.0)
        else:
            fitted = fitted._fit_network(found, labels)
        rows = np.isin(labels, found.cluster_to_class)
        return replace(fitted, odds_exponent=choose_odds(fitted.log_pooled(found)[rows], labels[rows]))

    def _fit_network(self, found: Evidence, labels: np.ndarray) -> Probability:
        """What concerns the network, among the classes that its head has a column for."""
        classes = np.flatnonzero(has_column(found.log_softmax))
        if not (rows := np.isin(labels, classes)).any():
            return self
        own = np.searchsorted(classes, labels[rows])  # labels among these classes
        network = found.log_softmax[rows][:, classes]
        gaussians = self._log_gaussians(found)[rows][:, classes]  # the pool does not depend on their sum
        temperature = fit_softmax_temperature(network, own)
        log_priors = found.class_log_priors[classes]
        weight, prior_weight = choose_network(network, log_priors, own, temperature)
        share = choose_share(gaussians, weigh_network(network, log_priors, weight, prior_weight), own)
        return replace(
            self,
            softmax_temperature=temperature,
            gaussian_weight=share,
            network_weight=(1 - share) * weight,
            prior_weight=(1 - share) * prior_weight,
        )

    def log_probabilities(self, found: Evidence) -> np.ndarray:
        """Log class probabilities (N, C)."""
        return raise_odds(self.log_pooled(found), self.odds_exponent)

    def log_pooled(self, found: Evidence) -> np.ndarray:
        """Log class probabilities (N, C) before the odds are raised."""
        gaussians = self._log_gaussians(found)
        if not self.network_weight:
            return gaussians
        network = self.network_weight * found.log_softmax
        if self.prior_weight:
            network = network + self.prior_weight * found.class_log_priors
        return pool(gaussians, network, gaussian_weight=self.gaussian_weight)

    def _log_gaussians(self, found: Evidence) -> np.ndarray:
        """Log class posterior of the Gaussians (N, C), with its share of class frequencies."""
        logs = log_posterior(found.squared_distances, found.log_weights, found.cluster_to_class, self.temperature)
        return mix_frequencies(logs, found.class_log_priors, self.frequency_share)

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
        return cls(**{field.name: values[field.name] for field in fields(cls)})
