"""Members are trained one by one, an interrupted ensemble goes on where it stopped, and the whole is one run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from commands import flat
from maple.baselines.ensemble import MAX_MEMBERS
from maple.baselines.ensemble_training import member_seeds, train_ensemble
from maple.data.sources import open_images
from maple.errors import UsageError
from maple.files import RunFile
from maple.networks import create_backbone, embed
from maple.options import build_options
from maple.runs.setup.config import resolve_config
from maple.runs.setup.presets import list_presets
from maple.training.loop import train_backbone
from maple.training.options import TrainOptions
from maple.training.recipe import create_recipe

OPTIONS = TrainOptions(epochs=1, batch_size=32, seed=3, precision="32-true")


@pytest.fixture(scope="module")
def digits():
    images = open_images("digits")
    return images.subset(np.arange(200)), images.subset(np.arange(200, 300))


def make_backbone(seed):
    torch.manual_seed(seed)
    return create_backbone("resnet9", 10)


def train(digits, folder=None, resume=False, make=make_backbone, options=OPTIONS, show_progress=False):
    recipe = create_recipe("ensemble", members=2)
    how = {"options": options, "folder": folder, "resume": resume, "show_progress": show_progress}
    return train_ensemble(make, recipe, *digits, **how)


def test_members_are_independent_trainings_with_their_own_seeds(digits):
    run = train(digits)
    outputs = embed(run.backbone, digits[1])
    probabilities = 0
    for seed in (300, 301):
        options = {"epochs": 1, "batch_size": 32, "seed": seed, "precision": "32-true", "show_progress": False}
        alone = train_backbone(make_backbone(seed), create_recipe("cross-entropy"), *digits, **options)
        probabilities += torch.from_numpy(embed(alone.backbone, digits[1]).logits).softmax(dim=1).numpy() / 2
    np.testing.assert_allclose(torch.from_numpy(outputs.logits).softmax(dim=1).numpy(), probabilities, atol=1e-5)
    assert outputs.embeddings.shape == (100, 256)
    assert run.snapshots["after"].shape == (100, 256)
    assert run.backbone.made_by.recipe == "ensemble"


def test_members_share_a_time_limit(digits, monkeypatch, capsys):
    limits = []

    def watch(*arguments, **keywords):
        limits.append(keywords["options"].time_limit)
        return train_backbone(*arguments, **keywords)

    monkeypatch.setattr("maple.baselines.ensemble_training.train_backbone", watch)
    train(digits, options=replace(OPTIONS, time_limit=1000.0), show_progress=True)
    assert limits == [500.0, 500.0]
    assert "member 2 of 2, with its share of --time-limit, 8 min 20 s" in flat(capsys.readouterr().err)


def test_a_killed_ensemble_goes_on(digits, tmp_path):
    """The first member is finished; only the second is trained when the ensemble goes on."""

    def make_one(seed):
        if seed > 300:
            raise KeyboardInterrupt
        return make_backbone(seed)

    whole = train(digits, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(digits, tmp_path / "killed", make=make_one)
    before = (tmp_path / "killed" / RunFile.MEMBERS / "0" / "history.csv").stat().st_mtime_ns
    resumed = train(digits, tmp_path / "killed", resume=True)
    assert (tmp_path / "killed" / RunFile.MEMBERS / "0" / "history.csv").stat().st_mtime_ns == before
    np.testing.assert_array_equal(embed(whole.backbone, digits[1]).logits, embed(resumed.backbone, digits[1]).logits)
    assert (tmp_path / "killed" / "history.csv").is_file()
    assert resumed.history[0]["validation_accuracy"] == pytest.approx(whole.history[0]["validation_accuracy"])


def test_an_ensemble_killed_within_a_member_goes_on_after_its_last_epoch(digits, tmp_path):
    options = replace(OPTIONS, epochs=2)
    trained = []  # seed of the member, batch by batch

    def make(seed, stop_at=None):
        backbone = make_backbone(seed)

        def count(module, inputs):
            if module.training:
                trained.append(seed)
                if len(trained) == stop_at:
                    raise KeyboardInterrupt

        backbone.register_forward_pre_hook(count)
        return backbone

    whole = train(digits, tmp_path / "whole", options=options, make=make)
    per_member = trained.count(300)
    assert trained == [300] * per_member + [301] * per_member
    trained.clear()
    killed_at = per_member + per_member * 3 // 4  # in the second epoch of the second member
    with pytest.raises(KeyboardInterrupt):
        train(digits, tmp_path / "killed", options=options, make=lambda seed: make(seed, killed_at))
    trained.clear()
    resumed = train(digits, tmp_path / "killed", resume=True, options=options, make=make)
    assert trained == [301] * (per_member // 2)
    np.testing.assert_array_equal(embed(whole.backbone, digits[1]).logits, embed(resumed.backbone, digits[1]).logits)


def test_no_two_ensembles_share_a_member():
    assert member_seeds(0, 5) == [0, 1, 2, 3, 4]
    seeds = [seed for ensemble in range(5) for seed in member_seeds(ensemble, MAX_MEMBERS)]
    assert len(set(seeds)) == 5 * MAX_MEMBERS


def test_member_seeds_are_seeds(digits):
    largest = member_seeds(2**32 // 100 - 1, MAX_MEMBERS)
    assert [build_options(TrainOptions, {"seed": seed}).seed for seed in largest] == largest
    with pytest.raises(UsageError, match="--seed 42949672"):
        train(digits, options=TrainOptions(epochs=1, seed=2**32 // 100))


def test_an_ensemble_of_another_seed_is_not_gone_on_with(digits, tmp_path):
    def stop(seed):
        if seed > 300:
            raise KeyboardInterrupt
        return make_backbone(seed)

    with pytest.raises(KeyboardInterrupt):
        train(digits, tmp_path, make=stop)
    with pytest.raises(UsageError, match="--seed 300"):
        train(digits, tmp_path, resume=True, options=replace(OPTIONS, seed=4))


def test_presets_have_the_ensembles_of_the_paper():
    papers = [preset for preset in list_presets() if preset.startswith("paper")]
    members = {preset: resolve_config({"recipe": "ensemble"}, preset=preset).recipe.members for preset in papers}
    assert members == {"paper": 10, "paper-code": 10, "paper-diatoms": 10, "paper-imagenet": 3}
    assert resolve_config({"recipe": "ensemble"}).recipe.members == 5
