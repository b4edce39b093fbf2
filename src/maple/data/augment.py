"""Augmentation of training batches: shifts, flips, turns, cutout, mixing; and shuffled patches as outliers.

PixMix (Hendrycks et al. 2022, https://arxiv.org/abs/2112.05135) mixes training images with structurally complex
pictures, which improves the detection of unknown images. The publication downloads its pictures; here they are
attractors of random iterated function systems, drawn from a seed.

Letters for shapes: B images in a batch, S side of the square, F fractals, P points of a fractal.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from maple.errors import UsageError, suggest

AUGMENTATIONS = ("crop", "translate", "flip", "alternate-flip", "flip-both", "turn", "cutout", "mix")
N_FRACTALS = 500
MAPS = 4  # affine maps of a system
POINTS, STEPS, SETTLED = 300, 60, 10  # points iterated at once, their steps, first steps that are not drawn
MAX_ROUNDS = 4  # k of the publication for CIFAR
BETA = 3.0  # beta of the publication
PATCH_GRIDS = (4, 8)  # patches per side of a shuffled image


def parse_augment(augment: str) -> frozenset[str]:
    """Parse ``'crop,flip'`` to a set of names; ``'none'`` is the empty set.

    >>> sorted(parse_augment("crop, flip-both"))
    ['crop', 'flip-both']
    """
    names = frozenset(name.strip() for name in augment.split(","))
    if names == {"none"}:
        return frozenset()
    for name in sorted(names - set(AUGMENTATIONS)):
        raise UsageError(f"unknown augmentation '{name}': {suggest(name, [*AUGMENTATIONS, 'none'])}")
    for pair in ({"crop", "translate"}, {"flip", "alternate-flip"}, {"flip-both", "alternate-flip"}):
        if pair <= names:
            raise UsageError(f"augmentation '{augment}': '{max(pair)}' and '{min(pair)}' exclude each other")
    return names


def augment_batch(images: Tensor, augment: str, generator: torch.Generator, mirrored: Tensor | None = None) -> Tensor:
    """Augment each image of a batch (B, S, S, 3) on its own.

    ``crop`` shifts by up to S / 8 pixels in both directions, with the border reflected, ``translate`` by up to S / 16;
    ``flip`` mirrors left-right, ``flip-both`` left-right and up-down, each with probability one half;
    ``alternate-flip`` mirrors the images in the mask ``mirrored`` (B,), see
    :func:`~maple.data.batches.alternate_flips`; ``turn`` exchanges rows and columns with probability one half, so that
    with ``flip-both`` all eight positions of a square are equally frequent. These only choose the row and the column
    that a pixel is taken from, so one gather does everything. After it, ``mix`` mixes images with fractals
    (:func:`mix_batch`) and ``cutout`` covers a square of half the side with the mean colour of the batch (DeVries &
    Taylor 2017, https://arxiv.org/abs/1708.04552).

    >>> batch = torch.arange(2 * 8 * 8 * 3, dtype=torch.uint8).reshape(2, 8, 8, 3)
    >>> augment_batch(batch, "crop,flip", torch.Generator().manual_seed(0)).shape
    torch.Size([2, 8, 8, 3])
    """
    names = parse_augment(augment)
    if not names:
        return images
    n, size = images.shape[:2]
    rows = torch.arange(size).expand(n, size)  # (B, S): the row that each row of the result is taken from
    columns = rows
    if names & {"crop", "translate"}:
        reach = size // 8 if "crop" in names else max(1, size // 16)
        rows = _shift(rows, size, reach, generator)
        columns = _shift(columns, size, reach, generator)
    if names & {"flip", "flip-both"}:
        columns = _mirror(columns, size, generator)
    if "alternate-flip" in names:
        if mirrored is None:
            raise UsageError("augmentation 'alternate-flip' needs the mask of mirrored images: call alternate_flips")
        columns = torch.where(mirrored[:, None], size - 1 - columns, columns)
    if "flip-both" in names:
        rows = _mirror(rows, size, generator)
    first = torch.arange(n)[:, None] * size  # (B, 1)
    flat = (first + rows)[:, :, None] * size + columns[:, None, :]  # (B, S, S): pixels of the whole batch, counted
    if "turn" in names:
        turned = torch.rand((n, 1, 1), generator=generator) < 0.5
        flat = torch.where(turned, flat.transpose(1, 2), flat)
    images = images.reshape(n * size * size, -1).index_select(0, flat.reshape(-1)).reshape(images.shape)
    if "mix" in names:
        images = mix_batch(images, generator)
    return _cut_out(images, generator) if "cutout" in names else images


def _cut_out(images: Tensor, generator: torch.Generator) -> Tensor:
    """Cover a square of half the side of each image (B, S, S, 3), around a random pixel."""
    n, size = images.shape[:2]
    centres = torch.randint(0, size, (2, n, 1), generator=generator)
    reach = size // 4
    index = torch.arange(size)
    rows, columns = ((index >= centre - reach) & (index < centre + reach) for centre in centres)  # (B, S) each
    covered = (rows[:, :, None] & columns[:, None, :])[..., None]  # (B, S, S, 1)
    colour = images.float().mean((0, 1, 2)).round().to(images.dtype)  # (3,)
    return torch.where(covered, colour, images)


def _shift(index: Tensor, size: int, reach: int, generator: torch.Generator) -> Tensor:
    """Shift (B, S) indices by up to ``reach`` per image; indices beyond the border are reflected."""
    shifted = index + torch.randint(-reach, reach + 1, (len(index), 1), generator=generator)
    return (size - 1) - ((size - 1) - shifted.abs()).abs()


def _mirror(index: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Reverse the (B, S) indices of half of the images."""
    mirrored = torch.rand((len(index), 1), generator=generator) < 0.5
    return torch.where(mirrored, size - 1 - index, index)


# --- fractals and patches --------------------------------------------------------------------------------------------


@cache
def make_fractals(size: int, n: int = N_FRACTALS, seed: int = 0) -> Tensor:
    """Pictures (F, S, S, 3), uint8: coloured attractors of random affine maps on a coloured background.

    >>> make_fractals(16, n=3).shape
    torch.Size([3, 16, 16, 3])
    """
    rng = np.random.default_rng(seed)
    matrices, shifts, weights = _random_systems(rng, n)
    colours = rng.random((n, MAPS, 3))
    pictures = np.repeat(rng.random((n, 1, 3)) * rng.random((n, 1, 1)), size * size, axis=1)  # (F, S * S, 3)
    points = rng.random((n, POINTS, 2))
    rows = np.arange(n)[:, None]
    for step in range(STEPS):
        chosen = (rng.random((n, POINTS, 1)) > weights.cumsum(1)[:, None, :-1]).sum(2)  # (F, P): index of the map
        points = np.einsum("fpij,fpj->fpi", matrices[rows, chosen], points) + shifts[rows, chosen]
        if step < SETTLED:
            continue
        low, high = points.min(1, keepdims=True), points.max(1, keepdims=True)
        places = ((points - low) / np.maximum(high - low, 1e-9) * (size - 1e-6)).astype(int)  # (F, P, 2)
        pictures[rows, places[..., 0] * size + places[..., 1]] = colours[rows, chosen]
    return torch.from_numpy((pictures * 255).astype(np.uint8)).reshape(n, size, size, 3)


def _random_systems(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Contractions (F, MAPS, 2, 2), shifts (F, MAPS, 2) and probabilities (F, MAPS), by the area of the map."""
    turn, lean = rng.uniform(0, 2 * np.pi, (2, n, MAPS))
    scales = rng.uniform(0.2, 0.85, (n, MAPS, 2))

    def rotation(angle: np.ndarray) -> np.ndarray:
        cosine, sine = np.cos(angle), np.sin(angle)
        return np.stack([np.stack([cosine, -sine], -1), np.stack([sine, cosine], -1)], -2)

    matrices = rotation(turn) * scales[..., None, :] @ rotation(lean)
    areas = scales.prod(-1) + 0.05
    return matrices, rng.uniform(-1, 1, (n, MAPS, 2)), areas / areas.sum(1, keepdims=True)


def mix_batch(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mix each image of a batch (B, S, S, 3), uint8, with up to four fractals or changed copies of itself.

    Each round adds or multiplies, with random shares in which the image usually dominates.
    """
    n, size = images.shape[:2]
    fractals = make_fractals(size)
    start = images.to(torch.float32).div_(255)
    mixed = torch.where(_coin(n, generator), start, _change(start, generator))
    rounds = torch.randint(0, MAX_ROUNDS + 1, (n,), generator=generator)
    for number in range(MAX_ROUNDS):
        rows = torch.nonzero(rounds > number)[:, 0]
        if not len(rows):
            break
        pictures = fractals[torch.randint(0, len(fractals), (len(rows),), generator=generator)]
        others = torch.where(
            _coin(len(rows), generator), pictures.to(torch.float32).div_(255), _change(start[rows], generator)
        )
        mixed[rows] = _mix(mixed[rows], others, generator)
    return mixed.mul_(255).round_().to(torch.uint8)


def shuffle_patches(images: Tensor) -> Tensor:
    """Images (B, C, S, S) whose patches, a grid of 4 x 4 or 8 x 8, change places at random (torch's own generator).

    Textures and colours stay, the object is gone: unknown images that need no other data (Noroozi & Favaro 2016 shuffle
    likewise, https://arxiv.org/abs/1603.09246). A side that neither 4 nor 8 divides is cut into single pixels.

    >>> image = torch.arange(64.0).reshape(1, 1, 8, 8)
    >>> bool((shuffle_patches(image).flatten().sort().values == image.flatten()).all())
    True
    """
    size = images.shape[2]
    grids = [grid for grid in PATCH_GRIDS if size % grid == 0] or [size]
    parts = zip(images.chunk(len(grids)), grids, strict=False)  # fewer parts than grids for a single image
    return torch.cat([_shuffle_grid(part, grid) for part, grid in parts])


def quarter_turns(n: int) -> Tensor:
    """The turns (n,) of :func:`turn_images`, in quarters: 1, 2, 3, 1, ..."""
    return 1 + torch.arange(n) % 3


def turn_images(images: Tensor) -> Tensor:
    """Images (B, C, S, S) turned by 90, 180, 270, 90, ... degrees: the task of telling the turn needs no labels.

    Gidaris et al. 2018 learn features from it, https://arxiv.org/abs/1803.07728.

    >>> turn_images(torch.tensor([[[[1, 2], [3, 4]]]]).repeat(2, 1, 1, 1))[:, 0].tolist()
    [[[2, 4], [1, 3]], [[4, 3], [2, 1]]]
    """
    if images.shape[2] != images.shape[3]:
        sides = " x ".join(map(str, images.shape[2:]))
        raise UsageError(f"images of {sides} pixels cannot be turned by a quarter: make them square")
    turned = torch.empty_like(images)
    for quarters in (1, 2, 3):
        turned[quarters - 1 :: 3] = torch.rot90(images[quarters - 1 :: 3], quarters, (2, 3))
    return turned


def _shuffle_grid(images: Tensor, grid: int) -> Tensor:
    """Permute the grid x grid patches of each image (B, C, S, S)."""
    n, channels, size = images.shape[:3]
    side = size // grid
    patches = images.reshape(n, channels, grid, side, grid, side).permute(0, 2, 4, 1, 3, 5)  # (B, g, g, C, s, s)
    order = torch.rand(n, grid * grid, device=images.device).argsort(1)  # (B, g * g)
    shuffled = patches.reshape(n, grid * grid, -1).gather(1, order[..., None].expand(-1, -1, channels * side * side))
    return shuffled.reshape(n, grid, grid, channels, side, side).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)


def _mix(first: Tensor, second: Tensor, generator: torch.Generator) -> Tensor:
    """Sums or products of images in [0, 1], with the weights of the publication."""
    n = len(first)
    own, other = _beta(n, generator), 1 - _beta(n, generator)  # Beta(3, 1) and Beta(1, 3)
    added = (own * (2 * first - 1) + other * (2 * second - 1) + 1) / 2
    multiplied = (2 * first).clamp_min(1e-6) ** own * (2 * second).clamp_min(1e-6) ** other / 2
    return torch.where(_coin(n, generator), added, multiplied).clamp_(0, 1)


def _change(images: Tensor, generator: torch.Generator) -> Tensor:
    """Solarise, posterise or stretch the contrast of each image (B, S, S, 3) in [0, 1]."""
    n = len(images)
    choice = torch.randint(0, 3, (n, 1, 1, 1), generator=generator)
    solarised = torch.where(images > 0.5 + 0.5 * _uniform(n, generator), 1 - images, images)
    levels = torch.randint(2, 9, (n, 1, 1, 1), generator=generator)
    posterised = (images * levels).floor().div(levels).clamp_max(1)
    low, high = images.amin((1, 2), keepdim=True), images.amax((1, 2), keepdim=True)
    stretched = (images - low) / (high - low).clamp_min(1e-3)
    return torch.where(choice == 0, solarised, torch.where(choice == 1, posterised, stretched))


def _uniform(n: int, generator: torch.Generator) -> Tensor:
    return torch.rand((n, 1, 1, 1), generator=generator)


def _coin(n: int, generator: torch.Generator) -> Tensor:
    return _uniform(n, generator) < 0.5


def _beta(n: int, generator: torch.Generator) -> Tensor:
    """Draws of Beta(3, 1), by inversion: the cube root of uniform numbers."""
    return _uniform(n, generator) ** (1 / BETA)
