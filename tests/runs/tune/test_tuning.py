"""The outcome of a search: notes on it, and the command that trains with it."""

from __future__ import annotations

import maple.runs.tune.search as tune
from maple.runs.tune.search import tune_recipe
from tuning import request_for


def test_notes_on_what_was_found(tmp_path, formula, monkeypatch):
    monkeypatch.setattr(tune, "judge_run", lambda *_: {"nll": 1.0, "gaussian": 1.0, "errors": 0.1, "accuracy": 0.5})
    same = tune_recipe(request_for(tmp_path / "same", values={"max_clusters": [3, 5]}))
    assert "none split a class" in same.describe()
    accuracies = iter([0.9, 0.5])
    monkeypatch.setattr(
        tune, "judge_run", lambda *_: {"nll": 1.0, "gaussian": (a := next(accuracies)), "errors": 0.1, "accuracy": a}
    )
    worse = tune_recipe(request_for(tmp_path / "worse", values={"max_clusters": [3, 5]}, criterion="gaussian"))
    assert worse.best.number == 2 and "trial 1 classifies better" in worse.describe()
