"""OpenBLAS, of NumPy and of SciPy: its buffers and its threads.

Without room for a buffer, OpenBLAS asks for it again without end. Its threads wait for the next product in a loop that
takes a processor for about 30 ms: between batches of a network, that is time that the network does not get.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from scipy.linalg import cholesky
from threadpoolctl import ThreadpoolController

_BUFFERS = 2 * 2**26  # bytes: one of 32 MiB for each of the two libraries, and room to align them
_SIDE = 64  # of a matrix that takes a buffer; smaller ones do without
_SERIAL_PRODUCTS = 2**27  # multiplications below which several threads do not pay: a few milliseconds of one
_lock = threading.Lock()
_within: list[Any] = []  # the limit of one thread, once for each thread of the program that is within it


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


@contextmanager
def one_thread(n_products: int = 0) -> Iterator[None]:
    """Limit BLAS to one thread where fewer than 2^27 multiplications follow.

    The limit is one of the process: of several threads within it, the last one that leaves it ends it.

    >>> with one_thread():
    ...     float(np.ones((2, 2)).sum())
    4.0
    """
    if n_products >= _SERIAL_PRODUCTS:
        yield
        return
    with _lock:
        _within.append(_within[0] if _within else limit_threads(1))
    try:
        yield
    finally:
        with _lock:
            limit = _within.pop()
            if not _within:
                limit.restore_original_limits()


def limit_threads(n: int | None) -> Any:
    """Let BLAS use at most ``n`` threads from now on, within a ``with`` statement until its end."""
    return _pools().limit(limits=n)


@cache
def _pools() -> ThreadpoolController:
    """The thread pools of BLAS; looking for them takes milliseconds."""
    return ThreadpoolController().select(user_api="blas")
