"""MC-Dropout against explicit loops; samples are fixed thinned networks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from maple.baselines.mc_dropout import DropoutRecipe, SampledBackbone, dropout_layers, dropout_mask
from maple.errors import UsageError
from maple.networks import Backbone, create_backbone, embed


def make_backbone(seed: int = 0, n_classes: int = 4) -> Backbone:
    torch.manual_seed(seed)
    return create_backbone("resnet9", n_classes).eval()


def make_sampled(dropout: float = 0.3, samples: int = 10) -> SampledBackbone:
    backbone = make_backbone()
    recipe = DropoutRecipe(dropout=dropout, samples=samples)
    recipe.prepare(backbone)
    return recipe.finish(backbone)


class Thin(nn.Module):
    """Leaves out the units that the next numbers of a generator say, the same ones of every image."""

    def __init__(self, share: float, generator: torch.Generator) -> None:
        super().__init__()
        self.share, self.generator = share, generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape[1:], generator=self.generator) >= self.share
        return torch.stack([torch.where(kept, image / (1 - self.share), 0.0) for image in x])


def thin_network(backbone: Backbone, share: float, seed: int) -> Backbone:
    """A copy with other layers in the places of its dropout layers."""
    thin, generator = copy.deepcopy(backbone), torch.Generator().manual_seed(seed)
    for name, layer in list(thin.named_modules()):
        if isinstance(layer, nn.Dropout):
            thin.set_submodule(name, Thin(share, generator))
    return thin.eval()


def test_dropout_average_against_a_loop(images):
    backbone, sampled = make_backbone(), make_sampled(0.3, samples=4)
    with torch.no_grad():
        embedding, logits = sampled(images)
        passes = [thin_network(backbone, 0.3, seed)(images)[1] for seed in range(4)]
        mean = sum(each.softmax(dim=1) for each in passes) / 4
        for number, each in enumerate(passes):
            torch.testing.assert_close(sampled.sample(images, number), each)
        torch.testing.assert_close(logits.softmax(dim=1), mean)
        torch.testing.assert_close(embedding, backbone.embed(images))
        assert not torch.allclose(mean, backbone(images)[1].softmax(dim=1), atol=1e-3)


def test_an_image_does_not_depend_on_its_batch():
    images = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    sampled = make_sampled()
    whole = embed(sampled, images, batch_size=40).logits
    for size in (1, 7):
        np.testing.assert_allclose(embed(sampled, images, batch_size=size).logits, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(embed(sampled, images.flip(0)).logits, whole[::-1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(embed(sampled, images[17:18]).logits, whole[17:18], rtol=1e-5, atol=1e-5)


def test_samples_are_different_networks_and_stay_what_they_are(images):
    sampled = make_sampled()
    with torch.no_grad():
        samples = torch.stack([sampled.sample(images, number) for number in range(10)])
        torch.testing.assert_close(sampled.sample(images, 3), samples[3], rtol=0, atol=0)  # whatever was drawn before
    for one in range(10):
        for other in range(one):
            assert (samples[one] - samples[other]).abs().max() > 1e-2


def test_the_share_that_is_kept():
    mask = dropout_mask((300, 300), 0.3, torch.Generator().manual_seed(1))
    assert mask.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    assert abs((mask > 0).double().mean() - 0.7) < 4 * (0.3 * 0.7 / 90_000) ** 0.5
    assert abs(mask.double().mean() - 1) < 0.01


def test_every_layer_of_every_sample_leaves_out_other_units():
    """Two dropout layers in a row keep a unit with probability (1 - p)²; over many samples each unit is as likely."""
    body = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3), nn.Flatten())
    sampled = SampledBackbone.from_backbone(
        Backbone(body, nn.Identity(), embedding_size=192, mean=(0, 0, 0), std=(1, 1, 1)).eval(), 200
    )
    ones = torch.ones(2, 3, 8, 8)
    samples = torch.stack([sampled.sample(ones, number) for number in range(200)])  # (S, 2, 192)
    assert torch.equal(samples[:, 0], samples[:, 1])  # the same ones of every image
    kept = (samples[:, 0] > 0).double()
    assert abs(kept.mean() - 0.49) < 4 * (0.49 * 0.51 / kept.numel()) ** 0.5
    assert (kept.mean(dim=0) - 0.49).abs().max() < 5 * (0.49 * 0.51 / 200) ** 0.5
    assert (kept.mean(dim=1) - 0.49).abs().max() < 5 * (0.49 * 0.51 / 192) ** 0.5
    assert kept.unique(dim=0).shape == kept.shape


def test_batch_normalisation_is_frozen(images):
    sampled = make_sampled().train().eval()
    modes = []
    for layer in sampled.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_hook(lambda layer, *_: modes.append(layer.training))
    sampled(images)
    assert modes and not any(modes)


def test_gradients_of_images_go_through_the_samples(images):
    x = images.clone().requires_grad_()
    sampled = make_sampled()
    sampled(x)[1].logsumexp(dim=1).sum().backward()
    assert (x.grad.flatten(1).abs().sum(dim=1) > 0).all()
    assert not any(layer._forward_hooks for layer in dropout_layers(sampled))


def test_sampling_is_repeatable_and_changes_no_statistics(images):
    sampled = make_sampled()
    before = {name: tensor.clone() for name, tensor in sampled.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = embed(sampled, images), embed(sampled, images)
    assert np.array_equal(first.logits, second.logits)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's numbers are drawn
    assert all(torch.equal(before[name], tensor) for name, tensor in sampled.state_dict().items())
    assert not any(layer.training for layer in sampled.modules())


def test_while_training_one_pass_is_one_pass(images):
    sampled = make_sampled(samples=6).train()
    calls = []
    sampled.body.register_forward_hook(lambda *_: calls.append(1))
    sampled(images)
    assert len(calls) == 1
    sampled.eval()(images)
    assert len(calls) == 1 + 6 + 1


def test_a_network_without_dropout_layers_is_refused():
    with pytest.raises(UsageError, match=r"nn\.Dropout"):
        DropoutRecipe().prepare(Backbone(nn.Flatten(), nn.Linear(12, 2), embedding_size=12))


def test_embeddings_alone_take_one_pass(images):
    sampled = make_sampled()
    calls = []
    sampled.body.register_forward_hook(lambda *_: calls.append(1))
    outputs = embed(sampled, images, logits=False)
    assert outputs.logits is None and len(calls) == 1
    assert np.array_equal(outputs.embeddings, embed(sampled, images).embeddings)
