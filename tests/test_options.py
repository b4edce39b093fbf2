"""Options have one source and three doors."""

from __future__ import annotations

from dataclasses import fields

import pytest

from maple.errors import ConfigError
from maple.options import GROUPS, PRESETS, TrainOptions, as_dict, build_options, read_toml, resolve_config, to_toml


def test_names_are_unique_over_all_sections():
    names = [f.name for group in GROUPS.values() for f in fields(group)]
    assert len(names) == len(set(names))


def test_every_option_has_help():
    for group in GROUPS.values():
        for f in fields(group):
            assert f.metadata["help"], f.name


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_keys_exist(preset):
    names = {f.name for group in GROUPS.values() for f in fields(group)}
    assert set(PRESETS[preset]) <= names
    resolve_config(preset=preset)


def test_round_trip_through_toml(tmp_path):
    config = resolve_config({"epochs": "7", "splits": ["0.6", "0.2", "0.1", "0.1"]}, preset="paper-diatoms")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config.sections()))
    assert resolve_config(file=read_toml(path)).sections() == config.sections()


def test_precedence_is_flag_file_preset_default():
    config = resolve_config({"epochs": "1"}, {"train": {"epochs": 2, "batch_size": 3}}, preset="paper")
    assert (config.train.epochs, config.train.batch_size) == (1, 3)
    assert config.train.learning_rate == PRESETS["paper"]["learning_rate"]
    assert config.train.devices == TrainOptions().devices


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, "unknown key 'epoch'.*did you mean 'epochs'"),
        ({"epochs": 0}, "'epochs'.*greater than or equal to 1"),
        ({"epochs": "many"}, "'epochs'.*valid integer"),
        ({"optimizer": "sdg"}, "'optimizer'.*'sgd' or 'adam'"),
        ({"momentum": 1.5}, "'momentum'.*less than or equal to 1"),
    ],
)
def test_wrong_values_name_the_key(values, message):
    with pytest.raises(ConfigError, match=message):
        build_options(TrainOptions, values)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"epochs": "0"}, r"^--epochs 0: input should be greater than or equal to 1 \(passes over"),
        ({"size": "abc"}, "^--size abc: expected side of the square images in pixels, or 'auto'$"),
        ({"splits": ["0.8", "0.1", "0.1"]}, "^--splits 0.8,0.1,0.1: expected shares of train, validation"),
        ({"splits": ["a", "0", "0", "1"]}, "^--splits a,0,0,1: expected shares of train, validation"),
        ({"seed": "-10"}, "^--seed -10: input should be greater than or equal to 0"),
        ({"split_seed": "-1"}, "^--split-seed -1: "),
        ({"embedding_size": "big"}, "^--embedding-size big: "),
    ],
)
def test_wrong_flags_are_called_flags(flags, message):
    with pytest.raises(ConfigError, match=message):
        resolve_config(flags)
    with pytest.raises(ConfigError, match=message):
        resolve_config(flags, {"train": {"seed": 1}}, "paper")


def test_wrong_file_values_name_key_and_section():
    with pytest.raises(ConfigError, match=r"^'size' in section \[data\] is 'abc': expected side of the square"):
        resolve_config({"epochs": 3}, {"data": {"size": "abc"}})
    with pytest.raises(ConfigError, match=r"write it as a section \[train\]"):
        resolve_config(file={"train": 3})


def test_recipe_is_named_not_switched():
    assert not {"triplet", "clustering"} & resolve_config().sections()["recipe"].keys()
    for key in ("triplet", "clustering"):
        with pytest.raises(ConfigError, match=rf"'{key}' .*use recipe in section \[model\]"):
            resolve_config(file={"recipe": {key: False}})


def test_wrong_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=r"unknown section 'trian'.*did you mean 'train'"):
        resolve_config(file={"trian": {}})
    with pytest.raises(ConfigError, match="unknown preset"):
        resolve_config(preset="papers")


def test_as_dict_has_only_plain_values():
    for section in resolve_config().sections().values():
        assert all(isinstance(value, str | int | float | bool | list | None) for value in section.values())
    assert as_dict(TrainOptions())["epochs"] == TrainOptions().epochs
