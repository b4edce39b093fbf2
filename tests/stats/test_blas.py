"""Buffers of OpenBLAS: too little memory for one ends in an error, not in a loop without end."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
