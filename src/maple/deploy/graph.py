r"""A predictor as one graph of tensor operations: images in, all that a prediction says out.

:class:`PredictorGraph` does what :meth:`maple.prediction.predictor.Predictor.predict_described` does, in torch
operations that
ONNX has too. Nothing is learned here: all constants come from a fitted predictor, and NumPy has the last word, with
which :mod:`maple.deploy.export` compares. Letters for shapes are those of :mod:`maple.types`.

The graph is small, since a node takes microseconds whatever it computes, and so do a hundred kilobytes of constants:
convolutions have filled the cache with their weights.

- products with embeddings are in float32 where that is exact enough; what follows is float64 (:class:`Project`);
- squared distances to all clusters are one more product (:class:`Distances`);
- the chi-square tail, which ONNX lacks, is one sum of exponentials (:func:`tail_terms`);
- the fused score, linear from knot to knot, is one sum of ramps (:class:`Surprises`);
- p-values are looked up in a sorted table by comparisons, since ONNX cannot bisect (:class:`PValues`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import gammaln
from torch import Tensor, nn
from torch.nn import functional as F

from maple.decisions.calibration import Decision
from maple.decisions.probability import LOWEST, ClassRule, Probability
from maple.detectors.learned import Densities, Learned
from maple.detectors.scores import FUSED, Part, Score, Surprise
from maple.errors import UsageError
from maple.networks import channel_responses, listening
from maple.prediction.predictor import Predictor
from maple.stats.background import Background
from maple.stats.gaussians import Gaussians, float32_suffices

OUTPUTS = (
    "class_id",
    "probabilities",
    "probability",
    "typicality",
    "uncertainty",
    "score",
    "p_value",
    "is_ood",
    "cluster",
    "md_class_id",
    "softmax_class_id",
    "log_probabilities",
    "squared_distance",
    "position",
)
SMALLEST = 1e-30  # of squared distances and norms: logarithms and powers stay finite
ENDLESS = 2.0**300  # a surprise that no score reaches
ONE_STEP = 1024  # entries with which a value is compared at once
ERFC_STEP, ERFC_LOW, ERFC_HIGH = 0.5, -16.0, 44.0  # of the integral in :func:`erfc_terms`


def _constant(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.as_tensor(np.array(values), dtype=dtype)


class Affine(nn.Module):
    """x W + b in float64, with constants: x (N, I), W (I, O), b (O,)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: np.ndarray, bias: np.ndarray) -> None:
        super().__init__()
        self.register_buffer("weight", _constant(weight))
        self.register_buffer("bias", _constant(bias))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


# ------------------------------------------------------------------------------------------------------ distances


class _UnitRows(torch.autograd.Function):
    """Rows (N, D) divided by their lengths, a row of zeros by 1: one node of ONNX, for which torch has no word."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=1, eps=SMALLEST)

    @staticmethod
    def symbolic(g: Any, rows: Any) -> Any:
        return g.op("LpNormalization", rows, axis_i=1, p_i=2)


class _SquaredLengths(torch.autograd.Function):
    """Squared lengths (N, 1) of rows (N, K): one more such node."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.square().sum(1, keepdim=True)

    @staticmethod
    def symbolic(g: Any, rows: Any) -> Any:
        return g.op("ReduceSumSquare", rows, g.op("Constant", value_t=torch.tensor([1])), keepdims_i=1)


