"""Shares and indices of splits: stratified, independent of order and machine, against explicit loops."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from image_files import arrays
from maple.data.image_set import ImageSet
from maple.data.shares import fold_shares, share_out, split_indices
from maple.errors import UsageError

SHARES = (0.7, 0.1, 0.1, 0.1)


def parts_of(images: ImageSet, seed: int = 0) -> list[set[bytes]]:
    return [set(images.keys[rows]) for rows in split_indices(images.labels, images.keys, SHARES, seed)]


def test_splits_are_stratified_and_complete() -> None:
    labels = np.repeat([0, 1, 2], [100, 37, 4])
    keys = np.array([f"{i:032x}" for i in range(141)], dtype="S32")
    parts = split_indices(labels, keys, SHARES, seed=0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(141))
    counts = np.array([np.bincount(labels[rows], minlength=3) for rows in parts])
    assert counts.tolist() == [[70, 26, 1], [10, 4, 1], [10, 4, 1], [10, 3, 1]]


def test_splits_do_not_depend_on_the_order_of_rows(rng: np.random.Generator) -> None:
    images = arrays(200, 5)
    assert parts_of(images) == parts_of(images.subset(rng.permutation(200)))
    assert parts_of(images) != parts_of(images, seed=1)


def test_splits_are_the_same_in_every_process_and_release() -> None:
    code = (
        "import numpy as np; from maple.data.shares import split_indices;"
        "k = np.array([b'%032x' % (i * i) for i in range(24)], dtype='S32');"
        "print([r.tolist() for r in split_indices(np.arange(24) % 2, k, (.5, .25, .25), 3)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1")
    }
    assert outputs == {GOLDEN_SPLIT}


GOLDEN_SPLIT = "[[0, 2, 3, 4, 6, 7, 15, 19, 20, 21, 22, 23], [1, 12, 13, 16, 17, 18], [5, 8, 9, 10, 11, 14]]\n"


def test_splits_against_an_explicit_loop() -> None:
    images = arrays(90, 3)
    expected: list[list[int]] = [[], [], [], []]
    for label in range(3):
        rows = np.flatnonzero(images.labels == label).tolist()
        rows.sort(key=lambda i: hashlib.blake2b(images.keys[i], digest_size=16, key=b"7").digest())
        for part, start, stop in zip(expected, (0, 21, 24, 27), (21, 24, 27, 30)):  # 70, 10, 10, 10 % of 30
            part.extend(rows[start:stop])
    parts = split_indices(images.labels, images.keys, SHARES, seed=7)
    assert [part.tolist() for part in parts] == [sorted(part) for part in expected]


def test_copies_of_an_image_stay_in_one_split(rng: np.random.Generator) -> None:
    pixels = rng.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    source = rng.integers(0, 60, 300)  # every image several times, also under both labels
    images = ImageSet.from_arrays(pixels[source], rng.integers(0, 2, 300))
    for seed in range(5):
        parts = parts_of(images, seed)
        assert sum(len(part) for part in parts) == len(set().union(*parts))
        for rows in split_indices(images.labels, images.keys, SHARES, seed):
            assert set(images.labels[rows]) == {0, 1}


@settings(max_examples=200, deadline=None)
@given(st.integers(4, 500), st.lists(st.floats(0.01, 1), min_size=4, max_size=4), st.integers(0, 3))
def test_shares_are_met_to_one_image_and_never_empty(n: int, weights: list[float], zero: int) -> None:
    weights[zero] = 0.0
    shares = np.array(weights) / sum(weights)
    counts = share_out(n, shares)
    assert counts.sum() == n and (counts[shares > 0] >= 1).all() and counts[zero] == 0
    if (n * shares[shares > 0] >= 1).all():
        assert (np.abs(counts - n * shares) < 1).all()


def test_given_sources_fold_their_share_into_train() -> None:
    assert fold_shares(SHARES, ()) == SHARES
    assert fold_shares(SHARES, ("test", "validation")) == (0.9, 0.0, 0.1, 0.0)
    for shares in ((0.5, 0.1, 0.1, 0.1), (1.2, -0.1, -0.1, 0.0), (0.5, 0.5)):
        with pytest.raises(UsageError, match="splits"):
            fold_shares(shares, ())
    with pytest.raises(UsageError, match="splits"):
        fold_shares((0.0, 0.5, 0.5, 0.0), ())
