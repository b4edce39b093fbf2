"""The intermediate layer that is found in a network, by maps, by tokens, or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from maple.errors import UsageError
from maple.networks import create_backbone, embed, open_model, wrap_backbone
from maple.networks.hooks import evaluating
from maple.networks.origin import Origin
from maple.networks.shallow_finder import find_shallow
from maple.prediction.store import load_backbone, save_backbone

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)


def found(module: nn.Module, size: int = 32) -> str | None:
    with evaluating(module):
        return find_shallow(module, torch.rand(2, 3, size, size))


def conv(n_in: int, n_out: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, stride, 1), nn.BatchNorm2d(n_out), nn.ReLU())


class Staged(nn.Module):
    """Three stages of two blocks, and one activation that runs after each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first = nn.Sequential(conv(8, 8), conv(8, 8))
        self.second = nn.Sequential(conv(8, 16, 2), conv(16, 16))
        self.third = nn.Sequential(conv(16, 24, 2), conv(24, 24))
        self.relu = nn.ReLU()
        self.squeeze = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        x = self.relu(self.first(self.relu(self.stem(x))))
        x = self.second(x)
        x = self.relu(x * self.squeeze(x.mean((2, 3), keepdim=True)).sigmoid())
        return self.head(self.third(x).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(depth))
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


@pytest.mark.parametrize("name", ["resnet9", "resnet18-16", "resnet20", "wrn-16-1", "efficientnet-b0"])
def test_own_architectures_have_theirs_where_the_rule_finds_it(name):
    body = create_backbone(name, 10).body
    assert found(body) == body.shallow


def test_the_last_stage_at_the_middle_resolution():
    """Neither a layer inside it, nor one that runs several times, nor the vector of a squeeze."""
    assert found(Staged()) == "second"


def test_maps_of_one_resolution_are_halved():
    same = nn.Sequential(*(conv(3, 3) for _ in range(5)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    assert found(same) == "2"


def test_the_block_at_a_third_of_a_transformer():
    assert found(Transformer(6)) == "blocks.2"
    assert found(Transformer(12)) == "blocks.4"


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
        Transformer(2),
    ],
    ids=["no maps", "one map", "two blocks"],
)
def test_networks_without_earlier_layers_have_none(module):
    assert found(module) is None
    assert embed(wrap_backbone(module), IMAGES).shallow is None


@pytest.mark.parametrize(("module", "layer", "width"), [(Staged(), "second", 16), (Transformer(), "blocks.2", 16)])
def test_a_wrapped_network_answers_with_its_layer(module, layer, width):
    backbone = wrap_backbone(module)
    assert backbone.shallow == layer
    responses = embed(backbone, IMAGES).shallow
    assert responses.shape == (4, width) and np.isfinite(responses).all()
    assert embed(backbone, IMAGES[:0]).shallow.shape[0] == 0
    np.testing.assert_array_equal(embed(wrap_backbone(module, shallow=layer), IMAGES).shallow, responses)


def test_responses_of_tokens_are_those_of_the_layer():
    backbone = wrap_backbone(Transformer())
    heard = []
    handle = backbone.body.blocks[2].register_forward_hook(lambda layer, inputs, output: heard.append(output))
    responses = embed(backbone, IMAGES).shallow
    handle.remove()
    np.testing.assert_allclose(responses, np.log(heard[0].abs().mean(1).numpy() + 1e-3), rtol=1e-5)


def test_the_layer_can_be_named_or_left_out():
    assert wrap_backbone(Staged(), shallow="first").shallow == "first"
    assert wrap_backbone(Staged(), shallow="none").shallow is None
    assert wrap_backbone(Staged(), shallow=None).shallow is None
    with pytest.raises(UsageError, match="'third'"):
        wrap_backbone(Staged(), shallow="thrid")


def test_a_layer_behind_a_dictionary_is_found():
    class Wrapped(Staged):
        def forward(self, x):
            return {"logits": super().forward(x)}

    backbone = wrap_backbone(Wrapped())
    assert backbone.shallow == "module.second"
    assert embed(backbone, IMAGES).shallow.shape == (4, 16)


def test_a_run_holds_the_layer_and_old_ones_have_none(tmp_path, monkeypatch):
    (tmp_path / "shallow_zoo.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    layers = [nn.Conv2d(3, 8, 3, padding=1)]\n"
        "    layers += [nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)]\n"
        "    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    backbone = open_model("python:shallow_zoo:make", trust=True, size=32)
    assert backbone.shallow == backbone.origin.shallow == "1"
    save_backbone(tmp_path / "w.safetensors", backbone)
    again = load_backbone(tmp_path / "w.safetensors", trust=True)
    np.testing.assert_array_equal(embed(again, IMAGES).shallow, embed(backbone, IMAGES).shallow)
    backbone.origin = Origin.from_dict({**backbone.origin.to_dict(), "shallow": None})  # as stored before
    save_backbone(tmp_path / "old.safetensors", backbone)
    assert load_backbone(tmp_path / "old.safetensors", trust=True).shallow is None
