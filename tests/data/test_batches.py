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
    count_batches,
    evaluation_batches,
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


def test_an_unknown_augmentation_is_refused_before_the_first_batch() -> None:
    with pytest.raises(UsageError, match="'flip'"):
        training_batches(image_set(), np.zeros(40), batch_size=8, augment="flipp", seed=0, epoch=1)


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
