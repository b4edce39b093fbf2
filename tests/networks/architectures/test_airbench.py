"""The airbench network: whitening against a covariance by NumPy, Dirac filters, sizes, names, errors, training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from maple.data.image_set import ImageSet
from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.errors import DataError, UsageError
from maple.networks import create_backbone, fit_whitening
from maple.networks.architectures import create_network
from maple.networks.architectures.airbench import Airbench, BiasNorm, DiracConv, whitening_filters
from maple.prediction.own_loop import Relabeller
from maple.training.loop import train_backbone
from maple.training.maple import MapleRecipe
from maple.training.recipe import create_recipe

MUON = {"optimizer": "muon", "learning_rate": 0.24, "momentum": 0.6, "schedule": "linear", "precision": "32-true"}


def smooth_images(n: int, height: int = 12, width: int = 12) -> torch.Tensor:
    """Random images whose neighbouring pixels and channels are alike, as photographs are."""
    noise = torch.randn(n, 3, height + 2, width + 2, generator=torch.Generator().manual_seed(0))
    return nn.functional.avg_pool2d(noise + noise[:, :1], 3, stride=1) + 0.3


def patches(images: torch.Tensor) -> np.ndarray:
    """All 2x2 patches (n, 12) in the order of a filter's weights, by slices."""
    x = images.double().numpy()
    corners = [x[:, :, i : x.shape[2] - 1 + i, j : x.shape[3] - 1 + j] for i in range(2) for j in range(2)]
    return np.stack(corners, axis=2).transpose(0, 3, 4, 1, 2).reshape(-1, 12)


def test_whitened_patches_have_mean_zero_and_identity_covariance() -> None:
    images = smooth_images(50)
    filters, biases = whitening_filters(images, epsilon=0.0)
    outputs = nn.functional.conv2d(images.double(), filters.double(), biases.double())
    rows = outputs.permute(0, 2, 3, 1).reshape(-1, 24).numpy()
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(np.cov(rows[:, ::2].T, bias=True), np.eye(12), atol=1e-4)
    np.testing.assert_array_equal(rows[:, 1::2], -rows[:, ::2])


def test_filters_are_the_eigenvectors_that_numpy_finds() -> None:
    images = smooth_images(30, 9, 15)
    values, vectors = np.linalg.eigh(np.cov(patches(images).T, bias=True))
    filters, _ = whitening_filters(images)
    expected = (vectors.T / np.sqrt(values + 5e-4)[:, None])[::-1]  # largest first
    found = filters[::2].reshape(12, 12).double().numpy()
    np.testing.assert_allclose(np.abs((found * expected).sum(1)), (expected**2).sum(1), rtol=1e-3)


def test_grey_and_constant_channels_give_finite_filters_and_outputs_near_zero() -> None:
    grey = smooth_images(20)[:, :1].expand(-1, 3, -1, -1)
    constant = torch.cat([smooth_images(20)[:, :2], torch.full((20, 1, 12, 12), 0.7)], dim=1)
    for images in (grey, constant):
        filters, biases = whitening_filters(images)
        outputs = nn.functional.conv2d(images, filters, biases)
        assert torch.isfinite(outputs).all() and filters.abs().max() < 50
        silent = (outputs == 0).all(0).all(1).all(1)
        assert silent.sum() == (16 if images is grey else 8)  # directions that do not vary, with both signs


def test_too_few_or_unsuitable_images_are_errors() -> None:
    whitening_filters(torch.rand(1, 3, 32, 32))  # one image has 961 patches
    with pytest.raises(DataError, match="3"):
        whitening_filters(torch.rand(2, 3, 8, 8))
    for shape in ((5, 1, 8, 8), (5, 3, 8), (5, 3, 1, 8)):
        with pytest.raises(UsageError):
            whitening_filters(torch.rand(shape))


def test_whitening_is_fitted_once_and_kept_with_the_weights() -> None:
    network = create_network("airbench-4")
    assert isinstance(network, Airbench)
    network.fit_whitening(smooth_images(20))
    kept = network.whiten.weight.clone()
    other = create_network("airbench-4")
    other.load_state_dict(network.state_dict())
    assert isinstance(other, Airbench)
    other.fit_whitening(torch.rand(20, 3, 12, 12))
    assert torch.equal(other.whiten.weight, kept)
    assert not any(parameter.requires_grad for parameter in network.whiten.parameters())


def test_training_needs_whitened_patches_and_prediction_does_not() -> None:
    network, images = create_network("airbench-4"), smooth_images(20)
    assert network.train().training and torch.isfinite(network.eval()(images)).all()
    with pytest.raises(UsageError, match=r"maple\.networks\.fit_whitening"):
        network.train()(images)
    network.fit_whitening(images)
    assert torch.isfinite(network.train()(images)).all()


def test_an_own_loop_is_told_to_whiten_first() -> None:
    backbone, train = create_backbone("airbench-4", 2), two_classes(20)
    session = Relabeller(MapleRecipe(), train.labels, n_classes=2, epochs=1)
    images = torch.from_numpy(train.pixels / 255).permute(0, 3, 1, 2).float()
    with pytest.raises(UsageError, match="fit_whitening"):
        session.loss(backbone, images, session.labels)
    fit_whitening(backbone, train)
    session.loss(backbone, images, session.labels).backward()


