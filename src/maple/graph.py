r"""A predictor as one graph of tensor operations: images in, all that a prediction says out.

:class:`PredictorGraph` does what :meth:`maple.predictor.Predictor.predict_described` does, in torch operations that
ONNX has too. Nothing is learned here: all constants come from a fitted predictor, and NumPy has the last word, with
which :mod:`maple.export` compares. Letters for shapes are those of :mod:`maple.types`.

The graph is small, since a node takes microseconds whatever it computes:

- all products with the embedding are one, in float32 where that is exact enough; what follows is float64;
- squared distances to the clusters of all Gaussians, and the place on the map, are one more product
  (:class:`Distances`);
- the chi-square tail, which ONNX lacks, is one sum of exponentials (:func:`tail_terms`);
- p-values and surprises are looked up in sorted tables by comparisons, since ONNX cannot bisect (:class:`SortedRows`).
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

from maple.backbone import channel_responses, listening
from maple.calibrate import LOWEST, Decision
from maple.detector import MapleDetector
from maple.errors import UsageError
from maple.gaussian import Background, Gaussians
from maple.predictor import Predictor
from maple.relabel import ClassRule
from maple.scores import FUSED, Part, Score, Surprise

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


class Distances(nn.Module):
    """Squared distances to the clusters of several Gaussians, and the place on the map of the first.

    With z all projections side by side (N, K), a squared distance |z|² - 2 z c' + |c|² is linear in (z, z²), as is the
    place on the map: one product gives all. With one covariance per cluster, there is one product per Gaussians.
    """

    matrix: Tensor  # (D, K) of all Gaussians side by side
    powers: Tensor  # of the norm of an embedding, for each of the Gaussians
    owners: Tensor  # (K,) which of the Gaussians a component belongs to
    offset: Tensor  # (K,)

    def __init__(self, gaussians: Sequence[Gaussians]) -> None:
        super().__init__()
        self.n_components = [each.n_components for each in gaussians]
        self.n_clusters = [each.n_clusters for each in gaussians]
        self.divides = any(each.norm_exponent for each in gaussians)
        self.full = gaussians[0].whitenings is not None
        dtype = torch.float32 if all(each.float32 for each in gaussians) else torch.float64
        owners = np.repeat(np.arange(len(gaussians)), self.n_components)
        self.register_buffer("matrix", _constant(np.hstack([each.matrix for each in gaussians]), dtype))
        self.register_buffer("powers", _constant([-each.norm_exponent for each in gaussians]))
        self.register_buffer("owners", _constant(owners, torch.int64))
        self.register_buffer("offset", _constant(np.concatenate([each.offset for each in gaussians])))
        parts = [_on_map(gaussians[0])]
        parts += [_whitened(each) for each in gaussians] if self.full else [_squares(gaussians)]
        self.parts = nn.ModuleList(parts)

    def project(self, embedding: Tensor) -> Tensor:
        """The projections (N, K), float64."""
        product = (embedding.to(self.matrix.dtype) @ self.matrix).double()
        if self.divides:
            norm = torch.linalg.vector_norm(embedding.double(), dim=1, keepdim=True)  # (N, 1)
            factors = norm.clamp_min(SMALLEST) ** self.powers  # (N, 1) or more
            product = product * (factors if len(self.powers) == 1 else factors.index_select(1, self.owners))
        return product + self.offset

    def forward(self, embedding: Tensor) -> tuple[list[Tensor], Tensor]:
        """Squared distances (N, M) of each of the Gaussians, positive for the first, and places on the map (N, 2)."""
        z = self.project(embedding)
        on_map, *parts = self.parts
        if not self.full:
            *squared, position = parts[0](torch.cat([z, z * z], dim=1)).split([*self.n_clusters, 2], dim=1)
            return [squared[0].clamp_min(SMALLEST), *squared[1:]], position
        own = z.split(self.n_components, dim=1)
        whitened = [
            part(each).reshape(-1, n_clusters, n_components).square().sum(2)
            for part, each, n_clusters, n_components in zip(parts, own, self.n_clusters, self.n_components, strict=True)
        ]
        return [whitened[0].clamp_min(SMALLEST), *whitened[1:]], on_map(own[0])


def _on_map(gaussians: Gaussians) -> Affine:
    """From a projection (N, K) to its place on the map (N, 2)."""
    return Affine(gaussians.map_axes, gaussians.on_map(np.zeros((1, gaussians.n_components)))[0])


def _squares(gaussians: Sequence[Gaussians]) -> Affine:
    """From (z, z²) (N, 2 K) to all squared distances, and the place on the map of the first Gaussians (N, M + 2)."""
    n, m = (sum(getattr(each, name) for each in gaussians) for name in ("n_components", "n_clusters"))
    weight, bias = np.zeros((2, n, m + 2)), np.zeros(m + 2)
    row = column = 0
    for each in gaussians:
        rows, columns = slice(row, row + each.n_components), slice(column, column + each.n_clusters)
        weight[0, rows, columns], weight[1, rows, columns] = -2 * each.centroids.T, 1.0
        bias[columns] = (each.centroids**2).sum(axis=1)
        row, column = rows.stop, columns.stop
    place = _on_map(gaussians[0])
    weight[0, : len(place.weight), m:], bias[m:] = place.weight.numpy(), place.bias.numpy()
    return Affine(weight.reshape(2 * n, m + 2), bias)


def _whitened(gaussians: Gaussians) -> Affine:
    """From a projection (N, K) to its deviation from each centroid, whitened by that cluster's covariance (N, M K)."""
    whitenings = gaussians.whitenings
    assert whitenings is not None
    offsets = np.einsum("mk,mkj->mj", gaussians.centroids, whitenings)  # (M, K)
    return Affine(np.concatenate(list(whitenings), axis=1), -offsets.ravel())


