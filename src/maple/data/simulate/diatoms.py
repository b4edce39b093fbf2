"""``simulated-diatoms``: diatom-like microorganisms as bright-field light microscopy shows them, drawn by formula.

A diatom lives in a box of glass. Seen on its lid (*valve view*) it shows outline, striae and raphe; seen from the side
(*girdle view*) it is a rectangle with bands, whatever the taxon. Classes are therefore multi-modal, and some are hard
to tell apart in one of their views, which is the case that relabelling is made for.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from maple.data.simulate.drawing import draw
from maple.data.simulate.taxa import KINDS, KNOWN, Taxon
from maple.data.simulate.traits import Array, Sampler, sample_body, sample_marks, sample_scene, sample_speck
from maple.errors import UsageError, check_integer, suggest

SMALLEST, LARGEST = 8, 512  # sides in pixels
_BLOCK = 256  # images whose traits come from one random stream: the unit of prefix stability
_PIXELS_AT_ONCE = 2**15  # drawn together: temporaries of 128 KiB stay in the cache
_SPECKS = 5  # debris specks per image, most of them invisible


class SimulatedImages(NamedTuple):
    """Images with labels and views; ``views`` indexes ``VIEWS``."""

    images: Array  # (n, S, S, 3) uint8
    labels: Array  # (n,) int64, indexes ``names``
    names: tuple[str, ...]
    views: Array  # (n,) int64


def simulated_diatoms(
    n: int, *, size: int = 32, seed: int = 0, kind: Literal["known", "near", "far"] = "known", n_taxa: int = 8
) -> SimulatedImages:
    """Draw n images of simulated diatoms (``known``, ``near``) or of other objects on the slide (``far``).

    Labels take turns, so that classes are balanced within one image. The same seed gives the same images, and fewer
    images are the first of more. ``size`` changes the resolution, not the organisms. ``n_taxa`` is the number of known
    taxa; ``near`` and ``far`` always show all of theirs.

    >>> images, labels, names, views = simulated_diatoms(16, seed=1)
    >>> images.shape, images.dtype, names[:3]
    ((16, 32, 32, 3), dtype('uint8'), ('Navicula', 'Gomphonema', 'Cymbella'))
    >>> labels
    array([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7])
    >>> simulated_diatoms(5, kind="far").names
    ('bubble', 'clump', 'fibre', 'grain', 'empty')
    """
    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r} of simulated diatoms: {suggest(str(kind), KINDS)}")
    n = check_integer("n", n, 1)
    size = check_integer("size", size, SMALLEST, LARGEST)
    seed = check_integer("seed", seed, 0)
    n_taxa = check_integer("n_taxa", n_taxa, 2, len(KNOWN))
    taxa = KNOWN[:n_taxa] if kind == "known" else KINDS[kind]

    images = np.empty((n, size, size, 3), np.uint8)
    views = np.empty(n, np.int64)
    labels = np.arange(n, dtype=np.int64) % len(taxa)
    for start in range(0, n, _BLOCK):
        block = slice(start, min(start + _BLOCK, n))
        _fill_block(images[block], views[block], taxa, start, (list(KINDS).index(kind), start // _BLOCK, seed))
    return SimulatedImages(images, labels, tuple(taxon.name for taxon in taxa), views)


def _fill_block(images: Array, views: Array, taxa: tuple[Taxon, ...], start: int, stream: tuple[int, ...]) -> None:
    """Draw the images from number ``start`` on, at most one block, into ``images`` and ``views``.

    Traits are always sampled for a whole block, and pixels drawn in groups that depend on the size alone, so that an
    image does not depend on the images after it.
    """
    rng = np.random.default_rng(stream)
    sampler = Sampler(taxa, np.arange(start, start + _BLOCK) % len(taxa), rng)
    view = sampler.view()
    views[:] = view[: len(views)]
    view = view[:, None, None]
    drawn = sample_body(sampler, view), sample_marks(sampler, view), sample_scene(sampler)
    specks = [sample_speck(sampler) for _ in range(_SPECKS)]
    size = images.shape[1]
    group = min(_BLOCK, max(1, _PIXELS_AT_ONCE // size**2))
    for first in range(0, len(images), group):
        rows = slice(first, first + group)
        body, marks, scene, *some_specks = (traits.select(rows) for traits in (*drawn, *specks))
        images[rows] = draw(size, body, marks, scene, some_specks, rng)[: len(images) - first]
