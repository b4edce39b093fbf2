"""Embedding images of any source without side effects."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.errors import DataError, UsageError
from maple.networks import (
    Backbone,
    as_image_batch,
    create_backbone,
    embed,
    embed_batches,
    fit_whitening,
    normalise_images,
)
from maple.networks.architectures.airbench import whitening_filters
from maple.types import Outputs


def plain(pixels: np.ndarray) -> Tensor:
    """(N, 3, H, W) float32 in [0, 1], by the longest way round."""
    return torch.stack([torch.tensor(p.transpose(2, 0, 1).astype(np.float32) / 255) for p in pixels])


def reference(backbone: Backbone, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    clone = copy.deepcopy(backbone).eval()
    with torch.no_grad():
        embedding, logits = clone(plain(pixels))
    return embedding.numpy(), logits.numpy()


def test_embed_arrays_tensors_and_loaders_alike(backbone: Backbone, pixels: np.ndarray) -> None:
    expected = reference(backbone, pixels)
    x = plain(pixels)
    labels = torch.arange(11) % 3
    sources = {
        "uint8 NHWC": pixels,
        "uint8 NCHW": pixels.transpose(0, 3, 1, 2),
        "float32 tensor": x,
        "float64 NHWC": pixels.astype(np.float64) / 255,
        "uint8 tensor": torch.from_numpy(pixels),
        "channels_last": x.to(memory_format=torch.channels_last),
        "loader of x": DataLoader(list(x), batch_size=4),
        "loader of (x, y)": DataLoader(TensorDataset(x, labels), batch_size=4),
        "loader of uint8": DataLoader(list(torch.from_numpy(pixels)), batch_size=5),
        "generator": (part for part in x.split(3)),
    }
    for name, source in sources.items():
        outputs = embed(backbone, source, batch_size=4)
        np.testing.assert_allclose(outputs.embeddings, expected[0], rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(outputs.logits, expected[1], rtol=1e-4, atol=1e-5, err_msg=name)
        assert outputs.embeddings.dtype == outputs.logits.dtype == np.float32
        assert outputs.embeddings.shape == (11, 128)
        if name == "loader of (x, y)":
            assert outputs.labels.dtype == np.int64 and outputs.labels.tolist() == labels.tolist()
        else:
            assert outputs.labels is None


def test_embed_image_sets_in_order_with_labels_and_clusters(
    backbone: Backbone, pixels: np.ndarray, tmp_path: Path
) -> None:
    np.savez(tmp_path / "few.npz", images=pixels, labels=np.arange(11) % 3)
    images = open_images(tmp_path / "few.npz")
    expected = reference(backbone, pixels)[0]
    clusters, mapping = np.arange(11) % 4, np.array([0, 1, 2, 2])
    outputs = embed(backbone, images, batch_size=4, cluster_ids=clusters, cluster_to_class=mapping)
    np.testing.assert_allclose(outputs.embeddings, expected, rtol=1e-4, atol=1e-5)
    assert outputs.labels.tolist() == (np.arange(11) % 3).tolist()
    assert outputs.cluster_ids.tolist() == clusters.tolist() and outputs.cluster_to_class is mapping
    again = embed(backbone, images, batch_size=4)
    assert np.array_equal(outputs.embeddings, again.embeddings)  # nothing random
    chosen = np.array([7, 2, 9, 0, 2])
    some = embed(backbone, images, batch_size=2, cluster_ids=clusters, indices=chosen)
    np.testing.assert_allclose(some.embeddings, expected[chosen], rtol=1e-4, atol=1e-5)
    assert some.labels.tolist() == (chosen % 3).tolist() and some.cluster_ids.tolist() == clusters[chosen].tolist()


def test_indices_of_arrays(backbone: Backbone, pixels: np.ndarray) -> None:
    chosen = np.array([3, 1, 10])
    outputs = embed(backbone, pixels, indices=chosen, cluster_ids=np.arange(11))
    np.testing.assert_allclose(outputs.embeddings, reference(backbone, pixels)[0][chosen], rtol=1e-4, atol=1e-5)
    assert outputs.cluster_ids.tolist() == chosen.tolist()


def test_no_images_give_empty_outputs(backbone: Backbone, pixels: np.ndarray) -> None:
    outputs = embed(backbone, pixels, indices=np.array([], dtype=np.int64))
    assert outputs.embeddings.shape == (0, 128) and outputs.logits.shape == (0, 5) and len(outputs.labels) == 0


def test_batches_add_up_and_are_lazy(backbone: Backbone, pixels: np.ndarray) -> None:
    done: list[tuple[int, int]] = []
    batches = embed_batches(backbone, pixels, batch_size=4, progress=lambda *counts: done.append(counts))
    first = next(batches)
    assert len(first) == 4 and done == []
    parts = [first, *batches]
    assert [len(part) for part in parts] == [4, 4, 3] and done == [(4, 11), (8, 11), (11, 11)]
    for source, n in ((DataLoader(list(plain(pixels)), batch_size=8), 11), (plain(pixels).split(8), 0)):
        done.clear()
        embed(backbone, source, progress=lambda *counts: done.append(counts))
        assert done == [(8, n), (11, n)]
    whole = embed(backbone, pixels, batch_size=4)
    assert np.array_equal(Outputs.concatenate(parts).embeddings, whole.embeddings)


def modes(module: nn.Module) -> list[bool]:
    return [m.training for m in module.modules()]


def test_embed_restores_the_mode_of_every_layer(backbone: Backbone, pixels: np.ndarray) -> None:
    backbone.train()
    backbone.body.blocks[0].eval()  # frozen on purpose by the user
    before = modes(backbone)
    embed(backbone, pixels)
    assert modes(backbone) == before
    backbone.eval()
    embed(backbone, pixels)
    assert not any(modes(backbone))


def test_embed_restores_the_mode_after_an_exception(backbone: Backbone, pixels: np.ndarray) -> None:
    backbone.train()
    with pytest.raises(UsageError):
        embed(backbone, pixels[:, :4, :4])
    assert all(modes(backbone))

    def fail(*_: object) -> None:
        raise RuntimeError("broken layer")

    backbone.body.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken layer"):
        embed(backbone, pixels)
    assert all(modes(backbone)) and torch.is_grad_enabled()


def test_between_batches_the_caller_may_train(backbone: Backbone, pixels: np.ndarray) -> None:
    """A generator must not leave its caller in evaluation mode or without gradients."""
    backbone.train()
    batches = embed_batches(backbone, pixels, batch_size=4)
    next(batches)
    assert all(modes(backbone)) and torch.is_grad_enabled()
    backbone(plain(pixels))[1].sum().backward()


def test_embed_changes_no_statistics_and_keeps_no_graph(backbone: Backbone, pixels: np.ndarray) -> None:
    backbone.train()
    before = copy.deepcopy(backbone.state_dict())
    embed(backbone, pixels)
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())
    backbone(plain(pixels))  # training does move them, so the comparison can fail
    assert not torch.equal(
        backbone.state_dict()["body.blocks.0.1.running_mean"], before["body.blocks.0.1.running_mean"]
    )
    assert all(p.grad is None for p in backbone.parameters())


def test_embed_ignores_autocast(backbone: Backbone, pixels: np.ndarray) -> None:
    expected = embed(backbone, pixels)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = embed(backbone, pixels)
    assert outputs.embeddings.dtype == np.float32
    assert np.array_equal(outputs.embeddings, expected.embeddings) and np.array_equal(outputs.logits, expected.logits)


def test_dropout_is_off_while_embedding(pixels: np.ndarray) -> None:
    backbone = create_backbone("wrn-10-1", 3).train()
    for layer in (m for m in backbone.modules() if isinstance(m, nn.Dropout)):
        layer.p = 0.5
    assert np.array_equal(embed(backbone, pixels).embeddings, embed(backbone, pixels).embeddings)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 8, 8), np.uint8), r"shape \(2, 8, 8\)"),
        (np.zeros((2, 3, 8, 3), np.uint8), r"\(2, 3, 8, 3\)"),
        (np.zeros((2, 8, 8, 4), np.uint8), r"\(N, H, W, 3\)"),
        (np.full((2, 8, 8, 3), 200.0), r"\[0, 1\]"),
        (np.full((2, 8, 8, 3), np.nan), r"\[0, 1\]"),
        (-torch.ones(2, 3, 8, 8), r"\[0, 1\]"),
        (np.zeros((2, 8, 8, 3), np.int64), "uint8"),
        ("cifar10", "str"),
        (7, "int"),
    ],
)
def test_ambiguous_images_are_refused(backbone: Backbone, images: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        embed(backbone, images)


def test_misused_options_are_refused(backbone: Backbone, pixels: np.ndarray) -> None:
    loader = DataLoader(list(plain(pixels)), batch_size=4, shuffle=True)
    with pytest.raises(UsageError, match="shuffle=False"):
        embed(backbone, loader, cluster_ids=np.zeros(11))
    with pytest.raises(UsageError, match="Subset"):
        embed(backbone, loader, indices=np.arange(3))
    with pytest.raises(UsageError, match="cluster_ids"):
        embed(backbone, pixels, cluster_ids=np.zeros(5))
    with pytest.raises(UsageError, match="batch_size"):
        embed(backbone, pixels, batch_size=0)


def test_as_image_batch_keeps_the_colours_apart() -> None:
    red = np.zeros((1, 8, 10, 3), np.uint8)
    red[..., 0] = 255
    x = as_image_batch(red)
    assert x.shape == (1, 3, 8, 10) and x[:, 0].min() == 1 and x[:, 1:].max() == 0


def test_whitening_filters_come_from_evenly_spaced_normalised_images(monkeypatch) -> None:
    """Any source of images gives the same filters; a second call, and networks without whitening, change nothing."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), np.uint8)
    images = ImageSet.from_arrays(pixels, np.zeros(20, np.int64), size=16)
    monkeypatch.setattr("maple.networks.embedding.WHITENING_IMAGES", 10)
    first, second = (create_backbone("airbench-8", 2, mean=(0.1, 0.2, 0.3)) for _ in range(2))
    fit_whitening(first, images)
    fit_whitening(second, torch.from_numpy(pixels).permute(0, 3, 1, 2))
    rows = np.linspace(0, 19, 10).astype(int)
    expected, _ = whitening_filters(normalise_images(as_image_batch(pixels[rows]), first.mean, first.std))
    for backbone in (first, second):
        torch.testing.assert_close(backbone.body.whiten.weight, expected)
    fit_whitening(first, 255 - pixels)
    torch.testing.assert_close(first.body.whiten.weight, expected)
    other = create_backbone("resnet9", 2)
    before = other.body.blocks[0][0].weight.clone()
    fit_whitening(other, images)
    assert torch.equal(other.body.blocks[0][0].weight, before)


class Fragile(nn.Module):
    """The mean of each colour; NaN for a white image."""

    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(2.2 - x.mean((1, 2, 3)))[:, None]  # of normalised images
        return root - root + x.mean((2, 3))


def test_an_image_that_gives_nan_is_named_unless_asked_for() -> None:
    backbone = Backbone(Fragile(), nn.Linear(3, 2), embedding_size=3, name="fragile")
    pixels = np.full((7, 8, 8, 3), 100, np.uint8)
    pixels[[3, 6]] = 255
    images = ImageSet.from_arrays(pixels, name="slides")
    with pytest.raises(DataError, match=r"fragile.*slides#3"):
        embed(backbone, images, batch_size=2)
    with pytest.raises(DataError, match="slides#6"):
        embed(backbone, images, indices=np.array([1, 0, 6]))
    with pytest.raises(DataError, match="image 3"):
        embed(backbone, pixels)
    kept = embed(backbone, images, finite=False).embeddings
    assert np.flatnonzero(np.isnan(kept).any(1)).tolist() == [3, 6]
