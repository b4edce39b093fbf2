"""Backbones: normalisation, embedding layer, memory format, bad arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from maple.errors import UsageError
from maple.networks import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Backbone,
    EnsembleBody,
    create_backbone,
    embed,
    linear_head,
    list_backbones,
)
from maple.networks.architectures import create_network
from maple.prediction.store import load_backbone, save_backbone


def test_embedding_is_what_the_head_sees(backbone: Backbone) -> None:
    x = torch.rand(3, 3, 32, 32)
    backbone.eval()
    embedding, logits = backbone(x)
    assert embedding.shape == (3, 128) and logits.shape == (3, 5)
    assert torch.equal(backbone.embed(x), embedding)
    torch.testing.assert_close(logits, embedding @ backbone.head.weight.T + backbone.head.bias)


def test_images_are_normalised_inside(backbone: Backbone) -> None:
    backbone.eval()
    x = torch.rand(2, 3, 16, 16)
    normalised = torch.empty_like(x)
    for c in range(3):
        normalised[:, c] = (x[:, c] - IMAGENET_MEAN[c]) / IMAGENET_STD[c]
    torch.testing.assert_close(backbone.embed(x), backbone.body(normalised), rtol=1e-4, atol=1e-5)
    other = create_backbone("resnet9", 5, mean=(0.1, 0.2, 0.3), std=(1, 2, 3))
    assert other.mean.tolist() == pytest.approx([0.1, 0.2, 0.3]) and other.std.tolist() == [1, 2, 3]


def test_embedding_layer_in_front_of_the_head() -> None:
    backbone = create_backbone("resnet20", 10, embedding_size=24).eval()
    x = torch.rand(2, 3, 32, 32)
    embedding, logits = backbone(x)
    assert backbone.embedding_size == embedding.shape[1] == backbone.head.in_features == 24
    assert isinstance(backbone.embedding_layer, nn.Linear) and backbone.embedding_layer.in_features == 64
    torch.testing.assert_close(logits, backbone.head(embedding))
    logits.sum().backward()  # the head's loss shapes the embedding layer
    assert backbone.embedding_layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("size", [8, 32, 64])
def test_sizes_are_not_hard_coded(size: int) -> None:
    for name in ("resnet9", "resnet20", "wrn-10-2"):
        backbone = create_backbone(name, 3).eval()
        assert backbone.embed(torch.rand(2, 3, size, size)).shape == (2, backbone.embedding_size)


def test_outputs_are_float32_under_autocast(backbone: Backbone) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        embedding, logits = backbone(torch.rand(4, 3, 16, 16))
    assert embedding.dtype == logits.dtype == torch.float32


def test_memory_format_reaches_the_convolutions(backbone: Backbone) -> None:
    seen = []
    backbone.body.blocks[2].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    backbone(torch.rand(4, 3, 16, 16))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert backbone.body.blocks[1][0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (3, 32, 32), (2, 3, 4, 4), (2, 32, 32, 3)])
def test_wrong_shapes_say_what_is_right(backbone: Backbone, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"\(N, 3, H, W\)"):
        backbone(torch.rand(shape))


def test_no_head_no_logits() -> None:
    backbone = Backbone(create_network("resnet9"), None, embedding_size=128)
    with pytest.raises(UsageError, match="head"):
        backbone(torch.rand(2, 3, 8, 8))
    outputs = embed(backbone, torch.rand(2, 3, 8, 8))
    assert outputs.logits is None and outputs.embeddings.shape == (2, 128)


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="resnet9"):
        create_backbone("resnet-9", 10)
    with pytest.raises(UsageError, match="wrn-27-10"):
        create_backbone("wrn-27-10", 10)
    with pytest.raises(UsageError, match="at least 1"):
        create_backbone("resnet9", 0)
    with pytest.raises(UsageError, match="at least 1"):
        create_backbone("resnet9", 2, embedding_size=0)
    with pytest.raises(UsageError, match="mean"):
        create_backbone("resnet9", 2, mean=(0.5,))
    with pytest.raises(UsageError, match="std"):
        create_backbone("resnet9", 2, std=(1, 0, 1))
    assert {"resnet9", "resnet18", "resnet20", "resnet32", "resnet44", "resnet56", "wrn-28-10"} <= set(list_backbones())


def test_a_branch_leaves_the_head_beside_the_embedding(tmp_path):
    torch.manual_seed(0)
    backbone = create_backbone("wrn-10-1", 3, embedding_size=8, branch=True).eval()
    x = torch.rand(2, 3, 16, 16)
    embedding, logits = backbone(x)
    pooled = backbone.body((x - backbone.mean[:, None, None]) / backbone.std[:, None, None])
    torch.testing.assert_close(embedding, backbone.embedding_layer(pooled))
    torch.testing.assert_close(logits, backbone.head(pooled))
    assert (backbone.embedding_size, backbone.head_size) == (8, 64)
    save_backbone(tmp_path / "weights.safetensors", backbone)
    again = load_backbone(tmp_path / "weights.safetensors")
    torch.testing.assert_close(again(x), (embedding, logits))
    with pytest.raises(UsageError, match="--embedding-branch"):
        linear_head(backbone)
    with pytest.raises(UsageError, match="--embedding-size"):
        create_backbone("wrn-10-1", 3, branch=True)


def test_embeddings_are_concatenated() -> None:
    members = [nn.Sequential(create_network("resnet9").eval(), nn.Linear(128, size)) for size in (3, 5)]
    body, x = EnsembleBody(members), torch.rand(2, 3, 16, 16)
    assert body.min_size == 8 and body.member_bodies == [member[0] for member in members]
    torch.testing.assert_close(body(x), torch.cat([member(x) for member in members], dim=1))