@pytest.mark.parametrize(
    ("shape", "error", "named"),
    [
        ((0, 3, 8, 8), DataError, "no training images"),
        ((1, 3, 8, 8), DataError, "1 training image,.* 3"),
        ((40, 1, 16, 16), UsageError, r"\(40, 1, 16, 16\)"),
        ((40, 3, 1, 9), UsageError, r"\(40, 3, 1, 9\)"),
    ],
)
def test_images_that_cannot_be_whitened(shape: tuple[int, ...], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        fit_whitening(create_backbone("airbench-4", 2), torch.rand(shape))


def test_images_that_are_not_square_are_whitened_and_embedded() -> None:
    backbone, images = create_backbone("airbench-4", 2), torch.rand(6, 3, 9, 20)
    fit_whitening(backbone, images)
    assert backbone.train()(images)[0].shape == (6, 16)


def test_dirac_filters_keep_their_input() -> None:
    x = torch.randn(2, 5, 7, 6)
    torch.testing.assert_close(DiracConv(5, 9)(x)[:, :5], x)


def test_normalisation_learns_a_bias_and_no_scale() -> None:
    norm = BiasNorm(4)
    x = torch.randn(8, 4, 3, 3) * 3 + 2
    norm(x)
    torch.testing.assert_close(norm.running_mean, 0.4 * x.mean(dim=(0, 2, 3)))
    assert norm.bias.requires_grad and not norm.weight.requires_grad


@pytest.mark.parametrize("size", [(8, 8), (32, 32), (21, 34)])
@pytest.mark.parametrize("name", ["airbench-4", "airbench-4-max-gelu"])
def test_any_image_size_gives_one_embedding_per_image(name: str, size: tuple[int, int]) -> None:
    network = create_network(name).eval()
    embedding = network(torch.randn(2, 3, *size))
    assert embedding.shape == (2, 16) and torch.isfinite(embedding).all()


def test_names_say_width_pooling_and_activation() -> None:
    published = create_network("airbench-64-max-gelu")
    assert isinstance(published, Airbench)
    assert published.pooling == "max"
    learned = sum(p.numel() for p in published.parameters() if p.requires_grad)
    filters = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    assert learned == filters + 2 * (64 + 256 + 256)  # and biases of the norms
    assert sum(isinstance(layer, nn.GELU) for layer in published.modules()) == 7
    assert create_backbone("airbench", 10).embedding_size == 256
    for name in ("airbench-0", "airbench-32-min"):
        with pytest.raises(UsageError, match=name):
            create_network(name)
    with pytest.raises(UsageError, match="airbench"):
        create_network("airbensch")


def test_heads_start_small() -> None:
    head = create_backbone("airbench-32", n_classes=10).head
    assert isinstance(head, nn.Linear)
    assert head.weight.std().item() == pytest.approx(1 / 128, rel=0.1) and head.bias.abs().max() == 0


# --- training --------------------------------------------------------------------------------------------------------


def two_classes(n: int) -> ImageSet:
    rng = np.random.default_rng(n)
    labels = np.arange(n) % 2
    pixels = rng.integers(0, 200, (n, 12, 12, 3), dtype=np.uint8)
    pixels[labels == 1, :6] += 55
    return ImageSet.from_arrays(pixels, labels)


def test_it_learns_by_name_and_resumes_to_the_same_weights(tmp_path: Path) -> None:
    train, validation = two_classes(120), two_classes(40)
    options = {**MUON, "epochs": 4, "batch_size": 40, "augment": "alternate-flip,translate", "weight_decay": 1e-3}

    def new() -> tuple:
        torch.manual_seed(0)
        return create_backbone("airbench-4", 2), MapleRecipe(triplet=False, clustering=False)

    whole = train_backbone(*new(), train, validation, show_progress=False, **options)
    assert whole.history[-1]["validation_accuracy"] > 0.9
    assert bool(whole.backbone.body.is_whitened)

    class Stop(Exception):
        pass

    def stop(history: list) -> None:
        if len(history) == 2:
            raise Stop

    with pytest.raises(Stop):
        train_backbone(*new(), train, validation, show_progress=False, folder=tmp_path, on_epoch=stop, **options)
    resumed = train_backbone(*new(), train, validation, show_progress=False, folder=tmp_path, resume=True, **options)
    for (name, a), b in zip(whole.backbone.state_dict().items(), resumed.backbone.state_dict().values()):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("recipe", ["cross-entropy", "maple"])
def test_small_grey_images_are_learned_by_a_network_narrower_than_the_whitening(recipe: str) -> None:
    """Grey images leave two thirds of the whitened channels silent; biases must not run away on them."""
    splits = load_splits("digits", DataOptions())
    torch.manual_seed(0)
    options = {**MUON, "epochs": 3, "batch_size": 100, "augment": "translate", "workers": 0}
    backbone = create_backbone("airbench-8", 10)
    run = train_backbone(
        backbone, create_recipe(recipe), splits.train, splits.validation, show_progress=False, **options
    )
    assert run.history[-1]["validation_accuracy"] > 0.85
