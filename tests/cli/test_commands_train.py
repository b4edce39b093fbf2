"""demo, train, fit and tune: what becomes of their arguments, and what is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import flat, run
from maple.runs.requests import FitRequest, TrainRequest


@pytest.fixture
def asked(monkeypatch) -> list[Any]:
    """The requests of ``train`` and ``fit``, which are not carried out."""
    requests: list[Any] = []
    monkeypatch.setattr("maple.runs.train.train_run", requests.append)
    monkeypatch.setattr("maple.runs.fit.fit_run", lambda request, engine: requests.append(request))
    return requests


def test_arguments_of_train_become_a_request(asked, tmp_path):
    (tmp_path / "c.toml").write_text("[train]\nepochs = 3\n")
    options = (
        "--config",
        tmp_path / "c.toml",
        "--set",
        "sngp.features=64",
        "--ood",
        "a=simulated-diatoms?n=9",
        "--learning-rate",
        0.5,
    )
    assert run("train", "some/digits", "--preset", "paper", "--resume", "--recipe", "sngp", *options) == 0
    (request,) = asked
    assert isinstance(request, TrainRequest) and request.command.startswith("maple train some/digits")
    assert request.source == "some/digits" and request.folder == Path("runs/digits") and request.resume
    assert request.resume is True
    assert request.flags == {"recipe": "sngp", "learning_rate": "0.5", "sngp.features": "64"}
    assert (
        request.file == {"train": {"epochs": 3}}
        and request.ood == {"a": "simulated-diatoms?n=9"}
        and request.preset == "paper"
    )
    assert request.trust is False and request.init is None


def test_arguments_of_fit_become_a_request(asked, tmp_path):
    (tmp_path / "names.txt").write_text("a\n# remark\nb\n")
    options = ("--class-names", f"@{tmp_path}/names.txt", "--mean", "0.5,0.4,0.3", "--classes", 2, "--workers", 0)
    assert run("fit", "timm/resnet18", "--data", "digits", "--out", "r", *options, "--drop-head", "--trust") == 0
    (request,) = asked
    assert isinstance(request, FitRequest) and request.model == "timm/resnet18" and request.source == "digits"
    assert request.class_names == ("a", "b") and request.mean == (0.5, 0.4, 0.3) and request.std is None
    assert (
        request.n_classes == 2 and (request.workers, request.flags) == (0, {}) and request.drop_head and request.trust
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["fit", "resnet9", "--data", "digits", "--mean", "1,2"], "--mean"),
        (["fit", "resnet9", "--data", "digits", "--std", "a,b,c"], "--std"),
        (["fit", "resnet9"], "--data"),
        (["train", "digits", "--set", "epochs=3"], "NAME.OPTION=VALUE"),
        (["train", "digits", "--config", "no/such.toml"], "no/such.toml"),
        (["tune", "digits", "--search", "random"], "random"),
        (["tune", "digits", "--values", "max_clusters"], "--values"),
        (["tune", "digits", "--criterion", "auroc"], "auroc"),
    ],
)
def test_wrong_use_is_named(asked, tmp_path, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    assert named in flat(capsys.readouterr().err) and not asked and not list(tmp_path.iterdir())


def test_a_search_is_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ("--search", "grid", "--parameters", "max_clusters", "--values", "max_clusters=3,5", "--dry-run")
    assert run("tune", "digits", *options, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert list(plan["parameters"]) == ["max_clusters"] and not list(tmp_path.iterdir())
    assert run("tune", "digits", *options) == 0
    assert "max_clusters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "resume", "source"),
    [
        (["digits"], False, "digits"),
        (["--resume", "digits"], True, "digits"),
        (["--resume", "auto", "digits"], "auto", "digits"),
        (["digits", "--resume", "auto"], "auto", "digits"),
        (["--resume", "--seed", "1", "auto"], True, "auto"),
        (["digits", "--resume=auto"], "auto", "digits"),
    ],
)
def test_a_word_may_follow_resume(asked, words, resume, source):
    assert run("train", *words) == 0
    assert (asked[0].resume, asked[0].source) == (resume, source)


def test_another_word_after_resume_is_refused(asked, capsys):
    assert run("train", "digits", "--resume=soon") == 2
    assert "--resume auto" in flat(capsys.readouterr().err) and not asked
