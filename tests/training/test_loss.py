"""Triplet loss against explicit loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maple.training.loss import (
    LossTerm,
    all_triplets_loss,
    boundary_distances,
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


def all_triplets_by_loops(embeddings: np.ndarray, targets: np.ndarray, margin: float, own: bool) -> float:
    terms, n = [], range(len(targets))
    for a in n:
        positives = [p for p in n if p != a and targets[p] == targets[a]] or ([a] if own else [])
        for p in positives:
            for other in n:
                if targets[other] != targets[a]:
                    near, far = (np.linalg.norm(embeddings[a] - embeddings[i]) for i in (p, other))
                    terms.append(max(near - far + margin, 0.0))
    return float(np.mean(terms)) if terms else 0.0


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("n_targets", [1, 2, 4, 30])
@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_all_triplets_equal_explicit_loops(rng, n_targets, margin, own):
    embeddings = rng.normal(size=(17, 4))
    targets = rng.integers(0, n_targets, 17)
    loss = all_triplets_loss(torch.from_numpy(embeddings), torch.from_numpy(targets), margin, own)
    assert float(loss) == pytest.approx(all_triplets_by_loops(embeddings, targets, margin, own), rel=1e-9)


def test_gradient_of_all_triplets_is_that_of_the_cubic_formula(rng):
    embeddings = torch.from_numpy(rng.normal(size=(11, 3))).requires_grad_()
    targets = torch.from_numpy(rng.integers(0, 3, 11))
    d, same = torch.cdist(embeddings, embeddings), targets[:, None] == targets[None, :]
    valid = (same & ~torch.eye(11, dtype=torch.bool))[:, :, None] & ~same[:, None, :]  # (a, p, n)
    cubic = torch.relu(d[:, :, None] - d[:, None, :] + 0.7)[valid].mean()
    (expected,) = torch.autograd.grad(cubic, embeddings)
    (found,) = torch.autograd.grad(all_triplets_loss(embeddings, targets, 0.7), embeddings)
    torch.testing.assert_close(found, expected)


def test_all_triplets_of_equal_images_have_finite_gradients():
    embeddings = torch.ones(6, 3, requires_grad=True)
    loss = all_triplets_loss(embeddings, torch.tensor([0, 0, 1, 1, 2, 2]), 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(0.5) and torch.isfinite(embeddings.grad).all()


def test_a_lone_image_can_be_its_own_positive(rng):
    embeddings = torch.from_numpy(rng.normal(size=(3, 2)))
    targets = torch.tensor([0, 1, 2])
    nearest = torch.cdist(embeddings, embeddings).fill_diagonal_(torch.inf).amin(1)
    assert float(triplet_loss(embeddings, targets, 0.7)) == 0
    found = triplet_loss(embeddings, targets, 0.7, own_positive=True)
    torch.testing.assert_close(found, torch.relu(0.7 - nearest).mean())


def test_all_triplets_of_a_batch_of_four_count_lone_anchors_as_their_own_positives(rng):
    """As in the paper's batches of diatoms: two images of one class, two lone ones; every triplet written out."""
    embeddings, targets, margin = torch.from_numpy(rng.normal(size=(4, 3))), torch.tensor([0, 0, 1, 2]), 2.5
    distances = torch.cdist(embeddings, embeddings)
    triplets = [
        (0, 1, 2),
        (0, 1, 3),
        (1, 0, 2),
        (1, 0, 3),
        (2, 2, 0),
        (2, 2, 1),
        (2, 2, 3),
        (3, 3, 0),
        (3, 3, 1),
        (3, 3, 2),
    ]
    terms = [torch.relu(distances[a, p] - distances[a, n] + margin) for a, p, n in triplets]
    found = all_triplets_loss(embeddings, targets, margin, own_positive=True)
    torch.testing.assert_close(found, torch.stack(terms).mean())
    without = all_triplets_loss(embeddings, targets, margin)
    torch.testing.assert_close(without, torch.stack(terms[:4]).mean())


def test_boundary_distances_are_those_to_the_hyperplanes(rng):
    """The distance of e to the points where two logits are equal, by projection onto each hyperplane."""
    embeddings, weight, bias = rng.normal(size=(7, 4)), rng.normal(size=(5, 4)), rng.normal(size=5)
    logits = embeddings @ weight.T + bias
    expected = []
    for e, f in zip(embeddings, logits):
        k = int(f.argmax())
        distances = []
        for m in set(range(5)) - {k}:
            normal, offset = weight[k] - weight[m], bias[k] - bias[m]
            foot = e - (normal @ e + offset) / (normal @ normal) * normal
            assert abs(foot @ normal + offset) < 1e-9
            distances.append(np.linalg.norm(e - foot))
        expected.append(np.mean(distances))
    found = boundary_distances(torch.from_numpy(logits), torch.from_numpy(weight))
    np.testing.assert_allclose(found.numpy(), expected)


def test_boundary_distances_have_finite_gradients(rng):
    logits = torch.from_numpy(rng.normal(size=(6, 3))).requires_grad_()
    weight = torch.from_numpy(rng.normal(size=(3, 4))).requires_grad_()
    boundary_distances(logits, weight).sum().backward()
    assert torch.isfinite(logits.grad).all() and torch.isfinite(weight.grad).all()
