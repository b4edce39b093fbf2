"""The paper's post-hoc rows on a public network: from cached outputs, once per network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))
import paper_width  # noqa: E402
from public_study import make_study  # noqa: E402


def test_rows_of_a_network_are_measured_once_and_printed(tmp_path, monkeypatch, capsys):
    rows = tmp_path / "paper_width.json"
    study = make_study(tmp_path, n=300)
    monkeypatch.setattr(paper_width, "Study", lambda *_: study)
    arguments = ["paper_width.py", "--cache", str(tmp_path), "--networks", study.name, "--json", str(rows)]
    monkeypatch.setattr(sys, "argv", arguments)
    paper_width.main()
    found = {row["row"]: row for row in json.loads(rows.read_text())[study.name]["rows"]}
    assert found["DNN+PCA+MD"]["components"] < found["DNN+MD"]["components"] == 16
    assert found["softmax"]["accuracy"] > 0.9 and found["MAPLE, default"]["accuracy"] > 0.9
    assert found["DNN+MD"]["ece"] > 0.2  # a tail is uniform for known images, whatever the accuracy
    assert all(0 <= row["mean"] <= 1 for row in found.values())
    monkeypatch.setattr(paper_width, "measure", lambda _: pytest.fail("a network is not measured again"))
    paper_width.main()
    monkeypatch.setattr(sys, "argv", ["paper_width.py", "table", "--json", str(rows)])
    paper_width.main()
    assert "| DNN+PCA+ED |" in capsys.readouterr().out
