"""Corrupted images, sets and sources: determinism, severity, names, wrong use."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maple.data.catalogue.table import is_built_in
from maple.data.corrupt import (
    CORRUPTIONS,
    corrupt_images,
    corrupt_set,
    corrupted_sets,
    draw_corruptions,
)
from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.data.splits import load_splits
from maple.errors import DataError, UsageError

FAMILIES = list(CORRUPTIONS)


def damage(images: np.ndarray, family: str, seed: int = 0) -> list[float]:
    return [float(((corrupt_images(images, family, s, seed).astype(float) - images) ** 2).mean()) for s in range(1, 6)]


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
        out = corrupt_images(some, family, severity, seed=3)
        assert out.shape == some.shape and out.dtype == np.uint8
        np.testing.assert_array_equal(out, corrupt_images(some, family, severity, seed=3))
    np.testing.assert_array_equal(some, before)
    if (family, shape) != ("defocus-blur", (8, 8)):  # less than a pixel out of focus
        assert (out != some).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_company_of_an_image_does_not_matter(
    images: np.ndarray, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = corrupt_images(images[:9], family, 4)
    order = np.array([5, 0, 8, 3])
    np.testing.assert_array_equal(corrupt_images(images[:9][order], family, 4), whole[order])
    np.testing.assert_array_equal(corrupt_images(images[2:3], family, 4), whole[2:3])
    monkeypatch.setattr("maple.data.corrupt._PIXELS_AT_ONCE", 2 * 32 * 32)  # in blocks of two
    np.testing.assert_array_equal(corrupt_images(images[:9], family, 4), whole)


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


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("snow", "brightness", "fog")])
def test_the_mean_is_roughly_kept(images: np.ndarray, family: str) -> None:
    for severity in (1, 5):
        assert abs(corrupt_images(images, family, severity).mean() - images.mean()) < 4


def test_seeds_and_keys(images: np.ndarray) -> None:
    twins = images[[0, 0]]
    same = corrupt_images(twins, "gaussian-noise", 3)
    np.testing.assert_array_equal(same[0], same[1])  # by content
    other = corrupt_images(twins, "gaussian-noise", 3, keys=["a", "b"])
    assert (other[0] != other[1]).mean() > 0.9
    np.testing.assert_array_equal(other[0], corrupt_images(twins[:1], "gaussian-noise", 3, keys=[b"a"])[0])
    assert (corrupt_images(twins, "gaussian-noise", 3, seed=1) != same).mean() > 0.9


def test_black_and_white_images_do_no_harm() -> None:
    for value in (0, 255):
        flat = np.full((1, 32, 32, 3), value, np.uint8)
        for family in FAMILIES:
            corrupt_images(flat, family, 5)  # warnings are errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fogg", 1), "'fogg'.*'fog'"),
        (("frost", 1), "'frost'"),
        (("fog", 0), "severity"),
        (("fog", 6), "severity"),
        (("fog", 1.5), "severity"),
    ],
)
def test_wrong_use(images: np.ndarray, arguments: tuple, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        corrupt_images(images, *arguments)


def test_images_that_cannot_be_corrupted(images: np.ndarray) -> None:
    for wrong in (images[0], images.astype(float), images[..., :1], images[:, :4, :4]):
        with pytest.raises(UsageError, match="shape"):
            corrupt_images(wrong, "fog", 1)
    with pytest.raises(UsageError, match="keys"):
        corrupt_images(images, "fog", 1, keys=["a"])
    assert corrupt_images(images[:0], "fog", 1).shape == (0, 32, 32, 3)


def test_lengths_grow_with_the_side(images: np.ndarray) -> None:
    """An image of twice the side, corrupted and halved, resembles the corrupted image."""
    large = images[:16].repeat(2, axis=1).repeat(2, axis=2)
    for family in ("defocus-blur", "motion-blur", "zoom-blur", "pixelate"):
        keys = np.arange(16)
        out = corrupt_images(large, family, 5, keys=keys).reshape(16, 32, 2, 32, 2, 3).mean(axis=(2, 4))
        small = corrupt_images(images[:16], family, 5, keys=keys).astype(float)
        assert ((out - small) ** 2).mean() < 0.35 * ((small - images[:16]) ** 2).mean()


@pytest.fixture
def clean(images: np.ndarray) -> ImageSet:
    return ImageSet.from_arrays(images, np.arange(48) % 3, ["a", "b", "c"], name="svhn/test")


def test_a_corrupted_set_keeps_labels_and_tells_what_was_done(clean: ImageSet) -> None:
    foggy = corrupt_set(clean, "fog", 3, seed=2)
    np.testing.assert_array_equal(foggy.pixels, corrupt_images(clean.pixels, "fog", 3, 2, clean.keys))
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
    with pytest.raises(DataError, match="set"):
        corrupt_set(stream, "contrast", 3, memory_limit=10)


def test_corrupted_sources(root: Path) -> None:
    source = "corrupted:pets/test?family=gaussian_noise&severity=2&seed=1"
    images = open_images(source, data_root=root)
    clean = open_images("pets/test", data_root=root)
    np.testing.assert_array_equal(images.pixels, corrupt_images(clean.pixels, "gaussian-noise", 2, 1, clean.keys))
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
        ("corrupted:digits?family=fogg", "'fog'"),
        ("corrupted:digits?famly=fog", "'family'"),
        ("corrupted:digits?severity=6", "severity=6"),
        ("corrupted:digits?severity=two", "severity=two"),
        ("corrupted:digits?seed=-1", "seed=-1"),
        ("corrupted:?family=fog", "corrupted:SOURCE"),
        ("corrupted:corrupted:digits?family=fog", "corrupted:SOURCE"),
        ("corrupted:simulated-diatoms?n=9", "'n'"),
        ("corrupted:digit?family=fog", "'digit'"),
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
