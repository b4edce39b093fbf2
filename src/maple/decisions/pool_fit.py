"""Fits of the parameters of class probabilities to validation images: maximum likelihood, checked by cross-validation.

The softmax of the network at its fitted temperature is the simplest form. Class frequencies get a weight and a share,
the Gaussians a share and the odds an exponent only where that makes images more likely that it was not fitted to (ten
folds).
Shapes: N images, C classes, M clusters.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.special import logsumexp

from maple.decisions.pool import log_odds, pool, raise_odds, weigh_network
from maple.errors import DataError
from maple.stats.arrays import as_array
from maple.stats.gaussians import log_posterior

TEMPERATURE_RANGE = (1e-3, 1e6)
# Standard deviation of the prior on log T: T lies within a factor of ten of 1. The prior weighs as much as one image,
# so it decides only where the images carry no information.
LOG_TEMPERATURE_DEVIATION = log(10)
_LOG_EXPONENT_DEVIATION = log(2)  # of the prior on the logarithm of the exponent of the odds
_SMALLEST_EXPONENT = 0.05
_TEMPERATURE_STEPS = np.geomspace(1 / 64, 2, 25)  # of Gaussians with class frequencies, relative to those without
_SMALLEST_FREQUENCY_SHARE, _LARGEST_FREQUENCY_SHARE = 1e-4, 0.5
_SMALLEST_WEIGHT = 0.01  # of the softmax, relative to that at its temperature
_FOLDS = 10


# ------------------------------------------------------------------------------------------------------ temperatures


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
        return float(-posterior[rows, labels].sum() + (log_temperature / LOG_TEMPERATURE_DEVIATION) ** 2 / 2)

    # A grid brackets the minimum, whatever the scale of the distances; Brent's method refines it.
    grid = np.log(np.geomspace(*TEMPERATURE_RANGE, num=28))
    best = int(np.argmin([loss(point) for point in grid]))
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6}).x))


def fit_softmax_temperature(log_softmax: np.ndarray, labels: np.ndarray) -> float:
    """The temperature of the network's log class probabilities (N, C) (Guo et al. 2017): the case d² = -2 log p."""
    n_classes = log_softmax.shape[1]
    return fit_temperature(-2 * log_softmax, labels, np.zeros(n_classes), np.arange(n_classes))


# --------------------------------------------------------------------------------------------------------- gaussians


def choose_gaussians(
    squared_distances: np.ndarray,
    labels: np.ndarray,
    log_weights: np.ndarray,
    cluster_to_class: np.ndarray,
    log_priors: np.ndarray,
) -> tuple[float, float]:
    """Temperature and share of :func:`~maple.decisions.pool.mix_frequencies`; the share is 0 unless it helps.

    Arguments as for :func:`fit_temperature`; ``log_priors`` (C,) are the frequencies of the classes. The share has to
    make held-out images more likely than :func:`fit_temperature` does. Both are those of greatest likelihood, less
    s² / 2.

    >>> rng = np.random.default_rng(0)
    >>> logits, log_priors = 4 * rng.normal(size=(5000, 3)), np.log(np.full(3, 1 / 3))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    >>> strange = rng.random(5000) < 0.2
    >>> labels[strange] = rng.integers(0, 3, strange.sum())
    >>> np.round(choose_gaussians(-2 * logits, labels, np.zeros(3), np.arange(3), log_priors), 1)
    array([1. , 0.2])
    """
    simple = fit_temperature(squared_distances, labels, log_weights, cluster_to_class)
    known = np.isin(labels, cluster_to_class)
    squared_distances, labels = as_array(squared_distances)[known], as_array(labels)[known]
    priors = np.exp(log_priors - logsumexp(log_priors))[labels]  # (N,)

    def of_labels(temperature: float) -> np.ndarray:  # (N,) their probabilities
        return np.exp(-losses(log_posterior(squared_distances, log_weights, cluster_to_class, temperature), labels))

    temperatures = simple * _TEMPERATURE_STEPS
    gaussians, mixed = np.stack([of_labels(each) for each in temperatures]), np.empty(len(labels))
    for others, rows in folds(labels):
        fits = [_fit_frequencies(each[others], priors[others]) for each in gaussians]
        best, share = _first(fits)
        mixed[rows] = -np.log((1 - share) * gaussians[best, rows] + share * priors[rows])
    alone = losses(log_posterior(squared_distances, log_weights, cluster_to_class, simple), labels)
    if mixed.sum() >= alone.sum():
        return simple, 0.0
    best, _ = _first([_fit_frequencies(each, priors) for each in gaussians])
    bounds = np.log(temperatures[[max(best - 1, 0), min(best + 1, len(temperatures) - 1)]])
    found = minimize_scalar(
        lambda x: _fit_frequencies(of_labels(np.exp(x)), priors)[0], bounds=bounds, method="bounded"
    )
    temperature = float(np.exp(found.x))
    return temperature, _fit_frequencies(of_labels(temperature), priors)[1]


