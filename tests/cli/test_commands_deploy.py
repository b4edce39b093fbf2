"""export and serve: what becomes of their arguments, and what is refused before any work."""

from __future__ import annotations

import json
from typing import Any

import pytest

from commands import flat, run
from maple.deploy.serve.options import ServeOptions


def test_an_export_is_reported(finished, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    assert run("export", finished, tmp_path / "m.onnx", "--no-exemplars", "--preprocess", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(tmp_path / "m.onnx") and said["n_bytes"] == (tmp_path / "m.onnx").stat().st_size
    assert said["n_exemplars"] == 0 and said["input"].endswith("uint8") and said["change"] is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["export", "run", "model.pb"], "model.pb"),
        (["export", "run", "model.pt2", "--quantise"], "--quantise"),
        (["export", "run", "model.onnx", "--ood", "far=digits"], "--quantise"),
        (["serve", "run", "--port", "70000"], "--port 70000"),
        (["serve", "run", "--queue", "3"], "--max-images 64"),
        (["serve", "run", "--max-batch", "many"], "--max-batch many"),
    ],
)
def test_wrong_use_is_named(arguments, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    assert named in flat(capsys.readouterr().err) and not list(tmp_path.iterdir())


def test_options_and_decision_of_a_service_are_separated(monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr("maple.deploy.serve.server.serve_model", lambda *given, **more: calls.append((*given, more)))
    monkeypatch.setenv("MAPLE_API_KEY", "s3cret")
    assert run("serve", "m.onnx", "--port", 0, "--access-log", "--false-alarm", 0.1, "--per-class") == 0
    ((model, options, decision, more),) = calls
    assert model.name == "m.onnx" and more == {"trust": False}
    assert options == ServeOptions(port=0, access_log=True, api_key="s3cret")
    assert decision == {"false_alarm": "0.1", "per_class": True}
