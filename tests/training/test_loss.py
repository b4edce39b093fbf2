"""Triplet loss against explicit loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maple.training.loss import (
    LossTerm,
    contrastive_loss,
    pairwise_distances,
    relative_spread,
    triplet_loss,
    weighted_sum,
)


def triplet_by_loops(embeddings: np.ndarray, targets: np.ndarray, margin: float) -> float:
    terms = []
    for a in range(len(targets)):
        positives = [
            np.linalg.norm(embeddings[a] - embeddings[p])
            for p in range(len(targets))
            if p != a and targets[p] == targets[a]
        ]
        negatives = [
            np.linalg.norm(embeddings[a] - embeddings[n]) for n in range(len(targets)) if targets[n] != targets[a]
        ]
        if positives and negatives:
            terms.append(max(max(positives) - min(negatives) + margin, 0.0))
    return float(np.mean(terms)) if terms else 0.0


@pytest.mark.parametrize("n_targets", [2, 3, 30])
@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_equals_explicit_loops(rng, n_targets, margin):
    embeddings = rng.normal(size=(24, 5))
    targets = rng.integers(0, n_targets, 24)
    loss = triplet_loss(torch.from_numpy(embeddings), torch.from_numpy(targets), margin)
    assert float(loss) == pytest.approx(triplet_by_loops(embeddings, targets, margin), rel=1e-9)


@pytest.mark.parametrize("softness", [0.05, 0.5])
def test_soft_mining_equals_explicit_loops(rng, softness):
    embeddings, targets = rng.normal(size=(12, 3)), rng.integers(0, 3, 12)
    terms = []
    for a in range(12):
        d = np.linalg.norm(embeddings - embeddings[a], axis=1)
        same = (targets == targets[a]) & (np.arange(12) != a)
        other = targets != targets[a]
        positive = np.average(d[same], weights=np.exp(d[same] / softness))
        negative = np.average(d[other], weights=np.exp(-d[other] / softness))
        terms.append(max(positive - negative + 0.7, 0.0))
    loss = triplet_loss(torch.from_numpy(embeddings), torch.from_numpy(targets), 0.7, softness)
    assert float(loss) == pytest.approx(np.mean(terms), rel=1e-9)


@pytest.mark.parametrize("targets", [[0, 0, 1, 2, 1, 0], [0, 1, 2, 3, 4, 5], [0] * 6])
def test_contrastive_loss_equals_explicit_loops(rng, targets):
    embeddings = rng.normal(size=(6, 3))
    near, far = [], []
    for i in range(6):
        for j in range(6):
            distance = np.linalg.norm(embeddings[i] - embeddings[j])
            if i != j and targets[i] == targets[j]:
                near.append(distance**2)
            elif i != j:
                far.append(max(2.0 - distance, 0.0) ** 2)
    expected = sum(np.mean(terms) for terms in (near, far) if terms)
    loss = contrastive_loss(torch.from_numpy(embeddings), torch.tensor(targets), margin=2.0)
    assert float(loss) == pytest.approx(expected, rel=1e-9)


def test_little_softness_is_batch_hard(rng):
    embeddings, targets = torch.from_numpy(rng.normal(size=(20, 3))), torch.from_numpy(rng.integers(0, 3, 20))
    hard = triplet_loss(embeddings, targets, 0.7)
    assert float(triplet_loss(embeddings, targets, 0.7, 1e-4)) == pytest.approx(float(hard), rel=1e-3)


def test_image_is_never_its_own_positive():
    # One far pair of each class: with themselves as positives the loss would be 0.
    embeddings = torch.tensor([[0.0], [10.0], [1.0], [11.0]])
    loss = triplet_loss(embeddings, torch.tensor([0, 0, 1, 1]), margin=0.5)
    assert float(loss) == pytest.approx(10 - 1 + 0.5)


@pytest.mark.parametrize("targets", [[0, 0, 0, 0], [0, 1, 2, 3], [0]])
def test_batch_without_triplets_gives_zero_with_a_gradient(targets):
    embeddings = torch.randn(len(targets), 3, requires_grad=True)
    loss = triplet_loss(embeddings, torch.tensor(targets), margin=0.7)
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(embeddings.grad, torch.zeros_like(embeddings))


def test_coinciding_embeddings_have_a_finite_gradient():
    embeddings = torch.ones(6, 4, requires_grad=True)
    loss = triplet_loss(embeddings, torch.tensor([0, 0, 0, 1, 1, 1]), margin=0.7)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.7)
    assert torch.isfinite(embeddings.grad).all()


def test_gradient_by_finite_differences():
    torch.manual_seed(0)
    embeddings = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 1, 2] * 4)
    assert torch.autograd.gradcheck(lambda e: triplet_loss(e, targets, 0.7), (embeddings,))


def test_distances_survive_a_large_offset(rng):
    points = torch.from_numpy(rng.normal(size=(20, 8)) + 100)
    assert torch.allclose(pairwise_distances(points), torch.cdist(points, points), atol=1e-5)


def test_spread_is_scale_free_and_zero_for_a_point(rng):
    points = torch.from_numpy(rng.normal(size=(50, 4)))
    assert float(relative_spread(points)) == pytest.approx(float(relative_spread(7 * points)))
    assert float(relative_spread(torch.full((5, 3), 2.0))) == 0


def test_weights_scale_the_gradient_of_their_term():
    x = torch.tensor(2.0, requires_grad=True)
    weighted_sum({"square": LossTerm(x * x), "cube": LossTerm(x**3, weight=0.25)}).backward()
    assert float(x.grad) == 2 * 2 + 0.25 * 3 * 4