def _fit_frequencies(gaussians: np.ndarray, priors: np.ndarray) -> tuple[float, float]:
    """Loss and share of ``priors`` (N,) beside ``gaussians`` (N,) that makes the labels most likely."""

    def loss(share: float) -> float:
        return float(-np.log((1 - share) * gaussians + share * priors).sum() + share**2 / 2)

    found = minimize_scalar(loss, bounds=(_SMALLEST_FREQUENCY_SHARE, _LARGEST_FREQUENCY_SHARE), method="bounded")
    return float(found.fun), float(found.x)


def _first(fits: list[tuple[float, float]]) -> tuple[int, float]:
    """Place and share of the fit with the least loss."""
    best = min(range(len(fits)), key=lambda i: fits[i][0])
    return best, fits[best][1]


# ----------------------------------------------------------------------------------------------------------- network


def choose_network(
    log_softmax: np.ndarray, log_priors: np.ndarray, labels: np.ndarray, temperature: float
) -> tuple[float, float]:
    """The weights of :func:`fit_network` where class frequencies make held-out images more likely, else (1 / T, 0)."""
    simple, weighed = (1 / temperature, 0.0), np.empty(len(labels))
    for others, rows in folds(labels):
        weights = fit_network(log_softmax[others], log_priors, labels[others], temperature)
        weighed[rows] = losses(weigh_network(log_softmax[rows], log_priors, *weights), labels[rows])
    better = weighed.sum() < losses(weigh_network(log_softmax, log_priors, *simple), labels).sum()
    return fit_network(log_softmax, log_priors, labels, temperature) if better else simple


def fit_network(
    log_softmax: np.ndarray, log_priors: np.ndarray, labels: np.ndarray, temperature: float
) -> tuple[float, float]:
    """The weights a > 0 of the softmax and c of class frequencies in :func:`weigh_network` of greatest likelihood.

    ``log_softmax`` (N, C), ``log_priors`` (C,) of the training images, ``labels`` (N,). The network may have been
    trained on batches with equally many images of each class: its softmax lacks the frequencies of the classes, and
    c = 1 restores them; c = 0 where it has learned them. With T the temperature of the softmax alone, this minimises

        sum over images of -log p(label | a, c) + (a T - 1)² / 2 + c² / 2,  c in [0, 1].

    The model is log-linear, so the loss is convex; the prior weighs as much as one image.

    >>> rng = np.random.default_rng(0)
    >>> log_softmax, log_priors = np.log(rng.dirichlet(np.ones(3), size=20000)), np.log([0.7, 0.2, 0.1])
    >>> labels = (weigh_network(log_softmax, log_priors, 0.5, 0.8) + rng.gumbel(size=(20000, 3))).argmax(axis=1)
    >>> np.round(fit_network(log_softmax, log_priors, labels, 1.0), 1)
    array([0.5, 0.8])
    """
    scaled, centre = log_softmax / temperature, np.array([1.0, 0.0])
    of_labels = np.array([scaled[np.arange(len(labels)), labels].sum(), log_priors[labels].sum()])

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        logs = weights[0] * scaled + weights[1] * log_priors  # (N, C)
        totals = logsumexp(logs, axis=1, keepdims=True)
        shares = np.exp(logs - totals)
        expected = np.array([np.vdot(shares, scaled), shares.sum(axis=0) @ log_priors])
        away = weights - centre
        return float(totals.sum() - weights @ of_labels + away @ away / 2), expected - of_labels + away

    bounds = [(_SMALLEST_WEIGHT, None), (0, 1)]
    found = minimize(loss, centre, jac=True, method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-12}).x
    return float(found[0]) / temperature, float(found[1])


# ------------------------------------------------------------------------------------------------------------- share


