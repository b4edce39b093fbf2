"""The loop: what it promises about optimiser, modes, resuming and processes."""

from __future__ import annotations

import csv
import itertools
import math

import numpy as np
import pytest
import torch

from maple.backbone import create_backbone
from maple.config import DataOptions, TrainOptions
from maple.errors import DataError, RunError, TrainError
from maple.recipe import MapleRecipe, create_recipe
from maple.splits import load_splits
from maple.train import (
    HISTORY_COLUMNS,
    history_csv,
    inherit_rows,
    learning_rate_at,
    make_optimizer,
    named_state,
    train_backbone,
)


@pytest.fixture(scope="module")
def splits():
    return load_splits("digits", DataOptions())


def start(recipe, splits, folder=None, epochs=4, resume=False, seed=0, **options):
    torch.manual_seed(seed)
    backbone = create_backbone("resnet9", 10)
    return train_backbone(
        backbone,
        recipe,
        splits.train,
        splits.validation,
        folder=folder,
        resume=resume,
        show_progress=False,
        epochs=epochs,
        batch_size=64,
        seed=seed,
        **options,
    )


EAGER = MapleRecipe(relabel_every=1, hard_class_error=0.0, min_cluster_size=10, max_clusters=3)


@pytest.fixture(scope="module")
def eager_run(splits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eager")
    return start(EAGER, splits, folder), folder


def test_learns(eager_run):
    run, _ = eager_run
    assert run.history[-1]["validation_accuracy"] > 0.8


def test_relabelling_grows_head_and_moves_no_probability(eager_run):
    run, _ = eager_run
    events = [row for row in run.history if row["relabelled"]]
    assert events, "no class was split"
    assert run.backbone.head.out_features == run.relabelling.n_clusters > 10
    for row in events:
        assert row["relabel_shift"] < 1e-5


def test_no_event_after_the_last_epoch(eager_run):
    run, _ = eager_run
    assert run.history[-1]["relabelled"] == ""


def test_history_file(eager_run):
    run, folder = eager_run
    with (folder / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == HISTORY_COLUMNS
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3, 4]
    assert float(rows[-1]["validation_accuracy"]) == run.history[-1]["validation_accuracy"]
    assert history_csv(run.history) == (folder / "history.csv").read_text()


def test_new_head_belongs_to_the_optimiser(splits):
    """After a split the grown rows move apart: an optimiser that does not know the head would leave them equal."""
    run = start(MapleRecipe(relabel_every=2, hard_class_error=0.0, min_cluster_size=10), splits, epochs=3)
    parents = run.relabelling.parents
    weight = run.backbone.head.weight.detach()
    split = [c for c in np.unique(parents) if np.sum(parents == c) > 1]
    assert split
    for parent in split:
        first, second = np.flatnonzero(parents == parent)[:2]
        assert not torch.allclose(weight[first], weight[second])


@pytest.mark.parametrize(
    "recipe",
    [
        EAGER,
        create_recipe(
            "maple", relabel_every=1, hard_class_error=0.0, head_growth="fresh", cluster_scope="class", class_rule="max"
        ),
    ],
)
def test_resumed_run_reaches_the_same_weights(splits, tmp_path, recipe):
    whole = start(recipe, splits, tmp_path / "whole")

    class Killed(Exception):
        pass

    class Kill(type(recipe)):
        def class_probabilities(self, outputs):
            if len(seen) == 2:
                raise Killed
            seen.append(1)
            return super().class_probabilities(outputs)

    seen: list[int] = []
    options = {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}
    with pytest.raises(Killed):
        start(Kill(**options), splits, tmp_path / "killed")
    torch.manual_seed(99)  # whatever the state of the generator
    resumed = start(recipe, splits, tmp_path / "killed", resume=True)
    assert len(resumed.history) == 4
    for (name, a), b in zip(whole.backbone.state_dict().items(), resumed.backbone.state_dict().values()):
        assert torch.equal(a, b), name
    np.testing.assert_array_equal(whole.relabelling.cluster_ids, resumed.relabelling.cluster_ids)
    drop = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]  # noqa: E731
    assert drop(whole.history) == drop(resumed.history)


def test_resume_refuses_other_options(splits, tmp_path):
    start(create_recipe("cross-entropy"), splits, tmp_path, epochs=1)
    with pytest.raises(RunError, match=r"started with --learning-rate 0\.1"):
        start(create_recipe("cross-entropy"), splits, tmp_path, epochs=1, resume=True, learning_rate=0.2)


def test_batch_norm_keeps_learning_after_validation(splits):
    """Validation puts the network into evaluation mode; training must take it out again."""
    snapshots = []

    class Watch(MapleRecipe):
        def class_probabilities(self, outputs):
            snapshots.append({k: v.clone() for k, v in backbone.state_dict().items() if "running_mean" in k})
            return super().class_probabilities(outputs)

    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 10)
    train_backbone(
        backbone, Watch(clustering=False), splits.train, splits.validation, epochs=3, batch_size=64, show_progress=False
    )
    for earlier, later in itertools.pairwise(snapshots):
        assert all(not torch.equal(earlier[k], later[k]) for k in earlier)


def test_divergence_is_an_error_with_a_remedy(splits):
    with pytest.raises(TrainError, match="lower --learning-rate"):
        start(create_recipe("cross-entropy"), splits, learning_rate=1e30, schedule="constant")


def test_collapse_is_reported(splits, capsys):
    """Raw embeddings scaled to a point by an overwhelming triplet loss at a high rate."""
    recipe = create_recipe("triplet", triplet_space="raw", triplet_warmup=0.0, triplet_weight=1000.0)
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 10)
    run = train_backbone(
        backbone,
        recipe,
        splits.train,
        splits.validation,
        epochs=3,
        batch_size=64,
        learning_rate=0.1,
        show_progress=True,
    )
    assert run.history[-1]["spread"] < 0.02
    assert "collapsed" in capsys.readouterr().err


def test_missing_class_is_named(splits):
    without = splits.validation.subset(np.flatnonzero(splits.validation.labels != 3))
    with pytest.raises(DataError, match="class '3' has no validation image"):
        torch.manual_seed(0)
        train_backbone(create_backbone("resnet9", 10), EAGER, splits.train, without, epochs=1)


def test_schedules():
    for schedule in ("triangular", "cosine"):
        options = TrainOptions(schedule=schedule, learning_rate=0.2)
        rates = [learning_rate_at(p, options) for p in np.linspace(0, 1, 101)]
        assert max(rates) == pytest.approx(0.2)
        assert rates[-1] == pytest.approx(0, abs=1e-12)
        assert min(rates) >= 0
    assert learning_rate_at(0.9, TrainOptions(schedule="constant", learning_rate=0.05)) == 0.05
    assert math.isclose(learning_rate_at(0.5, TrainOptions(schedule="cosine", learning_rate=1.0)), 0.5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_children_inherit_their_parents_momentum(optimizer):
    module = torch.nn.Module()
    module.head = torch.nn.Linear(3, 2)
    optimiser = make_optimizer(module, TrainOptions(optimizer=optimizer))
    module.head(torch.randn(4, 3)).square().sum().backward()
    optimiser.step()
    state = named_state(optimiser, module)
    key = "momentum_buffer" if optimizer == "sgd" else "exp_avg"
    before = state["head.weight"][key].clone()
    inherit_rows(state, "head.", np.array([0, 0, 1]))
    assert torch.equal(state["head.weight"][key], before[[0, 0, 1]])
