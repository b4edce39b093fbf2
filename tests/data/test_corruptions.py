"""Each family of corruptions, against SciPy, Pillow, formulas and explicit loops."""

from __future__ import annotations

import colorsys
import io

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from maple.data._corruptions import (
    CORRUPTIONS,
    bilinear,
    disk,
    draw_normal,
    draw_uniform,
    image_generator,
    plasma,
    streak,
    to_pixels,
    to_unit,
    zoom_matrix,
)
from maple.data.corrupt import corrupt_images


def test_families_stand_in_the_order_in_which_they_are_drawn() -> None:
    assert list(CORRUPTIONS) == [
        *("gaussian-noise", "shot-noise", "impulse-noise", "defocus-blur", "glass-blur", "motion-blur", "zoom-blur"),
        *("snow", "fog", "brightness", "contrast", "elastic-transform", "pixelate", "jpeg-compression"),
    ]
    assert all(len(corruption.levels) == 5 for corruption in CORRUPTIONS.values())


def test_random_numbers_depend_on_key_purpose_and_seed_alone() -> None:
    def draw(key, purpose, seed):
        return image_generator(key, purpose, seed).random()

    first = draw(b"a", "fog", 0)
    assert first == draw(b"a", "fog", 0) == draw("a", "fog", np.int64(0))
    assert len({first, draw(b"b", "fog", 0), draw(b"a", "snow", 0), draw(b"a", "fog", 1)}) == 4


@pytest.mark.parametrize("draw", [lambda rngs: draw_uniform(rngs, -1, 1, (3,)), lambda rngs: draw_normal(rngs, (3,))])
def test_each_row_is_drawn_from_its_own_generator(draw) -> None:
    def rngs(*seeds: int):
        return [np.random.default_rng(seed) for seed in seeds]

    both = draw(rngs(1, 2))
    assert both.dtype == np.float32 and both.shape == (2, 3)
    np.testing.assert_array_equal(both[1:], draw(rngs(2)))


def test_every_grey_level_survives_the_way_to_numbers_and_back() -> None:
    levels = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(to_pixels(to_unit(levels)), levels)
    np.testing.assert_array_equal(to_pixels(np.array([-1.0, 2.0])), [0, 255])


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.04), (2, 0.06), (3, 0.08), (4, 0.09), (5, 0.10)])
def test_gaussian_noise_has_its_deviation(severity: int, deviation: float) -> None:
    grey = np.full((40, 32, 32, 3), 128, np.uint8)
    noise = (corrupt_images(grey, "gaussian-noise", severity, keys=np.arange(40)).astype(float) - 128) / 255
    assert noise.std() == pytest.approx(deviation, rel=0.01) and abs(noise.mean()) < 4 * deviation / 350
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.06


@pytest.mark.parametrize(("severity", "photons"), [(1, 500), (2, 250), (3, 100), (4, 75), (5, 50)])
def test_shot_noise_varies_as_photons_do(severity: int, photons: int) -> None:
    grey = np.full((40, 32, 32, 3), 64, np.uint8)
    seen = corrupt_images(grey, "shot-noise", severity, keys=np.arange(40)).astype(float) / 255
    assert seen.mean() == pytest.approx(64 / 255, rel=0.01)
    assert seen.var() == pytest.approx(64 / 255 / photons, rel=0.03)


def test_impulse_noise_changes_its_share_to_the_extremes(images: np.ndarray) -> None:
    for severity, share in enumerate((0.01, 0.02, 0.03, 0.05, 0.07), 1):
        grey = np.full((40, 32, 32, 3), 100, np.uint8)
        out = corrupt_images(grey, "impulse-noise", severity, keys=np.arange(40))
        assert set(np.unique(out)) == {0, 100, 255}
        for extreme in (0, 255):
            assert (out == extreme).mean() == pytest.approx(share / 2, rel=0.1)


# --- blur ------------------------------------------------------------------------------------------------------------


def test_defocus_by_scipy(images: np.ndarray) -> None:
    for severity in (1, 3, 5):
        radius, softness = CORRUPTIONS["defocus-blur"].levels[severity - 1]
        kernel = disk(radius, softness, 1)
        assert kernel.sum() == pytest.approx(1) and (kernel == kernel[::-1, ::-1]).all()
        exact = ndimage.correlate(images[0].astype(float), kernel[..., None], mode="mirror")
        assert np.abs(corrupt_images(images[:1], "defocus-blur", severity)[0] - exact).max() < 0.51
    assert (disk(1.5, 0.1, 1) > 1e-6).sum() == 9  # a disc of radius 1.5 is the 3 x 3 neighbourhood
    large = disk(6, 0.4, 4)
    assert np.sqrt((large > large.max() / 2).sum() / np.pi) == pytest.approx(6, abs=0.3)


