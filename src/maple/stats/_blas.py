"""Buffers of OpenBLAS: without room for one, OpenBLAS asks for it again without end, in NumPy as in SciPy."""

from __future__ import annotations

import mmap
from functools import cache

import numpy as np
from scipy.linalg import cholesky

_BUFFERS = 2 * 2**26  # bytes: one of 32 MiB for each of the two libraries, and room to align them
_SIDE = 64  # of a matrix that takes a buffer; smaller ones do without


@cache
def reserve_buffers() -> None:
    """Let both libraries take their buffers, which they keep; :class:`MemoryError` where memory is too small."""
    try:
        mmap.mmap(-1, _BUFFERS).close()
    except OSError as error:
        raise MemoryError(f"{error.strerror or error}: no room for buffers of matrix products") from None
    matrix = np.eye(_SIDE)
    np.linalg.cholesky(matrix @ matrix)
    cholesky(matrix)
