"""The service at twice its saturating rate, with hostile images, killed decoders and a model that is loaded again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torture import Torture

ROOT = Path(__file__).parents[2]


@pytest.mark.torture
def test_storm(tmp_path: Path, torture: Torture) -> None:
    if not (ROOT / "benchmarks").exists():
        pytest.skip("the benchmarks are not part of a source distribution")
    out = tmp_path / "storm.json"
    script = [sys.executable, "benchmarks/serve_load.py", "--storm", "--deadline-ms", "10000", "--json", str(out)]
    while True:
        done = subprocess.run(
            [*script, "--seconds", "20", "--probe-seconds", "4"], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        found = json.loads(out.read_text())
        assert done.returncode == 0, found["targets"]
        torture.count("load", "seconds at twice saturation", round(found["seconds"]))
        torture.count("load", "requests answered", sum(found["statuses"].values()))
        torture.count("load", "hostile requests answered", sum(found["hostile_statuses"].values()))
        torture.count("load", "decoders killed", found["killed_decoders"])
        torture.count("load", "models loaded again", found["reloads"])
        if not torture.goes_on():
            break