def test_glass_blur_by_explicit_loops(images: np.ndarray) -> None:
    """Severity 4, image by image as the published code goes, with its copies instead of swaps."""
    sigma, _, rounds = CORRUPTIONS["glass-blur"].levels[3]
    image = images[7]
    moves = image_generator(b"key", "glass-blur", 0).integers(-1, 1, (2, 30, 30, 2))
    x = np.rint(ndimage.gaussian_filter(image.astype(float), (sigma, sigma, 0), mode="nearest")).astype(np.uint8)
    for turn in range(rounds):
        for i, h in enumerate(range(31, 1, -1)):
            for j, w in enumerate(range(31, 1, -1)):
                dx, dy = moves[turn, i, j]
                x[h, w] = x[h + dy, w + dx]
    exact = ndimage.gaussian_filter(x.astype(float), (sigma, sigma, 0), mode="nearest")
    found = corrupt_images(image[None], "glass-blur", 4, keys=[b"key"])[0]
    assert np.abs(found - exact).max() < 1.01  # rounding before the shuffle may go either way


def test_streaks_by_explicit_loops() -> None:
    rng = np.random.default_rng(0)
    x, angles = rng.random((3, 9, 11, 2)), np.array([0.0, 37.0, -120.0])
    radius, sigma = 2.5, 1.4
    taps = np.exp(-0.5 * (np.arange(7) / sigma) ** 2)
    taps /= taps.sum()
    exact = np.zeros_like(x)
    for n, angle in enumerate(np.deg2rad(angles)):
        for row in range(9):
            for column in range(11):
                for step, weight in enumerate(taps):
                    r = min(max(row + int(np.ceil(step * np.sin(angle) - 0.5)), 0), 8)
                    c = min(max(column + int(np.ceil(step * np.cos(angle) - 0.5)), 0), 10)
                    exact[n, row, column] += weight * x[n, r, c]
    np.testing.assert_allclose(streak(x, angles, radius, sigma), exact, atol=1e-12)


@pytest.mark.parametrize(("length", "factor"), [(32, 1.0), (32, 1.07), (32, 1.25), (32, 2.25), (33, 1.31), (8, 1.25)])
def test_zooms_by_scipy(length: int, factor: float) -> None:
    line = np.random.default_rng(0).random(length)
    crop = int(np.ceil(length / factor))
    first = (length - crop) // 2
    zoomed = ndimage.zoom(line[first : first + crop], factor, order=1)
    trim = (len(zoomed) - length) // 2
    np.testing.assert_allclose(zoom_matrix(length, factor) @ line, zoomed[trim : trim + length], atol=1e-6)


def test_zoom_blur_is_a_mean_over_zooms(images: np.ndarray) -> None:
    total = images[0].astype(float).copy()
    for factor in np.arange(1, 1.11, 0.01):  # 12 of them, since 0.11 / 0.01 is a little more than 11
        matrix = zoom_matrix(32, factor)
        total += np.einsum("ij,jkc,lk->ilc", matrix, images[0].astype(float), matrix)
    assert np.abs(corrupt_images(images[:1], "zoom-blur", 2)[0] - total / 13).max() < 0.51


# --- weather ---------------------------------------------------------------------------------------------------------


def test_weather_makes_brighter(images: np.ndarray) -> None:
    for family in ("snow", "brightness"):
        means = [corrupt_images(images, family, severity).mean() for severity in range(1, 6)]
        assert means == sorted(means) and means[0] > images.mean()
    assert corrupt_images(images, "fog", 5).std() < images.std()  # fog keeps the brightest value, and veils


def test_brightness_by_colorsys(images: np.ndarray) -> None:
    some = images[:2, ::4, ::4].copy()
    some[0, 0, 0] = 0  # black has no hue
    for severity, more in enumerate((0.05, 0.1, 0.15, 0.2, 0.3), 1):
        out = corrupt_images(some, "brightness", severity)
        for pixel, seen in zip(some.reshape(-1, 3), out.reshape(-1, 3)):
            hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
            exact = np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + more, 1))) * 255
            assert np.abs(seen - exact).max() < 0.501


