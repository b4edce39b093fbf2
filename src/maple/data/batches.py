"""Batches for a network: order, decoding ahead, augmentation.

Training batches are a function of (seed, epoch, rank) alone, so that a resumed run gets the batches of an uninterrupted
one, and torch's global random state is left alone. Only :func:`training_batches` can augment;
:func:`evaluation_batches`, which statistics and evaluation use, cannot.

Letters for shapes: B images in a batch, S side of the square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from maple.data.augment import augment_batch, parse_augment
from maple.data.image_set import ImageSet, read_pixels
from maple.errors import DataError, UsageError, suggest
from maple.text import plural

Sampler = Literal["auto", "shuffle", "balanced"]

IMAGES_PER_CLASS = 4  # K of the balanced sampler
_ORDER, _AUGMENT, _SIDE = 0, 1, 2  # random streams


# --- the order of an epoch -------------------------------------------------------------------------------------------


def count_batches(n_images: int, batch_size: int, world_size: int = 1) -> int:
    """Number of batches in an epoch, the same for every rank and sampler.

    The last, incomplete batch is dropped where it would leave a rank with fewer than two images, which batch
    normalisation cannot use.

    >>> count_batches(1000, 256), count_batches(1025, 256), count_batches(513, 256, world_size=2)
    (4, 4, 2)
    """
    whole, rest = divmod(n_images, batch_size)
    return whole + (rest // world_size >= 2)


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """Order of the images in one epoch, and the share of one rank."""

    batch_size: int  # images of a step over all ranks
    seed: int
    number: int
    sampler: Sampler = "auto"
    rank: int = 0
    world_size: int = 1


def plan_epoch(targets: np.ndarray, epoch: Epoch) -> list[np.ndarray]:
    """Rows of each batch of one rank in one epoch.

    ``shuffle`` visits every image once. ``balanced`` fills each rank's batch with P targets x K images (K = 4, less
    where the batch would hold fewer than two targets), so that every image has positives and negatives in its batch:
    targets come in random order, each once before any comes again; images likewise within a target. Rare targets are
    then seen more often, frequent ones less, in about as many images per epoch. ``auto`` is balanced where a rank's
    batch is smaller than 4 images per target, else shuffle.

    >>> [batch.tolist() for batch in plan_epoch(np.zeros(5), Epoch(batch_size=3, sampler="shuffle", seed=0, number=1))]
    [[1, 4, 3], [0, 2]]
    """
    targets = np.asarray(targets)
    per_rank = epoch.batch_size // epoch.world_size
    n_batches = count_batches(len(targets), epoch.batch_size, epoch.world_size)
    if per_rank < 1:
        raise UsageError(f"batch size {epoch.batch_size} is too small for {epoch.world_size} processes: raise it")
    if n_batches == 0:
        images, processes = plural(len(targets), "training image"), plural(epoch.world_size, "process")
        raise DataError(f"{images} cannot fill a batch for {processes}: add images")
    rng = np.random.default_rng(_seed(epoch.seed, epoch.number, _ORDER))
    sampler = epoch.sampler
    if sampler == "auto":
        sampler = "balanced" if per_rank < IMAGES_PER_CLASS * len(np.unique(targets)) else "shuffle"
    if sampler == "shuffle":
        return _plan_shuffled(rng.permutation(len(targets)), n_batches, epoch)
    if sampler != "balanced":
        raise UsageError(f"unknown sampler '{sampler}': {suggest(sampler, ['auto', 'shuffle', 'balanced'])}")
    return _plan_balanced(targets, n_batches, epoch, rng)


def _plan_shuffled(order: np.ndarray, n_batches: int, epoch: Epoch) -> list[np.ndarray]:
    size = epoch.batch_size
    steps = [order[start : start + size] for start in range(0, n_batches * size, size)]
    return [np.array_split(step, epoch.world_size)[epoch.rank] for step in steps]


def _plan_balanced(targets: np.ndarray, n_batches: int, epoch: Epoch, rng: np.random.Generator) -> list[np.ndarray]:
    per_rank = epoch.batch_size // epoch.world_size
    images_per_target = max(1, min(IMAGES_PER_CLASS, per_rank // 2))
    targets_per_batch = per_rank // images_per_target
    groups = _balanced_groups(targets, n_batches * epoch.world_size * targets_per_batch, images_per_target, rng)
    batches = groups.reshape(n_batches, epoch.world_size, -1)  # (batches, ranks, P * K)
    return list(batches[:, epoch.rank])


def _balanced_groups(targets: np.ndarray, n_groups: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Rows (groups, size): each group of one target, neighbouring groups of different ones."""
    distinct, inverse = np.unique(targets, return_inverse=True)
    sequence = _cycle(len(distinct), n_groups, rng)  # (groups,) which target
    members = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1])
    groups = np.empty((n_groups, size), dtype=np.int64)
    for target, rows in enumerate(members):
        places = np.flatnonzero(sequence == target)
        groups[places] = _draw_groups(rows, len(places), size, rng)
    return groups