class Project(nn.Module):
    """e / ||e||^exponent W + b (N, K), of embeddings e (N, D) of any precision; product in ``dtype``, then float64."""

    weight: Tensor  # (D, K)
    bias: Tensor  # (K,)

    def __init__(self, weight: np.ndarray, bias: np.ndarray, exponent: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.exponent = exponent
        self.register_buffer("weight", _constant(weight, dtype))
        self.register_buffer("bias", _constant(bias, dtype))

    def forward(self, embedding: Tensor) -> Tensor:
        e = embedding.to(self.weight.dtype)
        if self.exponent == 1:
            e = _UnitRows.apply(e)
        elif self.exponent:
            e = e * torch.linalg.vector_norm(e, dim=1, keepdim=True).clamp_min(SMALLEST) ** -self.exponent
        return torch.addmm(self.bias, e, self.weight).double()


def _projection(gaussians: Gaussians) -> Project:
    """From embeddings (N, D) to z = (projection, 1) (N, K + 1): with the 1, constants are part of later products."""
    weight, bias = np.pad(gaussians.matrix, ((0, 0), (0, 1))), np.append(gaussians.offset, 1.0)
    return Project(weight, bias, gaussians.norm_exponent, torch.float32 if gaussians.float32 else torch.float64)


class Distances(nn.Module):
    """Squared distances (N, M) to the clusters of Gaussians, from z = (projection, 1) (N, K + 1).

    With c' = (c, (1 - |c|²) / 2) for a centroid c, a squared distance is |z|² - 2 z c'. With one covariance per
    cluster, it is the squared length of z W, which whitens the deviation from the centroid.
    """

    matrix: Tensor  # (K + 1, M), or (K + 1, M K)

    def __init__(self, gaussians: Gaussians) -> None:
        super().__init__()
        self.shape = gaussians.centroids.shape
        self.full = gaussians.whitenings is not None
        self.register_buffer("matrix", _constant(_whitened(gaussians) if self.full else _linear(gaussians)))

    def forward(self, z: Tensor) -> Tensor:
        if self.full:
            return (z @ self.matrix).reshape(-1, *self.shape).square().sum(2)
        return torch.addmm(_SquaredLengths.apply(z), z, self.matrix)


def _linear(gaussians: Gaussians) -> np.ndarray:
    """What a squared distance has beyond |z|² (K + 1, M)."""
    centroids = gaussians.centroids
    return np.vstack([-2 * centroids.T, (centroids**2).sum(axis=1) - 1])


def _whitened(gaussians: Gaussians) -> np.ndarray:
    """From z to its deviation from each centroid, whitened by that cluster's covariance (K + 1, M K)."""
    whitenings = gaussians.whitenings
    assert whitenings is not None
    offsets = np.einsum("mk,mkj->mj", gaussians.centroids, whitenings)  # (M, K)
    return np.vstack([np.concatenate(list(whitenings), axis=1), -offsets.ravel()])


def _on_map(gaussians: Gaussians) -> np.ndarray:
    """From z to its place on the map (K + 1, 2)."""
    return np.vstack([gaussians.map_axes, gaussians.on_map(np.zeros((1, gaussians.n_components)))])


class SquaredLength(nn.Module):
    """Squared length (N, 1) of (e / ||e||^exponent - mean) W, from e (N, D): see :class:`Project`."""

    def __init__(
        self, mean: np.ndarray, weight: np.ndarray, exponent: float, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.inside = Project(weight, -mean @ weight, exponent, dtype)

    def forward(self, embedding: Tensor) -> Tensor:
        return _SquaredLengths.apply(self.inside(embedding))


def _background_distance(background: Background) -> SquaredLength:
    """The squared distance to all images as one Gaussian."""
    weight = background.matrix / np.sqrt(background.variances)
    return SquaredLength(background.mean, weight, background.norm_exponent)


def _shallow_distance(densities: Densities) -> SquaredLength:
    """The same of the responses of the shallow layer, in float32 where that is exact enough, as of embeddings."""
    background, moments = densities.shallow_background, densities.moments.shallow
    assert moments is not None
    weight = background.matrix / np.sqrt(background.variances)
    single = densities.gaussians.float32 and float32_suffices(moments, weight)
    return SquaredLength(background.mean, weight, 0.0, torch.float32 if single else torch.float64)


class Residual(nn.Module):
    """What of an embedding lies outside the principal components (N, 1): the whole less the inside, never negative."""

    def __init__(self, background: Background) -> None:
        super().__init__()
        self.whole = SquaredLength(background.mean, np.diag(background.scale), background.norm_exponent)
        self.inside = SquaredLength(background.mean, background.matrix, background.norm_exponent)

    def forward(self, embedding: Tensor) -> Tensor:
        return (self.whole(embedding) - self.inside(embedding)).clamp_min(0)


# ------------------------------------------------------------------------------------------------- chi-square tail


def tail_terms(degrees_of_freedom: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""Powers p, rates r and logarithms c (J,) with P(X >= d²) = sum_j exp(p_j log d² - r_j d² + c_j), X chi-square.

    With z = d²/2 the tail is :math:`\sum_i e^{-z} z^i / \Gamma(i + 1)` over i = 0, 1, .., k/2 - 1 for even k; for odd k
    over i = 1/2, 3/2, .., k/2 - 1, plus :func:`erfc_terms`. All terms are positive and none exceeds 1, so that nothing
    cancels or overflows.

    >>> from scipy.stats import chi2
    >>> p, r, c = tail_terms(7)
    >>> abs(np.exp(p * np.log(9.0) - r * 9.0 + c).sum() - chi2.sf(9.0, 7)) < 1e-9
    np.True_
    """
    odd = degrees_of_freedom % 2
    i = np.arange(odd / 2, degrees_of_freedom / 2)
    powers, rates, logs = i, np.full(len(i), 0.5), -i * math.log(2) - gammaln(i + 1)
    if odd:
        more, weights = erfc_terms()
        powers = np.append(powers, np.zeros(len(more)))
        rates, logs = np.append(rates, more / 2), np.append(logs, np.log(weights))
    return powers, rates, logs


def erfc_terms() -> tuple[np.ndarray, np.ndarray]:
    r"""Rates and weights of a sum of exponentials that is erfc(√z) for every z >= 0, to 1e-9: onnxruntime has none.

    .. math:: \mathrm{erfc}(\sqrt z) = \frac 1 \pi \int e^{-z (1 + e^u)} \frac{e^{u/2}}{1 + e^u} du

    by the trapezoidal rule, whose error falls as exp(-π² / step): the integrand is analytic in the strip |Im u| < π/2
    and decays at both ends. What lies below the lower end is a geometric series of the same rate.
    """
    u = np.arange(ERFC_LOW, ERFC_HIGH, ERFC_STEP)
    weights = ERFC_STEP / np.pi * np.exp(u / 2) / (1 + np.exp(u))
    weights[0] /= 1 - np.exp(-ERFC_STEP / 2)
    return 1 + np.exp(u), weights


class Tail(nn.Module):
    """The chi-square tail (N,) of squared distances (N, 1)."""

    def __init__(self, degrees_of_freedom: int) -> None:
        super().__init__()
        powers, rates, logs = tail_terms(degrees_of_freedom)
        self.exponents = Affine(np.stack([powers, -rates]), logs)

    def forward(self, squared_distance: Tensor) -> Tensor:
        both = torch.cat([squared_distance.log(), squared_distance], dim=1)  # (N, 2)
        return self.exponents(both).exp().sum(1).clamp_max(1)


# ---------------------------------------------------------------------------------------------------------- tables


class Surprises(nn.Module):
    """The fused score (N, 1) of the scores that it is made of (N, P): see :class:`maple.detectors.scores.Surprise`.

    What a score x adds is linear from knot to knot, and never falls. It is a sum of ramps, one from each knot to the
    next, height clip((x - start) / width, 0, 1): no term is negative, so that nothing cancels.
    """

    heights: Tensor  # (T,) of all ramps

    def __init__(self, surprises: Mapping[Score, Surprise]) -> None:
        super().__init__()
        ramps = [_ramps(surprise, FUSED[name]) for name, surprise in surprises.items()]
        owners = np.repeat(np.arange(len(ramps)), [len(starts) for starts, _, _ in ramps])
        starts, widths, heights = (np.concatenate(column) for column in zip(*ramps, strict=True))
        weight = np.zeros((len(ramps), len(owners)))
        weight[owners, np.arange(len(owners))] = 1 / widths
        self.climb = Affine(weight, -starts / widths)
        self.register_buffer("heights", _constant(heights))

    def forward(self, scores: Tensor) -> Tensor:
        return (self.climb(scores).clamp(0, 1) * self.heights).sum(1, keepdim=True)


def _ramps(surprise: Surprise, part: Part) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, widths and heights (T,) of the ramps that add up to what a score adds.

    In front of the first knot is one that every score has climbed, behind the last knot one that none climbs to its
    end. Of each, only what lies above the level ``part.beyond`` adds anything.
    """
    bottoms = np.r_[0.0, surprise.values]
    starts, heights = np.r_[-ENDLESS, surprise.scores], np.r_[np.diff(bottoms), ENDLESS]
    widths = np.r_[1.0, np.diff(surprise.scores), ENDLESS * surprise.excess]
    below = np.clip(part.beyond - bottoms, 0, heights)
    share = np.divide(below, heights, out=np.ones_like(below), where=heights > 0)
    starts, widths, heights = starts + share * widths, (1 - share) * widths, (1 - share) * heights
    rises = heights > 0
    return starts[rises], widths[rises], part.weight * heights[rises]


class PValues(nn.Module):
    """Conformal p-values (N,) of scores (N, 1): see :func:`maple.decisions.conformal.conformal_p_values`.

    The p-value of a score is that of the first calibration score not below it: the largest of those that are not. Each
    group ends in infinity. Many calibration scores are cut into B blocks, and there are two steps of √n comparisons:
    with the last score of each block, then with the scores of the block that was found.

    >>> PValues([np.array([1.0, 2.0, 3.0])])(torch.tensor([[0.5], [2.0], [9.0]]).double())
    tensor([1.0000, 0.7500, 0.2500], dtype=torch.float64)
    """

    scores: Tensor  # (G B, width) sorted calibration scores of each group
    values: Tensor  # (G B, width) their p-values; 0 where a group has fewer
    last: Tensor  # (G, B) last score of each block
    first: Tensor  # (G, B) p-value of its first score

    def __init__(self, groups: Sequence[np.ndarray]) -> None:
        super().__init__()
        longest = max(map(len, groups)) + 1
        width = longest if longest <= ONE_STEP else math.isqrt(longest - 1) + 1
        self.n_blocks = -(-longest // width)
        scores = np.full((len(groups), self.n_blocks * width), np.inf)
        values = np.zeros_like(scores)
        for row, own, group in zip(scores, values, groups, strict=True):
            row[: len(group)] = group
            own[: len(group) + 1] = np.arange(len(group) + 1, 0, -1) / (len(group) + 1)
        self.register_buffer("scores", _constant(scores.reshape(-1, width)))
        self.register_buffer("values", _constant(values.reshape(-1, width)))
        self.register_buffer("last", _constant(scores[:, width - 1 :: width]))
        self.register_buffer("first", _constant(values[:, ::width]))

    def forward(self, score: Tensor, group: Tensor | None = None) -> Tensor:
        """In the only group, or in groups (N,)."""
        block = group
        if self.n_blocks > 1:
            last, first = _rows(group, self.last, self.first)  # (1, B) or (N, B)
            block = torch.where(last < score, 0.0, first).argmax(1)
            block = block if group is None else group * self.n_blocks + block
        scores, values = _rows(block, self.scores, self.values)  # (1, width) or (N, width)
        return torch.where(scores < score, 0.0, values).amax(1)


def _rows(which: Tensor | None, *tables: Tensor) -> list[Tensor]:
    """Rows ``which`` (N,) of each table; all of them where that is None."""
    return [table if which is None else F.embedding(which, table) for table in tables]


class Decide(nn.Module):
    """Conformal p-value and in/out decision (N,), from score (N, 1) and class (N,): see :class:`Decision`."""

    thresholds: Tensor  # (C,), or (1,) where all classes have the same
    groups: Tensor  # (C,) of calibration images

    def __init__(self, decision: Decision) -> None:
        super().__init__()
        groups, thresholds = decision.group_scores, decision.thresholds
        self.is_calibrated, self.per_class = decision.n_images > 0, len(groups) > 1
        self.p_values = PValues(groups)
        self.register_buffer("thresholds", _constant(thresholds if self.per_class else thresholds[:1]))
        self.register_buffer("groups", _constant(decision.group_of_class, torch.int64))

    def forward(self, score: Tensor, class_id: Tensor) -> tuple[Tensor, Tensor]:
        threshold = self.thresholds.index_select(0, class_id) if self.per_class else self.thresholds
        is_ood = threshold < score.squeeze(1)
        if not self.is_calibrated:
            return torch.full_like(score.squeeze(1), math.nan), is_ood
        return self.p_values(score, self.groups.index_select(0, class_id) if self.per_class else None), is_ood


# --------------------------------------------------------------------------------------------------------- classes


class ByClass(nn.Module):
    """log sum exp over the clusters of each class: (N, M) to (N, C); see :func:`maple.stats.gaussians.class_logsumexp`.

    Before it is taken, values are multiplied by ``scale`` and weights (M,) are added.
    """

    members: Tensor  # (C, L) clusters of each class; 0 where it has fewer
    weights: Tensor  # (C, L), or (M,) where clusters are classes; -inf where it has fewer

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
        self.register_buffer("members", _constant(members, torch.int64))
        self.register_buffer("weights", _constant(of_members if self.splits else weights))

    def forward(self, values: Tensor) -> Tensor:
        values = values[:, self.members] if self.splits else values  # (N, C, L) or (N, M)
        values = values if self.scale == 1 else values * self.scale
        values = values + self.weights if self.splits or self.adds else values
        return values.logsumexp(2) if self.splits else values


class RaiseOdds(nn.Module):
    """Normalised log probabilities (N, C) and their first class (N,), from logs (N, C) that need not be normalised.

    See :func:`maple.decisions.probability.raise_odds`: with t the largest of the logs and r that of all others
    together, the odds
    t - r become b (t - r) where b t + (1 - b) r takes the place of t.
    """

    classes: Tensor  # (C,)
    exponent: Tensor  # (1, 1)

    def __init__(self, n_classes: int, exponent: float) -> None:
        super().__init__()
        self.changes, self.keeps_first = exponent != 1 and n_classes > 1, 0 < exponent <= 1
        self.register_buffer("classes", _constant(np.arange(n_classes), torch.int64))
        self.register_buffer("exponent", _constant([[exponent]]))
        self.rest_counts = 1 - exponent

    def forward(self, logs: Tensor) -> tuple[Tensor, Tensor]:
        if not self.changes:
            logs = logs.log_softmax(1)
            return logs, logs.argmax(1)
        top, first = logs.amax(1, keepdim=True), logs.argmax(1, keepdim=True)  # (N, 1) each
        is_first = self.classes == first  # (N, C)
        rest = logs.masked_fill(is_first, LOWEST).logsumexp(1, keepdim=True)  # (N, 1); finite, where others cannot be
        raised = torch.addmm(rest, top, self.exponent, beta=self.rest_counts)  # (N, 1)
        logs = torch.where(is_first, raised, logs).log_softmax(1)
        return logs, first.squeeze(1) if self.keeps_first else logs.argmax(1)


class ClassProbabilities(nn.Module):
    """Log class probabilities (N, C) and the first class (N,).

    See :class:`maple.decisions.probability.Probability`. Normalisation happens once, at the end.
    """

    def __init__(
        self, log_weights: np.ndarray, cluster_to_class: np.ndarray, n_columns: int, probability: Probability
    ) -> None:
        super().__init__()
        self.weight = weight = probability.network_weight
        self.by_class = ByClass(cluster_to_class, log_weights, -1 / (2 * probability.temperature))
        self.normalise = RaiseOdds(int(cluster_to_class.max()) + 1, probability.odds_exponent)
        head = np.unique(cluster_to_class[:n_columns])  # the classes that the network knows
        others = np.setdiff1d(cluster_to_class, head)
        self.knows_all = len(others) == 0
        if not self.knows_all:
            order = np.argsort(np.concatenate([head, others]))
            for name, ids in (("head", head), ("others", others), ("order", order)):
                self.register_buffer(name, _constant(ids, torch.int64))
        self.of_network = ByClass(np.searchsorted(head, cluster_to_class[:n_columns])) if weight else None

    def forward(self, squared_distances: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        logs = self.by_class(squared_distances)
        if self.of_network is None or logits is None:
            return self.normalise(logs)
        network = self.of_network(logits) * self.weight
        if self.knows_all:
            return self.normalise(logs + network)
        logs = logs.log_softmax(1)
        own = logs.index_select(1, self.get_buffer("head"))
        pooled = own.logsumexp(1, keepdim=True) + (own + network).log_softmax(1)
        both = torch.cat([pooled, logs.index_select(1, self.get_buffer("others"))], dim=1)
        return self.normalise(both.index_select(1, self.get_buffer("order")))


class NetworkClass(nn.Module):
    """The class that the network alone would say (N,), from its logits: see :mod:`maple.training.relabel`."""

    cluster_to_class: Tensor

    def __init__(self, cluster_to_class: np.ndarray, rule: ClassRule) -> None:
        super().__init__()
        self.rule = rule
        self.by_class = ByClass(cluster_to_class)
        self.register_buffer("cluster_to_class", _constant(cluster_to_class, torch.int64))

    def forward(self, logits: Tensor) -> Tensor:
        if self.rule == "sum":
            return self.by_class(logits).argmax(1)
        return self.cluster_to_class.index_select(0, logits.argmax(1))


class Energy(nn.Module):
    """Negative log-sum-exp of the logits (N, 1); with classes that the head lacks, see
    :attr:`maple.detectors.description.Description.energy`."""

    log_weights: Tensor  # (M,)
    known: Tensor  # clusters of the classes that the head knows

    def __init__(self, learned: Learned) -> None:
        super().__init__()
        self.knows_all = not learned.appended
        self.register_buffer("log_weights", _constant(learned.densities.gaussians.log_weights))
        known = np.flatnonzero(learned.head_classes[learned.cluster_to_class])
        self.register_buffer("known", _constant(known, torch.int64))

    def forward(self, logits: Tensor, squared_distances: Tensor) -> Tensor:
        inside: Tensor | float = 0.0  # log probability of the classes that the head knows, (N, 1)
        if not self.knows_all:
            logs = self.log_weights - squared_distances / 2  # (N, M)
            inside = logs.index_select(1, self.known).logsumexp(1, keepdim=True) - logs.logsumexp(1, keepdim=True)
        return inside - logits.logsumexp(1, keepdim=True)


# ----------------------------------------------------------------------------------------------------- all of it


class Seen(NamedTuple):
    """What scores are made of."""

    embedding: Tensor  # (N, D)
    logits: Tensor | None  # (N, M) float64
    responses: Tensor | None  # (N, F) of the shallow layer
    squared_distances: Tensor  # (N, M)
    squared_distance: Tensor  # (N, 1)


class DescriptionGraph(nn.Module):
    """All that detector and decision say about the outputs of a backbone: see
    :class:`maple.detectors.description.Description`."""

    cluster_to_class: Tensor  # (M,)
    map: Tensor  # (K + 1, 2)

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        learned = predictor.detector.learned_
        gaussians, cluster_to_class = learned.densities.gaussians, learned.cluster_to_class
        n_columns = learned.n_columns
        self.score_name: Score = learned.score
        self.scores: list[Score] = list(learned.surprises) if self.score_name == "fused" else [self.score_name]
        needs_plain = learned.densities.exponent != 0 and not {"distance", "relative"}.isdisjoint(self.scores)
        self.project, self.distances = _projection(gaussians), Distances(gaussians)
        plain = learned.densities.plain_gaussians if needs_plain else None
        self.plain = None if plain is None else nn.Sequential(_projection(plain), Distances(plain))
        self.tail = Tail(gaussians.n_components)
        self.probabilities = ClassProbabilities(
            gaussians.log_weights, cluster_to_class, n_columns, predictor.probability
        )
        self.network_class = NetworkClass(cluster_to_class[:n_columns], predictor.probability.class_rule)
        self.decide = Decide(predictor.decision)
        self.parts = nn.ModuleDict({name: part for name in self.scores if (part := _score_part(name, learned))})
        self.fuse = Surprises(learned.surprises) if self.score_name == "fused" else None
        self.register_buffer("cluster_to_class", _constant(cluster_to_class, torch.int64))
        self.register_buffer("map", _constant(_on_map(gaussians)))

    @property
    def needs_responses(self) -> bool:
        """Whether the responses of the shallow layer count."""
        return "shallow" in self.scores

    def forward(self, embedding: Tensor, logits: Tensor | None, responses: Tensor | None) -> tuple[Tensor, ...]:
        """The ``OUTPUTS`` in their order, from what a backbone says: (N, D), (N, M) and (N, F)."""
        z = self.project(embedding)  # (N, K + 1)
        squared = self.distances(z)  # (N, M)
        nearest = squared.amin(1, keepdim=True).clamp_min(SMALLEST)  # (N, 1)
        cluster = squared.argmin(1)
        wide = None if logits is None else logits.double()
        seen = Seen(embedding, wide, responses, squared, nearest)
        logs, class_id = self.probabilities(squared, wide)
        probabilities = logs.exp()
        score = self.score(seen)
        p_value, is_ood = self.decide(score, class_id)
        typicality = self.tail(nearest)
        md_class_id = self.cluster_to_class.index_select(0, cluster)
        found = {
            "class_id": class_id,
            "probabilities": probabilities,
            "probability": probabilities.amax(1),
            "typicality": typicality,
            "uncertainty": 1 - typicality,
            "score": score.squeeze(1),
            "p_value": p_value,
            "is_ood": is_ood,
            "cluster": cluster,
            "md_class_id": md_class_id,
            "softmax_class_id": md_class_id if wide is None else self.network_class(wide),
            "log_probabilities": logs,
            "squared_distance": nearest.squeeze(1),
            "position": z.mm(self.map),
        }
        return tuple(found[name] for name in OUTPUTS)

    def score(self, seen: Seen) -> Tensor:
        """The score (N, 1) that images are ranked by."""
        scores = [self._score_named(name, seen) for name in self.scores]
        return scores[0] if self.fuse is None else self.fuse(torch.cat(scores, dim=1))

    def _score_named(self, name: Score, seen: Seen) -> Tensor:
        """A score (N, 1), as :class:`maple.detectors.description.Description` computes the one of that name."""
        if name == "normalised":
            return seen.squared_distance
        if name == "distance":
            return self._plain_distance(seen)
        if name == "relative":
            return self._plain_distance(seen) - self.parts[name](seen.embedding)
        if name == "residual":
            return self.parts[name](seen.embedding)
        if name == "spread":
            return seen.squared_distance / seen.squared_distances.mean(1, keepdim=True)
        if name == "energy":
            return self.parts[name](seen.logits, seen.squared_distances)
        assert name == "shallow"
        return self.parts[name](seen.responses)

    def _plain_distance(self, seen: Seen) -> Tensor:
        """Squared distance (N, 1) to the nearest cluster of embeddings as they are."""
        return seen.squared_distance if self.plain is None else self.plain(seen.embedding).amin(1, keepdim=True)


def _score_part(name: Score, learned: Learned) -> nn.Module | None:
    """The constants of a score beyond squared distances."""
    if name == "relative":
        return _background_distance(learned.densities.plain_background)
    if name == "residual":
        return Residual(learned.densities.background)
    if name == "shallow":
        return _shallow_distance(learned.densities)
    return Energy(learned) if name == "energy" else None


class PredictorGraph(nn.Module):
    """From images to ``OUTPUTS``: (N, 3, S, S) float32 in [0, 1], or with ``preprocess`` (N, S, S, 3) uint8.

    >>> from maple.networks import create_backbone, embed
    >>> from maple.detectors.maple import MapleDetector
    >>> from dataclasses import replace
    >>> pixels = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 3), dtype=np.uint8)
    >>> backbone = create_backbone("resnet9", n_classes=2).eval()
    >>> known = replace(embed(backbone, pixels), labels=np.arange(64) % 2)
    >>> predictor = Predictor(backbone, MapleDetector().fit(known), size=8)
    >>> with torch.no_grad():
    ...     said = dict(zip(OUTPUTS, PredictorGraph(predictor, preprocess=True)(torch.from_numpy(pixels))))
    >>> bool((said["class_id"].numpy() == predictor(pixels).class_id).all())
    True
    """

    def __init__(self, predictor: Predictor, preprocess: bool = False) -> None:
        super().__init__()
        self.preprocess = preprocess
        self.backbone = predictor.backbone
        self.description = DescriptionGraph(predictor)
        if self.description.needs_responses and self.backbone.shallow is None:
            raise UsageError("the score needs a shallow layer, and the backbone names none: fit the detector again")

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x = images.permute(0, 3, 1, 2).float() / 255 if self.preprocess else images
        heard: list[Tensor] = []

        def hear(name: str, layer: nn.Module, inputs: Any, output: Tensor) -> None:
            heard.append(channel_responses(output))

        layers = {}
        if self.description.needs_responses:
            assert self.backbone.shallow is not None
            layers = {"shallow": self.backbone.body.get_submodule(self.backbone.shallow)}
        with listening(layers, hear):
            if self.backbone.head is None:
                embedding, logits = self.backbone.embed(x), None
            else:
                embedding, logits = self.backbone(x)
        return self.description(embedding, logits, heard[0] if heard else None)
