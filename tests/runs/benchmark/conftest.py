"""All suites in the tiny profile, which the tests of this folder share."""

from __future__ import annotations

import os

import pytest
from filelock import FileLock

from maple.runs.benchmark.suites import run_suites
from maple.runs.requests import BenchmarkRequest


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    """All suites in the tiny profile, into one folder that the processes of a test session share."""
    root = tmp_path_factory.getbasetemp()
    out = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "benchmark"
    with FileLock(f"{out}.lock"):  # the second process finds everything done
        return out, dict(run_suites(BenchmarkRequest(("all",), "tiny", out=out)))