def _cycle(n: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Numbers below n (length,): one random permutation after the other, never the same number twice in a row."""
    rounds: list[np.ndarray] = []
    for _ in range(-(-length // n)):
        order = rng.permutation(n)
        if rounds and n > 1 and order[0] == rounds[-1][-1]:
            order = np.roll(order, 1)
        rounds.append(order)
    return np.concatenate(rounds)[:length] if rounds else np.zeros(0, dtype=np.int64)


def _draw_groups(rows: np.ndarray, n_groups: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Groups (groups, size) of ``rows``, pass after pass in random order; a group repeats an image only if it must."""
    if len(rows) < size:
        return np.array([np.resize(rng.permutation(rows), size) for _ in range(n_groups)]).reshape(n_groups, size)
    whole = len(rows) // size  # groups per pass; the images left over differ from pass to pass
    passes = [rng.permutation(rows)[: whole * size] for _ in range(-(-n_groups // whole))]
    return np.concatenate([*passes, rows[:0]]).reshape(-1, size)[:n_groups]


def _seed(*numbers: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([number % 2**64 for number in numbers])


# --- batches ---------------------------------------------------------------------------------------------------------


def to_input(images: Tensor) -> Tensor:
    """Convert uint8 images (B, S, S, 3) to float32 (B, 3, S, S) in [0, 1], in channels_last memory."""
    return images.permute(0, 3, 1, 2).to(torch.float32).div_(255)


def alternate_flips(n_images: int, seed: int, epoch: int) -> Tensor:
    """Mask (N,) of the training images that are mirrored in an epoch: half of them, and the other half in the next.

    Each image is seen from both sides in any two epochs, which random flips leave to chance (Jordan 2024,
    https://arxiv.org/abs/2404.00498).

    >>> bool((alternate_flips(5, seed=0, epoch=1) ^ alternate_flips(5, seed=0, epoch=2)).all())
    True
    """
    first = torch.rand(n_images, generator=_generator(seed, 0, _SIDE)) < 0.5
    return first if epoch % 2 else ~first


def training_batches(
    images: ImageSet, targets: np.ndarray, epoch: Epoch, *, augment: str = "auto", workers: int = 0
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of one epoch, (x, target, index): float32 (B, 3, S, S) in [0, 1], int64 (B,), int64 (B,).

    See :func:`plan_epoch` for the order. Images that are not in memory are decoded by ``workers`` processes;
    augmentation always happens here, a whole batch at a time.
    """
    targets = np.asarray(targets, dtype=np.int64)
    if len(targets) != len(images):
        raise DataError(f"{len(images)} images but {len(targets)} targets: each image needs one target")
    augment = images.augment if augment == "auto" else augment
    alternates = "alternate-flip" in parse_augment(augment)
    mirrored = alternate_flips(len(images), epoch.seed, epoch.number) if alternates else None
    plan = plan_epoch(targets, epoch)
    generator = _generator(epoch.seed, epoch.number, _AUGMENT, epoch.rank)

    def read() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for index, batch in zip(plan, read_pixels(images, plan, workers)):
            rows = torch.from_numpy(index)
            sides = None if mirrored is None else mirrored[rows]
            x = to_input(augment_batch(torch.from_numpy(batch), augment, generator, sides))
            yield x, torch.from_numpy(targets[index]), rows

    return read()  # after the checks, which a generator would put off


def evaluation_batches(
    images: ImageSet, *, batch_size: int = 512, indices: Any = None, workers: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches (x, index) of all images, or of those at ``indices``, in order and never augmented.

    >>> digits = ImageSet.from_arrays(np.full((5, 8, 8), 255, np.uint8))
    >>> [(tuple(x.shape), index.tolist()) for x, index in evaluation_batches(digits, batch_size=3)]
    [((3, 3, 8, 8), [0, 1, 2]), ((2, 3, 8, 8), [3, 4])]
    """
    rows = np.arange(len(images)) if indices is None else np.asarray(indices, dtype=np.int64)
    plan = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    for index, batch in zip(plan, read_pixels(images, plan, workers)):
        yield to_input(torch.from_numpy(batch)), torch.from_numpy(index)


def _generator(*numbers: int) -> torch.Generator:
    state = int(_seed(*numbers).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state >> 1)
