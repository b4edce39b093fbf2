"""evaluate, update, benchmark and report as a user runs them."""

from __future__ import annotations

import json

import pytest

from commands import flat, run

FAR = "far=simulated-diatoms/far?n=60"


def test_an_evaluation_as_table_and_json(finished, capsys):
    assert run("evaluate", finished, "--ood", FAR, "--detector", "energy") == 0
    shown = flat(capsys.readouterr().out)
    assert "energy" in shown and "far" in shown
    assert run("evaluate", finished, "--ood", FAR, "--detector", "knn", "--set", "knn.k=3", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said["methods"]) == ["softmax", "energy", "knn", "softmax-scaled", "maple", "maple-paper"]
    assert "scaled softmax" in (finished / "report.html").read_text(encoding="utf-8")  # still the summary's comparison
    assert said["methods"]["knn"]["detection"]["far"]["auroc"] > 0.5
    command = json.loads((finished / "results.json").read_text())["provenance"]["command"]
    assert command.startswith("maple evaluate ") and "knn.k=3" in command


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["evaluate", "{run}", "--ood", "far=x", "--ood", "far=y"], "'far'"),
        (["evaluate", "{run}", "--detector", ""], "--detector"),
        (["evaluate", "{run}", "--set", "knn.k=x"], "--set knn.k=x"),
        (["update", "{run}"], "--data"),
        (["update", "{run}", "--data", "digits", "--only", "nosuch"], "nosuch"),
        (["benchmark", "md", "--profile", "gpu"], "gpu"),
        (["evaluate", "{run}", "--set", "sngp.features=3"], "maple train"),
        (["evaluate", "{run}", "--set", "train.epochs=3"], "maple train"),
        (["evaluate", "{run}", "--set", "decision.false_alarm=0.1"], "--false-alarm"),
        (["benchmark", "md", "--seeds", "0,x"], "--seeds"),
        (["benchmark", "md", "--seeds", "0", "--seed", "3"], "--seeds"),
        (["benchmark", "md", "--dry-run", "--set", "sgnp.nonsense=3"], "'sngp'"),
        (["benchmark", "md", "--dry-run", "--set", "train.epoch=3"], "'epochs'"),
        (["benchmark", "md", "--dry-run", "--set", "train.seed=3"], "--seeds"),
        (["benchmark", "md", "--dry-run", "--set", "model.recipe=sngp"], "model.recipe"),
    ],
)
def test_wrong_use_is_named(finished, capsys, arguments, named):
    assert run(*(word.format(run=finished) for word in arguments)) == 2
    assert named in flat(capsys.readouterr().err)


def test_suites_are_listed_and_planned(tmp_path, capsys):
    assert run("benchmark") == 0
    assert "cifar10" in capsys.readouterr().out
    assert run("benchmark", "md", "--profile", "tiny", "--out", tmp_path / "b", "--dry-run", "--json") == 0
    *trainings, total = json.loads(capsys.readouterr().out)
    assert trainings and {row["epochs"] for row in trainings} == {2} and total["training"].endswith("to be done")
    assert not (tmp_path / "b").exists()


def test_report_with_predictions(finished, image_folder, tmp_path):
    out, html = tmp_path / "p.csv", tmp_path / "r.html"
    run("predict", finished, image_folder / "dark", "--out", out)
    assert run("report", finished, out, "--out", html) == 0
    assert "<html" in html.read_text()
