"""Detectors of the logits alone, in one forward pass; the probability of a class sums over its clusters.

With p_c the probability of class c, and F_c the log-sum-exp of the logits of its clusters:

=============  ===========================================================
``softmax``    1 - max_c p_c
``energy``     - log-sum-exp of all logits
``entropy``    - sum_c p_c log p_c
``max-logit``  - max_c F_c
``gen``        sum of (p_c (1 - p_c))^gamma over the most probable classes
=============  ===========================================================
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import logsumexp

from maple.detectors.base import Batches, Detector
from maple.detectors.registry import register_detector
from maple.detectors.scores import energy_score
from maple.errors import UsageError
from maple.options import AboveZero, Positive, option
from maple.stats.arrays import as_array
from maple.stats.gaussians import class_logsumexp
from maple.types import About, Outputs

_ABOUT = partial(About, needs="logits")


class ColumnDetector(Detector):
    """A detector of logits that learns the class of each column."""

    cluster_to_class_: np.ndarray  # (M,) int64

    def _check_columns(self, n_columns: int) -> None:
        if n_columns != len(self.cluster_to_class_):
            fitted = f"the '{self.name}' detector was fitted on {len(self.cluster_to_class_)}"
            raise UsageError(f"logits have {n_columns} columns, but {fitted}: use the same backbone")


class LogitDetector(ColumnDetector):
    """A score of the logits alone; it learns only the class of each column."""

    needs_training_images = False

    def _fit(self, batches: Batches, validation: Outputs | None) -> None:
        first = next(batches.start())
        columns, given = np.arange(self._read(first).shape[1]), first.cluster_to_class
        self.cluster_to_class_ = columns if given is None else as_array(given).astype(np.int64)

    def _read(self, outputs: Outputs) -> np.ndarray:
        """The logits (N, M), in float64."""
        if outputs.logits is None:
            raise UsageError(f"the '{self.name}' detector needs logits: embed with a backbone that has a head")
        return as_array(outputs.logits).astype(np.float64)

    def _score(self, outputs: Outputs) -> np.ndarray:
        logits = self._read(outputs)
        self._check_columns(logits.shape[1])
        return self._score_logits(logits)

    @abstractmethod
    def _score_logits(self, logits: np.ndarray) -> np.ndarray: ...


@register_detector("softmax")
class SoftmaxDetector(LogitDetector):
    """1 - probability of the most probable class (Hendrycks & Gimpel 2017); a class sums over its clusters.

    Computed as the probability of all *other* classes, which avoids ties at 0 for confident images.

    >>> logits = np.log([[0.5, 0.25, 0.25]])
    >>> outputs = Outputs(np.zeros((1, 2)), logits, cluster_to_class=np.array([0, 1, 1]))
    >>> SoftmaxDetector().fit(outputs).score(outputs)
    array([0.5])
    """

    about = _ABOUT("probability of the other classes", "Hendrycks & Gimpel 2017", "https://arxiv.org/abs/1610.02136")

    def _score_logits(self, logits: np.ndarray) -> np.ndarray:
        return probability_of_others(class_logsumexp(logits, self.cluster_to_class_))


def probability_of_others(log_class: np.ndarray) -> np.ndarray:
    """The probability (N,) of all classes but the most probable one, from unnormalised log probabilities (N, C)."""
    others = log_class.copy()
    others[np.arange(len(others)), others.argmax(axis=1)] = -np.inf
    return np.exp(logsumexp(others, axis=1) - logsumexp(log_class, axis=1))


@register_detector("energy")
class EnergyDetector(LogitDetector):
    """Negative log-sum-exp of the logits (Liu et al. 2020).

    >>> outputs = Outputs(np.zeros((1, 2)), np.array([[0.0, 0.0]]))
    >>> EnergyDetector().fit(outputs).score(outputs).round(3)
    array([-0.693])
    """

    about = _ABOUT("negative log-sum-exp of the logits", "Liu et al. 2020", "https://arxiv.org/abs/2010.03759")

    def _score_logits(self, logits: np.ndarray) -> np.ndarray:
        return energy_score(logits)


def log_probabilities(log_class: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log probability of each class and of its complement, (N, C) each, from unnormalised log probabilities (N, C).

    If one class has nearly all of the probability, its value is computed from those of the others, which avoids ties.

    >>> log_p, log_rest = log_probabilities(np.array([[0.0, -100.0]]))
    >>> log_p  # p is 1 to the last digit
    array([[-3.72007598e-44, -1.00000000e+02]])
    >>> bool((log_rest == log_p[:, ::-1]).all())
    True
    """
    total = logsumexp(log_class, axis=1, keepdims=True)  # (N, 1)
    top = (np.arange(len(log_class)), log_class.argmax(axis=1))
    others = log_class - total
    log_top = others[top]
    others[top] = -np.inf
    log_rest = np.log1p(-np.exp(others))  # (N, C): each of the others has at most 1/2
    log_rest[top] = logsumexp(others, axis=1)
    rest = np.minimum(np.exp(log_rest[top]), 0.5)
    log_p = others
    log_p[top] = np.where(rest < 0.5, np.log1p(-rest), log_top)
    return log_p, log_rest


