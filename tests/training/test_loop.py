"""The loop: what it promises about optimiser, modes, resuming and processes."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from maple.data.batches import count_batches
from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.errors import DataError, RunError, TrainError, UsageError
from maple.files import load_arrays
from maple.networks import Backbone, create_backbone
from maple.training.head import inherit_rows, named_state
from maple.training.history import COLUMNS, history_csv
from maple.training.loop import train_backbone
from maple.training.loss import LossTerm
from maple.training.maple import MapleRecipe
from maple.training.optimizers import learning_rate_at, make_optimizer
from maple.training.options import TrainOptions
from maple.training.recipe import Recipe, create_recipe
from maple.training.resume import data_digest


@pytest.fixture(scope="module")
def splits():
    return load_splits("digits", DataOptions())


@pytest.fixture(scope="module")
def few(splits):
    """A few images, for tests of what surrounds the learning."""
    return dataclasses.replace(splits, train=splits.train.subset(np.arange(256)))


def start(recipe, splits, folder=None, epochs=4, resume=False, seed=0, backbone=None, **options):
    if backbone is None:
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


def test_snapshots_know_their_epochs(eager_run, few):
    run, _ = eager_run
    first = next(row["epoch"] for row in run.history if row["relabelled"])
    assert run.snapshot_epochs == {"before": first, "after": 4}
    assert start(create_recipe("cross-entropy"), few, epochs=4).snapshot_epochs == {"before": 2, "after": 4}


def test_history_file(eager_run):
    run, folder = eager_run
    with (folder / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
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
        create_recipe("mc-dropout"),
        create_recipe("sngp", features=64),
        create_recipe("duq"),
        create_recipe("vmdls"),
        create_recipe("due"),
    ],
    ids=lambda recipe: recipe.name,
)
def test_resumed_run_reaches_the_same_weights(splits, tmp_path, recipe):
    half = dataclasses.replace(splits, train=splits.train.subset(np.arange(640)))
    whole = start(recipe, half, tmp_path / "whole", epochs=3)

    class Killed(Exception):
        pass

    class Kill(type(recipe)):
        def class_probabilities(self, outputs):
            if len(seen) == 2:
                raise Killed
            seen.append(1)
            return super().class_probabilities(outputs)

    seen: list[int] = []
    options = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    with pytest.raises(Killed):
        start(Kill(**options), half, tmp_path / "killed", epochs=3)
    torch.manual_seed(99)  # other weights, another state of the generator: all that counts is in the checkpoint
    backbone = create_backbone("resnet9", 10)
    resumed = start(recipe, half, tmp_path / "killed", epochs=3, resume=True, backbone=backbone)
    assert len(resumed.history) == 3
    for (name, a), b in zip(whole.backbone.state_dict().items(), resumed.backbone.state_dict().values()):
        assert torch.equal(a, b), name
    np.testing.assert_array_equal(whole.relabelling.cluster_ids, resumed.relabelling.cluster_ids)
    drop = lambda rows: [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]  # noqa: E731
    assert drop(whole.history) == drop(resumed.history)
    assert whole.snapshot_epochs == resumed.snapshot_epochs
    for name, snapshot in whole.snapshots.items():
        np.testing.assert_array_equal(snapshot, resumed.snapshots[name])


# --- what a resumed run must share with the run it continues


@pytest.fixture(scope="module")
def one_epoch(few, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-epoch")
    start(create_recipe("triplet"), few, folder, epochs=1)
    return folder


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (create_recipe("triplet"), {"learning_rate": 0.2}, "--learning-rate"),
        (create_recipe("triplet", margin=0.9), {}, "--margin"),
        (create_recipe("maple"), {}, "--recipe"),
    ],
)
def test_resume_refuses_other_options(few, one_epoch, recipe, options, message):
    with pytest.raises(UsageError, match=message):
        start(recipe, few, one_epoch, epochs=1, resume=True, **options)


def test_resume_refuses_other_data_of_equal_size(few, splits, one_epoch):
    others = dataclasses.replace(few, train=splits.train.subset(np.arange(256, 512)))
    labels = dataclasses.replace(few.train, labels=np.roll(few.train.labels, 1))
    for changed in (others, dataclasses.replace(few, train=labels)):
        with pytest.raises(RunError, match="other images or labels"):
            start(create_recipe("triplet"), changed, one_epoch, epochs=1, resume=True)


def test_resume_refuses_another_network(few, one_epoch):
    for backbone in (create_backbone("resnet20", 10), create_backbone("resnet9", 10, embedding_size=16)):
        with pytest.raises(RunError, match="another network than"):
            start(create_recipe("triplet"), few, one_epoch, epochs=1, resume=True, backbone=backbone)


def test_resume_accepts_options_that_change_nothing(few, one_epoch):
    run = start(create_recipe("triplet"), few, one_epoch, epochs=1, resume=True, workers=0, checkpoint_every=3)
    assert len(run.history) == 1


def test_digest_knows_order_labels_and_names(splits):
    images = splits.train.subset(np.arange(10))
    variants = [
        images,
        images.subset(np.arange(10)[::-1]),
        dataclasses.replace(images, labels=np.roll(images.labels, 1)),
        dataclasses.replace(images, class_names=tuple("abcdefghij")),
    ]
    assert len({data_digest(variant) for variant in variants}) == 4
    assert data_digest(images) == data_digest(splits.train.subset(np.arange(10)))


# --- the head


def test_recipe_builds_a_missing_head(few, tmp_path):
    class Wide(MapleRecipe):
        def build_head(self, embedding_size, n_outputs):
            return torch.nn.Sequential(torch.nn.Linear(embedding_size, 12), torch.nn.Linear(12, n_outputs))

    runs = []
    for resume in (False, True):
        backbone = create_backbone("resnet9", 10)
        backbone.head = None
        runs.append(start(Wide(clustering=False), few, tmp_path, epochs=1, resume=resume, backbone=backbone))
        assert len(backbone.head) == 2
    for a, b in zip(runs[0].backbone.state_dict().values(), runs[1].backbone.state_dict().values()):
        assert torch.equal(a, b)


def test_head_without_bias_is_restored(few, tmp_path):
    runs = []
    for resume in (False, True):
        backbone = create_backbone("resnet9", 10)
        backbone.head = torch.nn.Linear(backbone.embedding_size, 10, bias=False)
        runs.append(start(create_recipe("triplet"), few, tmp_path, epochs=1, resume=resume, backbone=backbone))
    assert runs[1].backbone.head.bias is None
    assert torch.equal(runs[0].backbone.head.weight, runs[1].backbone.head.weight)


def test_head_of_wrong_size_is_an_error_with_a_remedy(few):
    with pytest.raises(UsageError, match=r"has 7 outputs, but there are 10 classes: set backbone\.head = None"):
        start(EAGER, few, backbone=create_backbone("resnet9", 7))


def test_options_come_from_one_place(few):
    with pytest.raises(UsageError, match="not both: epochs"):
        train_backbone(
            create_backbone("resnet9", 10), EAGER, few.train, few.validation, options=TrainOptions(), epochs=2
        )


# --- numbers that go wrong


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


def test_divergence_is_an_error_with_a_remedy(few):
    with pytest.raises(TrainError, match=r"the loss .* start again with --overwrite .* --learning-rate 1e\+29"):
        start(create_recipe("cross-entropy"), few, learning_rate=1e30, schedule="constant")


def test_last_step_of_an_epoch_cannot_spoil_the_checkpoint(few, tmp_path):
    """The loss of the last step is finite, its gradient is not."""
    steps = count_batches(len(few.train), 64)
    calls = itertools.count(1)

    class Spoil(MapleRecipe):
        def loss(self, step):
            terms = super().loss(step)
            if next(calls) == 2 * steps:
                terms["spoilt"] = LossTerm((step.embeddings.sum() * 0).sqrt())
            return terms

    with pytest.raises(TrainError, match="no longer finite in epoch 2"):
        start(Spoil(clustering=False), few, tmp_path)
    arrays, metadata = load_arrays(tmp_path / "resume.safetensors")
    assert metadata["epoch"] == 1
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert len((tmp_path / "history.csv").read_text().splitlines()) == 1 + 1


def test_history_shows_the_triplet_loss_without_its_weight(few):
    recipe = create_recipe("triplet", triplet_weight=0.25, triplet_warmup=0.0, prototype_weight=0.5)
    (row,) = start(recipe, few, epochs=1).history
    assert row["triplet"] > 0.1
    assert row["loss"] == pytest.approx(row["cross_entropy"] + 0.25 * row["triplet"] + 0.5 * row["prototype"], rel=1e-5)


def test_history_holds_the_terms_of_any_recipe(few, tmp_path):
    class Plain(Recipe):
        def loss(self, step):
            return {"brier": LossTerm((step.logits.softmax(1) - torch.eye(10)[step.targets]).square().sum(1).mean())}

    run = start(Plain(), few, tmp_path, epochs=1)
    with (tmp_path / "history.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["brier"]) == run.history[0]["brier"] == run.history[0]["loss"]
    assert row["triplet"] == ""


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.05, "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4},
        {"optimizer": "adam", "learning_rate": 2e-4, "weight_decay": 0.0},
        {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.0},
    ],
    ids=["sgd-0.05", "adam-2e-4", "adam-0.01"],
)
def test_default_recipe_survives_the_optimisers_of_the_paper(splits, options, capsys):
    torch.manual_seed(0)
    run = train_backbone(
        create_backbone("resnet9", 10),
        MapleRecipe(),
        splits.train,
        splits.validation,
        epochs=4,
        batch_size=64,
        schedule="constant",
        **options,
    )
    assert run.history[-1]["validation_accuracy"] > 0.7
    assert min(row["spread"] for row in run.history) > 0.2
    assert "warning" not in capsys.readouterr().err


def test_collapse_is_reported_once(splits, capsys):
    """Embeddings that are one point from the start, and learn too slowly to part."""
    layer = nn.Linear(3 * 8 * 8, 16)
    nn.init.zeros_(layer.weight)
    nn.init.ones_(layer.bias)
    backbone = Backbone(nn.Sequential(nn.Flatten(), layer), nn.Linear(16, 10), embedding_size=16)
    run = train_backbone(
        backbone,
        create_recipe("triplet"),
        splits.train,
        splits.validation,
        epochs=3,
        batch_size=64,
        learning_rate=1e-6,
        show_progress=True,
    )
    assert max(row["spread"] for row in run.history) < 0.02
    assert capsys.readouterr().err.count("warning:") == 1


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
