"""Losses as pure functions of a batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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


def batch_hard_triplet(embeddings: Tensor, targets: Tensor, margin: float) -> Tensor:
    r"""Triplet loss with the hardest positive and the hardest negative of each anchor in the batch.

    .. math:: \frac{1}{|A|} \sum_{a \in A} \max\Big\{\max_{p} \lVert x_a - x_p \rVert
              - \min_{n} \lVert x_a - x_n \rVert + \alpha,\; 0\Big\}

    An anchor takes part only if the batch holds another image of its target *and* one of a different target; an image
    is never its own positive. Without any such anchor the loss is 0.

    >>> points = torch.tensor([[0.0], [1.0], [3.0], [9.0]])
    >>> batch_hard_triplet(points, torch.tensor([0, 0, 1, 2]), margin=2.0)  # ((1 - 3 + 2) + (1 - 2 + 2)) / 2
    tensor(0.5000)
    """
    distances = pairwise_distances(embeddings)  # (B, B)
    same = targets[:, None] == targets[None, :]  # (B, B)
    positive = same & ~torch.eye(len(targets), dtype=torch.bool, device=targets.device)
    anchors = positive.any(1) & (~same).any(1)  # (B,)
    if not anchors.any():
        return embeddings.sum() * 0
    hardest_positive = distances.masked_fill(~positive, -torch.inf).amax(1)[anchors]
    hardest_negative = distances.masked_fill(same, torch.inf).amin(1)[anchors]
    return F.relu(hardest_positive - hardest_negative + margin).mean()


def relative_spread(embeddings: Tensor) -> Tensor:
    """Root mean squared deviation from the mean, relative to the root mean squared norm: 0 when all rows coincide.

    >>> relative_spread(torch.ones(4, 3))
    tensor(0.)
    """
    centred = embeddings - embeddings.mean(0)
    return centred.square().sum(1).mean().sqrt() / embeddings.square().sum(1).mean().sqrt().clamp_min(1e-30)
