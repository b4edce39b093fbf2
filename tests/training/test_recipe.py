"""The contract of recipes: defaults, steps, warnings and registration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from maple.errors import UsageError
from maple.networks import Backbone
from maple.options import NonNegative, option
from maple.training.loss import LossTerm
from maple.training.recipe import (
    COLLAPSED_SPREAD,
    Recipe,
    Step,
    create_recipe,
    find_recipe,
    list_recipes,
    register_recipe,
)
from maple.types import Outputs, Relabelling
from plugins import forgetting_plugins


@dataclass(frozen=True, kw_only=True)
class Smooth(Recipe):
    """Cross-entropy with smooth targets."""

    smoothing: NonNegative = option(0.1, "share of the target spread over all classes")

    def loss(self, step):
        return {"cross_entropy": LossTerm(F.cross_entropy(step.logits, step.targets, label_smoothing=self.smoothing))}


def make_backbone(head):
    return Backbone(nn.Flatten(), head, embedding_size=12)


def test_a_recipe_needs_only_a_loss():
    recipe, backbone = Smooth(), make_backbone(nn.Linear(12, 2))
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    recipe.prepare(backbone)
    recipe.start(backbone, lambda rows: np.zeros((len(rows), 12)), np.array([0, 1]), seed=0)
    recipe.begin_epoch(backbone, 1, 10)
    assert recipe.finish(backbone) is backbone and recipe.rebuild(backbone) is backbone
    assert all(torch.equal(before[name], value) for name, value in backbone.state_dict().items())
    assert not recipe.compares_images and recipe.build_head(12, 5).out_features == 5
    current = Relabelling.initial(np.array([0, 1]), 2)
    assert recipe.relabel(1, np.eye(2), np.array([0, 1]), current, lambda rows: rows, 0) is None
    with pytest.raises(NotImplementedError, match="Smooth"):
        recipe.grow_head(nn.Linear(12, 2), current)


def test_a_detached_step_holds_the_same_numbers_without_a_graph():
    backbone = make_backbone(nn.Linear(12, 2))
    images = torch.rand(3, 3, 2, 2, requires_grad=True)
    step = Step(images, *backbone(images), torch.tensor([0, 1, 1]), 0.5, backbone)
    plain = step.detached()
    for name in ("images", "embeddings", "logits"):
        assert getattr(step, name).requires_grad and not getattr(plain, name).requires_grad
        assert torch.equal(getattr(step, name), getattr(plain, name))
    assert plain.head is backbone.head and plain.targets is step.targets and plain.progress == 0.5


def test_class_probabilities_add_clusters():
    outputs = Outputs(np.zeros((1, 2)), np.log([[0.3, 0.3, 0.4]]), cluster_to_class=np.array([0, 0, 1]))
    np.testing.assert_allclose(Smooth().class_probabilities(outputs), [[0.6, 0.4]])


def test_embeddings_of_almost_one_point_have_collapsed():
    assert Smooth().find_collapse([{"spread": COLLAPSED_SPREAD}], epochs=3) is None
    assert "--learning-rate" in Smooth().find_collapse([{"spread": 0.5}, {"spread": 0.019}], epochs=3)


def test_registration_makes_name_section_and_options_known():
    with forgetting_plugins():
        register_recipe("label-smooth")(Smooth)
        recipe = create_recipe("label-smooth", smoothing="0.2")
        assert (recipe.name, recipe.section, recipe.smoothing) == ("label-smooth", "label_smooth", 0.2)
        assert recipe.options() == {"recipe": "label-smooth", "smoothing": 0.2}
        assert "label-smooth" in list_recipes()
        assert find_recipe("label-smooth").about.title == "Cross-entropy with smooth targets."
        with pytest.raises(UsageError, match="'smooth'"):
            create_recipe("label-smooth", smooth=0.2)
    assert "label-smooth" not in list_recipes()


@pytest.mark.parametrize("name", ["maple", "train", "recipe"])
def test_names_of_methods_and_sections_are_taken(name):
    with pytest.raises(UsageError, match=f"'{name}'"):
        register_recipe(name)(Smooth)
