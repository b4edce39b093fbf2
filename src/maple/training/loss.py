"""Losses as pure functions of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class LossTerm(NamedTuple):
    """One term of the loss: the history shows ``value``, training minimises ``weight * value``."""

    value: Tensor  # ()
    weight: float = 1.0


def weighted_sum(terms: Mapping[str, LossTerm]) -> Tensor:
    """The sum of all terms, each times its weight.

    >>> weighted_sum({"a": LossTerm(torch.tensor(3.0)), "b": LossTerm(torch.tensor(4.0), weight=0.5)})
    tensor(5.)
    """
    return torch.stack([weight * value for value, weight in terms.values()]).sum()


def pairwise_distances(embeddings: Tensor) -> Tensor:
    """Euclidean distances between all rows, with a finite gradient where two rows coincide.

    >>> pairwise_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    tensor([[0., 5.],
            [5., 0.]])
    """
    gram = embeddings @ embeddings.T  # (B, B)
    norms = gram.diagonal()  # (B,)
    squared = (norms[:, None] - 2 * gram + norms[None, :]).clamp_min(0)
    zero = squared <= torch.finfo(squared.dtype).eps * norms.max()
    return torch.where(zero, 0, torch.where(zero, 1, squared).sqrt())


def triplet_loss(
    embeddings: Tensor, targets: Tensor, margin: float, softness: float = 0.0, own_positive: bool = False
) -> Tensor:
    r"""Triplet loss with one positive and one negative distance per anchor, from all other images in the batch.

    .. math:: \frac{1}{|A|} \sum_{a \in A} \max\{d^+_a - d^-_a + \alpha,\; 0\}

    With ``softness`` 0 (batch-hard) :math:`d^+_a` is the largest distance to an image of the same target and
    :math:`d^-_a` the smallest to one of another. With a softness s > 0 both are means, weighted by
    :math:`\exp(d/s)` over the positives and :math:`\exp(-d/s)` over the negatives: the softer, the less a few hard or
    wrongly labelled images count. In large batches of classes that still overlap the hardest positive is farther away
    than the hardest negative for nearly every anchor, and the quickest way down is to shrink all distances: batch-hard
    mining then collapses the embeddings, soft mining does not.

    An anchor takes part only if the batch holds another image of its target *and* one of a different target; an image
    is never its own positive, except with ``own_positive`` if it has no other. Without any such anchor the loss is 0.

    >>> points = torch.tensor([[0.0], [1.0], [3.0], [9.0]])
    >>> triplet_loss(points, torch.tensor([0, 0, 1, 2]), margin=2.0)  # ((1 - 3 + 2) + (1 - 2 + 2)) / 2
    tensor(0.5000)
    """
    distances = pairwise_distances(embeddings)  # (B, B)
    positive, same = _pairs(targets, own_positive)  # (B, B) each
    anchors = positive.any(1) & (~same).any(1)  # (B,)
    if not anchors.any():
        return embeddings.sum() * 0
    negative = ~same
    if not anchors.all():
        distances, positive, negative = distances[anchors], positive[anchors], negative[anchors]
    if softness == 0:
        farthest = distances.masked_fill(~positive, -torch.inf).amax(1)
        gaps = farthest - distances.masked_fill(~negative, torch.inf).amin(1)  # (B,)
    else:
        weights = _soft_weights(distances, positive, 1 / softness) - _soft_weights(distances, negative, -1 / softness)
        gaps = (weights * distances).sum(1)  # (B,): one weighted mean less the other
    return F.relu(gaps + margin).mean()


def all_triplets_loss(embeddings: Tensor, targets: Tensor, margin: float, own_positive: bool = False) -> Tensor:
    r"""Triplet loss averaged over all valid triplets of the batch, as in the text of the paper.

    .. math:: \frac{1}{|T|} \sum_{(a, p, n) \in T} \max\{d_{ap} - d_{an} + \alpha,\; 0\}

    T holds all (a, p, n) with p another image of a's target and n one of a different target. With the negative
    distances of an anchor sorted, those below :math:`d_{ap} + \alpha` come first and their sum is a cumulative one:
    memory and time grow with the square of the batch, not with its cube. Without any triplet the loss is 0.

    >>> points = torch.tensor([[0.0], [1.0], [3.0]])
    >>> all_triplets_loss(points, torch.tensor([0, 0, 1]), margin=2.0)  # ((1 - 3 + 2) + (1 - 2 + 2)) / 2
    tensor(0.5000)
    """
    distances = pairwise_distances(embeddings)  # (B, B)
    positive, same = _pairs(targets, own_positive)  # (B, B) each
    n_triplets = (positive.sum(1) * (~same).sum(1)).sum()
    if n_triplets == 0:
        return embeddings.sum() * 0
    reach = distances + margin  # (B, B): negatives nearer than this add to the loss
    negatives = distances.masked_fill(same, torch.inf).sort(1).values  # (B, B), ascending, then inf
    nearer = torch.searchsorted(negatives.detach(), reach.detach())  # (B, B): number of nearer negatives
    sums = F.pad(negatives.masked_fill(negatives.isinf(), 0).cumsum(1), (1, 0))  # (B, B + 1): of the first n
    terms = nearer * reach - sums.gather(1, nearer)  # (B, B): anchor and positive, summed over negatives
    return terms[positive].sum() / n_triplets


def _pairs(targets: Tensor, own_positive: bool = False) -> tuple[Tensor, Tensor]:
    """Masks (B, B) of the positive pairs and of all pairs with equal targets.

    An image is its own positive only with ``own_positive``, and only if it has no other.
    """
    same = targets[:, None] == targets[None, :]
    itself = torch.eye(len(targets), dtype=torch.bool, device=targets.device)
    positive = same & ~itself
    if own_positive:
        positive |= itself & ~positive.any(1, keepdim=True)
    return positive, same


def contrastive_loss(embeddings: Tensor, targets: Tensor, margin: float) -> Tensor:
    r"""Contrastive loss of all pairs in the batch (Hadsell et al. 2006): mean over each kind of pair, added.

    .. math:: \frac{1}{|P|} \sum_{ij \in P} d_{ij}^2 + \frac{1}{|N|} \sum_{ij \in N} \max\{\alpha - d_{ij},\; 0\}^2

    P are the pairs of equal targets, N those of different ones. A kind that is absent from the batch adds 0.

    >>> points = torch.tensor([[0.0], [1.0], [3.0]])
    >>> contrastive_loss(points, torch.tensor([0, 0, 1]), margin=2.5)  # 1 + (0 + 0.25) / 2
    tensor(1.1250)
    """
    distances = pairwise_distances(embeddings)  # (B, B)
    positive, same = _pairs(targets)  # (B, B) each
    near = distances.square()[positive].sum() / positive.sum().clamp_min(1)
    far = F.relu(margin - distances).square()[~same].sum() / (~same).sum().clamp_min(1)
    return near + far


def _soft_weights(distances: Tensor, mask: Tensor, sharpness: float) -> Tensor:
    """Weights of each row over ``mask``, proportional to exp(sharpness d) with sum 1; constants of the gradient."""
    return (sharpness * distances.detach()).masked_fill_(~mask, -torch.inf).softmax(1)


def relative_spread(embeddings: Tensor) -> Tensor:
    """Root mean squared deviation from the mean, relative to the root mean squared norm: 0 when all rows coincide.

    >>> relative_spread(torch.ones(4, 3))
    tensor(0.)
    """
    centred = embeddings - embeddings.mean(0)
    return centred.square().sum(1).mean().sqrt() / embeddings.square().sum(1).mean().sqrt().clamp_min(1e-30)


def prototype_loss(embeddings: Tensor, prototypes: Tensor, targets: Tensor, scale: float = 10.0) -> Tensor:
    r"""Cross-entropy of the cosines between embeddings (N, D) and one prototype per target (M, D).

    .. math:: -\frac{1}{N} \sum_n \log \frac{\exp(s \cos(e_n, w_{y_n}))}{\sum_m \exp(s \cos(e_n, w_m))}

    On the unit sphere, where distances are measured, it pulls an image to the direction of its class and away from all
    others (Wang et al. 2017, https://arxiv.org/abs/1704.06369). It mines no pairs, so it does not depend on the
    composition of the batch; with several prototypes per class it is a smoothed triplet loss (Qian et al. 2019,
    https://arxiv.org/abs/1909.05235).

    >>> e = torch.eye(2)
    >>> prototype_loss(e, 3 * e, torch.tensor([0, 1]), scale=1.0)  # log(1 + exp(-1))
    tensor(0.3133)
    """
    cosines = F.normalize(embeddings, dim=1) @ F.normalize(prototypes, dim=1).T  # (N, M)
    return F.cross_entropy(scale * cosines, targets)


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    r"""Cross-entropy of logits (N, M) to the uniform distribution, the least possible confidence.

    .. math:: \frac{1}{N} \sum_n \Bigl(\log \sum_m \exp f_{nm} - \frac{1}{M} \sum_m f_{nm}\Bigr)

    Outlier exposure (Hendrycks et al. 2019, https://arxiv.org/abs/1812.04606).

    >>> uniform_cross_entropy(torch.zeros(3, 2))  # log 2
    tensor(0.6931)
    """
    return (logits.logsumexp(1) - logits.mean(1)).mean()


def boundary_distances(logits: Tensor, weight: Tensor) -> Tensor:
    r"""Mean distance (N,) of embeddings to the boundaries between their class and all others, from logits (N, M).

    .. math:: \frac{1}{M - 1} \sum_{m \ne k} \frac{f_k - f_m}{\lVert w_k - w_m \rVert}, \quad k = \arg\max f

    Longer embeddings do not increase logits divided by it (ELogitNorm, Ding et al. 2025,
    https://arxiv.org/abs/2504.11434); ``weight`` (M, D) is that of the head.

    >>> boundary_distances(torch.tensor([[3.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    tensor([1.5000])
    """
    best = logits.argmax(1)  # (N,)
    gaps = logits.gather(1, best[:, None]) - logits  # (N, M), 0 for the class itself
    lengths = pairwise_distances(weight)[best]  # (N, M)
    others = F.one_hot(best, logits.shape[1]) == 0
    return torch.where(others, gaps / torch.where(others, lengths, 1).clamp_min(1e-7), 0).sum(1) / others.sum(1)
