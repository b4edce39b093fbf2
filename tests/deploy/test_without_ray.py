"""Commands with ``--engine ray`` where Ray is not installed."""

from __future__ import annotations

import sys

import pytest

from commands import flat
from commands import run as maple


@pytest.mark.parametrize("command", [
    ["predict", "run", "images", "--out", "p.csv"],
    ["fit", "python:module:make", "--data", "images"],
    ["evaluate", "run"],
    ["monitor", "run", "images"],
], ids=lambda command: command[0])  # fmt: skip
def test_one_line_names_the_extra(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("maple.deploy.ray.")]:
        monkeypatch.delitem(sys.modules, name)  # those that other tests have imported
    monkeypatch.setitem(sys.modules, "ray", None)
    assert maple(*command, "--engine", "ray") == 2
    said = flat(capsys.readouterr().err)
    assert "pip install 'maple-uncertainty[ray]'" in said and "Traceback" not in said
    assert not [*tmp_path.iterdir()]
