"""Options of training and of MAPLE's recipe: defaults, ranges of a search and switches are valid themselves."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

from maple.errors import ConfigError
from maple.options import as_dict, build_options, list_options
from maple.training.options import BY_OPTIMIZER, MapleOptions, TrainOptions

GROUPS = pytest.mark.parametrize("group", [TrainOptions, MapleOptions])


@GROUPS
def test_defaults_pass_their_own_checks(group):
    defaults = as_dict(group())
    assert as_dict(build_options(group, defaults)) == defaults


@GROUPS
def test_values_and_bounds_of_a_search_are_valid(group):
    searched = {name: each.metadata["search"] for name, each in list_options(group).items() if each.metadata["search"]}
    assert searched
    for name, where in searched.items():
        factor = getattr(group(), name) if where.relative else 1
        for value in (*where.grid, *(where.bounds or ())):
            build_options(group, {name: factor * value})


@GROUPS
def test_options_that_need_a_switch_name_one(group):
    options = list_options(group)
    needed = {each.metadata["needs"] for each in options.values()} - {""}
    assert all(isinstance(options[name].default, bool) for name in needed)
    assert needed == ({"triplet", "clustering"} if group is MapleOptions else set())


def test_no_option_belongs_to_both_sections():
    assert not list_options(TrainOptions).keys() & list_options(MapleOptions).keys()


@pytest.mark.parametrize(
    ("group", "values"),
    [
        (TrainOptions, {"epochs": 0}),
        (TrainOptions, {"learning_rate": 0}),
        (TrainOptions, {"step_factor": 1}),
        (TrainOptions, {"milestones": [3, 0]}),
        (TrainOptions, {"seed": 2**32}),
        (MapleOptions, {"label_smoothing": 1}),
        (MapleOptions, {"prototype_scale": 0}),
        (MapleOptions, {"hard_class_error": 1.5}),
        (MapleOptions, {"cluster_method": "dbscan"}),
    ],
    ids=str,
)
def test_values_out_of_range_name_the_option(group, values):
    with pytest.raises(ConfigError, match=f"'{next(iter(values))}'"):
        build_options(group, values)


def test_every_setting_that_follows_has_a_value_for_every_optimizer():
    optimizers = get_args(get_type_hints(TrainOptions)["optimizer"])
    following = [each.name for each in fields(TrainOptions) if each.default is None and each.name != "time_limit"]
    assert {optimizer: sorted(values) for optimizer, values in BY_OPTIMIZER.items()} == {
        optimizer: sorted(following) for optimizer in optimizers
    }
