"""Augmentation: each image is one of the allowed ones, mixing follows the publication, patches stay whole."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maple.data.augment import (
    _beta,
    _mix,
    augment_batch,
    make_fractals,
    mix_batch,
    parse_augment,
    quarter_turns,
    shuffle_patches,
    turn_images,
)
from maple.errors import UsageError


def reference_augment(image: np.ndarray, dy: int, dx: int, left_right: bool, up_down: bool) -> np.ndarray:
    """Pad by reflection, cut out, mirror: one image, step by step."""
    size = len(image)
    reach = size // 8
    padded = np.pad(image, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    flipped = image_crop = padded[reach + dy : reach + dy + size, reach + dx : reach + dx + size]
    if left_right:
        flipped = flipped[:, ::-1]
    if up_down:
        flipped = flipped[::-1]
    assert image_crop.shape == image.shape
    return flipped


@pytest.mark.parametrize("augment", ["crop", "flip", "flip-both", "crop,flip", "crop,flip-both"])
def test_every_augmented_image_is_one_of_the_allowed_ones(augment: str) -> None:
    rng = np.random.default_rng(2)
    one = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    batch = torch.from_numpy(np.repeat(one[None], 400, axis=0))
    result = augment_batch(batch, augment, torch.Generator().manual_seed(0)).numpy()
    shifts = range(-2, 3) if "crop" in augment else [0]
    allowed = {
        reference_augment(one, dy, dx, left_right, up_down).tobytes()
        for dy in shifts
        for dx in shifts
        for left_right in ([False, True] if "flip" in augment else [False])
        for up_down in ([False, True] if "both" in augment else [False])
    }
    seen = Counter(image.tobytes() for image in result)
    assert set(seen) <= allowed
    assert len(seen) > 0.95 * len(allowed)  # each image in its own way, all ways occur
    assert max(seen.values()) < 6 * 400 / len(allowed) or len(allowed) < 5


def test_flips_and_turns_place_a_square_in_all_eight_ways_equally_often() -> None:
    image = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    batch = torch.from_numpy(np.repeat(image[None], 4000, axis=0))
    result = augment_batch(batch, "flip-both,turn", torch.Generator().manual_seed(0))
    turned = [np.rot90(image, k) for k in range(4)]
    counts = [int((result.numpy() == way).all((1, 2, 3)).sum()) for way in (*turned, *(way[::-1] for way in turned))]
    assert sum(counts) == 4000 and min(counts) > 400


def test_flips_happen_to_half_of_the_images() -> None:
    batch = torch.zeros((4000, 8, 8, 3), dtype=torch.uint8)
    batch[:, 0, 0] = 255  # a mark in the upper left corner
    result = augment_batch(batch, "flip-both", torch.Generator().manual_seed(0))
    for corner in ((0, 0), (0, 7), (7, 0), (7, 7)):
        assert abs((result[:, corner[0], corner[1], 0] == 255).float().mean() - 0.25) < 0.03
    result = augment_batch(batch, "flip", torch.Generator().manual_seed(0))
    assert abs((result[:, 0, 0, 0] == 255).float().mean() - 0.5) < 0.03
    assert (result[:, 7] == 0).all()  # never upside down


def test_augmentation_leaves_its_input_alone_and_none_changes_nothing() -> None:
    batch = torch.randint(0, 256, (16, 8, 8, 3), dtype=torch.uint8)
    before = batch.clone()
    generator = torch.Generator().manual_seed(0)
    assert not torch.equal(augment_batch(batch, "crop,flip", generator), before)
    assert torch.equal(batch, before)
    assert torch.equal(augment_batch(batch, "none", generator), before)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 33])
def test_any_side_can_be_augmented(size: int) -> None:
    batch = torch.randint(0, 256, (5, size, size, 3), dtype=torch.uint8)
    assert augment_batch(batch, "crop,flip-both", torch.Generator().manual_seed(0)).shape == batch.shape


def test_unknown_augmentations_get_a_suggestion() -> None:
    for wrong, named in (("crop,flipp", "flipp"), ("auto", "auto"), ("", ""), ("none,crop", "none")):
        with pytest.raises(UsageError, match=f"'{named}'"):
            parse_augment(wrong)


def test_translate_shifts_by_a_sixteenth_with_reflected_borders() -> None:
    images = torch.arange(32 * 32).reshape(1, 32, 32, 1).expand(400, 32, 32, 3)
    shifted = augment_batch(images, "translate", torch.Generator().manual_seed(0))
    reflected = torch.nn.functional.pad(images[:1, :, :, 0].double(), (2, 2, 2, 2), mode="reflect")[0]
    windows = {(i, j): reflected[i : i + 32, j : j + 32].long() for i in range(5) for j in range(5)}
    seen = {next(place for place, w in windows.items() if torch.equal(w, image[:, :, 0])) for image in shifted}
    assert seen == set(windows)


@pytest.mark.parametrize("augment", ["flip,alternate-flip", "crop,translate", "flip-both,alternate-flip"])
def test_augmentations_that_exclude_each_other_are_errors(augment: str) -> None:
    with pytest.raises(UsageError):
        augment_batch(torch.zeros(2, 8, 8, 3), augment, torch.Generator())


def test_cutout_covers_a_square_of_at_most_half_the_side() -> None:
    images = torch.cat([torch.zeros(300, 16, 16, 3), torch.full((300, 16, 16, 3), 200)]).to(torch.uint8)
    cut = augment_batch(images, "cutout", torch.Generator().manual_seed(0))
    covered = (cut != images).any(3)
    assert (cut[covered] == 100).all()  # the mean colour
    areas = covered.sum((1, 2))
    assert areas.max() == 64 and areas.min() >= 16
    rows, columns = covered.any(2).sum(1), covered.any(1).sum(1)
    assert torch.equal(rows * columns, areas)  # rectangles


def test_mix_and_cutout_go_with_shifts_and_flips() -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), dtype=np.uint8))
    changed = augment_batch(images, "translate,flip,mix,cutout", torch.Generator().manual_seed(0))
    assert changed.shape == images.shape and changed.dtype == torch.uint8


# --- fractals and patches --------------------------------------------------------------------------------------------


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


@given(n=st.integers(1, 7), size=st.integers(1, 6))
def test_turning_back_gives_the_images(n, size):
    images = torch.rand(n, 3, size, size)
    turned = turn_images(images)
    back = [
        torch.rot90(image, -int(quarters), (1, 2)) for image, quarters in zip(turned, quarter_turns(n), strict=True)
    ]
    assert torch.equal(torch.stack(back), images)


def test_images_that_are_not_square_cannot_be_turned():
    with pytest.raises(UsageError, match="16 x 20"):
        turn_images(torch.rand(1, 3, 16, 20))
