"""Order, augmentation and workers: what a network sees, and that evaluation never sees augmentation."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from maple.data import batches
from maple.data.batches import (
    Epoch,
    alternate_flips,
    augment_batch,
    count_batches,
    evaluation_batches,
    parse_augment,
)
from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.errors import DataError, UsageError


def image_set(n: int = 40, size: int = 8, n_classes: int = 4) -> ImageSet:
    rng = np.random.default_rng(0)
    return ImageSet.from_arrays(
        rng.integers(0, 256, (n, size, size, 3), dtype=np.uint8), np.arange(n) % n_classes, name="random"
    )


@pytest.fixture
def streamed(tmp_path: Path) -> tuple[ImageSet, ImageSet]:
    """The same files in memory and from disk."""
    rng = np.random.default_rng(1)
    for i in range(30):
        (tmp_path / f"c{i % 3}").mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / f"c{i % 3}" / f"{i}.png")
    return open_images(tmp_path), open_images(tmp_path, memory_limit=0)


def plan_epoch(targets: np.ndarray, epoch: int = 1, **order: Any) -> list[np.ndarray]:
    return batches.plan_epoch(targets, Epoch(number=epoch, seed=0, **order))


def training_batches(images: ImageSet, targets: np.ndarray, **options: Any) -> Iterator[Any]:
    """Batches of an epoch whose order and options are given together."""
    reading = {name: options.pop(name) for name in ("augment", "workers") if name in options}
    order = Epoch(**{"seed": 0, "number": options.pop("epoch", 1)} | options)
    return batches.training_batches(images, targets, order, **reading)


def epoch_of(images: ImageSet, **changes: object) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    options = {"batch_size": 8, "augment": "crop,flip", "sampler": "shuffle", "seed": 0, "epoch": 1} | changes
    return list(training_batches(images, images.labels, **options))  # type: ignore[arg-type]


# --- augmentation -----------------------------------------------------------------------------------------------------


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
    with pytest.raises(UsageError, match="'flip'"):
        training_batches(image_set(), np.zeros(40), batch_size=8, augment="flipp", seed=0, epoch=1)


# --- the order of an epoch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("n", [40, 43, 48, 97])
def test_ranks_partition_the_epoch(n: int, world_size: int) -> None:
    plans = [
        plan_epoch(np.zeros(n), batch_size=12, sampler="shuffle", epoch=3, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert {len(plan) for plan in plans} == {count_batches(n, 12, world_size)}
    rows = np.concatenate([batch for plan in plans for batch in plan])
    assert len(set(rows)) == len(rows)  # nothing twice
    dropped = n % 12 if (n % 12) // world_size < 2 else 0
    assert len(rows) == n - dropped
    assert min(len(batch) for plan in plans for batch in plan) >= 2


def test_a_last_batch_of_one_is_dropped_and_of_two_kept() -> None:
    assert [len(batch) for batch in plan_epoch(np.zeros(9), batch_size=8, sampler="shuffle", epoch=1)] == [8]
    assert [len(batch) for batch in plan_epoch(np.zeros(10), batch_size=8, sampler="shuffle", epoch=1)] == [
        8,
        2,
    ]
    assert count_batches(11, 8, world_size=2) == 1 and count_batches(12, 8, world_size=2) == 2
    with pytest.raises(DataError, match="1 training image"):
        plan_epoch(np.zeros(1), batch_size=8, epoch=1)
    with pytest.raises(UsageError, match="4 processes"):
        plan_epoch(np.zeros(30), batch_size=3, epoch=1, world_size=4)
    with pytest.raises(UsageError, match="'balanced'"):
        plan_epoch(np.zeros(30), batch_size=3, sampler="balance", epoch=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 2])
def test_balanced_batches_hold_positives_and_negatives(world_size: int) -> None:
    rng = np.random.default_rng(0)
    targets = rng.permutation(np.repeat(np.arange(30), rng.integers(4, 40, 30)))
    seen: Counter[int] = Counter()
    for rank in range(world_size):
        plan = plan_epoch(targets, batch_size=32, sampler="balanced", epoch=1, rank=rank, world_size=world_size)
        assert len(plan) == count_batches(len(targets), 32, world_size)
        for batch in plan:
            assert len(batch) == 32 // world_size
            for group in batch.reshape(-1, 4):
                assert len(set(targets[group])) == 1 and len(set(group)) == 4
            assert len(set(targets[batch])) >= 2
            seen.update(targets[batch].tolist())
    assert abs(sum(seen.values()) - len(targets)) <= 32  # about as many images as there are
    assert max(seen.values()) - min(seen.values()) <= 4 * 2 * world_size  # every target as often, rare or not


def test_targets_are_drawn_without_replacement() -> None:
    targets = np.repeat(np.arange(16), 10)
    plan = plan_epoch(targets, batch_size=32, sampler="balanced", epoch=1)
    sequence = np.concatenate([targets[batch[::4]] for batch in plan])
    for start in range(0, len(sequence) - 15, 16):
        assert set(sequence[start : start + 16]) == set(range(16))
    rows = np.concatenate(plan)
    assert max(Counter(rows.tolist()).values()) <= 2


@pytest.mark.parametrize(("batch_size", "group"), [(2, 1), (3, 1), (4, 2), (6, 3), (8, 4), (10, 4)])
def test_small_balanced_batches_keep_two_targets(batch_size: int, group: int) -> None:
    targets = np.repeat([0, 1, 2], [30, 30, 2])
    for epoch in range(5):
        for batch in plan_epoch(targets, batch_size=batch_size, sampler="balanced", epoch=epoch):
            assert len(set(targets[batch])) >= 2
            assert len(batch) == batch_size // group * group


def test_a_target_with_one_image_repeats_it() -> None:
    targets = np.array([0] * 12 + [1])
    batch = plan_epoch(targets, batch_size=8, sampler="balanced", epoch=1)[0]
    assert Counter(batch.tolist())[12] == 4


def test_auto_balances_only_small_batches() -> None:
    def is_shuffled(n_targets: int, batch_size: int, world_size: int = 1) -> bool:
        targets = np.arange(400) % n_targets
        options = {"batch_size": batch_size, "world_size": world_size}
        auto, shuffle = (plan_epoch(targets, sampler=sampler, **options) for sampler in ("auto", "shuffle"))
        return all(np.array_equal(a, b) for a, b in zip(auto, shuffle))

    assert is_shuffled(10, 40) and not is_shuffled(10, 39)
    assert not is_shuffled(10, 40, world_size=2) and is_shuffled(10, 80, world_size=2)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batches_are_float32_channels_last_in_the_unit_interval() -> None:
    images = image_set(40, 16)
    for x, target, index in epoch_of(images, augment="none"):
        assert x.dtype == torch.float32 and x.shape == (8, 3, 16, 16)
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert target.dtype == index.dtype == torch.int64
        assert images.pixels is not None
        expected = images.pixels[index.numpy()].transpose(0, 3, 1, 2).astype(np.float32) / 255
        np.testing.assert_array_equal(x.numpy(), expected)
        np.testing.assert_array_equal(target.numpy(), images.labels[index.numpy()])
    white = ImageSet.from_arrays(np.full((4, 8, 8), 255, np.uint8), [0, 1, 0, 1])
    assert next(evaluation_batches(white))[0].max() == 1.0


def test_batches_follow_from_seed_and_epoch_alone() -> None:
    images = image_set()
    first = epoch_of(images)
    torch.manual_seed(123)
    np.random.default_rng(5).random(3)
    epoch_of(images, epoch=9)
    for a, b in zip(first, epoch_of(images), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
    for change in ({"seed": 1}, {"epoch": 2}):
        other = epoch_of(images, **change)
        assert not torch.equal(torch.cat([b[2] for b in first]), torch.cat([b[2] for b in other]))
        assert not torch.equal(first[0][0], other[0][0])
    epoch_of(images, seed=-5)


def test_the_global_random_state_is_left_alone(streamed: tuple[ImageSet, ImageSet]) -> None:
    state, legacy = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for images in streamed:
        epoch_of(images)
        list(evaluation_batches(images))
    assert torch.equal(state, torch.random.get_rng_state())
    assert (legacy == np.random.get_state()[1]).all()  # noqa: NPY002


def test_augmentation_differs_between_epochs_ranks_and_images() -> None:
    same = ImageSet.from_arrays(np.repeat(image_set(1, 16).pixels, 64, axis=0), np.arange(64) % 2)
    found = [
        next(
            training_batches(
                same, same.labels, batch_size=64, augment="crop,flip", seed=0, epoch=e, rank=r, world_size=2
            )
        )[0]
        for e in (1, 2)
        for r in (0, 1)
    ]
    for x in found:
        assert len({image.numpy().tobytes() for image in x}) > 10
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_auto_augmentation_is_that_of_the_images() -> None:
    digits = open_images("digits").subset(np.arange(64))
    auto, crop = (epoch_of(digits, augment=augment) for augment in ("auto", "crop"))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(auto, crop, strict=True))


def test_evaluation_is_never_augmented(streamed: tuple[ImageSet, ImageSet]) -> None:
    assert "augment" not in inspect.signature(evaluation_batches).parameters
    for images in streamed:
        for _ in range(2):
            found = list(evaluation_batches(images, batch_size=7))
            assert torch.cat([index for _, index in found]).tolist() == list(range(30))
            x = torch.cat([x for x, _ in found]).numpy()
            expected = np.stack([images.read(i) for i in range(30)]).transpose(0, 3, 1, 2).astype(np.float32) / 255
            np.testing.assert_array_equal(x, expected)
        chosen = [5, 2, 2, 29]
        assert (
            torch.cat([index for _, index in evaluation_batches(images, batch_size=3, indices=chosen)]).tolist()
            == chosen
        )
        assert list(evaluation_batches(images, indices=[])) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_gives_the_same_batches_as_memory(streamed: tuple[ImageSet, ImageSet], workers: int) -> None:
    memory, stream = streamed
    assert stream.pixels is None
    for a, b in zip(epoch_of(memory), epoch_of(stream, workers=workers), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
        assert b[0].is_contiguous(memory_format=torch.channels_last)
    evaluated = zip(evaluation_batches(memory), evaluation_batches(stream, workers=workers), strict=True)
    assert all(torch.equal(a[0], b[0]) for a, b in evaluated)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_disappears_is_named_in_one_sentence(streamed: tuple[ImageSet, ImageSet], workers: int) -> None:
    _, stream = streamed
    Path(stream.files[4]).unlink()
    with pytest.raises(DataError, match="c0") as caught:
        list(evaluation_batches(stream, workers=workers))
    assert stream.files[4] in str(caught.value) and "\n" not in str(caught.value)


def test_targets_may_be_clusters_and_must_fit() -> None:
    images = image_set()
    clusters = np.arange(40) % 7
    for _, target, index in training_batches(images, clusters, batch_size=8, augment="none", seed=0, epoch=1):
        np.testing.assert_array_equal(target.numpy(), clusters[index.numpy()])
    with pytest.raises(DataError, match=r"40 images.*3 targets"):
        training_batches(images, clusters[:3], batch_size=8, seed=0, epoch=1)


def test_alternate_flips_show_each_image_from_both_sides() -> None:
    first, second, third = (alternate_flips(1000, seed=3, epoch=epoch) for epoch in (1, 2, 3))
    assert torch.equal(first, ~second) and torch.equal(first, third)
    assert 0.4 < first.float().mean() < 0.6
    assert not torch.equal(first, alternate_flips(1000, seed=4, epoch=1))


def test_batches_follow_the_alternate_flips() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    images = ImageSet.from_arrays(pixels, np.arange(20) % 2)
    for epoch in (1, 2):
        mirrored = alternate_flips(20, 0, epoch)
        order = Epoch(batch_size=7, sampler="shuffle", seed=0, number=epoch)
        for x, _, index in batches.training_batches(images, images.labels, order, augment="alternate-flip"):
            for image, row in zip(x, index.tolist()):
                expected = pixels[row][:, ::-1] if mirrored[row] else pixels[row]
                np.testing.assert_array_equal(np.rint(image.permute(1, 2, 0).numpy() * 255), expected)


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
