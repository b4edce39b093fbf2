"""Schedules and optimisers by name."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args, get_type_hints

import numpy as np
import pytest

from maple.training.optimizers import OPTIMIZERS, SCHEDULES, learning_rate_at
from maple.training.options import TrainOptions


def test_schedules():
    for schedule in ("triangular", "cosine"):
        options = TrainOptions(schedule=schedule, learning_rate=0.2)
        rates = [learning_rate_at(p, options) for p in np.linspace(0, 1, 101)]
        assert max(rates) == pytest.approx(0.2)
        assert rates[-1] == pytest.approx(0, abs=1e-12)
        assert min(rates) >= 0
    assert learning_rate_at(0.9, TrainOptions(schedule="constant", learning_rate=0.05)) == 0.05
    assert math.isclose(learning_rate_at(0.5, TrainOptions(schedule="cosine", learning_rate=1.0)), 0.5)


def test_tables_have_the_names_of_the_options():
    fields = {
        field.name: get_args(get_type_hints(TrainOptions)[field.name]) for field in dataclasses.fields(TrainOptions)
    }
    assert set(fields["optimizer"]) == set(OPTIMIZERS)
    assert set(fields["schedule"]) == set(SCHEDULES)
