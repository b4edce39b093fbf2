"""Corruptions: closed forms, SciPy and Pillow as oracles; damage, seeds and batches; corrupted sources."""

from __future__ import annotations

import colorsys
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from maple.data.corrupt import (
    CORRUPTIONS,
    bilinear,
    corrupt,
    corrupt_set,
    corrupted_sets,
    disk,
    draw_corruptions,
    plasma,
    streak,
    zoom_matrix,
)
from maple.data.image_set import ImageSet
from maple.data.simulate import simulated_diatoms
from maple.data.sources import is_built_in, open_images
from maple.data.splits import load_splits
from maple.errors import DataError, UsageError

FAMILIES = list(CORRUPTIONS)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Coloured images with shapes and fine texture: (48, 32, 32, 3)."""
    rng = np.random.default_rng(0)
    pixels = simulated_diatoms(48, size=32, seed=5).images.astype(float)
    tint = rng.uniform(0.4, 1.2, (48, 1, 1, 3))
    return np.clip(pixels * tint + rng.normal(0, 6, pixels.shape), 0, 255).astype(np.uint8)


def damage(images: np.ndarray, family: str, seed: int = 0) -> list[float]:
    return [float(((corrupt(images, family, s, seed).astype(float) - images) ** 2).mean()) for s in range(1, 6)]


# --- all families -----------------------------------------------------------------------------------------------------


def test_the_fourteen_families_that_need_no_picture() -> None:
    assert list(CORRUPTIONS) == [
        *("gaussian-noise", "shot-noise", "impulse-noise"),
        *("defocus-blur", "glass-blur", "motion-blur", "zoom-blur"),
        *("snow", "fog", "brightness"),
        *("contrast", "elastic-transform", "pixelate", "jpeg-compression"),
    ]
    assert all(len(corruption.levels) == 5 for corruption in CORRUPTIONS.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(32, 32), (8, 8), (48, 40)])
def test_shape_type_and_determinism(images: np.ndarray, family: str, shape: tuple[int, int]) -> None:
    some = images[:3] if shape == (32, 32) else np.random.default_rng(1).integers(0, 256, (3, *shape, 3), np.uint8)
    before = some.copy()
    for severity in (1, 5):
        out = corrupt(some, family, severity, seed=3)
        assert out.shape == some.shape and out.dtype == np.uint8
        np.testing.assert_array_equal(out, corrupt(some, family, severity, seed=3))
    np.testing.assert_array_equal(some, before)
    if (family, shape) != ("defocus-blur", (8, 8)):  # less than a pixel out of focus
        assert (out != some).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_company_of_an_image_does_not_matter(
    images: np.ndarray, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = corrupt(images[:9], family, 4)
    order = np.array([5, 0, 8, 3])
    np.testing.assert_array_equal(corrupt(images[:9][order], family, 4), whole[order])
    np.testing.assert_array_equal(corrupt(images[2:3], family, 4), whole[2:3])
    monkeypatch.setattr("maple.data.corrupt._PIXELS_AT_ONCE", 2 * 32 * 32)  # in blocks of two
    np.testing.assert_array_equal(corrupt(images[:9], family, 4), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_damage_grows_with_severity(images: np.ndarray, family: str) -> None:
    found = damage(images, family)
    assert found[0] > 0
    if family == "elastic-transform":  # the published shear falls as the displacements grow: see below
        return
    if family == "glass-blur":  # the published blur around more displacements hides some of them
        assert min(found[3:]) > 1.2 * max(found[:3])
        return
    if family == "motion-blur":  # severities 3 and 4 have one deviation
        assert found[3] == pytest.approx(found[2], rel=0.01)
        found.pop(3)
    assert found == sorted(found) and len(set(found)) == len(found)


def test_displacements_grow_while_the_shear_falls() -> None:
    """An affine map leaves a ramp plane; what is left after fitting a plane is due to the displacements."""
    y, x = np.mgrid[:32, :32]
    ramps = np.stack([np.repeat((40 + a * x + b * y)[..., None], 3, 2) for a, b in ((4, 1), (1, 5), (3, 3))])
    ramps = ramps.astype(np.uint8)
    inner = (slice(9, -9), slice(9, -9))
    plane = np.stack([x[inner].ravel(), y[inner].ravel(), np.ones(x[inner].size)], axis=1)

    def roughness(severity: int) -> float:
        flat = corrupt(ramps, "elastic-transform", severity)[:, 9:-9, 9:-9, 0].reshape(3, -1).T.astype(float)
        return float(np.sqrt((np.linalg.lstsq(plane, flat, rcond=None)[1] / len(flat)).mean()))

    found = [roughness(severity) for severity in range(1, 6)]
    assert found[0] < 0.5  # rounding alone
    assert found[1] < found[2] < found[3] < found[4] and found[4] > 1


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("snow", "brightness", "fog")])
def test_the_mean_is_roughly_kept(images: np.ndarray, family: str) -> None:
    for severity in (1, 5):
        assert abs(corrupt(images, family, severity).mean() - images.mean()) < 4


def test_weather_makes_brighter(images: np.ndarray) -> None:
    for family in ("snow", "brightness"):
        means = [corrupt(images, family, severity).mean() for severity in range(1, 6)]
        assert means == sorted(means) and means[0] > images.mean()
    assert corrupt(images, "fog", 5).std() < images.std()  # fog keeps the brightest value, and veils


def test_seeds_and_keys(images: np.ndarray) -> None:
    twins = images[[0, 0]]
    same = corrupt(twins, "gaussian-noise", 3)
    np.testing.assert_array_equal(same[0], same[1])  # by content
    other = corrupt(twins, "gaussian-noise", 3, keys=["a", "b"])
    assert (other[0] != other[1]).mean() > 0.9
    np.testing.assert_array_equal(other[0], corrupt(twins[:1], "gaussian-noise", 3, keys=[b"a"])[0])
    assert (corrupt(twins, "gaussian-noise", 3, seed=1) != same).mean() > 0.9


def test_black_and_white_images_do_no_harm() -> None:
    for value in (0, 255):
        flat = np.full((1, 32, 32, 3), value, np.uint8)
        for family in FAMILIES:
            corrupt(flat, family, 5)  # warnings are errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fogg", 1), "unknown corruption 'fogg': did you mean 'fog'"),
        (("frost", 1), "unknown corruption 'frost'"),
        (("fog", 0), "from 1 to 5"),
        (("fog", 6), "from 1 to 5"),
        (("fog", 1.5), "from 1 to 5"),
    ],
)
def test_wrong_use(images: np.ndarray, arguments: tuple, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        corrupt(images, *arguments)


def test_images_that_cannot_be_corrupted(images: np.ndarray) -> None:
    for wrong in (images[0], images.astype(float), images[..., :1], images[:, :4, :4]):
        with pytest.raises(UsageError, match="cannot be corrupted"):
            corrupt(wrong, "fog", 1)
    with pytest.raises(UsageError, match="one key per image"):
        corrupt(images, "fog", 1, keys=["a"])
    assert corrupt(images[:0], "fog", 1).shape == (0, 32, 32, 3)


# --- one family at a time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.04), (2, 0.06), (3, 0.08), (4, 0.09), (5, 0.10)])
def test_gaussian_noise_has_its_deviation(severity: int, deviation: float) -> None:
    grey = np.full((40, 32, 32, 3), 128, np.uint8)
    noise = (corrupt(grey, "gaussian-noise", severity, keys=np.arange(40)).astype(float) - 128) / 255
    assert noise.std() == pytest.approx(deviation, rel=0.01) and abs(noise.mean()) < 4 * deviation / 350
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.06


@pytest.mark.parametrize(("severity", "photons"), [(1, 500), (2, 250), (3, 100), (4, 75), (5, 50)])
def test_shot_noise_varies_as_photons_do(severity: int, photons: int) -> None:
    grey = np.full((40, 32, 32, 3), 64, np.uint8)
    seen = corrupt(grey, "shot-noise", severity, keys=np.arange(40)).astype(float) / 255
    assert seen.mean() == pytest.approx(64 / 255, rel=0.01)
    assert seen.var() == pytest.approx(64 / 255 / photons, rel=0.03)


def test_impulse_noise_changes_its_share_to_the_extremes(images: np.ndarray) -> None:
    for severity, share in enumerate((0.01, 0.02, 0.03, 0.05, 0.07), 1):
        grey = np.full((40, 32, 32, 3), 100, np.uint8)
        out = corrupt(grey, "impulse-noise", severity, keys=np.arange(40))
        assert set(np.unique(out)) == {0, 100, 255}
        for extreme in (0, 255):
            assert (out == extreme).mean() == pytest.approx(share / 2, rel=0.1)


def test_contrast_by_its_formula(images: np.ndarray) -> None:
    for severity, kept in enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1):
        mean = images.astype(float).mean(axis=(1, 2), keepdims=True)
        exact = (images - mean) * kept + mean
        assert np.abs(corrupt(images, "contrast", severity) - exact).max() < 0.501


def test_brightness_by_colorsys(images: np.ndarray) -> None:
    some = images[:2, ::4, ::4].copy()
    some[0, 0, 0] = 0  # black has no hue
    for severity, more in enumerate((0.05, 0.1, 0.15, 0.2, 0.3), 1):
        out = corrupt(some, "brightness", severity)
        for pixel, seen in zip(some.reshape(-1, 3), out.reshape(-1, 3)):
            hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
            exact = np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + more, 1))) * 255
            assert np.abs(seen - exact).max() < 0.501


def test_jpeg_by_pillow(images: np.ndarray) -> None:
    for severity, quality in enumerate((80, 65, 58, 50, 40), 1):
        out = corrupt(images[:3], "jpeg-compression", severity)
        for image, seen in zip(images, out):
            file = io.BytesIO()
            Image.fromarray(image).save(file, "JPEG", quality=quality)
            np.testing.assert_array_equal(seen, np.asarray(Image.open(file)))


def test_pixelate_by_pillow_and_at_any_size(images: np.ndarray) -> None:
    for severity, share in enumerate((0.95, 0.9, 0.85, 0.75, 0.65), 1):
        out = corrupt(images[:3], "pixelate", severity)
        for image, seen in zip(images, out):
            small = Image.fromarray(image).resize((int(32 * share),) * 2, Image.Resampling.BOX)
            np.testing.assert_array_equal(seen, np.asarray(small.resize((32, 32), Image.Resampling.BOX)))
    large = np.random.default_rng(0).integers(0, 256, (1, 96, 96, 3), np.uint8)
    assert len(np.unique(corrupt(large, "pixelate", 5)[0].reshape(-1, 3), axis=0)) == 20 * 20  # as coarse as at 32


def test_defocus_by_scipy(images: np.ndarray) -> None:
    for severity in (1, 3, 5):
        radius, softness = CORRUPTIONS["defocus-blur"].levels[severity - 1]
        kernel = disk(radius, softness, 1)
        assert kernel.sum() == pytest.approx(1) and (kernel == kernel[::-1, ::-1]).all()
        exact = ndimage.correlate(images[0].astype(float), kernel[..., None], mode="mirror")
        assert np.abs(corrupt(images[:1], "defocus-blur", severity)[0] - exact).max() < 0.51
    assert (disk(1.5, 0.1, 1) > 1e-6).sum() == 9  # a disc of radius 1.5 is the 3 x 3 neighbourhood
    large = disk(6, 0.4, 4)
    assert np.sqrt((large > large.max() / 2).sum() / np.pi) == pytest.approx(6, abs=0.3)


def test_glass_blur_by_explicit_loops(images: np.ndarray) -> None:
    """Severity 4, image by image as the published code goes, with its copies instead of swaps."""
    from maple.data.corrupt import _generator

    sigma, _, rounds = CORRUPTIONS["glass-blur"].levels[3]
    image = images[7]
    moves = _generator(b"key", "glass-blur", 0).integers(-1, 1, (2, 30, 30, 2))
    x = np.rint(ndimage.gaussian_filter(image.astype(float), (sigma, sigma, 0), mode="nearest")).astype(np.uint8)
    for turn in range(rounds):
        for i, h in enumerate(range(31, 1, -1)):
            for j, w in enumerate(range(31, 1, -1)):
                dx, dy = moves[turn, i, j]
                x[h, w] = x[h + dy, w + dx]
    exact = ndimage.gaussian_filter(x.astype(float), (sigma, sigma, 0), mode="nearest")
    found = corrupt(image[None], "glass-blur", 4, keys=[b"key"])[0]
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
    assert np.abs(corrupt(images[:1], "zoom-blur", 2)[0] - total / 13).max() < 0.51


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
    from maple.data.corrupt import _generator

    clouds = plasma([_generator(b"k", "fog", 0)], 32, 3)[0, :, :, None]
    x = images[0] / 255
    exact = (x + 0.5 * clouds) * x.max() / (x.max() + 0.5) * 255
    assert np.abs(corrupt(images[:1], "fog", 2, keys=[b"k"])[0] - exact).max() < 0.51


def test_bilinear_by_scipy() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((2, 9, 7, 3))
    rows, columns = rng.uniform(-5, 13, (2, 6, 5)), rng.uniform(-5, 11, (2, 6, 5))
    found = bilinear(x, rows, columns)
    for n in range(2):
        for channel in range(3):
            exact = ndimage.map_coordinates(x[n, ..., channel], [rows[n], columns[n]], order=1, mode="mirror")
            np.testing.assert_allclose(found[n, ..., channel], exact, atol=1e-12)


def test_as_much_snow_at_any_size() -> None:
    for severity in (1, 5):
        means = [
            corrupt(np.full((20, side, side, 3), 60, np.uint8), "snow", severity, keys=np.arange(20)).mean()
            for side in (32, 64, 100)
        ]
        assert max(means) - 60 < 1.3 * (min(means) - 60)


def test_lengths_grow_with_the_side(images: np.ndarray) -> None:
    """An image of twice the side, corrupted and halved, resembles the corrupted image."""
    large = images[:16].repeat(2, axis=1).repeat(2, axis=2)
    for family in ("defocus-blur", "motion-blur", "zoom-blur", "pixelate"):
        keys = np.arange(16)
        out = corrupt(large, family, 5, keys=keys).reshape(16, 32, 2, 32, 2, 3).mean(axis=(2, 4))
        small = corrupt(images[:16], family, 5, keys=keys).astype(float)
        assert ((out - small) ** 2).mean() < 0.35 * ((small - images[:16]) ** 2).mean()


# --- sets and sources -------------------------------------------------------------------------------------------------


@pytest.fixture
def clean(images: np.ndarray) -> ImageSet:
    return ImageSet.from_arrays(images, np.arange(48) % 3, ["a", "b", "c"], name="svhn/test")


def test_a_corrupted_set_keeps_labels_and_tells_what_was_done(clean: ImageSet) -> None:
    foggy = corrupt_set(clean, "fog", 3, seed=2)
    np.testing.assert_array_equal(foggy.pixels, corrupt(clean.pixels, "fog", 3, 2, clean.keys))
    np.testing.assert_array_equal(foggy.labels, clean.labels)
    assert foggy.class_names == clean.class_names and foggy.augment == clean.augment == "crop"
    assert foggy.name == "corrupted:svhn/test?family=fog&severity=3&seed=2"
    assert foggy.files[1] == "svhn/test#1?family=fog&severity=3&seed=2"
    others = [clean, corrupt_set(clean, "fog", 4, 2), corrupt_set(clean, "fog", 3), corrupt_set(clean, "snow", 3, 2)]
    for other in others:
        assert not np.isin(foggy.keys, other.keys).any()
    part = corrupt_set(clean.subset([5, 2]), "fog", 3, seed=2)
    np.testing.assert_array_equal(part.pixels, foggy.subset([5, 2]).pixels)
    np.testing.assert_array_equal(part.keys, foggy.keys[[5, 2]])


def test_all_draws_one_for_each_image(clean: ImageSet) -> None:
    mixed = corrupt_set(clean, "all", "all")
    drawn = draw_corruptions(clean.keys, "all", "all")
    assert len(mixed) == len(clean) and mixed.name == "corrupted:svhn/test?family=all&severity=all&seed=0"
    for i in (0, 11, 47):
        family, severity = drawn[i]
        np.testing.assert_array_equal(mixed.read(i), corrupt_set(clean.subset([i]), family, severity).read(0))
        assert mixed.files[i].endswith(f"?family={family}&severity={severity}&seed=0")
    assert drawn[3:5] == draw_corruptions(clean.keys[3:5], "all", "all")
    assert drawn != draw_corruptions(clean.keys, "all", "all", seed=1)
    many = draw_corruptions(np.arange(7000), "all", "all")
    counts = np.unique(np.array([f"{family} {severity}" for family, severity in many]), return_counts=True)[1]
    assert len(counts) == 70 and counts.min() > 60 and counts.max() < 140
    assert {family for family, _ in draw_corruptions(clean.keys, "fog", "all")} == {"fog"}
    assert {severity for _, severity in draw_corruptions(clean.keys, "all", 2)} == {2}


def test_corrupted_sets_go_through_all(clean: ImageSet) -> None:
    few = clean.subset([0])
    assert [(family, severity) for family, severity, _ in corrupted_sets(few)] == [
        (family, severity) for family in FAMILIES for severity in range(1, 6)
    ]
    (_, _, only), *rest = corrupted_sets(few, ["contrast"], [2], seed=4)
    assert not rest and only.name.endswith("family=contrast&severity=2&seed=4")


def test_sets_on_disk_are_read_or_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    from image_files import write_folder

    folder = write_folder(tmp_path / "set", {"a": 2, "b": 2}, rng)
    stream = open_images(folder, memory_limit=0)
    np.testing.assert_array_equal(
        corrupt_set(stream, "contrast", 3).pixels, corrupt_set(open_images(folder), "contrast", 3).pixels
    )
    with pytest.raises(DataError, match="too much to be corrupted in memory"):
        corrupt_set(stream, "contrast", 3, memory_limit=10)


def test_corrupted_sources(root: Path) -> None:
    source = "corrupted:pets/test?family=gaussian_noise&severity=2&seed=1"
    images = open_images(source, data_root=root)
    clean = open_images("pets/test", data_root=root)
    np.testing.assert_array_equal(images.pixels, corrupt(clean.pixels, "gaussian-noise", 2, 1, clean.keys))
    assert images.name == "corrupted:pets/test?family=gaussian-noise&severity=2&seed=1"
    assert open_images(images.name, data_root=root).keys.tolist() == images.keys.tolist()
    assert open_images("corrupted:pets", data_root=root).name == "corrupted:pets/test?family=all&severity=all&seed=0"
    assert open_images("corrupted:pets", data_root=root, split="train", size=16).pixels.shape == (40, 16, 16, 3)
    assert (open_images(source, data_root=root, labelled=False).labels == -1).all()
    assert (open_images([source], data_root=root, labelled=False).labels == -1).all()
    assert len(open_images(f"corrupted:{root}/pets/test.parquet?severity=all")) == 12
    diatoms = open_images("corrupted:simulated-diatoms?n=9&seed=3?family=fog&severity=1")
    assert len(diatoms) == 9 and diatoms.augment == "crop,flip-both"
    assert is_built_in(source)
    splits = load_splits("corrupted:digits?family=contrast&severity=2", test="digits")
    assert splits.train.name.startswith("corrupted:digits") and len(splits.test) == 1797


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("corrupted:digits?family=fogg", "did you mean 'fog'"),
        ("corrupted:digits?famly=fog", "did you mean 'family'"),
        ("corrupted:digits?severity=6", "from 1 to 5"),
        ("corrupted:digits?severity=two", "from 1 to 5"),
        ("corrupted:digits?seed=-1", "from 0 to"),
        ("corrupted:?family=fog", "names no clean images"),
        ("corrupted:corrupted:digits?family=fog", "names no clean images"),
        ("corrupted:simulated-diatoms?n=9", "unknown parameter 'n'"),
        ("corrupted:digit?family=fog", "no data set, file or folder 'digit'"),
    ],
)
def test_corrupted_sources_that_cannot_be_opened(source: str, words: str, root: Path) -> None:
    with pytest.raises(UsageError, match=words):
        open_images(source, data_root=root)


@pytest.mark.shared
def test_real_images_are_damaged_as_published(shared_dir: Path) -> None:
    """Orders of magnitude on CIFAR-10: pixel noise of 10 % is 650 squared grey levels, and so on."""
    import pyarrow.parquet as pq

    encoded = pq.read_table(shared_dir / "data/cifar10/test.parquet", columns=["image"])["image"][:64].to_pylist()
    images = np.stack([np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in encoded])
    assert damage(images, "gaussian-noise")[4] == pytest.approx(0.1**2 * 255**2, rel=0.15)  # clipping takes some
    assert damage(images, "impulse-noise")[4] == pytest.approx(0.07 * 20_000, rel=0.2)
    assert damage(images, "contrast")[4] == pytest.approx(
        0.85**2 * images.astype(float).var(axis=(1, 2)).mean(), rel=0.02
    )
