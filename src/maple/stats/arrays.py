"""Arrays: conversion of tensors and lists, records of arrays, blocks of rows, normalised embeddings, checks of values.

Torch tensors are accepted in place of arrays. Shapes: N images, D embedding, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from maple.errors import DataError, UsageError

# Elements per row block of elementwise operations: a block should fit into the cache.
BLOCK_ELEMENTS = 1 << 20
# Tolerance for float32 softmax sums above 1; such probabilities are clipped, larger ones rejected.
PROBABILITY_SLACK = 1e-5
_SMALLEST_NORM = np.finfo(np.float64).tiny  # whose inverse is finite; smaller vectors count as zero
_LISTED = 5  # row numbers in a message, at most


def as_array(values: Any) -> np.ndarray:
    """A NumPy array from an array, a list or a torch tensor (of any device and float type)."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # NumPy has none
            values = values.float()
    return np.asarray(values)


def as_embeddings(values: Any, dim: int | None = None) -> np.ndarray:
    """An (N, D) array of float32 or float64, D being ``dim`` if given; half precision and integers become float32."""
    array = as_array(values)
    if array.ndim != 2:
        raise UsageError(f"embeddings have shape {array.shape}: give a table of N rows and D columns")
    if dim is not None and array.shape[1] != dim:
        raise UsageError(f"embeddings have {array.shape[1]} columns instead of {dim}: use the backbone of the fit")
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def row_blocks(n_rows: int, n_columns: int, *, elements: int | None = None, min_rows: int = 512) -> Iterator[slice]:
    """Consecutive slices over the rows, each of at most ``elements`` (``BLOCK_ELEMENTS``), or ``min_rows`` rows.

    The step is a power of two: BLAS works in panels, and a block that is not a whole number of them costs a tenth more.

    >>> list(row_blocks(5000, 512))
    [slice(0, 2048, None), slice(2048, 4096, None), slice(4096, 5000, None)]
    """
    rows = max(min_rows, (elements or BLOCK_ELEMENTS) // max(1, n_columns))
    step = 1 << (rows.bit_length() - 1)
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def row_norms(embeddings: np.ndarray) -> np.ndarray:
    """Euclidean norm of each row (N,); rows whose squares over- or underflow are computed again, in float64."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares = np.vecdot(embeddings, embeddings)  # one BLAS call per row: faster than einsum
        norms = np.sqrt(squares)
        extreme = ~((squares > 1e-30) & (squares < 1e30))  # also catches NaN
        if extreme.any():
            norms = norms.astype(np.float64)
            norms[extreme] = _extreme_norms(embeddings[extreme].astype(np.float64))
    return norms


def _extreme_norms(embeddings: np.ndarray) -> np.ndarray:
    """Norms (N,) in float64 of rows whose squares over- or underflow: each row is divided by its largest entry."""
    largest = np.abs(embeddings).max(axis=1, initial=0.0)
    scaled = embeddings / np.where(largest > 0, largest, 1.0)[:, None]
    return largest * np.linalg.norm(scaled, axis=1)


def norm_factors(embeddings: np.ndarray, exponent: float) -> np.ndarray:
    """1 / ||e||^exponent for each row (N,); 1 for a zero vector, which stays zero."""
    norms = row_norms(embeddings)
    norms[norms < _SMALLEST_NORM] = 1
    return norms**-exponent


def normalise(embeddings: Any, exponent: float = 1.0) -> np.ndarray:
    """Each embedding divided by its norm to the power ``exponent``: e / ||e||^exponent; zero vectors stay zero.

    0 leaves embeddings unchanged (the paper), 1 puts them on the unit sphere (Mahalanobis++).

    >>> normalise([[3.0, 4.0], [0.0, 0.0]])
    array([[0.6, 0.8],
           [0. , 0. ]])
    """
    embeddings = as_embeddings(embeddings)
    if exponent == 0:
        return embeddings
    factors = norm_factors(embeddings, exponent)
    with np.errstate(invalid="ignore"):  # an infinite embedding becomes NaN here and is reported where it is used
        return (embeddings * factors[:, None]).astype(embeddings.dtype, copy=False)


def broken_rows(values: np.ndarray) -> np.ndarray:
    """The positions of the rows with NaN or infinity.

    >>> broken_rows(np.array([[1.0, 2.0], [np.nan, 0.0]]))
    array([1])
    """
    return np.flatnonzero(~np.isfinite(values).all(axis=tuple(range(1, values.ndim))))


def list_rows(rows: np.ndarray) -> str:
    """Row numbers for a message; a few of many.

    >>> list_rows(np.array([4])), list_rows(np.arange(8))
    ('row 4, counted from 0', 'rows 0, 1, 2, 3, 4 and 3 more, counted from 0')
    """
    more = f" and {len(rows) - _LISTED:,} more" if len(rows) > _LISTED else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:_LISTED]))}{more}, counted from 0"


def check_rows(values: np.ndarray, name: str) -> np.ndarray:
    """The same rows (N, ...); an error if some hold NaN or infinity.

    >>> check_rows(np.array([[1.0, 2.0], [np.nan, 0.0]]), "embeddings")
    Traceback (most recent call last):
    ...
    maple.errors.DataError: 1 of 2 embeddings hold NaN or infinity (row 1, counted from 0): leave those images out
    """
    rows = broken_rows(values)
    if len(rows):
        found = f"{len(rows):,} of {len(values):,} {name} hold NaN or infinity ({list_rows(rows)})"
        raise DataError(f"{found}: leave those images out")
    return values


# ---------------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, eq=False)
class ArrayRecord:
    """Base of frozen dataclasses of arrays and numbers that are saved as arrays by field name."""

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The record as arrays, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: np.atleast_1d(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """The inverse of :meth:`to_arrays`."""
        scalars = {each.name: _SCALARS[each.type] for each in fields(cls) if each.type in _SCALARS}
        numbers = {name: kind(arrays[name].item()) for name, kind in scalars.items()}
        return cls(**{**arrays, **numbers})


_SCALARS: dict[Any, type] = {"float": float, "int": int, "bool": bool}  # by annotation


def add_prefix(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays with ``prefix`` in front of each name."""
    return {prefix + name: array for name, array in arrays.items()}


def with_prefix(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays whose names start with ``prefix``, without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


# ----------------------------------------------------------------------------------------------------------- checks


_FIND = "find the images they come from"


def _rows_where(mask: np.ndarray) -> np.ndarray:
    """The positions of the rows with a True; 0 for a scalar."""
    return np.unique(np.nonzero(np.atleast_1d(mask))[0])


def check_values(values: Any, name: str, ndim: int = 1, may_be_empty: bool = False) -> np.ndarray:
    """The array in float64, with ``ndim`` dimensions, at least one row and no NaN."""
    array = as_array(values).astype(np.float64)
    if array.ndim != ndim:
        raise UsageError(f"{name} has the shape {array.shape}: give an array with {ndim} dimension(s)")
    if array.size == 0 and not may_be_empty:
        raise DataError(f"{name} is empty: give at least one image")
    if missing := int(np.isnan(array).sum()):
        where = list_rows(_rows_where(np.isnan(array)))
        raise DataError(f"{name} holds {missing} NaN among {array.size} values ({where}): {_FIND}")
    return array


def check_finite(values: Any, name: str) -> np.ndarray:
    """The vector, also without infinities."""
    array = check_values(values, name)
    if infinite := int(np.isinf(array).sum()):
        where = list_rows(_rows_where(np.isinf(array)))
        raise DataError(f"{name} holds {infinite} infinite values among {array.size} ({where}): {_FIND}")
    return array


def check_unit(values: Any, name: str, ndim: int = 1) -> np.ndarray:
    """Probabilities; rounding errors outside [0, 1] are clipped."""
    array = check_values(values, name, ndim)
    if outside := int(((array < -PROBABILITY_SLACK) | (array > 1 + PROBABILITY_SLACK)).sum()):
        raise DataError(f"{name} holds {outside} values outside [0, 1]: give probabilities, not logits or scores")
    return np.clip(array, 0.0, 1.0)


def check_ids(values: Any, name: str, n_classes: int | None = None) -> np.ndarray:
    """Integer ids; with ``n_classes``, ids of those classes."""
    array = check_finite(values, name)
    ids = array.astype(np.int64)
    if not np.array_equal(ids, array):
        raise DataError(f"{name} holds values that are not whole numbers: give class ids")
    if n_classes is not None and (wrong := int(((ids < 0) | (ids >= n_classes)).sum())):
        raise DataError(f"{name} holds {wrong} ids outside 0..{n_classes - 1}: leave out images of unknown class")
    return ids


def check_lengths(**arrays: np.ndarray) -> None:
    """Raise UsageError if the arrays differ in their number of images."""
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise UsageError(f"numbers of images differ ({lengths}): give one entry per image in each")
