"""Fractals and PixMix-like mixing: ranges, shares, reproducibility."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maple.data._mixing import _beta, _mix, make_fractals, mix_batch, shuffle_patches


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int, size: int = 16) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, size, size, 3), dtype=np.uint8))


def test_fractals_are_varied_and_follow_the_seed() -> None:
    make_fractals.cache_clear()
    first = make_fractals(32, n=20)
    make_fractals.cache_clear()
    assert torch.equal(first, make_fractals(32, n=20))
    assert first.dtype == torch.uint8 and first.shape == (20, 32, 32, 3)
    colours = [len(torch.unique(picture.reshape(-1, 3), dim=0)) for picture in first]
    assert min(colours) >= 3  # the ground and at least two maps
    assert (first.float().std((1, 2)).amax(1) > 10).float().mean() > 0.9


def test_mixing_keeps_images_recognisable_and_follows_the_generator() -> None:
    images = pictures(200)
    mixed = mix_batch(images, seeded())
    assert torch.equal(mixed, mix_batch(images, seeded())) and not torch.equal(mixed, mix_batch(images, seeded(1)))
    assert mixed.dtype == torch.uint8 and mixed.shape == images.shape
    flat, other = (
        x.reshape(200, -1).float() - x.reshape(200, -1).float().mean(1, keepdim=True) for x in (images, mixed)
    )
    cosine = torch.nn.functional.cosine_similarity(flat, other)
    assert cosine.median() > 0.5
    unchanged = (images == mixed).all(3).all(2).all(1).float().mean()
    assert 0.02 < unchanged < 0.3  # half of those with no round, a fifth


def test_sums_and_products_by_the_published_formulas() -> None:
    first, second = torch.rand(50, 4, 4, 3), torch.rand(50, 4, 4, 3)
    found = _mix(first, second, seeded())
    again = seeded()
    a, b = _beta(50, again), 1 - _beta(50, again)
    sums = torch.rand((50, 1, 1, 1), generator=again) < 0.5
    added = ((first * 2 - 1) * a + (second * 2 - 1) * b + 1) / 2
    multiplied = (first * 2) ** a * (second * 2) ** b / 2
    torch.testing.assert_close(found, torch.where(sums, added, multiplied).clamp(0, 1), rtol=1e-4, atol=1e-5)


def test_beta_numbers_have_the_moments_of_beta_3_1() -> None:
    numbers = _beta(20000, seeded())
    assert abs(numbers.mean() - 0.75) < 0.01 and abs(numbers.var() - 0.0375) < 0.002


@pytest.mark.parametrize(("size", "side"), [(32, 8), (32, 4), (16, 2), (9, 1)])
def test_patches_change_places_as_wholes(size: int, side: int) -> None:
    """Every patch of the result is a patch of the image, for one of the two halves of the batch."""
    images = torch.rand(6, 3, size, size)
    shuffled = shuffle_patches(images)
    assert shuffled.shape == images.shape and not torch.equal(shuffled, images)

    def patches(image: torch.Tensor) -> set[bytes]:
        cut = image.unfold(1, side, side).unfold(2, side, side)  # (3, g, g, s, s)
        return {patch.numpy().tobytes() for patch in cut.permute(1, 2, 0, 3, 4).reshape(-1, 3, side, side)}

    assert any(patches(old) == patches(new) for old, new in zip(images, shuffled, strict=True))


def test_a_single_image_is_shuffled_too() -> None:
    image = torch.rand(1, 3, 8, 8)
    assert shuffle_patches(image).flatten().sort().values.equal(image.flatten().sort().values)
