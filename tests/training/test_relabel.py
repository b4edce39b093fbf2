"""Pseudo-labels: when they change, and what follows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from maple.networks import Backbone
from maple.training.maple import MapleRecipe
from maple.training.relabel import PseudoLabels, changed_classes
from maple.types import Outputs, Relabelling


def regrouped(cluster_ids, cluster_to_class):
    mapping = np.array(cluster_to_class)
    return Relabelling(np.array(cluster_ids), mapping, np.arange(len(mapping)), np.ones(len(mapping)))


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        (regrouped([0, 0, 1, 1, 2, 2], [0, 0, 1]), []),
        (regrouped([1, 1, 0, 0, 2, 2], [0, 0, 1]), []),  # other numbers, same clusters
        (regrouped([0, 1, 1, 0, 2, 2], [0, 0, 1]), [0]),  # as many clusters, other members
        (regrouped([0, 0, 1, 1, 2, 3], [0, 0, 1, 1]), [1]),
        (regrouped([0, 0, 0, 0, 1, 2], [0, 1, 1]), [0, 1]),
    ],
)
def test_changed_classes_compare_members(after, changed):
    before = regrouped([0, 0, 1, 1, 2, 2], [0, 0, 1])
    assert changed_classes(before, after).tolist() == changed


@pytest.mark.parametrize("branch", [False, True])
def test_adopted_clusters_grow_the_head_and_the_state_of_the_optimiser(branch):
    """The shift is measured only where the head reads the embedding."""
    torch.manual_seed(0)
    recipe, embedding = MapleRecipe(), nn.Linear(4, 4)
    backbone = Backbone(nn.Flatten(), nn.Linear(4, 2), embedding_size=4, embedding_layer=embedding, branch=branch)
    points = torch.randn(5, 4)
    seen = Outputs(points.numpy(), backbone.head(points).detach().numpy(), cluster_to_class=np.array([0, 1]))
    clusters = PseudoLabels(recipe, Relabelling.initial(np.array([0, 0, 1]), 2), seed=0)
    after = Relabelling(np.array([0, 1, 2]), np.array([0, 0, 1]), np.array([0, 0, 1]), np.array([0.5, 0.5, 1]))
    momentum = {"head.bias": {"momentum_buffer": torch.tensor([1.0, 2.0])}}
    adopted = clusters.adopt(after, backbone, momentum, seen, recipe.class_probabilities(seen))
    assert clusters.current is after and adopted.classes == (0,)
    assert backbone.head.out_features == 3
    assert adopted.state["head.bias"]["momentum_buffer"].tolist() == [1, 1, 2]
    assert math.isnan(adopted.shift) if branch else adopted.shift < 1e-6


class Proposing:
    """A recipe that proposes the same clusters after every epoch."""

    def __init__(self, after: Relabelling | None) -> None:
        self.after = after
        self.asked: list[tuple[object, ...]] = []

    def relabel(self, *asked: object) -> Relabelling | None:
        self.asked.append(asked)
        return self.after


def test_only_clusters_that_differ_are_proposed():
    before = regrouped([0, 0, 1, 1], [0, 1])
    split, same = regrouped([0, 1, 2, 2], [0, 0, 1]), regrouped([1, 1, 0, 0], [1, 0])
    for after, expected in ((split, split), (same, None), (None, None)):
        recipe = Proposing(after)
        found = PseudoLabels(recipe, before, seed=7).propose(3, "probabilities", "labels", "embed")
        assert found is expected
        assert recipe.asked == [(3, "probabilities", "labels", before, "embed", 7)]


def test_the_shift_is_the_largest_change_of_a_probability():
    torch.manual_seed(0)
    recipe, backbone = MapleRecipe(), Backbone(nn.Flatten(), nn.Linear(4, 2), embedding_size=4)
    points = torch.randn(5, 4)
    seen = Outputs(points.numpy(), backbone.head(points).detach().numpy(), cluster_to_class=np.array([0, 1]))
    said = recipe.class_probabilities(seen)
    clusters = PseudoLabels(recipe, Relabelling.initial(np.array([0, 0, 1]), 2), seed=0)
    moved = said + np.array([[0.2, 0.0], [0.0, -0.3], [0, 0], [0, 0], [0.1, 0.1]])
    same = Relabelling(np.array([0, 0, 1]), np.array([0, 1]), np.array([0, 1]), np.ones(2))
    assert clusters.adopt(same, backbone, {}, seen, moved).shift == pytest.approx(0.3, abs=1e-6)
