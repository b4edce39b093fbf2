"""Whole trainings in two processes against each other and against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import maple.stats.clustering.splitting as splitting
import maple.training.loop as loop
from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.networks import Backbone, create_backbone
from maple.prediction.fit import fit_predictor
from maple.training.maple import MapleRecipe
from maple.training.options import TrainOptions
from maple.training.processes import make_fabric, share_work
from maple.training.recipe import SharedRows, create_recipe
from maple.training.step import TrainingStep
from maple.types import Relabelling
from processes import in_processes
from short_parallel import IMAGES, describe, digest, train_digits

pytestmark = pytest.mark.slow
CPU = TrainOptions(accelerator="cpu", precision="32-true")


# --- processes agree --------------------------------------------------------------------------------------------------


def train_described(settings: dict[str, Any]) -> dict[str, Any]:
    return describe(train_digits(**settings))


@cache
def trained_by(n: int) -> list[dict[str, Any]]:
    """What each of ``n`` processes holds after the same training, which several tests look at."""
    return in_processes(train_described, {}, n=n)


EXTRA_IMAGES = {"outlier_share": 0.25, "rotation_share": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "clusters": {},
    "fresh head": {"recipe": {"head_growth": "fresh", "cluster_scope": "class"}},
    "outliers and rotations": {"recipe": {"name": "triplet", **EXTRA_IMAGES}},
    "muon and whitening": {"network": "airbench-8", "optimizer": "muon"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_processes_hold_the_same_weights_clusters_and_history(name):
    first, second = in_processes(train_described, SETTINGS[name]) if SETTINGS[name] else trained_by(2)
    assert first["history"][-1]["epoch"] == 2
    for row in (*first["history"], *second["history"]):
        assert all(value == value for value in row.values()), f"{row} has NaN"
    assert first == second
    if "outlier_share" in SETTINGS[name].get("recipe", {}):
        assert {"outlier", "rotation"} <= first["history"][0].keys()
    else:
        assert first["history"][-1]["clusters"] > 10


# --- resuming ---------------------------------------------------------------------------------------------------------


def train_in_two_parts(folder: Path, resume: bool) -> dict[str, Any]:
    """The first epoch, or what is left."""
    try:
        return describe(train_digits(folder=folder, resume=resume, stop_after=None if resume else 1))
    except KeyboardInterrupt:
        return {}


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 3)])
def test_a_training_is_resumed_by_any_number_of_processes(tmp_path, before, after):
    whole = trained_by(before)[0]
    in_processes(train_in_two_parts, tmp_path, False, n=before)
    found = in_processes(train_in_two_parts, tmp_path, True, n=after)
    assert all(each == found[0] for each in found)
    assert found[0]["history"][0] == whole["history"][0] and len(found[0]["history"]) == 2
    assert found[0]["history"][1]["clusters"] == whole["history"][1]["clusters"] > 10
    assert (found[0] == whole) == (before == after)


# --- the batch --------------------------------------------------------------------------------------------------------


def take_a_step(optimizer: str) -> dict[str, Any]:
    """One step of a network without batch normalisation, on this process's share of a batch."""
    options = TrainOptions(optimizer=optimizer, accelerator="cpu", precision="32-true")
    fabric = make_fabric(options)
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU())
    backbone = Backbone(body, nn.Linear(16, 4), embedding_size=16)
    step = TrainingStep(fabric, create_recipe("cross-entropy"), backbone, options)
    share = slice(fabric.global_rank, None, fabric.world_size)
    images, targets = torch.rand(16, 3, 8, 8)[share], (torch.arange(16) // 4)[share]
    loss = step(images, targets, epoch=1, share=0.5)["loss"]
    state = step.collect()
    momentum = [state[name]["momentum_buffer"].numpy() for name in sorted(state)]
    return {"loss": loss, "momentum": momentum, "weights": [p.detach().numpy() for p in backbone.parameters()]}


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_a_step_of_two_processes_is_that_of_the_whole_batch(optimizer):
    """The batch size counts the images of all processes; gradients are averaged before Muon orthogonalises them."""
    alone = in_processes(take_a_step, optimizer, n=1)[0]
    both = in_processes(take_a_step, optimizer)
    assert np.mean([each["loss"] for each in both]) == pytest.approx(alone["loss"], rel=1e-6)
    for key in ("momentum", "weights"):
        for ours, theirs, expected in zip(both[0][key], both[1][key], alone[key]):
            np.testing.assert_array_equal(ours, theirs)
            np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=1e-6)


