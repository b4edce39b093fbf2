"""Members are trained one by one, an interrupted ensemble goes on where it stopped, and the whole is one run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maple.backbone import create_backbone, embed
from maple.config import TrainOptions
from maple.data import open_images
from maple.ensemble import MEMBERS, train_ensemble
from maple.recipe import create_recipe
from maple.train import train_backbone

OPTIONS = TrainOptions(epochs=1, batch_size=32, seed=3, precision="32-true")


@pytest.fixture(scope="module")
def digits():
    images = open_images("digits")
    return images.subset(np.arange(200)), images.subset(np.arange(200, 300))


def make_backbone(seed):
    torch.manual_seed(seed)
    return create_backbone("resnet9", 10)


def train(digits, folder=None, resume=False, make=make_backbone):
    recipe = create_recipe("ensemble", members=2)
    how = {"options": OPTIONS, "folder": folder, "resume": resume, "show_progress": False}
    return train_ensemble(make, recipe, *digits, **how)


def test_members_are_independent_trainings_with_their_own_seeds(digits):
    run = train(digits)
    outputs = embed(run.backbone, digits[1])
    probabilities = 0
    for seed in (3, 4):
        options = {"epochs": 1, "batch_size": 32, "seed": seed, "precision": "32-true", "show_progress": False}
        alone = train_backbone(make_backbone(seed), create_recipe("cross-entropy"), *digits, **options)
        probabilities += torch.from_numpy(embed(alone.backbone, digits[1]).logits).softmax(dim=1).numpy() / 2
    np.testing.assert_allclose(torch.from_numpy(outputs.logits).softmax(dim=1).numpy(), probabilities, atol=1e-5)
    assert outputs.embeddings.shape == (100, 256)
    assert run.snapshots["after"].shape == (100, 256)
    assert run.backbone.made_by["recipe"] == "ensemble"


def test_a_killed_ensemble_goes_on(digits, tmp_path):
    """The first member is finished; only the second is trained when the ensemble goes on."""

    def make_one(seed):
        if seed > 3:
            raise KeyboardInterrupt
        return make_backbone(seed)

    whole = train(digits, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(digits, tmp_path / "killed", make=make_one)
    before = (tmp_path / "killed" / MEMBERS / "0" / "history.csv").stat().st_mtime_ns
    resumed = train(digits, tmp_path / "killed", resume=True)
    assert (tmp_path / "killed" / MEMBERS / "0" / "history.csv").stat().st_mtime_ns == before
    np.testing.assert_array_equal(embed(whole.backbone, digits[1]).logits, embed(resumed.backbone, digits[1]).logits)
    assert (tmp_path / "killed" / "history.csv").is_file()
    assert resumed.history[0]["validation_accuracy"] == pytest.approx(whole.history[0]["validation_accuracy"])
