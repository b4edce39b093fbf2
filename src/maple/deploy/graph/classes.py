"""Class probabilities, and the class of the network alone."""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor, nn

from maple.decisions.pool import LOWEST, SMALLEST_PRIOR, ClassRule
from maple.decisions.probability import Probability
from maple.deploy.graph._constants import constant
from maple.stats.gaussians import class_logsumexp


class ByClass(nn.Module):
    """Log-sum-exp over the clusters of each class, (N, M) to (N, C); see :func:`maple.stats.gaussians.class_logsumexp`.

    Values are first multiplied by ``scale``, then ``weights`` (M,) are added.
    """

    members: Tensor  # (C, L) clusters of each class; 0 as padding
    weights: Tensor  # (C, L), or (M,) if each class is one cluster; -inf as padding

    def __init__(self, cluster_to_class: np.ndarray, weights: np.ndarray | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.scale, self.adds = scale, weights is not None
        weights = np.zeros(len(cluster_to_class)) if weights is None else weights
        classes = [np.flatnonzero(cluster_to_class == c) for c in range(int(cluster_to_class.max()) + 1)]
        self.splits = not np.array_equal(cluster_to_class, np.arange(len(classes)))
        members = np.zeros((len(classes), max(map(len, classes))), dtype=np.int64)
        of_members = np.full(members.shape, -np.inf)
        for c, own in enumerate(classes):
            members[c, : len(own)], of_members[c, : len(own)] = own, weights[own]
        self.register_buffer("members", constant(members, torch.int64))
        self.register_buffer("weights", constant(of_members if self.splits else weights))

    def forward(self, values: Tensor) -> Tensor:
        values = values[:, self.members] if self.splits else values  # (N, C, L) or (N, M)
        values = values if self.scale == 1 else values * self.scale
        values = values + self.weights if self.splits or self.adds else values
        return values.logsumexp(2) if self.splits else values


class RaiseOdds(nn.Module):
    """Log probabilities (N, C) and the most probable class (N,), from unnormalised logs (N, C).

    See :func:`maple.decisions.pool.raise_odds`: with t the largest log and r the log-sum-exp of the others, the
    log odds t - r become b (t - r) if b t + (1 - b) r replaces t.
    """

    classes: Tensor  # (C,)
    exponent: Tensor  # (1, 1)

    def __init__(self, n_classes: int, exponent: float) -> None:
        super().__init__()
        self.changes, self.keeps_first = exponent != 1 and n_classes > 1, 0 < exponent <= 1
        self.register_buffer("classes", constant(np.arange(n_classes), torch.int64))
        self.register_buffer("exponent", constant([[exponent]]))
        self.rest_counts = 1 - exponent

    def forward(self, logs: Tensor) -> tuple[Tensor, Tensor]:
        if not self.changes:
            logs = logs.log_softmax(1)
            return logs, logs.argmax(1)
        top, first = logs.amax(1, keepdim=True), logs.argmax(1, keepdim=True)  # (N, 1) each
        is_first = self.classes == first  # (N, C)
        rest = logs.masked_fill(is_first, LOWEST).logsumexp(1, keepdim=True)  # (N, 1); always finite
        raised = torch.addmm(rest, top, self.exponent, beta=self.rest_counts)  # (N, 1)
        logs = torch.where(is_first, raised, logs).log_softmax(1)
        return logs, first.squeeze(1) if self.keeps_first else logs.argmax(1)


class ClassProbabilities(nn.Module):
    """Log class probabilities (N, C) and the most probable class (N,), normalised once at the end.

    See :class:`maple.decisions.probability.Probability`.
    """

    def __init__(
        self,
        log_weights: np.ndarray,
        log_priors: np.ndarray,
        cluster_to_class: np.ndarray,
        n_columns: int,
        probability: Probability,
    ) -> None:
        super().__init__()
        self.weight = weight = probability.network_weight
        self.of_gaussians = probability.gaussian_weight
        self.by_class = ByClass(cluster_to_class, log_weights, -1 / (2 * probability.temperature))
        self.normalise = RaiseOdds(int(cluster_to_class.max()) + 1, probability.odds_exponent)
        head = np.unique(cluster_to_class[:n_columns])  # the classes that the network knows
        others = np.setdiff1d(cluster_to_class, head)
        self.knows_all = len(others) == 0
        if not self.knows_all:
            order = np.argsort(np.concatenate([head, others]))
            for name, ids in (("head", head), ("others", others), ("order", order)):
                self.register_buffer(name, constant(ids, torch.int64))
        self.of_network = ByClass(np.searchsorted(head, cluster_to_class[:n_columns])) if weight else None
        self.adds_priors = probability.prior_weight != 0
        of_classes = class_logsumexp(log_priors[None], cluster_to_class)[0]  # (C,)
        self.register_buffer("priors", constant(probability.prior_weight * of_classes[head]))
        self.share = share = probability.frequency_share
        frequencies = np.exp(of_classes - logsumexp(of_classes))
        self.register_buffer("frequencies", constant(share * np.maximum(frequencies, SMALLEST_PRIOR)))

    def forward(self, squared_distances: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.of_network is None or logits is None:
            return self.normalise(self._of_gaussians(squared_distances))
        network = self.of_network(logits) * self.weight
        network = network + self.get_buffer("priors") if self.adds_priors else network
        if self.knows_all:
            return self.normalise(self._add(network, self._of_gaussians(squared_distances)))
        logs = self._of_gaussians(squared_distances).log_softmax(1)
        own = logs.index_select(1, self.get_buffer("head"))
        pooled = own.logsumexp(1, keepdim=True) + self._add(network, own).log_softmax(1)
        both = torch.cat([pooled, logs.index_select(1, self.get_buffer("others"))], dim=1)
        return self.normalise(both.index_select(1, self.get_buffer("order")))

    def _of_gaussians(self, squared_distances: Tensor) -> Tensor:
        """Unnormalised logs of the Gaussians (N, C), with their share of class frequencies."""
        logs = self.by_class(squared_distances)
        if not self.share:
            return logs
        return (logs.softmax(1) * (1 - self.share) + self.get_buffer("frequencies")).log()

    def _add(self, network: Tensor, gaussians: Tensor) -> Tensor:
        """Weighted logs of the network (N, C) plus those of the Gaussians (N, C) times their weight."""
        if self.of_gaussians in (0.0, 1.0):
            return network + gaussians if self.of_gaussians else network
        return network + self.of_gaussians * gaussians


class NetworkClass(nn.Module):
    """The class of the network alone (N,), from its logits; see :mod:`maple.training.relabel`."""

    cluster_to_class: Tensor

    def __init__(self, cluster_to_class: np.ndarray, rule: ClassRule) -> None:
        super().__init__()
        self.rule = rule
        self.by_class = ByClass(cluster_to_class)
        self.register_buffer("cluster_to_class", constant(cluster_to_class, torch.int64))

    def forward(self, logits: Tensor) -> Tensor:
        if self.rule == "sum":
            return self.by_class(logits).argmax(1)
        return self.cluster_to_class.index_select(0, logits.argmax(1))
