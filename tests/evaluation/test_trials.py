"""Records of a search: options and the values they take, trials as rows."""

from __future__ import annotations

import math

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maple.evaluation.trials import CRITERIA, Choices, Span, Trial


def test_sizes_and_text() -> None:
    assert (Choices((1, 2, 3)).size, Span(1, 5).size, Span(0.1, 5.0).size) == (3, 5, math.inf)
    assert str(Choices(("xmeans", 0.00012345))) == "xmeans, 0.0001234"
    assert str(Span(1e-5, 1e-2, log=True)).startswith("1e-05 to 0.01, ") and str(Span(1, 5)) == "1 to 5"


@given(st.floats(-10, 10), st.floats(-5, 0), st.floats(0, 5))
def test_the_nearest_value_lies_between_the_bounds(value: float, low: float, high: float) -> None:
    nearest = Span(low, high).nearest(value)
    assert low <= nearest <= high and (nearest == value or not low <= value <= high)


def test_the_nearest_choice() -> None:
    assert Choices((1, 2, 3)).nearest(3) == 3 and Choices((1, 2, 3)).nearest(7) == 2


@pytest.mark.parametrize("found", [Choices(("a", "b")), Span(2, 4), Span(0.5, 0.75), Span(1e-4, 1e-2, log=True)])
def test_optuna_suggests_values_of_the_space(found: Choices | Span) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(5):
        value = found.suggest(study.ask(), "option")
        assert found.nearest(value) == value
        assert isinstance(value, int) == (found == Span(2, 4))


def test_a_trial_as_a_row() -> None:
    trial = Trial(3, "finished", {"margin": 0.5}, {"nll": 0.25, "accuracy": 0.9}, epochs=4, clusters=12)
    row = trial.to_dict()
    assert (row["trial"], row["nll"], row["accuracy"], row["clusters"], row["margin"]) == (3, 0.25, 0.9, 12, 0.5)
    assert row["gaussian"] is None and row["seconds"] is None  # not measured
    assert set(CRITERIA) < set(row)


def test_only_some_states_are_final() -> None:
    states = ("finished", "pruned", "diverged", "failed", "interrupted", "running", "waiting")
    assert [Trial(1, state, {}).is_done for state in states] == [True] * 4 + [False] * 3
