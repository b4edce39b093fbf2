"""Ensembles are backbones; averages against a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from maple.baselines.ensemble import join_members
from maple.errors import UsageError
from maple.networks import Backbone, create_backbone, embed, linear_head
from maple.prediction.store import load_backbone, save_backbone
from maple.training.head import describe_maker
from maple.training.recipe import create_recipe


def make_backbone(seed: int = 0, n_classes: int = 4) -> Backbone:
    torch.manual_seed(seed)
    return create_backbone("resnet9", n_classes).eval()


def test_ensemble_average_against_a_loop(images):
    members = [make_backbone(seed) for seed in range(3)]
    with torch.no_grad():
        embedding, logits = join_members(members).eval()(images)
        mean = sum(member(images)[1].softmax(dim=1) for member in members) / 3
        torch.testing.assert_close(logits.softmax(dim=1), mean)
        torch.testing.assert_close(embedding, torch.cat([member.embed(images) for member in members], dim=1))


def test_members_must_be_alike():
    other = create_backbone("resnet9", 4, mean=(0.1, 0.2, 0.3))
    with pytest.raises(UsageError, match="ensemble"):
        join_members([make_backbone(), other])
    with pytest.raises(UsageError, match="head"):
        join_members([Backbone(nn.Flatten(), None, embedding_size=12)])


def test_an_ensemble_takes_images_as_small_as_its_members_do():
    with pytest.raises(UsageError, match=r"\(1, 3, 4, 4\).*8"):
        join_members([make_backbone(), make_backbone(1)])(torch.rand(1, 3, 4, 4))


@pytest.mark.parametrize("name", ["mc-dropout", "ensemble"])
def test_saved_and_loaded_alike(name, images, tmp_path):
    options = {"mc-dropout": {"dropout": 0.2, "samples": 3}, "ensemble": {"members": 2}}[name]
    recipe = create_recipe(name, **options)
    if name == "ensemble":
        backbone = join_members([make_backbone(seed) for seed in range(2)]).eval()
    else:
        backbone = make_backbone()
        recipe.prepare(backbone)
        backbone = recipe.finish(backbone)
    backbone.made_by = describe_maker(recipe, 4)
    save_backbone(tmp_path / "weights.safetensors", backbone)
    loaded = load_backbone(tmp_path / "weights.safetensors")
    assert type(loaded) is type(backbone)
    before, after = embed(backbone, images), embed(loaded, images)
    assert np.array_equal(before.logits, after.logits)
    assert np.array_equal(before.embeddings, after.embeddings)
    assert np.array_equal(before.shallow, after.shallow)


def test_detectors_of_a_linear_head_refuse_an_ensemble():
    with pytest.raises(UsageError, match="linear"):
        linear_head(join_members([make_backbone(), make_backbone(1)]))
