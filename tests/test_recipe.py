"""Heads grow without changing any class probability; recipes are two switches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from maple.config import PRESETS, RecipeOptions
from maple.errors import ConfigError, UsageError
from maple.recipe import RECIPES, MapleRecipe, create_recipe, grow_linear
from maple.relabel import class_probabilities
from maple.types import Outputs, Relabelling

SPLIT = Relabelling(
    np.array([0, 1, 2, 3]), np.array([0, 0, 0, 1]), np.array([0, 0, 0, 1]), np.array([0.2, 0.5, 0.3, 1])
)


@pytest.mark.parametrize("bias", [True, False])
def test_growing_keeps_every_class_probability(bias):
    torch.manual_seed(0)
    head = nn.Linear(16, 2, bias=bias)
    embeddings = 3 * torch.randn(100, 16)
    with torch.no_grad():
        before = class_probabilities(head(embeddings).numpy(), np.array([0, 1]))
        after = class_probabilities(grow_linear(head, SPLIT)(embeddings).numpy(), SPLIT.cluster_to_class)
    np.testing.assert_allclose(after, before, atol=1e-6)


def test_children_learn_apart_without_noise():
    """The new targets alone break the symmetry of equal rows."""
    torch.manual_seed(0)
    head = grow_linear(nn.Linear(2, 2), SPLIT)
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    optimiser = torch.optim.SGD(head.parameters(), 1.0)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(head(points), torch.arange(4)).backward()
        optimiser.step()
    assert (head(points).argmax(1) == torch.arange(4)).all()


def test_fresh_head_has_the_new_size_and_no_parents():
    recipe = MapleRecipe(head_growth="fresh", cluster_scope="class")
    head, inherits = recipe.grow_head(nn.Linear(16, 2), SPLIT)
    assert head.out_features == 4
    assert not inherits


def test_switches():
    for name, switches in RECIPES.items():
        terms = create_recipe(name).loss(torch.randn(8, 4), torch.randn(8, 2), torch.tensor([0, 1] * 4), 1.0)
        assert ("triplet" in terms) == switches["triplet"]


def test_triplet_weight_warms_up():
    recipe = create_recipe("triplet", triplet_warmup=0.5, triplet_weight=2.0)
    torch.manual_seed(0)
    batch = torch.randn(8, 4), torch.randn(8, 2), torch.tensor([0, 1] * 4)
    full = float(recipe.loss(*batch, 1.0)["triplet"])
    assert float(recipe.loss(*batch, 0.0)["triplet"]) == 0
    assert float(recipe.loss(*batch, 0.25)["triplet"]) == pytest.approx(full / 2)


def test_relabelling_only_when_due_and_hard(rng):
    recipe = MapleRecipe(relabel_every=2, hard_class_error=0.3, min_cluster_size=5, cluster_space="raw")
    points = np.concatenate(
        [rng.normal([5, 0], 0.1, (30, 2)), rng.normal([0, 5], 0.1, (30, 2)), rng.normal([-5, -5], 0.1, (30, 2))]
    )
    points = points.astype(np.float32)
    current = Relabelling.initial(np.repeat([0, 0, 1], 30), 2)
    wrong = np.array([[0.1, 0.9], [0.1, 0.9]]), np.array([0, 1])
    right = np.array([[0.9, 0.1], [0.1, 0.9]]), np.array([0, 1])
    embed = points.__getitem__
    assert recipe.relabel(1, *wrong, current, embed, 0) is None
    assert recipe.relabel(2, *right, current, embed, 0) is None
    after = recipe.relabel(2, *wrong, current, embed, 0)
    assert after.cluster_to_class.tolist() == [0, 0, 1]
    assert create_recipe("triplet", relabel_every=2).relabel(2, *wrong, current, embed, 0) is None


def test_only_hard_classes_are_embedded():
    asked = []

    def embed_rows(rows):
        asked.extend(rows)
        return np.eye(4, 2, dtype=np.float32)[: len(rows)]

    current = Relabelling.initial(np.array([0, 1, 0, 1]), 2)
    wrong = np.array([[0.1, 0.9], [0.1, 0.9]]), np.array([0, 1])
    MapleRecipe(relabel_every=1).relabel(1, *wrong, current, embed_rows, 0)
    assert asked == [0, 2]


def test_paper_rule_is_max_and_ours_is_sum():
    outputs = Outputs(np.zeros((1, 2)), np.log([[0.3, 0.3, 0.4]]), cluster_to_class=np.array([0, 0, 1]))
    assert MapleRecipe().class_probabilities(outputs).argmax() == 0
    assert MapleRecipe(class_rule="max").class_probabilities(outputs).argmax() == 1
    assert PRESETS["paper"]["class_rule"] == "max"


def test_presets_are_valid_recipes():
    names = set(RecipeOptions.__dataclass_fields__)
    for preset in PRESETS.values():
        create_recipe("maple", **{key: value for key, value in preset.items() if key in names})


def test_errors_name_the_remedy():
    with pytest.raises(ConfigError, match="head_growth 'fresh'"):
        MapleRecipe(head_growth="keep", cluster_scope="class")
    with pytest.raises(UsageError, match="did you mean 'maple'"):
        create_recipe("mapel")
    with pytest.raises(UsageError, match="linear head"):
        MapleRecipe().grow_head(nn.Sequential(), SPLIT)
