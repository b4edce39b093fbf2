"""Options of reading and splitting images: their defaults can be used, other values are refused by name."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from maple.data.decode import Fit
from maple.data.options import DataOptions
from maple.data.shares import fold_shares
from maple.errors import ConfigError, UsageError
from maple.options import build_options


def test_the_defaults_are_shares_of_everything() -> None:
    assert fold_shares(DataOptions().splits, ()) == DataOptions().splits


def test_the_ways_to_fit_a_square_are_those_of_the_decoder() -> None:
    assert get_args(get_type_hints(DataOptions)["fit"]) == get_args(Fit)


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", 0), ("size", "big"), ("fit", "padd"), ("splits", (1.5, 0, 0, 0)), ("min_images", -1), ("split_seed", -1)],
)
def test_values_that_cannot_be_used_are_named(name: str, value: object) -> None:
    with pytest.raises((UsageError, ConfigError), match=name.replace("_", "[-_]")):
        build_options(DataOptions, {name: value}, "data")