class SquaredLength(nn.Module):
    """Squared length (N,1) of (e / ||e||^exponent - mean) W, e (N, D) of any precision, in float64."""

    def __init__(self, mean: np.ndarray, weight: np.ndarray, exponent: float) -> None:
        super().__init__()
        self.exponent = exponent
        self.inside = Affine(weight, -mean @ weight)

    def forward(self, embedding: Tensor) -> Tensor:
        e = embedding.double()
        if self.exponent:
            e = e / torch.linalg.vector_norm(e, dim=1, keepdim=True).clamp_min(SMALLEST) ** self.exponent
        return self.inside(e).square().sum(1, keepdim=True)


def _background_distance(background: Background) -> SquaredLength:
    """The squared distance to all images as one Gaussian."""
    weight = background.matrix / np.sqrt(background.variances)
    return SquaredLength(background.mean, weight, background.norm_exponent)


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


class SortedRows(nn.Module):
    """R sorted rows of numbers, in which the place of a value is found by comparing it with all entries of its row.

    Long rows are cut into B blocks, and there are two steps of √n comparisons: with the last entry of each block, then
    with the entries of the block that was found. Rows are filled up with infinity. Places count through all rows, from
    one to the next by ``stride``, in the order of :meth:`lay_out`.

    >>> rows = SortedRows([np.array([1.0, 2.0, 3.0]), np.array([5.0])])
    >>> rows(torch.tensor([[[2.5], [4.0]]])) - torch.arange(2) * rows.stride  # entries below 2.5, and below 4
    tensor([[2, 0]])
    """

    last: Tensor  # (R, B - 1) last entry of each block but the last, which is for values above all
    blocks: Tensor  # (R B, width)
    first: Tensor  # (R,) number of the first block of each row

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        super().__init__()
        longest = max(1, *map(len, rows))
        if longest <= ONE_STEP:
            self.width, self.n_blocks = longest + 1, 1
        else:
            self.width = math.isqrt(longest - 1) + 1
            self.n_blocks = -(-longest // self.width) + 1
        self.stride = self.n_blocks * self.width
        blocks = self.lay_out(rows, math.inf).reshape(len(rows), self.n_blocks, self.width)
        self.register_buffer("blocks", _constant(blocks.reshape(-1, self.width)))
        self.register_buffer("first", _constant(np.arange(len(rows)) * self.n_blocks, torch.int64))
        if self.n_blocks > 1:
            self.register_buffer("last", _constant(blocks[:, :-1, -1]))

    def lay_out(self, rows: Sequence[np.ndarray], fill: float = 0.0) -> np.ndarray:
        """Rows one after the other (R stride,), each filled up."""
        table = np.full((len(rows), self.stride), fill)
        for place, row in zip(table, rows, strict=True):
            place[: len(row)] = row
        return table.ravel()

    def forward(self, values: Tensor, rows: Tensor | None = None) -> Tensor:
        """Places (N, R) of values (N, R, 1), one in each row; or (N,) of (N, 1), all in one row or in ``rows`` (N,)."""
        block = self.first if rows is None else rows * self.n_blocks  # (R,) or (N,)
        if self.n_blocks > 1:
            last = self.last if rows is None else F.embedding(rows, self.last)  # (R, B - 1) or (N, B - 1)
            found = (last < values).sum(-1)
            block = found if rows is None and len(self.first) == 1 else block + found
        return block * self.width + (F.embedding(block, self.blocks) < values).sum(-1)


class Surprises(nn.Module):
    """The fused score (N, 1) of the scores that it is made of (N, P): see :class:`maple.scores.Surprise`.

    What a score adds is linear from knot to knot, and constant below the first.
    """

    pieces: Tensor  # (T, 3) where a piece begins, what is added there, and its slope

    def __init__(self, surprises: Mapping[Score, Surprise]) -> None:
        super().__init__()
        self.rows = SortedRows([surprise.scores for surprise in surprises.values()])
        pieces = [_pieces(surprise, FUSED[name]) for name, surprise in surprises.items()]
        table = np.stack([self.rows.lay_out(column) for column in zip(*pieces, strict=True)], axis=1)
        self.register_buffer("pieces", _constant(table))

    def forward(self, scores: Tensor) -> Tensor:
        scores = scores.unsqueeze(2)  # (N, P, 1)
        start, value, slope = F.embedding(self.rows(scores), self.pieces).split(1, dim=2)
        return (value + slope * (scores - start)).clamp_min(0).sum(1)


def _pieces(surprise: Surprise, part: Part) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, value there and slope (Q + 1,) of the linear pieces of what a score adds, before it is cut off at 0."""
    knots, values = surprise.scores, part.weight * (surprise.values - part.beyond)
    slopes = np.r_[0.0, np.diff(values) / np.diff(knots), part.weight / surprise.excess]
    return np.append(knots[0], knots), np.append(values[0], values), slopes


class Decide(nn.Module):
    """Conformal p-value and in/out decision (N,), from score (N, 1) and class (N,): see :class:`Decision`."""

    thresholds: Tensor  # (C,), or (1,) where all classes have the same
    groups: Tensor  # (C,) of calibration images
    p_values: Tensor  # (T,)

    def __init__(self, decision: Decision) -> None:
        super().__init__()
        groups, thresholds = decision.group_scores, decision.thresholds
        self.is_calibrated, self.per_class = decision.n_images > 0, len(groups) > 1
        self.rows = SortedRows(groups)
        p_values = [np.arange(len(group) + 1, 0, -1) / (len(group) + 1) for group in groups]  # by scores below
        self.register_buffer("thresholds", _constant(thresholds if self.per_class else thresholds[:1]))
        self.register_buffer("groups", _constant(decision.group_of_class, torch.int64))
        self.register_buffer("p_values", _constant(self.rows.lay_out(p_values)))

    def forward(self, score: Tensor, class_id: Tensor) -> tuple[Tensor, Tensor]:
        threshold = self.thresholds.index_select(0, class_id) if self.per_class else self.thresholds
        is_ood = score.squeeze(1) > threshold
        if not self.is_calibrated:
            return torch.full_like(score.squeeze(1), math.nan), is_ood
        group = self.groups.index_select(0, class_id) if self.per_class else None
        return self.p_values.index_select(0, self.rows(score, group)), is_ood


# --------------------------------------------------------------------------------------------------------- classes


class ByClass(nn.Module):
    """log sum exp over the clusters of each class: (N, M) to (N, C); see :func:`maple.gaussian.class_logsumexp`.

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
    """From log probabilities (N, C), normalised or not, to normalised ones: see :func:`maple.calibrate.raise_odds`."""

    classes: Tensor  # (C,)
    powers: Tensor  # (2,) of the odds of the first class, and of none

    def __init__(self, n_classes: int, exponent: float) -> None:
        super().__init__()
        self.changes = exponent != 1 and n_classes > 1
        self.register_buffer("classes", _constant(np.arange(n_classes), torch.int64))
        self.register_buffer("powers", _constant([exponent, 0.0]))

    def forward(self, logs: Tensor) -> Tensor:
        if not self.changes:
            return logs.log_softmax(1)
        is_first = self.classes == logs.argmax(1, keepdim=True)  # (N, C)
        # A class that cannot be has -inf: LOWEST is as good, and can be subtracted from itself.
        rest = logs.masked_fill(is_first, LOWEST).clamp_min(LOWEST).logsumexp(1, keepdim=True)  # (N, 1)
        odds = logs.amax(1, keepdim=True) - rest
        first, others = (odds * self.powers).log_softmax(1).split(1, dim=1)  # (N, 1) each
        return torch.where(is_first, first, logs - rest + others)


class ClassProbabilities(nn.Module):
    """Log class probabilities (N, C): see :meth:`maple.detector.Description.log_probabilities`.

    Whatever is normalised in the end need not be normalised before.
    """

    def __init__(self, log_weights: np.ndarray, cluster_to_class: np.ndarray, n_columns: int, said: Predictor) -> None:
        super().__init__()
        self.weight = weight = said.network_weight
        self.by_class = ByClass(cluster_to_class, log_weights, -1 / (2 * said.temperature))
        self.normalise = RaiseOdds(int(cluster_to_class.max()) + 1, said.odds_exponent)
        head = np.unique(cluster_to_class[:n_columns])  # the classes that the network knows
        others = np.setdiff1d(cluster_to_class, head)
        self.knows_all = len(others) == 0
        if not self.knows_all:
            order = np.argsort(np.concatenate([head, others]))
            for name, ids in (("head", head), ("others", others), ("order", order)):
                self.register_buffer(name, _constant(ids, torch.int64))
        self.of_network = ByClass(np.searchsorted(head, cluster_to_class[:n_columns])) if weight else None

    def forward(self, squared_distances: Tensor, logits: Tensor | None) -> Tensor:
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
    """The class that the network alone would say (N,), from its logits: see :mod:`maple.relabel`."""

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
    """Negative log-sum-exp of the logits (N, 1); with classes that the head lacks, see :class:`maple.detector`."""

    log_weights: Tensor  # (M,)
    known: Tensor  # clusters of the classes that the head knows

    def __init__(self, detector: MapleDetector) -> None:
        super().__init__()
        self.knows_all = not detector.appended_
        self.register_buffer("log_weights", _constant(detector.gaussians_.log_weights))
        known = np.flatnonzero(detector.head_classes_[detector.cluster_to_class_])
        self.register_buffer("known", _constant(known, torch.int64))

    def forward(self, logits: Tensor, squared_distances: Tensor) -> Tensor:
        energy = -logits.logsumexp(1, keepdim=True)
        if self.knows_all:
            return energy
        logs = self.log_weights - squared_distances / 2  # (N, M)
        return energy + logs.index_select(1, self.known).logsumexp(1, keepdim=True) - logs.logsumexp(1, keepdim=True)


# ----------------------------------------------------------------------------------------------------- all of it


class Seen(NamedTuple):
    """What scores are made of."""

    embedding: Tensor  # (N, D)
    logits: Tensor | None  # (N, M) float64
    responses: Tensor | None  # (N, F) of the shallow layer
    squared_distances: Tensor  # (N, M)
    squared_distance: Tensor  # (N, 1)
    plain: Tensor | None  # (N, M) squared distances of embeddings as they are


class DescriptionGraph(nn.Module):
    """All that detector and decision say about the outputs of a backbone: see :class:`maple.detector.Description`."""

    cluster_to_class: Tensor

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        detector = predictor.detector
        gaussians, cluster_to_class = detector.gaussians_, detector.cluster_to_class_
        n_columns = len(cluster_to_class) - detector.appended_
        self.score_name: Score = detector.score_
        self.scores: list[Score] = list(detector.surprises_) if self.score_name == "fused" else [self.score_name]
        self.needs_plain = detector.exponent_ != 0 and not {"distance", "relative"}.isdisjoint(self.scores)
        self.distances = Distances([gaussians, detector.plain_gaussians_] if self.needs_plain else [gaussians])
        self.tail = Tail(gaussians.n_components)
        self.probabilities = ClassProbabilities(gaussians.log_weights, cluster_to_class, n_columns, predictor)
        self.network_class = NetworkClass(cluster_to_class[:n_columns], predictor.class_rule)
        self.decide = Decide(predictor.decision)
        self.parts = nn.ModuleDict({name: part for name in self.scores if (part := _score_part(name, detector))})
        self.fuse = Surprises(detector.surprises_) if self.score_name == "fused" else None
        self.register_buffer("cluster_to_class", _constant(cluster_to_class, torch.int64))

    @property
    def needs_responses(self) -> bool:
        """Whether the responses of the shallow layer count."""
        return "shallow" in self.scores

    def forward(self, embedding: Tensor, logits: Tensor | None, responses: Tensor | None) -> tuple[Tensor, ...]:
        """The ``OUTPUTS`` in their order, from what a backbone says: (N, D), (N, M) and (N, F)."""
        squared, position = self.distances(embedding)
        nearest = squared[0].amin(1, keepdim=True)  # (N, 1)
        cluster = squared[0].argmin(1)
        wide = None if logits is None else logits.double()
        seen = Seen(embedding, wide, responses, squared[0], nearest, squared[1] if self.needs_plain else None)
        logs = self.probabilities(squared[0], wide)
        class_id, probabilities = logs.argmax(1), logs.exp()
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
            "position": position,
        }
        return tuple(found[name] for name in OUTPUTS)

    def score(self, seen: Seen) -> Tensor:
        """The score (N, 1) that images are ranked by."""
        scores = [self._score_named(name, seen) for name in self.scores]
        return scores[0] if self.fuse is None else self.fuse(torch.cat(scores, dim=1))

    def _score_named(self, name: Score, seen: Seen) -> Tensor:
        """A score (N, 1), as :class:`maple.detector.Description` computes the one of that name."""
        plain = seen.squared_distance if seen.plain is None else seen.plain.amin(1, keepdim=True)
        if name == "normalised":
            return seen.squared_distance
        if name == "distance":
            return plain
        if name == "relative":
            return plain - self.parts[name](seen.embedding)
        if name == "residual":
            return self.parts[name](seen.embedding)
        if name == "spread":
            return seen.squared_distance / seen.squared_distances.mean(1, keepdim=True)
        if name == "energy":
            return self.parts[name](seen.logits, seen.squared_distances)
        assert name == "shallow"
        return self.parts[name](seen.responses)


def _score_part(name: Score, detector: MapleDetector) -> nn.Module | None:
    """The constants of a score beyond squared distances."""
    if name == "relative":
        return _background_distance(detector.plain_background_)
    if name == "residual":
        return Residual(detector.background_)
    if name == "shallow":
        return _background_distance(detector.shallow_background_)
    return Energy(detector) if name == "energy" else None


class PredictorGraph(nn.Module):
    """From images to ``OUTPUTS``: (N, 3, S, S) float32 in [0, 1], or with ``preprocess`` (N, S, S, 3) uint8.

    >>> from maple.backbone import create_backbone, embed
    >>> from maple.detector import MapleDetector
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
