"""``make torture``: the properties that Hypothesis tests, with hundreds of random examples instead of the usual 30."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torture import Torture

ROOT = Path(__file__).parents[2]
EXAMPLES = 300  # per property and round
FOLDERS = ("theory", "stats", "decisions", "data", "deploy/graph", "evaluation")


@pytest.mark.torture
@pytest.mark.parametrize("folder", FOLDERS)
def test_properties_hold_for_many_examples(folder: str, torture: Torture) -> None:
    environment = {**os.environ, "MAPLE_EXAMPLES": str(EXAMPLES), "OMP_NUM_THREADS": "1"}
    while torture.goes_on():
        seed = f"--hypothesis-seed={torture.rng.integers(2**31)}"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "hypothesis", seed, f"tests/{folder}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:]
        torture.count("properties, rounds of 300 examples", folder)
