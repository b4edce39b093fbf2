"""Conversion, blocks of rows, normalised embeddings, records of arrays, and checks of values."""

from __future__ import annotations

import re
from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import normalize

from maple.errors import DataError, UsageError
from maple.stats.arrays import (
    BLOCK_ELEMENTS,
    ArrayRecord,
    add_prefix,
    as_array,
    as_embeddings,
    broken_rows,
    check_finite,
    check_ids,
    check_lengths,
    check_rows,
    check_unit,
    check_values,
    list_rows,
    normalise,
    row_blocks,
    row_norms,
    with_prefix,
)


@given(n=st.integers(0, 10_000), d=st.integers(1, 5_000_000))
def test_row_blocks_cover_every_row_once(n, d):
    blocks = list(row_blocks(n, d))
    assert [row for block in blocks for row in (block.start, block.stop)] == sorted(
        [block.start for block in blocks] + [block.stop for block in blocks]
    )
    assert sum(block.stop - block.start for block in blocks) == n
    assert not blocks or (blocks[0].start == 0 and blocks[-1].stop == n)


@given(d=st.integers(1, 5_000_000), elements=st.none() | st.integers(1, 2**22), min_rows=st.integers(1, 2048))
def test_row_blocks_are_as_long_as_their_limit_allows(d, elements, min_rows):
    limit = max(min_rows, (elements or BLOCK_ELEMENTS) // d)  # rows
    step = next(row_blocks(2**23, d, elements=elements, min_rows=min_rows)).stop
    assert step.bit_count() == 1 and step <= limit < 2 * step  # the largest power of two


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 4)])
def test_broken_rows_are_counted_in_rows(shape):
    values = np.zeros(shape)
    values[2] = -np.inf
    values.reshape(6, -1)[4, -1] = np.nan
    assert broken_rows(values).tolist() == [2, 4]
    assert broken_rows(np.zeros(shape)).tolist() == []


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


def test_tensors_of_any_type_become_arrays():
    torch = pytest.importorskip("torch")
    values = torch.tensor([[1.5, 2.0]], requires_grad=True)
    np.testing.assert_array_equal(as_array(values), [[1.5, 2.0]])
    assert as_array(values.to(torch.bfloat16)).dtype == np.float32
    assert as_embeddings(values.half()).dtype == as_embeddings([[1, 2]]).dtype == np.float32
    assert as_embeddings(np.zeros((1, 2))).dtype == np.float64


@pytest.mark.parametrize(("values", "dim"), [([1.0, 2.0], None), ([[1.0, 2.0]], 3)])
def test_embeddings_are_a_table_of_known_width(values, dim):
    with pytest.raises(UsageError, match="embeddings"):
        as_embeddings(values, dim)


@dataclass(frozen=True, eq=False)
class Record(ArrayRecord):
    table: np.ndarray
    share: float = 0.5
    count: int = 3
    is_tied: bool = True
    weights: np.ndarray | None = None


@pytest.mark.parametrize("weights", [None, np.arange(2.0)])
def test_records_come_back_from_their_arrays(weights):
    record = Record(np.eye(2), 0.25, 7, False, weights)
    arrays = record.to_arrays()
    assert ("weights" in arrays) == (weights is not None)
    found = Record.from_arrays(arrays)
    np.testing.assert_array_equal(found.table, np.eye(2))
    assert (found.share, found.count, found.is_tied) == (0.25, 7, False)
    assert type(found.share) is float and type(found.count) is int and type(found.is_tied) is bool
    assert found.weights is weights


def test_prefixes_are_added_and_removed():
    arrays = {"mean": np.zeros(1), "scale": np.ones(1)}
    named = add_prefix("raw.", arrays) | {"other": np.ones(2)}
    assert with_prefix(named, "raw.").keys() == arrays.keys()


@pytest.mark.parametrize(
    ("check", "values", "error"),
    [
        (check_values, [[1.0]], UsageError),
        (check_values, [], DataError),
        (check_values, [np.nan], DataError),
        (check_finite, [np.inf], DataError),
        (check_unit, [1.1], DataError),
        (check_ids, [0.5], DataError),
        (check_ids, [np.inf], DataError),
        (lambda values, name: check_ids(values, name, 3), [3], DataError),
        (check_rows, np.array([[0.0], [np.inf]]), DataError),
    ],
)
def test_checks_name_the_array(check, values, error):
    with pytest.raises(error, match="logits"):
        check(values, "logits")


def test_checks_pass_what_can_be_used():
    np.testing.assert_array_equal(check_unit([-1e-6, 0.5, 1 + 1e-6], "p"), [0, 0.5, 1])  # rounding is clipped
    assert check_ids([0.0, 2.0], "labels", 3).dtype == np.int64
    assert len(check_values([], "scores", may_be_empty=True)) == 0
    check_lengths(a=np.zeros(2), b=np.ones(2))
    with pytest.raises(UsageError, match="a 2, b 3"):
        check_lengths(a=np.zeros(2), b=np.zeros(3))


@pytest.mark.parametrize("n", [1, 2, 5, 6, 1005])
def test_the_first_rows_are_listed_and_the_others_counted(n):
    numbers = [int(each.replace(",", "")) for each in re.findall(r"[\d,]*\d", list_rows(np.arange(10, 10 + n)))]
    assert numbers == [*range(10, 10 + min(n, 5)), *([n - 5] if n > 5 else []), 0]  # counted from 0


def test_a_norm_of_large_or_small_entries_is_that_of_mpmath():
    rows = np.array([[3e200, 4e200], [3e-200, 4e-200], [0.0, 0.0], [3.0, -4.0], [5e-324, 0.0], [1e308, 1e308]])
    expected = [float(mpmath.sqrt(sum(mpmath.mpf(float(each)) ** 2 for each in row))) for row in rows]
    np.testing.assert_allclose(row_norms(rows), expected, rtol=1e-15)
    small = np.array([[3e-30, 4e-30], [3e30, 4e30]], dtype=np.float32)  # squares leave float32
    np.testing.assert_allclose(row_norms(small), np.hypot(*small.astype(np.float64).T), rtol=1e-15)
