"""Layers of a backbone: which are found, and what their features are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradient_images import MEAN, STD, make_body, tensor_of
from maple.baselines.ensemble import join_members
from maple.detectors.gradients._layers import average_layers, find_layers
from maple.errors import UsageError
from maple.networks import Backbone, create_backbone, normalise_images, wrap_backbone


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("resnet9", 32, ("blocks.0", "blocks.2", "blocks.3", "blocks", "embedding")),  # pools by maximum
        ("resnet9", 8, ("blocks.0", "blocks.2", "blocks.3", "embedding")),  # the last stage is one pixel
        ("resnet20", 32, ("layer1", "layer2", "embedding")),  # the average of layer3 is the embedding
        ("wrn-16-1", 16, ("blocks.1", "blocks.3", "blocks", "embedding")),
    ],
)
def test_one_layer_per_stage_and_the_embedding(name, size, expected):
    backbone = create_backbone(name, n_classes=3)
    assert find_layers(backbone, torch.rand(2, 3, size, size)) == expected


def test_layers_of_a_network_of_single_layers():
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU()]
    backbone = wrap_backbone(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2)))
    assert find_layers(backbone, torch.rand(2, 3, 8, 8)) == ("1", "embedding")


def test_layers_that_are_called_twice_or_laid_out_otherwise_are_left_out():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2, self.act = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, 2, 1), nn.Tanh()
            self.last = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.act(self.conv2(self.act(self.conv1(x))))
            return self.last(x.permute(0, 2, 3, 1)).amax(dim=(1, 2))

    backbone = Backbone(Odd(), nn.Linear(5, 2), embedding_size=5)
    assert find_layers(backbone, torch.rand(2, 3, 16, 16)) == ("conv1", "conv2", "embedding")


def test_features_are_averages_over_space(backbone, test):
    x = tensor_of(test)[:4]
    with torch.no_grad():
        found = average_layers(backbone, x, ["1", "embedding", "0"])
        first = backbone.body[0](normalise_images(x, backbone.mean, backbone.std))
        second = backbone.body[1](first)
    assert list(found) == ["1", "embedding", "0"]
    torch.testing.assert_close(found["0"], first.mean(dim=(2, 3)))
    torch.testing.assert_close(found["1"], second.mean(dim=(2, 3)))
    torch.testing.assert_close(found["embedding"], backbone.embed(x))


def test_what_an_in_place_layer_does_afterwards_does_not_matter():
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone = Backbone(body, nn.Linear(4, 2), embedding_size=4)
    x = torch.rand(2, 3, 8, 8, requires_grad=True)
    found = average_layers(backbone, x, ["0"])["0"]
    torch.testing.assert_close(found, body[0](normalise_images(x, backbone.mean, backbone.std)).mean(dim=(2, 3)))
    assert torch.autograd.grad(found.sum(), x)[0].abs().sum() > 0


def test_a_layer_of_an_ensemble_is_that_of_all_members_side_by_side(test):
    members = [Backbone(make_body(seed), nn.Linear(24, 3), embedding_size=24, mean=MEAN, std=STD) for seed in range(3)]
    ensemble, x = join_members(members), tensor_of(test)[:4]
    names = find_layers(ensemble, x)
    assert names == find_layers(members[0], x) == ("0", "2", "embedding")
    with torch.no_grad():
        found = average_layers(ensemble, x, names)
        alone = [average_layers(member, x, names) for member in members]
    for name in names:
        torch.testing.assert_close(found[name], torch.cat([each[name] for each in alone], dim=1))
    with pytest.raises(UsageError, match=r"'members\.0\.0\.0'"):
        average_layers(ensemble, x, ["members.0.0.0"])
