"""Options of the network: the names that the help gives exist."""

from __future__ import annotations

import re

import pytest

from maple.errors import ConfigError
from maple.networks.architectures import is_network
from maple.networks.options import ModelOptions
from maple.options import build_options, list_options


def test_the_help_names_networks_that_exist():
    help = list_options(ModelOptions)["backbone"].metadata["help"]
    names = re.sub(r"\[-W\]", "", help.removeprefix("network: ")).replace("wrn-D-W", "wrn-16-4").split(", ")
    first, *depths = next(name for name in names if "/" in name).split("/")
    names = [name for name in names if "/" not in name] + [first, *(f"resnet{depth}" for depth in depths)]
    assert len(names) == 10 and all(map(is_network, names))
    assert is_network(ModelOptions().backbone)


def test_an_embedding_has_a_size_or_is_left_out():
    assert build_options(ModelOptions, {"embedding_size": "640"}).embedding_size == 640
    assert ModelOptions().embedding_size is None
    with pytest.raises(ConfigError, match="'embedding_size'"):
        build_options(ModelOptions, {"embedding_size": 0})