def normalise_by_shares() -> tuple[float, list[float]]:
    """The mean of what this process sees, and the running means of its batch normalisation after a step."""
    fabric = make_fabric(CPU)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=1.0)
    body = nn.Sequential(norm, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone = Backbone(body, nn.Linear(3, 2), embedding_size=3, mean=(0, 0, 0), std=(1, 1, 1))
    step = TrainingStep(fabric, create_recipe("cross-entropy"), backbone, CPU)
    images = torch.full((4, 3, 8, 8), 0.25 * (fabric.global_rank + 1))
    step(images, torch.arange(4) % 2, epoch=1, share=0.5)
    mine = norm.running_mean.tolist()[0]
    loop.agree_on_buffers(fabric, backbone)
    return mine, norm.running_mean.tolist()


def test_batch_normalisation_uses_the_share_of_each_and_keeps_the_statistics_of_the_first():
    first, second = in_processes(normalise_by_shares)
    assert (first[0], second[0]) == (0.25, 0.5)
    assert first[1] == second[1] == [0.25] * 3


# --- what is done once ------------------------------------------------------------------------------------------------


def counting(owner: Any, name: str) -> list[Any]:
    """The first arguments of all calls of a function from now on."""
    calls: list[Any] = []
    original: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments[0])
        return original(*arguments, **keywords)

    setattr(owner, name, counted)
    return calls


def whiten() -> tuple[int, str]:
    calls = counting(loop, "fit_whitening")
    run = train_digits(network="airbench-8", recipe={"name": "cross-entropy"}, epochs=1)
    assert run.backbone.body.is_whitened
    return len(calls), describe(run)["weights"]


def test_input_is_whitened_by_the_first_process_and_broadcast():
    first, second = in_processes(whiten)
    assert (first[0], second[0]) == (1, 0)
    assert first[1] == second[1]


def split_hard_classes() -> tuple[int, list[np.ndarray]]:
    """Split three of four classes; the number that this process clustered itself, and the clusters."""
    fabric = make_fabric(CPU)
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(4), [90, 120, 60, 80]))
    offset = 9.0 * rng.integers(0, 2, len(labels))
    points = rng.normal(size=(len(labels), 6)).astype(np.float32) + offset[:, None] + 30 * np.eye(6)[labels]
    calls = counting(splitting, "cluster_points")
    recipe = MapleRecipe(relabel_every=1, hard_class_error=0.5, cluster_space="raw", cluster_method="xmeans")
    rows = SharedRows(points.__getitem__, partial(share_work, fabric))
    wrong = np.tile([0.0, 0.0, 0.0, 1.0], (40, 1))  # all classes but the last are hard
    after = recipe.relabel(1, wrong, np.arange(40) % 4, Relabelling.initial(labels, 4), rows, 0)
    return len(calls), [after.cluster_ids, after.cluster_to_class, after.parents, after.shares]


def test_hard_classes_are_clustered_by_different_processes_as_by_one():
    alone = in_processes(split_hard_classes, n=1)[0]
    assert alone[0] == 3 and len(alone[1][1]) == 7
    both = in_processes(split_hard_classes)
    assert [each[0] for each in both] == [2, 1]
    for each in both:
        for ours, expected in zip(each[1], alone[1]):
            np.testing.assert_array_equal(ours, expected)


# --- the detector -----------------------------------------------------------------------------------------------------


def fit_digits() -> tuple[str, list[np.ndarray], np.ndarray]:
    """A digest of the detector, its moments, and calibration scores, of a network with random weights."""
    fabric = make_fabric(CPU)
    splits = load_splits("digits", DataOptions())
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 10)
    images = splits.train.subset(np.arange(IMAGES))
    predictor = fit_predictor(backbone, images, splits.validation, splits.calibration, fabric=fabric)
    state, _ = predictor.detector.get_state()
    found = predictor.detector.learned_.densities.moments
    moments = [
        array
        for each in (*found.by_exponent.values(), found.shallow)
        for array in (each.counts, each.means, each.within_covariance)
    ]
    return digest(*(state[name] for name in sorted(state))), moments, predictor.calibration.scores


def test_a_detector_is_that_of_one_process():
    alone = in_processes(fit_digits, n=1)[0]
    both = in_processes(fit_digits)
    assert both[0][0] == both[1][0]
    for ours, expected in zip(both[0][1], alone[1]):
        np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(both[1][2], alone[2], rtol=1e-6)