def choose_share(log_posterior: np.ndarray, log_network: np.ndarray, labels: np.ndarray) -> float:
    """The share of :func:`fit_share` where it makes held-out images more likely, else 0: the network alone.

    Arguments as for :func:`fit_share`; both models stay as they are.
    """
    pooled = np.empty(len(labels))
    for others, rows in folds(labels):
        share = fit_share(log_posterior[others], log_network[others], labels[others])
        pooled[rows] = losses(pool(log_posterior[rows], log_network[rows], 1 - share, share), labels[rows])
    better = pooled.sum() < losses(log_network, labels).sum()
    return fit_share(log_posterior, log_network, labels) if better else 0.0


def fit_share(log_posterior: np.ndarray, log_network: np.ndarray, labels: np.ndarray) -> float:
    """The share s of the Gaussians in the pool log p = s log p_Gaussians + (1 - s) log p_network, in [0, 1].

    Log probabilities (N, C) of either model, calibrated by itself, and ``labels`` (N,) class ids. Minimises

        sum over images of -log p(label | s) + s² / 2.

    The loss is convex in s. The last term weighs less than one image: where the images carry no information, the
    network stands alone. Weights that sum to 1 count the frequencies of the classes, which both models contain, once,
    and a pool of two equal models is that model.

    >>> rng = np.random.default_rng(0)
    >>> one, other = (np.log(rng.dirichlet(np.ones(3), size=20000)) for _ in range(2))
    >>> labels = (pool(one, other, 0.7, 0.3) + rng.gumbel(size=one.shape)).argmax(axis=1)
    >>> round(fit_share(one, other, labels), 1)
    0.3
    """

    def loss(share: float) -> float:
        return float(losses(pool(log_posterior, log_network, 1 - share, share), labels).sum() + share**2 / 2)

    found = minimize_scalar(loss, bounds=(0, 1), method="bounded", options={"xatol": 1e-4})
    return min((0.0, float(found.x), 1.0), key=loss)


# ---------------------------------------------------------------------------------------------------------- exponent


def choose_odds(log_probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The exponent of :func:`fit_odds` where it makes held-out images more likely, else 1."""
    raised = np.empty(len(labels))
    for others, rows in folds(labels):
        exponent = fit_odds(log_probabilities[others], labels[others])
        raised[rows] = losses(raise_odds(log_probabilities[rows], exponent), labels[rows])
    better = raised.sum() < losses(log_probabilities, labels).sum()
    return fit_odds(log_probabilities, labels) if better else 1.0


def fit_odds(log_probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The exponent b of :func:`raise_odds`, at most 1, that calibrates the most probable class on validation images.

    With z its log odds, the most probable class is correct with probability 1 / (1 + exp(-b z)); b minimises

        sum over images of -log p(correct or not | b) + (log b)² / 2 s²,  s = log 2.

    The prior has the weight of one image. Log probabilities (N, C), labels (N,).

    >>> rng = np.random.default_rng(0)
    >>> logs = np.log(rng.dirichlet(np.ones(3), size=20000))
    >>> labels = (raise_odds(logs, 0.7) + rng.gumbel(size=logs.shape)).argmax(axis=1)
    >>> bool(abs(fit_odds(logs, labels) - 0.7) < 0.05)
    True
    """
    if log_probabilities.shape[1] == 1:
        return 1.0
    odds = log_odds(log_probabilities)[0]
    signs = np.where(log_probabilities.argmax(axis=1) == labels, 1.0, -1.0)

    def loss(log_exponent: float) -> float:
        prior = (log_exponent / _LOG_EXPONENT_DEVIATION) ** 2 / 2
        return float(np.logaddexp(0, -signs * np.exp(log_exponent) * odds[:, 0]).sum() + prior)

    found = minimize_scalar(loss, bounds=(log(_SMALLEST_EXPONENT), 0.0), method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x)) if found.fun < loss(0.0) else 1.0


# -------------------------------------------------------------------------------------------------- cross-validation


def losses(log_probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Negative log-likelihood of the label of each image (N,)."""
    return -log_probabilities[np.arange(len(labels)), labels]


def folds(labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows to fit on and rows held out, ten times; each class is dealt out evenly.

    >>> [rows.tolist() for _, rows in folds(np.array([1, 0, 0, 1, 0, 0, 1]))]
    [[1], [2], [4], [5], [0], [3], [6], [], [], []]
    """
    fold = np.empty(len(labels), dtype=np.int64)
    fold[np.argsort(labels, kind="stable")] = np.arange(len(labels)) % _FOLDS
    for held_out in range(_FOLDS):
        yield np.flatnonzero(fold != held_out), np.flatnonzero(fold == held_out)
