"""ResNets for small images."""

from __future__ import annotations

import torch

from maple.networks.architectures import create_network
from maple.networks.architectures.resnet import ConvBlock, Subsample


def test_cifar_resnets_have_the_names_of_the_public_files() -> None:
    keys = create_network("resnet20").state_dict().keys()
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "layer3.2.bn2.bias"} <= keys
    assert not any("shortcut" in key for key in keys)  # option A has no parameters


def test_option_a_shortcut_by_loop() -> None:
    x = torch.randn(2, 4, 6, 6)
    y = Subsample(4)(x)
    assert y.shape == (2, 8, 3, 3)
    for channel in range(8):
        for i in range(3):
            for j in range(3):
                expected = x[:, channel - 2, 2 * i, 2 * j] if 2 <= channel < 6 else torch.zeros(2)
                assert torch.equal(y[:, channel, i, j], expected)


def test_pooling_before_normalisation_equals_pooling_behind_it_in_eval_mode() -> None:
    """Maximum commutes with ReLU and with a rising affine map: the faster order computes the same function."""
    block = ConvBlock(3, 4, pool=True).eval()
    conv, pool, norm, relu, _ = block
    norm.running_mean.uniform_(-1, 1), norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(block(x.clone()), pool(relu(norm(conv(x)))))


def test_resnet50_is_the_one_of_the_public_weight_files() -> None:
    """torchvision's ``resnet50`` has 25,557,032 parameters, 2,049,000 of them in its head, and these names."""
    with torch.device("meta"):
        network = create_network("resnet50")
        assert sum(p.numel() for p in network.parameters()) == 25_557_032 - 2_049_000
        assert network(torch.empty(2, 3, 224, 224)).shape == (2, 2048)
    keys = network.state_dict().keys()
    assert {"conv1.weight", "layer1.0.downsample.0.weight", "layer4.2.bn3.running_var"} <= keys
