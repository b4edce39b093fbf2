"""Averages over networks against explicit loops; dropout leaves batch normalisation alone; ensembles are backbones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from maple.backbone import Backbone, create_backbone, embed, linear_head
from maple.baselines.sampling import DropoutRecipe, SampledBackbone, average_logits, dropout_layers, join_members
from maple.errors import UsageError
from maple.predictor import load_backbone, save_backbone
from maple.recipe import create_recipe
from maple.train import describe_maker


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def make_backbone(seed: int = 0, n_classes: int = 4) -> Backbone:
    torch.manual_seed(seed)
    return create_backbone("resnet9", n_classes).eval()


def test_average_against_a_loop():
    logits = 3 * torch.randn(5, 7, 4, dtype=torch.float64)
    mean = sum(sample.softmax(dim=1) for sample in logits) / 5
    energy = sum(sample.logsumexp(dim=1) for sample in logits) / 5
    averaged = average_logits(logits)
    torch.testing.assert_close(averaged.softmax(dim=1), mean)
    torch.testing.assert_close(averaged.logsumexp(dim=1), energy)


def test_dropout_average_against_a_loop(images):
    recipe = DropoutRecipe(dropout=0.3, dropout_samples=4)
    backbone = make_backbone()
    recipe.prepare(backbone)
    with torch.no_grad():
        embedding, logits = recipe.finish(backbone)(images)
        torch.manual_seed(0)  # the masks of a call
        for layer in dropout_layers(backbone):
            layer.train()
        mean = sum(backbone(images)[1].softmax(dim=1) for _ in range(4)) / 4
        for layer in dropout_layers(backbone):
            layer.eval()
        torch.testing.assert_close(logits.softmax(dim=1), mean)
        torch.testing.assert_close(embedding, backbone.embed(images))
        assert not torch.allclose(mean, backbone(images)[1].softmax(dim=1), atol=1e-3)


def test_sampling_is_repeatable_and_changes_no_statistics(images):
    backbone = make_backbone()
    recipe = DropoutRecipe(dropout=0.3)
    recipe.prepare(backbone)
    sampled = recipe.finish(backbone)
    before = {name: tensor.clone() for name, tensor in sampled.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = embed(sampled, images), embed(sampled, images)
    assert np.array_equal(first.logits, second.logits)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's numbers are drawn
    assert all(torch.equal(before[name], tensor) for name, tensor in sampled.state_dict().items())
    assert not any(layer.training for layer in sampled.modules())


def test_while_training_one_pass_is_one_pass(images):
    recipe = DropoutRecipe(dropout=0.3)
    backbone = make_backbone()
    recipe.prepare(backbone)
    sampled = recipe.finish(backbone).train()
    assert isinstance(sampled, SampledBackbone)
    calls = []
    sampled.body.register_forward_hook(lambda *_: calls.append(1))
    sampled(images)
    assert len(calls) == 1
    sampled.eval()(images)
    assert len(calls) == 1 + recipe.dropout_samples + 1


def test_a_network_without_dropout_layers_is_refused():
    with pytest.raises(UsageError, match="no dropout layers"):
        DropoutRecipe().prepare(Backbone(nn.Flatten(), nn.Linear(12, 2), embedding_size=12))


def test_ensemble_average_against_a_loop(images):
    members = [make_backbone(seed) for seed in range(3)]
    with torch.no_grad():
        embedding, logits = join_members(members).eval()(images)
        mean = sum(member(images)[1].softmax(dim=1) for member in members) / 3
        torch.testing.assert_close(logits.softmax(dim=1), mean)
        torch.testing.assert_close(embedding, torch.cat([member.embed(images) for member in members], dim=1))


def test_members_must_be_alike():
    other = create_backbone("resnet9", 4, mean=(0.1, 0.2, 0.3))
    with pytest.raises(UsageError, match="differ in size or normalisation"):
        join_members([make_backbone(), other])
    with pytest.raises(UsageError, match="no head"):
        join_members([Backbone(nn.Flatten(), None, embedding_size=12)])


@pytest.mark.parametrize("name", ["mc-dropout", "ensemble"])
def test_saved_and_loaded_alike(name, images, tmp_path):
    options = {"mc-dropout": {"dropout": 0.2, "dropout_samples": 3}, "ensemble": {"members": 2}}[name]
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
    with pytest.raises(UsageError, match="need a linear one"):
        linear_head(join_members([make_backbone(), make_backbone(1)]))


def test_embeddings_alone_take_one_pass(images):
    recipe = DropoutRecipe(dropout=0.3)
    backbone = make_backbone()
    recipe.prepare(backbone)
    sampled = recipe.finish(backbone)
    calls = []
    sampled.body.register_forward_hook(lambda *_: calls.append(1))
    outputs = embed(sampled, images, logits=False)
    assert outputs.logits is None and len(calls) == 1
    assert np.array_equal(outputs.embeddings, embed(sampled, images).embeddings)
