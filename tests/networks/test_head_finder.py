"""Finding the head of trained classifiers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from classifiers import Tail
from maple.errors import UsageError
from maple.networks import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Backbone,
    create_backbone,
    wrap_backbone,
)
from maple.networks.architectures import create_network


def assert_wrapped(
    module: nn.Module, logits_of: Any = lambda output: output, size: int = 32, **options: Any
) -> Backbone:
    """The backbone gives the module's logits, and the module stays as it was."""
    before = copy.deepcopy(module.state_dict())
    names = [name for name, _ in module.named_modules()]
    modes = [m.training for m in module.modules()]
    backbone = wrap_backbone(module, **options)
    x = torch.rand(3, 3, size, size)
    assert [name for name, _ in module.named_modules()] == names
    assert [m.training for m in module.modules()] == modes
    assert all(torch.equal(module.state_dict()[key], value) for key, value in before.items())
    module.eval(), backbone.eval()
    with torch.no_grad():
        expected = logits_of(module(x))
        embedding, logits = backbone(x)
    assert embedding.shape == (3, backbone.embedding_size)
    assert torch.equal(logits, expected)
    assert torch.equal(backbone.head(embedding), expected)
    return backbone


@pytest.mark.parametrize(
    ("form", "logits_of"),
    [
        ("tensor", lambda o: o),
        ("dict", lambda o: o["logits"]),
        ("nested", lambda o: o[1][1]["out"]),
    ],
)
def test_wrap_finds_the_head_in_any_output(form: str, logits_of: Any) -> None:
    backbone = assert_wrapped(Tail(form), logits_of)
    assert backbone.embedding_size == 12 and backbone.head.out_features == 4 and backbone.name == "Tail"
    assert backbone.mean.tolist() == [0, 0, 0] and backbone.std.tolist() == [1, 1, 1]


def test_wrap_sequential_and_own_networks() -> None:
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(32, 16), nn.ReLU())
    assert assert_wrapped(nn.Sequential(body, nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 5)))).embedding_size == 16
    for name in ("resnet9", "resnet20", "wrn-10-2"):
        network = create_network(name)
        layers = OrderedDict(network=network, fc=nn.Linear(network.embedding_size, 6))
        assert assert_wrapped(nn.Sequential(layers)).embedding_size == network.embedding_size
    own = create_backbone("resnet9", 4)
    assert wrap_backbone(own) is own


def test_two_heads_must_be_named() -> None:
    with pytest.raises(UsageError, match="head='classifier'"):
        wrap_backbone(Tail("two"))
    assert assert_wrapped(Tail("two"), lambda o: o[0], head="classifier").head.out_features == 4
    assert assert_wrapped(Tail("two"), lambda o: o[1], head="other").head.out_features == 7


def test_named_head_need_not_be_linear() -> None:
    class Cosine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 8))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(x) @ nn.functional.normalize(self.weight).T

    layers = OrderedDict(conv=nn.Conv2d(3, 8, 3), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), cosine=Cosine())
    with pytest.raises(UsageError, match="head="):
        wrap_backbone(nn.Sequential(layers))
    assert assert_wrapped(nn.Sequential(layers), head="cosine").embedding_size == 8


def test_wrap_takes_given_or_timm_settings() -> None:
    module = Tail()
    module.pretrained_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1), "input_size": (3, 48, 48)}
    backbone = wrap_backbone(module)
    assert backbone.size == 48 and backbone.mean.tolist() == pytest.approx([0.5, 0.4, 0.3])
    backbone = wrap_backbone(module, mean=IMAGENET_MEAN, std=IMAGENET_STD).eval()
    x = torch.rand(2, 3, 20, 20)
    mean, std = torch.tensor(IMAGENET_MEAN).view(3, 1, 1), torch.tensor(IMAGENET_STD).view(3, 1, 1)
    torch.testing.assert_close(backbone(x)[1], module.eval()((x - mean) / std))


def test_modules_that_view_take_channels_last_images() -> None:
    backbone = wrap_backbone(Tail())
    assert backbone.embed(torch.rand(2, 3, 32, 32).to(memory_format=torch.channels_last)).shape == (2, 12)


def test_fixed_input_sizes_are_tried_or_given() -> None:
    for size in (32, 64, 224):
        module = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * (size // 4) ** 2, 2))
        assert_wrapped(module, size=size)
    odd = nn.Sequential(nn.Flatten(), nn.Linear(3 * 20 * 20, 9), nn.Linear(9, 2))
    with pytest.raises(UsageError, match=r"32, 64, 224 .*example="):
        wrap_backbone(odd)
    backbone = assert_wrapped(odd, size=20, example=torch.rand(2, 3, 20, 20))
    assert backbone.size == 20 and backbone.embedding_size == 9
    assert wrap_backbone(odd, example=np.zeros((2, 20, 20, 3), np.uint8)).size == 20


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Tail("softmax"), {}, r"Backbone\(module, None"),
        (Tail("softmax"), {"head": "classifier"}, "'classifier'"),
        (Tail("inplace"), {}, "head="),
        (Tail("slice"), {}, "'classifier'"),
        (Tail(), {"head": "fc"}, "'fc'.*classifier"),
        (Tail(), {"head": "hidden"}, "'hidden'"),
        (nn.Sequential(nn.Conv2d(3, 2, 1), nn.Linear(32, 5)), {}, r"\(2, 2, 32, 32\)"),
        (nn.Conv2d(3, 2, 1), {}, "head="),
        (Tail().double(), {}, "torch.float64"),
    ],
)
def test_wrapping_failures_say_what_to_do(module: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrap_backbone(module, **options)


def test_wrapping_leaves_random_numbers_alone() -> None:
    module = Tail()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    wrap_backbone(module)
    assert torch.equal(torch.rand(2), expected)


def test_wrapped_backbone_trains() -> None:
    backbone = wrap_backbone(Tail("dict"))
    embedding, logits = backbone(torch.rand(8, 3, 32, 32))
    (logits.logsumexp(1).mean() + embedding.square().mean()).backward()
    assert all(p.grad is not None for name, p in backbone.named_parameters() if "other" not in name)
