"""Blocks of rows and normalised embeddings."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import normalize

from maple.stats.arrays import normalise, row_blocks, row_norms


@given(n=st.integers(0, 10_000), d=st.integers(1, 5_000_000))
def test_row_blocks_cover_every_row_once(n, d):
    blocks = list(row_blocks(n, d))
    assert [row for block in blocks for row in (block.start, block.stop)] == sorted(
        [block.start for block in blocks] + [block.stop for block in blocks]
    )
    assert sum(block.stop - block.start for block in blocks) == n
    assert not blocks or (blocks[0].start == 0 and blocks[-1].stop == n)


def test_normalise_equals_scikit_learn(rng):
    embeddings = rng.normal(size=(30, 5)) * 10.0 ** rng.integers(-5, 5, size=(30, 1))
    np.testing.assert_allclose(normalise(embeddings), normalize(embeddings))
    np.testing.assert_allclose(np.linalg.norm(normalise(embeddings, 0.3), axis=1), row_norms(embeddings) ** 0.7)
    assert normalise(embeddings, 0) is embeddings
    assert normalise(embeddings.astype(np.float32)).dtype == np.float32
    np.testing.assert_array_equal(normalise(np.zeros((2, 3))), 0)
    tiny = np.full((1, 4), 1e-25, dtype=np.float32)  # its square underflows in float32
    np.testing.assert_allclose(normalise(tiny), 0.5)
    np.testing.assert_allclose(normalise(tiny * 1e25 * np.float32(1e30)), 0.5)  # its square overflows
