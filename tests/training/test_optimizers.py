"""Schedules and optimisers by name."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args, get_type_hints

import numpy as np
import pytest

from maple.errors import UsageError
from maple.training.optimizers import OPTIMIZERS, SCHEDULES, check_schedule, learning_rate_at
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


def test_step_schedule_falls_after_each_milestone():
    options = TrainOptions(schedule="step", milestones=(2, 4), epochs=5, learning_rate=1.0)
    rates = [learning_rate_at((epoch - 1 + share) / 5, options) for epoch in range(1, 6) for share in (0, 0.99)]
    np.testing.assert_allclose(rates, [1, 1, 1, 1, 0.2, 0.2, 0.2, 0.2, 0.04, 0.04])


def test_linear_schedule_falls_from_the_peak_to_zero():
    options = TrainOptions(schedule="linear", learning_rate=0.4)
    assert [learning_rate_at(p, options) for p in (0, 0.25, 1)] == pytest.approx([0.4, 0.3, 0])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"schedule": "step"}, "--milestones"),
        ({"schedule": "cosine", "milestones": (1,)}, "--milestones"),
        ({"schedule": "step", "milestones": (2, 4)}, "4"),
        ({"schedule": "step", "milestones": (2, 1)}, "2,1"),
    ],
)
def test_milestones_outside_the_training_are_errors(options, named):
    with pytest.raises(UsageError, match=named):
        check_schedule(TrainOptions(epochs=4, **options))
