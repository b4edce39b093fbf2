"""OpenBLAS: too little memory for a buffer is an error, not a loop without end; small products take one thread."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from maple.stats._blas import limit_threads, one_thread

SCRIPT = """
import resource
import numpy as np, scipy.linalg
from pathlib import Path
has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (has + {room}, resource.RLIM_INFINITY))
try:
    import maple.stats.covariance
except MemoryError:
    print("too small")
else:
    resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
    scipy.linalg.cholesky(np.eye(64))
    print("enough")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
@pytest.mark.parametrize(("mebibytes", "said"), [(30, "too small"), (1000, "enough")])
def test_memory_for_no_buffer_is_an_error(mebibytes: int, said: str) -> None:
    script = SCRIPT.format(room=mebibytes * 2**20)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == said, done.stderr


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_small_products_take_one_thread_and_large_ones_all():
    with threadpool_limits(3, user_api="blas"):
        with one_thread():
            assert blas_threads() == {1}
        assert blas_threads() == {3}
        with one_thread(10**12):
            assert blas_threads() == {3}


def test_threads_that_overlap_do_not_leave_the_limit_behind():
    with threadpool_limits(3, user_api="blas"):
        first, second = one_thread(), one_thread()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert blas_threads() == {1}
        second.__exit__(None, None, None)
        assert blas_threads() == {3}
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(enter_often, range(4)))
        assert blas_threads() == {3}


def enter_often(_: int) -> None:
    for _ in range(100):
        with one_thread():
            pass


def test_a_limit_without_a_context_stays():
    with threadpool_limits(3, user_api="blas"):
        limit_threads(2)
        assert blas_threads() == {2}
