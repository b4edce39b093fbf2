"""Algebra of class probabilities: two models pooled, odds of the first class raised, clusters summed.

Shapes: N images, C classes, M clusters.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.special import log_softmax, logsumexp, softmax

ClassRule = Literal["sum", "max"]
SMALLEST_PRIOR = 1e-30  # of a class without training images
LOWEST = -1e300  # stands for log 0 where log probabilities are subtracted from each other


def pool(
    log_posterior: np.ndarray, log_network: np.ndarray, network_weight: float = 1.0, gaussian_weight: float = 1.0
) -> np.ndarray:
    """Log class probabilities (N, C) of Gaussians and network together: a logarithmic opinion pool.

    log p(c) = g log p_Gaussians(c) + a log p_network(c), normalised; g is ``gaussian_weight``, a ``network_weight``.

    With g = 0 the pool is the softmax at temperature 1 / a. The network lacks classes that were added to the Gaussians
    later: -inf in ``log_network``. Let O be the classes that it has. By the law of total probability,

        p(c) = p_Gaussians(O) pool(c | O)  for c in O,    p(c) = p_Gaussians(c)  for all others:

    the network helps decide which of its own classes an image belongs to, not whether it belongs to one of them.

    >>> np.exp(pool(np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]]), 1.0)).round(3)
    array([[0.9, 0.1]])
    >>> np.exp(pool(np.log([[0.2, 0.2, 0.6]]), np.array([[np.log(0.9), np.log(0.1), -np.inf]]), 1.0)).round(3)
    array([[0.36, 0.04, 0.6 ]])
    """
    known = has_column(log_network)  # (C,)
    if not known.all():
        logs = log_posterior.copy()
        inside = logsumexp(logs[:, known], axis=1, keepdims=True)  # (N, 1) log p_Gaussians(O)
        logs[:, known] = inside + pool(logs[:, known], log_network[:, known], network_weight, gaussian_weight)
        return logs
    pooled = network_weight * log_network
    if gaussian_weight:
        pooled = pooled + gaussian_weight * log_posterior
    return log_softmax(pooled, axis=1)


def mix_frequencies(log_posterior: np.ndarray, log_priors: np.ndarray, share: float) -> np.ndarray:
    """Log class probabilities (N, C) of Gaussians that say nothing of a share of the images.

    p(c) = (1 - s) p_Gaussians(c) + s prior(c): tails of real embeddings are heavier than Gaussian, and one image whose
    class the Gaussians find impossible would otherwise need a temperature that spoils the probability of all others.
    ``log_priors`` (C,) are the frequencies of the classes.

    >>> np.exp(mix_frequencies(np.log([[0.99, 0.01]]), np.log([0.5, 0.5]), 0.1)).round(3)
    array([[0.941, 0.059]])
    """
    if not share:
        return log_posterior
    log_frequencies = np.maximum(log_priors - logsumexp(log_priors), np.log(SMALLEST_PRIOR))
    return np.logaddexp(np.log1p(-share) + log_posterior, np.log(share) + log_frequencies)


def weigh_network(log_network: np.ndarray, log_priors: np.ndarray, weight: float, prior_weight: float) -> np.ndarray:
    """Log class probabilities (N, C) of the network: a log p_softmax(c) + c log prior(c), normalised."""
    return log_softmax(weight * log_network + prior_weight * log_priors, axis=1)


def has_column(log_softmax: np.ndarray) -> np.ndarray:
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
    odds, rest, is_first = log_odds(log_probabilities, first)
    odds = exponent * odds
    return np.where(is_first, -np.logaddexp(0, -odds), log_probabilities - rest - np.logaddexp(0, odds))


def log_odds(log_probabilities: np.ndarray, first: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Log odds (N, 1) of the most probable class, log probability (N, 1) of all others, mask of that class (N, C)."""
    first = (log_probabilities.argmax(axis=1) if first is None else first)[:, None]  # (N, 1)
    is_first = np.arange(log_probabilities.shape[1]) == first  # (N, C)
    rest = logsumexp(np.where(is_first, -np.inf, log_probabilities), axis=1, keepdims=True)  # (N, 1)
    rest = np.maximum(rest, LOWEST)
    return np.take_along_axis(log_probabilities, first, 1) - rest, rest, is_first


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
    classes, starts = np.unique(cluster_to_class[order], return_index=True)
    reduce = np.add if rule == "sum" else np.maximum
    found = np.zeros((len(probabilities), int(classes[-1]) + 1))  # 0 for a class without clusters
    found[:, classes] = reduce.reduceat(probabilities[:, order], starts, axis=1)
    return found
