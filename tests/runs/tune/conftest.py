"""Few digits to train on, and trainings by formula where only the order of things matters."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from markupsafe import Markup

import maple.runs.tune.plan as plan
import maple.runs.tune.search as tune
import maple.runs.tune.tuning as outcome
from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.reporting.plots import Plot
from tuning import SPLITS


@pytest.fixture(scope="session")
def splits():
    return load_splits("digits", DataOptions(splits=SPLITS))


@pytest.fixture
def formula(monkeypatch, splits):
    """Trainings and criteria by formula: the best margin is 0.7, the best weight decay 1e-3. The calls are listed."""
    calls: list[dict[str, float]] = []

    def train(backbone, recipe, train, validation, *, options, on_epoch, **_):
        calls.append({"margin": recipe.margin, "weight_decay": options.weight_decay})
        history = []
        for epoch in range(1, options.epochs + 1):
            history.append({"epoch": epoch, "validation_loss": loss(recipe.margin, options) / epoch})
            history[-1] |= {"seconds": 1.0, "clusters": 10}
            on_epoch(history)
        return SimpleNamespace(history=history, loss=loss(recipe.margin, options))

    def loss(margin, options):
        return abs(margin - 0.7) + abs(math.log10(options.weight_decay) + 3)

    def judge(run, *_):
        return {"nll": run.loss, "gaussian": 1 + run.loss, "errors": 0.5, "accuracy": 1 - 0.1 * run.loss}

    monkeypatch.setattr(tune, "train_backbone", train)
    monkeypatch.setattr(tune, "judge_run", judge)
    monkeypatch.setattr(tune, "new_network", lambda *_: None)
    monkeypatch.setattr(outcome, "plot_trials", lambda *_: Plot(Markup("<svg></svg>"), "plot"))
    load = plan.load_run_splits  # once for all
    monkeypatch.setattr(
        plan, "load_run_splits", lambda origin, *rest: splits if origin.source == "digits" else load(origin, *rest)
    )
    return calls