def test_plasma_by_explicit_loops() -> None:
    """Diamond-square, point by point, on a torus: squares get their four corners, then edges their four neighbours."""
    side, decay = 8, 2.0
    offsets = list(np.random.default_rng(7).uniform(-1, 1, (side * side - 1,)).astype(np.float32))
    grid = np.zeros((side, side))
    step, wibble = side, 100.0
    while step >= 2:
        half = step // 2
        for shift_r, shift_c, corners in (
            (half, half, ((-half, -half), (-half, half), (half, -half), (half, half))),
            (0, half, ((0, -half), (0, half), (-half, 0), (half, 0))),
            (half, 0, ((0, -half), (0, half), (-half, 0), (half, 0))),
        ):
            for r in range(shift_r, side, step):
                for c in range(shift_c, side, step):
                    total = sum(grid[(r + dr) % side, (c + dc) % side] for dr, dc in corners)
                    grid[r, c] = total / 4 + wibble**2 * offsets.pop(0)
        step, wibble = half, wibble / decay
    grid -= grid.min()
    np.testing.assert_allclose(plasma([np.random.default_rng(7)], side, decay)[0], grid / grid.max(), atol=1e-5)


def test_fog_by_its_formula(images: np.ndarray) -> None:
    clouds = plasma([image_generator(b"k", "fog", 0)], 32, 3)[0, :, :, None]
    x = images[0] / 255
    exact = (x + 0.5 * clouds) * x.max() / (x.max() + 0.5) * 255
    assert np.abs(corrupt_images(images[:1], "fog", 2, keys=[b"k"])[0] - exact).max() < 0.51


def test_as_much_snow_at_any_size() -> None:
    for severity in (1, 5):
        means = [
            corrupt_images(np.full((20, side, side, 3), 60, np.uint8), "snow", severity, keys=np.arange(20)).mean()
            for side in (32, 64, 100)
        ]
        assert max(means) - 60 < 1.3 * (min(means) - 60)


# --- digital ---------------------------------------------------------------------------------------------------------


def test_displacements_grow_while_the_shear_falls() -> None:
    """An affine map leaves a ramp plane; what is left after fitting a plane is due to the displacements."""
    y, x = np.mgrid[:32, :32]
    ramps = np.stack([np.repeat((40 + a * x + b * y)[..., None], 3, 2) for a, b in ((4, 1), (1, 5), (3, 3))])
    ramps = ramps.astype(np.uint8)
    inner = (slice(9, -9), slice(9, -9))
    plane = np.stack([x[inner].ravel(), y[inner].ravel(), np.ones(x[inner].size)], axis=1)

    def roughness(severity: int) -> float:
        flat = corrupt_images(ramps, "elastic-transform", severity)[:, 9:-9, 9:-9, 0].reshape(3, -1).T.astype(float)
        return float(np.sqrt((np.linalg.lstsq(plane, flat, rcond=None)[1] / len(flat)).mean()))

    found = [roughness(severity) for severity in range(1, 6)]
    assert found[0] < 0.5  # rounding alone
    assert found[1] < found[2] < found[3] < found[4] and found[4] > 1


def test_contrast_by_its_formula(images: np.ndarray) -> None:
    for severity, kept in enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1):
        mean = images.astype(float).mean(axis=(1, 2), keepdims=True)
        exact = (images - mean) * kept + mean
        assert np.abs(corrupt_images(images, "contrast", severity) - exact).max() < 0.501


def test_jpeg_by_pillow(images: np.ndarray) -> None:
    for severity, quality in enumerate((80, 65, 58, 50, 40), 1):
        out = corrupt_images(images[:3], "jpeg-compression", severity)
        for image, seen in zip(images, out):
            file = io.BytesIO()
            Image.fromarray(image).save(file, "JPEG", quality=quality)
            np.testing.assert_array_equal(seen, np.asarray(Image.open(file)))


def test_pixelate_by_pillow_and_at_any_size(images: np.ndarray) -> None:
    for severity, share in enumerate((0.95, 0.9, 0.85, 0.75, 0.65), 1):
        out = corrupt_images(images[:3], "pixelate", severity)
        for image, seen in zip(images, out):
            small = Image.fromarray(image).resize((int(32 * share),) * 2, Image.Resampling.BOX)
            np.testing.assert_array_equal(seen, np.asarray(small.resize((32, 32), Image.Resampling.BOX)))
    large = np.random.default_rng(0).integers(0, 256, (1, 96, 96, 3), np.uint8)
    assert len(np.unique(corrupt_images(large, "pixelate", 5)[0].reshape(-1, 3), axis=0)) == 20 * 20


def test_bilinear_by_scipy() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((2, 9, 7, 3))
    rows, columns = rng.uniform(-5, 13, (2, 6, 5)), rng.uniform(-5, 11, (2, 6, 5))
    found = bilinear(x, rows, columns)
    for n in range(2):
        for channel in range(3):
            exact = ndimage.map_coordinates(x[n, ..., channel], [rows[n], columns[n]], order=1, mode="mirror")
            np.testing.assert_allclose(found[n, ..., channel], exact, atol=1e-12)