@register_detector("entropy")
class EntropyDetector(LogitDetector):
    """Entropy of the class probabilities: - sum_c p_c log p_c (Lakshminarayanan et al. 2017).

    >>> logits = np.log([[0.5, 0.25, 0.25]])
    >>> outputs = Outputs(np.zeros((1, 2)), logits, cluster_to_class=np.array([0, 1, 1]))
    >>> EntropyDetector().fit(outputs).score(outputs).round(3)
    array([0.693])
    """

    about = _ABOUT(
        "entropy of the class probabilities", "Lakshminarayanan et al. 2017", "https://arxiv.org/abs/1612.01474"
    )

    def _score_logits(self, logits: np.ndarray) -> np.ndarray:
        log_p, _ = log_probabilities(class_logsumexp(logits, self.cluster_to_class_))
        p = np.exp(log_p)
        return -(p * np.where(p > 0, log_p, 0.0)).sum(axis=1)


@register_detector("max-logit")
class MaxLogitDetector(LogitDetector):
    """Negative largest logit (Hendrycks et al. 2022); the logit of a split class is the log-sum-exp over clusters.

    >>> outputs = Outputs(np.zeros((1, 2)), np.array([[3.0, -1.0]]))
    >>> MaxLogitDetector().fit(outputs).score(outputs)
    array([-3.])
    """

    about = _ABOUT("negative largest logit", "Hendrycks et al. 2022", "https://arxiv.org/abs/1911.11132")

    def _score_logits(self, logits: np.ndarray) -> np.ndarray:
        return -class_logsumexp(logits, self.cluster_to_class_).max(axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class GenOptions:
    """Options of the generalised entropy."""

    gamma: AboveZero = option(0.1, "exponent; smaller values give small probabilities more weight")
    top: Positive = option(100, "number of most probable classes to sum over")


@register_detector("gen")
class GenDetector(GenOptions, LogitDetector):
    """Generalised entropy (Liu et al. 2023): sum of (p_c (1 - p_c))^gamma over the ``top`` most probable classes.

    A small gamma emphasises small probabilities; with many classes the smallest ones are noise and left out. Computed
    in logs, so that probabilities below the float range still count. The defaults are those of the authors' code for
    the 1,000 classes of ImageNet (https://github.com/XixiLiu95/GEN, benchmark.py); with fewer than 100 classes, all
    count.

    >>> outputs = Outputs(np.zeros((1, 2)), np.log([[0.5, 0.5]]))
    >>> GenDetector(gamma=0.5).fit(outputs).score(outputs)
    array([1.])
    """

    about = _ABOUT(
        "generalised entropy of the class probabilities",
        "Liu et al. 2023",
        "https://openaccess.thecvf.com/content/CVPR2023/papers/Liu_GEN_Pushing_the_Limits_of_Softmax-Based_Out-of-"
        "Distribution_Detection_CVPR_2023_paper.pdf",
    )

    def _score_logits(self, logits: np.ndarray) -> np.ndarray:
        log_p, log_rest = log_probabilities(class_logsumexp(logits, self.cluster_to_class_))
        terms = log_p + log_rest  # (N, C)
        if self.top < terms.shape[1]:
            kept = np.argpartition(log_p, -self.top, axis=1)[:, -self.top :]
            terms = np.take_along_axis(terms, kept, axis=1)
        return np.exp(self.gamma * terms).sum(axis=1)
