"""Storages, studies and attempts: opened, shared, resumed as they were started, or refused."""

from __future__ import annotations

import sys

import optuna
import pytest

import maple.runs.tune.study as study
from commands import flat, run
from maple.errors import RunError, UsageError
from maple.runs.requests import TuneRequest
from maple.runs.tune.search import tune_recipe
from tuning import FLAGS, TINY, request_for


def test_any_optuna_url_and_several_studies(tmp_path, formula):
    storage = f"sqlite:///{tmp_path / 'all.db'}"
    for name, margin in (("one", 0.3), ("two", 0.5)):
        tune_recipe(request_for(tmp_path / name, values={"margin": [margin]}, storage=storage))
    assert optuna.get_all_study_names(storage) == ["one", "two"]
    assert not (tmp_path / "one" / "study.db").exists()


@pytest.mark.parametrize(
    ("url", "says"),
    [("study.db", "takes an Optuna URL"), ("nothing://x", "cannot open the storage nothing://")],
)
def test_storages_that_cannot_be_opened(url, says, tmp_path, capsys):
    code = run(
        "tune", "digits", "--out", tmp_path, "--search", "grid", *TINY, "--values", "margin=0.3", "--storage", url
    )
    assert code == (2 if "URL" in says else 1)
    assert says in flat(capsys.readouterr().err)


def test_a_password_is_never_shown(tmp_path):
    with pytest.raises(RunError) as caught:
        tune_recipe(request_for(tmp_path, values={"margin": [0.3]}, storage="postgresql+none://me:secret@host/db"))
    assert "secret" not in str(caught.value)


def test_a_study_goes_on_only_as_it_was_started(tmp_path, formula):
    first = {"search": "grid", "flags": FLAGS, "values": {"margin": [0.3]}}
    tune_recipe(TuneRequest("digits", tmp_path, **first))
    for changed, says in (
        ({"flags": {**FLAGS, "epochs": 3}}, "with --epochs 2, not 3"),
        ({"criterion": "errors"}, "with --criterion nll, not errors"),
        ({"prune": False}, "with --prune True, not False"),
        ({"values": {"margin": [0.3, 0.6]}}, "other --parameters or --values"),
        ({"source": "simulated-diatoms?n=600&size=16"}, "with other images"),
    ):
        with pytest.raises(UsageError, match=says):
            tune_recipe(TuneRequest(**{"source": "digits", "out": tmp_path, **first, **changed}))
    assert len(formula) == 1
    assert len(tune_recipe(TuneRequest("digits", tmp_path, **{**first, "flags": {**FLAGS, "workers": 0}})).trials) == 1


def test_a_study_of_others_is_left_alone(tmp_path, formula):
    storage = f"sqlite:///{tmp_path / 'all.db'}"
    theirs = optuna.create_study(storage=storage, study_name="theirs")
    theirs.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(UsageError, match="'theirs'"):
        tune_recipe(request_for(tmp_path / "out", values={"margin": [0.3]}, storage=storage, study="theirs"))


def test_out_is_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        tune_recipe(request_for(tmp_path / "file", values={"margin": [0.3]}))


def test_optuna_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "maple.runs.tune.study", raising=False)
    with pytest.raises(UsageError, match=r"maple-uncertainty\[tune\]"):
        tune_recipe(request_for(tmp_path, values={"margin": [0.3]}))


# --- attempts ---------------------------------------------------------------------------------------------------------


def attempt(state: str, epochs: int = 0, **known: object) -> optuna.trial.FrozenTrial:
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState[state],
        value=0.5 if state == "COMPLETE" else None,
        params={"margin": 0.3},
        distributions={"margin": optuna.distributions.FloatDistribution(0, 1)},
        user_attrs=known,
        intermediate_values=dict.fromkeys(range(1, epochs + 1), 1.0),
    )


@pytest.mark.parametrize(
    ("attempts", "state"),
    [
        ([attempt("FAIL"), attempt("COMPLETE"), attempt("FAIL")], "finished"),
        ([attempt("FAIL"), attempt("RUNNING"), attempt("WAITING")], "running"),
        ([attempt("FAIL"), attempt("WAITING")], "waiting"),
        ([attempt("PRUNED", 2)], "pruned"),
        ([attempt("PRUNED", 2, reason="NaN")], "diverged"),
        ([attempt("FAIL", 1), attempt("FAIL", 2), attempt("FAIL", 3)], "interrupted"),  # each got further
        ([attempt("FAIL", 2)] * study._MAX_ATTEMPTS, "failed"),
        ([attempt("FAIL", 2, interrupted=True)] * study._MAX_ATTEMPTS, "interrupted"),
    ],
)
def test_attempts_at_a_setting_make_one_trial(attempts, state):
    trial = study._describe(7, attempts, "abc")
    assert (trial.number, trial.state, trial.settings, trial.folder) == (7, state, {"margin": 0.3}, "abc")


def test_of_equal_states_the_last_attempt_counts():
    trial = study._describe(1, [attempt("FAIL", 1), attempt("FAIL", 3, reason="disk")], "")
    assert (trial.epochs, trial.reason) == (3, "disk")


def test_the_settings_of_a_queued_attempt_are_known():
    queued = optuna.create_study()
    queued.enqueue_trial({"margin": 0.7})
    (waiting,) = queued.get_trials()
    assert study._settings(waiting) == {"margin": 0.7} and waiting.params == {}
