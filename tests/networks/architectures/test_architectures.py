"""All architectures: published parameter counts, any image size, shapes, initialisation, names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from maple.errors import UsageError
from maple.networks.architectures import create_network, list_networks

SMALL = ["resnet9", "resnet18", "resnet20", "resnet56", "wrn-16-4", "efficientnet-b0"]


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "embedding_size", "millions", "digits"),
    [
        ("resnet9", 128, 0.41, 2),
        ("resnet18", 512, 11.2, 1),
        ("resnet50", 2048, 23.5, 1),  # 25.6 with a head for 1000 classes
        ("resnet20", 64, 0.27, 2),  # He et al. 2016, table 6
        ("resnet32", 64, 0.46, 2),
        ("resnet44", 64, 0.66, 2),
        ("resnet56", 64, 0.85, 2),
        ("wrn-28-10", 640, 36.5, 1),  # Zagoruyko & Komodakis 2016, table 4
        ("wrn-40-4", 256, 8.9, 1),
        ("wrn-16-8", 512, 11.0, 1),
        ("wrn-40-1", 64, 0.6, 1),
    ],
)
def test_parameters_match_the_publications(name: str, embedding_size: int, millions: float, digits: int) -> None:
    with torch.device("meta"):
        network = create_network(name)
        head = nn.Linear(network.embedding_size, 10)
    assert network.embedding_size == embedding_size
    assert round((count(network) + count(head)) / 1e6, digits) == millions


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [8, 32, 64])
def test_any_image_size_gives_one_embedding_per_image(name: str, size: int) -> None:
    network = create_network(name).eval()
    with torch.no_grad():
        embedding = network(torch.randn(2, 3, size, size))
    assert embedding.shape == (2, network.embedding_size)
    assert embedding.dtype == torch.float32
    assert torch.isfinite(embedding).all()


def test_images_need_not_be_square_nor_even() -> None:
    for name in ("resnet9", "resnet20", "wrn-10-1"):
        network = create_network(name).eval()
        assert network(torch.randn(2, 3, 21, 34)).shape == (2, network.embedding_size)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_receives_a_gradient_and_signals_keep_their_scale(name: str) -> None:
    torch.manual_seed(0)
    network = create_network(name)
    embedding = network(torch.randn(16, 3, 16, 16))
    assert 0.05 < embedding.std() < 20
    embedding.square().sum().backward()
    for key, parameter in network.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", SMALL)
def test_eval_mode_treats_images_one_by_one(name: str) -> None:
    torch.manual_seed(0)
    network = create_network(name).eval()
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        together, alone = network(x), torch.cat([network(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_names_of_listed_networks_are_valid() -> None:
    with torch.device("meta"):
        for name in list_networks():
            assert create_network(name).embedding_size > 0


@pytest.mark.parametrize("name", ["resnet9", "resnet20", "wrn-10-1"])
def test_dropout_is_there_and_off_until_someone_sets_it(name: str) -> None:
    torch.manual_seed(0)
    network = create_network(name)
    layers = [m for m in network.modules() if isinstance(m, nn.Dropout)]
    assert layers and all(layer.p == 0 for layer in layers)
    for layer in layers:
        layer.p = 0.5
    x = torch.randn(4, 3, 16, 16)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet21", "resnet"),
        ("zzzz", "resnet9"),
        ("wrn-27-10", "22 or 28"),
        ("wrn-4-1", "10 or 16"),
        ("wrn-28-0", "wrn-28-1"),
        ("wrn-28", "wrn-28-10"),
    ],
)
def test_unknown_names_say_what_to_do(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create_network(name)
