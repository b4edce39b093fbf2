"""Requests of small searches on digits, and what they leave behind."""

from __future__ import annotations

from pathlib import Path

import optuna

from commands import read_rows
from maple.runs.requests import TuneRequest

SPLITS = (0.15, 0.1, 0.05, 0.7)
FLAGS = {"epochs": 2, "batch_size": 64, "splits": SPLITS, "learning_rate": 0.01}
TINY = ("--epochs", 2, "--batch-size", 64, "--splits", ",".join(map(str, SPLITS)))
MARGINS = {"margin": [0.3, 0.5, 0.7, 0.9]}


def request_for(out: Path, **given) -> TuneRequest:
    return TuneRequest("digits", out, **{"search": "grid", "flags": FLAGS, **given})


def rows_of(out: Path) -> list[dict[str, str]]:
    return read_rows(out / "trials.csv")


def attempts_of(out: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=None, storage=f"sqlite:///{out / 'study.db'}").get_trials()
