"""One configuration from flags, ``--set``, a file, a preset and defaults."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from maple.errors import ConfigError, UsageError
from maple.options import list_options, read_toml, to_toml
from maple.runs.setup.config import (
    SECTIONS,
    check_used,
    drop_unused,
    given_options,
    preset_options_unused,
    resolve_config,
)
from maple.runs.setup.presets import list_presets, read_preset
from maple.runs.train import new_network
from maple.training.head import fit_head
from maple.training.options import TrainOptions
from maple.training.recipe import Step, find_recipe, list_recipes


@pytest.mark.parametrize("recipe", list_recipes())
def test_names_are_unique_within_a_configuration(recipe):
    names = [name for group in SECTIONS.values() for name in list_options(group)] + list(find_recipe(recipe).options)
    assert len(names) == len(set(names))


def test_every_option_has_help():
    for group in (*SECTIONS.values(), *(find_recipe(name).kind for name in list_recipes())):
        for f in fields(group):
            assert f.metadata["help"], f.name


@pytest.mark.parametrize("recipe", list_recipes())
@pytest.mark.parametrize("preset", list_presets())
def test_presets_are_valid_with_every_recipe(preset, recipe):
    config = resolve_config({"recipe": recipe}, preset=preset)
    assert config.recipe.name == recipe
    for section, values in read_preset(preset).items():
        assert section in SECTIONS or section in list_recipes()
        if section in config.sections():
            unused = preset_options_unused(read_preset(preset), find_recipe(recipe)) if section == "model" else ()
            kept = {key: value for key, value in values.items() if key not in unused}
            assert kept.items() <= config.sections()[section].items()


@pytest.mark.parametrize("recipe", list_recipes())
def test_round_trip_through_toml(recipe, tmp_path):
    flags = {"recipe": recipe, "epochs": "7", "splits": ["0.6", "0.2", "0.1", "0.1"]}
    config = resolve_config(flags, preset="paper-diatoms")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config.sections()))
    assert resolve_config(file=read_toml(path)) == config


def test_precedence_is_flag_file_preset_default():
    config = resolve_config({"epochs": "1"}, {"train": {"epochs": 2, "batch_size": 3}}, preset="paper")
    assert (config.train.epochs, config.train.batch_size) == (1, 3)
    assert config.train.learning_rate == read_preset("paper")["train"]["learning_rate"]
    assert config.train.devices == TrainOptions().devices


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        ({"epochs": "0"}, "^--epochs 0: "),
        ({"size": "abc"}, "^--size abc: "),
        ({"splits": ["0.8", "0.1", "0.1"]}, "^--splits 0.8,0.1,0.1: "),
        ({"split_seed": "-1"}, "^--split-seed -1: "),
        ({"embedding_size": "big"}, "^--embedding-size big: "),
        ({"margin": "wide"}, "^--margin wide: "),
        ({"train.seed": "-10"}, r"^--set train\.seed=-10: "),
    ],
)
def test_wrong_flags_are_called_flags(flags, start):
    with pytest.raises(ConfigError, match=start):
        resolve_config(flags)
    with pytest.raises(ConfigError, match=start):
        resolve_config(flags, {"train": {"seed": 1}}, "paper")


def test_wrong_file_values_name_key_and_section():
    with pytest.raises(ConfigError, match=r"^'size' in section \[data\]"):
        resolve_config({"epochs": 3}, {"data": {"size": "abc"}})
    with pytest.raises(ConfigError, match=r"\[train\]"):
        resolve_config(file={"train": 3})
    with pytest.raises(ConfigError, match=r"'trian'.*'train'"):
        resolve_config(file={"trian": {}})
    with pytest.raises(ConfigError, match=r"'papers'.*'paper'"):
        resolve_config(preset="papers")


def test_recipe_is_named_not_switched():
    assert not {"triplet", "clustering"} & resolve_config().sections()["recipe"].keys()
    for key in ("triplet", "clustering"):
        with pytest.raises(ConfigError, match=rf"'{key}'.*\[model\]"):
            resolve_config(file={"recipe": {key: False}})
        with pytest.raises(UsageError, match=rf"recipe\.{key}"):
            resolve_config({f"recipe.{key}": "false"})


def test_sections_written_by_earlier_versions_are_read():
    config = resolve_config(file={"model": {"recipe": "sngp"}, "sngp": {"sngp_features": 64, "sngp_ridge": 2.0}})
    assert (config.recipe.features, config.recipe.ridge) == (64, 2.0)
    config = resolve_config(file={"model": {"recipe": "mc-dropout"}, "mc_dropout": {"dropout_samples": 3}})
    assert config.recipe.samples == 3


@pytest.mark.parametrize("owner", ["mc-dropout", "mc_dropout", "recipe"])
def test_options_of_the_chosen_recipe_have_several_owners(owner):
    flags = {"recipe": "mc-dropout", f"{owner}.samples": "3"}
    assert resolve_config(flags).recipe.samples == 3


def test_maple_is_a_recipe_and_a_detector():
    config = resolve_config({"maple.margin": "0.7", "maple.covariance": "full", "recipe": "triplet"})
    assert (config.recipe.margin, config.detector.covariance) == (0.7, "full")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"sngp.features": "3"}, "sngp"),  # not the chosen recipe
        ({"recipe": "sngp", "sngp.featurs": "3"}, "'features'"),
        ({"sngp.feature": "3"}, "'features'"),  # the name is checked before the recipe
        ({"sgnp.features": "3"}, "'sngp'"),
        ({"knn.k": "3"}, "maple evaluate --detector knn"),
        ({"train.epoch": "3"}, "'epochs'"),
        ({"recipe": "sngp", "margin": "3"}, "--recipe maple"),
        ({"recipe": "triplet", "max_clusters": "3"}, "--max-clusters"),
        ({"recipe": "triplet", "maple.max_clusters": "3"}, "maple.max_clusters"),
        ({"marign": "3"}, "'margin'"),
    ],
)
def test_options_that_have_no_effect_are_refused(flags, names):
    with pytest.raises(UsageError, match=names):
        resolve_config(flags)


def test_sections_of_other_recipes_are_refused():
    with pytest.raises(UsageError, match=r"\[sngp\]"):
        resolve_config(file={"sngp": {"ridge": 2.0}})
    with pytest.raises(UsageError, match=r"\[recipe\]"):
        resolve_config({"recipe": "sngp"}, {"recipe": {"margin": 0.2}})


def test_flags_of_a_profile_concern_only_some_recipes():
    flags = {"epochs": 3, "relabel_every": 2, "members": 4}
    assert drop_unused(flags, "triplet") == {"epochs": 3}
    assert drop_unused(flags, "maple") == {"epochs": 3, "relabel_every": 2}
    assert drop_unused(flags, "ensemble") == {"epochs": 3, "members": 4}


def test_settings_concern_only_some_recipes():
    flags = {"train.epochs": "3", "maple.max_clusters": "4", "ensemble.members": "5", "sngp.sngp_features": "64"}
    assert drop_unused(flags, "triplet") == {"epochs": 3}
    assert drop_unused(flags, "maple") == {"epochs": 3, "max_clusters": 4}
    assert drop_unused(flags, "ensemble") == {"epochs": 3, "members": 5}
    assert drop_unused(flags, "sngp") == {"epochs": 3, "features": 64}
    check_used(flags, ["triplet", "maple", "ensemble", "sngp"])


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("sgnp.features", "'sngp'"),
        ("sngp.feature", "'features'"),
        ("ensemble.members", "ensemble.members"),
        ("knn.k", "knn"),
    ],
)
def test_settings_that_concern_no_recipe_are_refused(key, names):
    with pytest.raises(UsageError, match=names):
        check_used({key: "3"}, ["maple", "sngp"])


@pytest.mark.parametrize(
    "key", ["triplet.max_clusters", "maple.max_clusters", "recipe.max_clusters", "triplet.triplet"]
)
def test_settings_without_effect_on_the_chosen_recipe_are_refused(key):
    with pytest.raises(UsageError, match=key):
        resolve_config({"recipe": "triplet", key: "3"})


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        ({"epochs": "3", "train.epochs": "2"}, "--epochs", "--set train.epochs"),
        ({"margin": "0.3", "maple.margin": "0.2"}, "--margin", "--set maple.margin"),
        ({"recipe.margin": "0.3", "maple.margin": "0.2"}, "--set recipe.margin", "--set maple.margin"),
    ],
)
def test_an_option_given_in_two_ways_is_refused(flags, first, second):
    with pytest.raises(UsageError) as caught:
        resolve_config(flags)
    assert first in str(caught.value) and second in str(caught.value)


@pytest.mark.parametrize("flags", [{"fit": "stretch", "margin": "0.7"}, {"data.fit": "stretch", "recipe.margin": 0.7}])
def test_options_have_one_name_however_they_are_given(flags):
    assert given_options(flags, "maple") == {"fit": "stretch", "margin": 0.7}


def test_sections_hold_only_plain_values():
    for recipe in list_recipes():
        for section in resolve_config({"recipe": recipe}).sections().values():
            assert all(isinstance(value, str | int | float | bool | list | None) for value in section.values())


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [("schedule", "steps", "step"), ("triplet_mining", "al", "all"), ("optimizer", "mouon", "muon")],
)
def test_unknown_names_bring_the_nearest_one(key, value, nearest):
    with pytest.raises(ConfigError, match=f"{value}.*'{nearest}'"):
        resolve_config({key: value})


def test_milestones_of_a_preset_follow_the_epochs():
    assert resolve_config(preset="paper").train.milestones == (60, 120, 160)
    assert resolve_config({"epochs": "20"}, preset="paper").train.milestones == (6, 12, 16)
    shortest = resolve_config({"epochs": 1}, preset="paper").train
    assert (shortest.schedule, shortest.milestones) == ("constant", ())
    own = resolve_config({"epochs": 20, "milestones": ["19"]}, preset="paper").train
    assert own.milestones == (19,)


def test_the_two_sources_of_the_paper_are_two_presets():
    text, code = (resolve_config(preset=name) for name in ("paper", "paper-code"))
    assert (text.recipe.triplet_mining, text.train.optimizer, text.train.schedule) == ("all", "sgd", "step")
    assert (code.recipe.triplet_mining, code.recipe.triplet_softness, code.train.optimizer) == ("hard", 0.0, "adam")
    assert code.train.augment == "flip" and code.detector.covariance == "global"
    assert {text.train.on_collapse, code.train.on_collapse} == {"stop"}


@pytest.mark.parametrize("recipe", list_recipes())
@pytest.mark.parametrize("preset", list_presets())
def test_every_preset_works_with_every_recipe(preset, recipe):
    """Its network takes the head of the recipe; a branch is kept exactly where the head may read beside it."""
    config = resolve_config({"recipe": recipe, "backbone": "wrn-10-1"}, preset=preset)
    backbone = new_network(config.model, 10, seed=0)
    backbone.head = fit_head(backbone, config.recipe, 10)
    assert backbone.branch == (preset == "paper-code" and config.recipe.takes_branch)
    sizes = {"paper-imagenet": 640, "paper-code": 256 if backbone.branch else 64}
    assert backbone.embedding_size == sizes.get(preset, 64)


def test_the_preset_for_imagenet_has_a_real_resnet50():
    config = resolve_config(preset="paper-imagenet")
    backbone = new_network(config.model, 1000, seed=0)
    stem = backbone.body.conv1
    assert (config.model.backbone, stem.kernel_size, stem.stride, stem.out_channels) == ("resnet50", (7, 7), (2, 2), 64)
    assert (backbone.embedding_layer.in_features, backbone.embedding_layer.out_features) == (2048, 640)
    assert backbone.head.in_features == 640


def test_the_preset_for_diatoms_counts_lone_anchors():
    config = resolve_config({"backbone": "wrn-10-1"}, preset="paper-diatoms")
    assert (config.train.batch_size, config.recipe.triplet_mining, config.recipe.triplet_lone) == (4, "all", "self")
    torch.manual_seed(0)
    points, targets = (0.1 * torch.randn(4, 8)).requires_grad_(), torch.arange(4)
    step = Step(torch.zeros(4, 3, 1, 1), points, torch.randn(4, 4), targets, 1.0, new_network(config.model, 4, seed=0))
    config.recipe.loss(step)["triplet"].value.backward()  # four classes: without lone anchors there is no triplet
    assert points.grad.abs().sum() > 0


def test_options_given_beside_a_preset_are_not_left_out():
    config = resolve_config({"recipe": "sngp", "embedding_branch": True, "embedding_size": 32}, preset="paper-code")
    assert config.model.embedding_branch and config.model.embedding_size == 32


@pytest.mark.parametrize(
    "flags, file, preset, expected",
    [
        ({}, {}, "", ("airbench-32", "muon", 0.24, 0.6, 0.001, "linear")),
        ({"backbone": "resnet18"}, {}, "", ("resnet18", "sgd", 0.1, 0.9, 0.0005, "triangular")),
        ({"optimizer": "adam"}, {}, "", ("airbench-32", "adam", 0.001, 0.9, 0.0, "triangular")),
        ({"train.optimizer": "sgd", "momentum": "0.5"}, {}, "", ("airbench-32", "sgd", 0.1, 0.5, 0.0005, "triangular")),
        ({}, {"model": {"backbone": "airbench"}}, "", ("airbench", "muon", 0.24, 0.6, 0.001, "linear")),
        (
            {"learning_rate": 0.3},
            {"train": {"optimizer": "sgd"}},
            "",
            ("airbench-32", "sgd", 0.3, 0.9, 0.0005, "triangular"),
        ),
        ({}, {}, "finetune", ("airbench-32", "sgd", 0.01, 0.9, 0.0001, "triangular")),
        ({"optimizer": "muon"}, {}, "paper", ("wrn-28-10", "muon", 0.05, 0.9, 0.0001, "step")),
    ],
)
def test_the_optimizer_follows_the_network_and_its_settings_the_optimizer(flags, file, preset, expected):
    config = resolve_config(flags, file, preset or None)
    train = config.train
    found = (train.optimizer, train.learning_rate, train.momentum, train.weight_decay, train.schedule)
    assert (config.model.backbone, *found) == expected
