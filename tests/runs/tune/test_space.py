"""What a search goes through."""

from __future__ import annotations

import maple.runs.tune.space as search_space
from maple.evaluation.trials import Choices, Span
from maple.runs.setup.config import resolve_config
from maple.training.recipe import list_recipes


def test_every_parameter_is_an_option_and_its_range_is_allowed():
    for recipe in list_recipes():
        config = resolve_config({"recipe": recipe})
        for name, parameter in search_space.list_parameters(recipe).items():
            for value in (*parameter.grid, *(parameter.bounds or ())):
                assert search_space.current_value(search_space.with_settings(config, {name: value}), name) == value
    assert {"dropout"} < set(search_space.list_parameters("mc-dropout"))
    assert "margin" not in search_space.list_parameters("clustering")


def test_a_search_begins_as_near_to_the_settings_as_it_may():
    assert Span(1, 3).nearest(10) == 3 and Span(0.1, 1.0).nearest(0.01) == 0.1 and Span(0.1, 1.0).nearest(0.5) == 0.5
    assert Choices((3, 5, 7)).nearest(7) == 7 and Choices((3, 5, 7)).nearest(4) == 5
