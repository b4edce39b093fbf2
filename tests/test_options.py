"""Options are declared once, checked with their types, and read from text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maple.errors import ConfigError, UsageError
from maple.options import (
    NoneByName,
    Positive,
    Share,
    as_dict,
    build_options,
    named_sources,
    named_values,
    option,
    read_names,
    read_numbers,
    read_toml,
    validate_options,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    former_prefix: ClassVar[str] = "sgd_"
    epochs: Positive = option(16, "passes over the training images")
    momentum: Share = option(0.9, "momentum")
    splits: tuple[Share, Share] = option((0.7, 0.3), "two shares")
    optimizer: str = option("sgd", "optimiser")


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"epoch": 3}, "'epoch'.*'epochs'"),
        ({"epochs": 0}, "'epochs'"),
        ({"epochs": "many"}, "'epochs'"),
        ({"momentum": 1.5}, "'momentum'"),
        ({"splits": [0.5]}, "'splits'"),
    ],
)
def test_wrong_values_name_the_key(values, name):
    with pytest.raises(ConfigError, match=name):
        build_options(Options, values)


def test_errors_name_the_place_that_the_value_comes_from():
    with pytest.raises(ConfigError, match=r"^--epochs 0: "):
        build_options(Options, {"epochs": "0"}, where=None)
    with pytest.raises(ConfigError, match=r"^--splits 0.5,0.2,0.3: "):
        build_options(Options, {"splits": ["0.5", "0.2", "0.3"]}, where=None)
    with pytest.raises(ConfigError, match=r"^--set train.epochs=0: "):
        build_options(Options, {"epochs": "0"}, where=None, owner="train")
    with pytest.raises(ConfigError, match=r"^'epochs' in section \[train\]"):
        build_options(Options, {"epochs": "0"}, "section [train]")


def test_text_is_converted_to_the_type_of_the_option():
    built = build_options(Options, {"epochs": "3", "momentum": "1", "splits": "0.4, 0.6"})
    assert built == Options(epochs=3, momentum=1.0, splits=(0.4, 0.6))


def test_former_names_are_read():
    assert build_options(Options, {"sgd_momentum": 0.5}).momentum == 0.5
    assert validate_options(Options, {"sgd_momentum": "0.5"}) == {"momentum": 0.5}


def test_a_combination_is_checked_by_the_class_itself():
    @dataclass(frozen=True)
    class Pair:
        low: int = option(0, "lower bound")
        high: int = option(1, "upper bound")

        def __post_init__(self) -> None:
            if self.low > self.high:
                raise ConfigError("low is above high")

    with pytest.raises(ConfigError, match="low"):
        build_options(Pair, {"low": 2})
    assert validate_options(Pair, {"low": 2}) == {"low": 2}  # high may come from elsewhere


def test_none_has_a_name():
    from typing import Annotated

    from pydantic import TypeAdapter

    adapter = TypeAdapter(Annotated[float | None, NoneByName])
    assert adapter.validate_python("none") is None and adapter.validate_python("0.5") == 0.5


def test_wrong_files(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml.*check the path"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml.*correct it"):
        read_toml(tmp_path / "bad.toml")


def test_as_dict_has_only_plain_values():
    assert as_dict(Options()) == {"epochs": 16, "momentum": 0.9, "splits": [0.7, 0.3], "optimizer": "sgd"}


def test_an_empty_key_is_no_former_name():
    with pytest.raises(ConfigError, match="''"):
        validate_options(Options, {"": 3})


def test_names_in_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match=r"none\.txt.*one name per line"):
        read_names(f"@{tmp_path / 'none.txt'}")


words = st.text(st.characters(categories=("L", "N")), min_size=1)


@given(st.dictionaries(words, words, max_size=4))
def test_pairs_come_back(sources):
    assert named_sources([f"{name}={source}" for name, source in sources.items()]) == sources


@pytest.mark.parametrize("pair", ["a", "=b", "a=", " =b"])
def test_sources_that_are_no_pair(pair):
    with pytest.raises(UsageError) as caught:
        named_sources([pair])
    assert "--ood" in str(caught.value) and f"'{pair}'" in str(caught.value)


def test_values_to_search():
    assert named_values(["a=1, 2", "b=x"]) == {"a": ["1", "2"], "b": ["x"]}
    assert named_values(None) == {}
    for pairs in (["a=,"], ["a=1", "a=2"]):
        with pytest.raises(UsageError) as caught:
            named_values(pairs)
        assert "--values" in str(caught.value) and "a" in str(caught.value)


@pytest.mark.parametrize("text", ["1,2", "1,2,x", "", "1,2,3,4"])
def test_numbers_of_the_wrong_kind_or_length(text):
    with pytest.raises(UsageError) as caught:
        read_numbers(text, "--mean", float, "three numbers", length=3)
    assert "--mean" in str(caught.value) and f"'{text}'" in str(caught.value)
    assert read_numbers(None, "--mean", float, "three numbers", length=3) is None
