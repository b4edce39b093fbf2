"""The training loop: relabelling, snapshots, history, modes, collapse."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from commands import read_rows
from maple.data.batches import count_batches
from maple.decisions.pool import class_probabilities
from maple.errors import DataError, TrainError, UsageError
from maple.files import load_arrays
from maple.networks import Backbone, create_backbone, embed
from maple.runs.setup.config import resolve_config
from maple.training.loop import train_backbone
from maple.training.loss import LossTerm
from maple.training.maple import MapleRecipe
from maple.training.options import TrainOptions
from maple.training.recipe import Recipe, create_recipe
from maple.training.resume import COLUMNS, history_csv
from short_training import EAGER, start
from torch_sets import NamedPictures, Pictures


class Watched(MapleRecipe):
    """Keeps the validation embeddings of each epoch, and the heads before and after each growth."""

    def class_probabilities(self, outputs):
        vars(self)["embeddings"] = outputs.embeddings
        return super().class_probabilities(outputs)

    def grow_head(self, head, relabelling):
        grown, inherits = super().grow_head(head, relabelling)
        event = (self.embeddings, copy.deepcopy(head), copy.deepcopy(grown), relabelling)
        vars(self).setdefault("events", []).append(event)
        return grown, inherits


@pytest.fixture(scope="module")
def eager_recipe():
    return Watched(**vars(EAGER))


@pytest.fixture(scope="module")
def eager_run(eager_recipe, splits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eager")
    return start(eager_recipe, splits, folder), folder


def test_learns(eager_run):
    run, _ = eager_run
    assert run.history[-1]["validation_accuracy"] > 0.8


def test_validation_outputs_of_the_last_epoch_are_handed_on(eager_run, splits):
    run, _ = eager_run
    again = embed(run.backbone, splits.validation)
    np.testing.assert_allclose(run.validation.embeddings, again.embeddings, rtol=1e-4, atol=1e-5)


def test_rotations_leave_no_head_behind(few):
    run = start(MapleRecipe(clustering=False, rotation_share=0.5), few, epochs=1)
    assert not any("rotation" in name for name in run.backbone.state_dict())
    assert run.validation is not None


def test_relabelling_grows_head_and_moves_no_probability(eager_run, eager_recipe):
    """In float64 only the rounded biases differ; float32 logits, which the history is about, round with their size."""
    run, _ = eager_run
    shifts = [row["relabel_shift"] for row in run.history if row["relabelled"]]
    assert shifts, "no class was split"
    assert run.backbone.head.out_features == run.relabelling.n_clusters > 10
    for shift, (embeddings, head, grown, after) in zip(shifts, eager_recipe.events, strict=True):
        x, former = torch.from_numpy(embeddings).double(), np.unique(after.parents, return_index=True)[1]
        with torch.no_grad():
            before = class_probabilities(head.double()(x).numpy(), after.cluster_to_class[former])
            exact = class_probabilities(grown.double()(x).numpy(), after.cluster_to_class)
            size = (x.abs() @ head.weight.abs().T).max().item()  # of the products that a logit sums
        assert np.abs(exact - before).max() < 1e-6
        assert shift < 1e-6 + torch.finfo(torch.float32).eps * size


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
    rows = read_rows(folder / "history.csv")
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


def test_options_come_from_one_place(few):
    with pytest.raises(UsageError, match="epochs"):
        train_backbone(
            create_backbone("resnet9", 10), EAGER, few.train, few.validation, options=TrainOptions(), epochs=2
        )


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

    with pytest.raises(TrainError, match="epoch 2"):
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
    (row,) = read_rows(tmp_path / "history.csv")
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
    with pytest.raises(DataError, match="class '3'"):
        torch.manual_seed(0)
        train_backbone(create_backbone("resnet9", 10), EAGER, splits.train, without, epochs=1)


def test_a_collapse_stops_where_asked_to_and_can_go_on(splits, tmp_path):
    def new():
        torch.manual_seed(0)
        layer = nn.Linear(3 * 8 * 8, 16)
        nn.init.zeros_(layer.weight)
        nn.init.ones_(layer.bias)
        return Backbone(nn.Sequential(nn.Flatten(), layer), nn.Linear(16, 10), embedding_size=16)

    recipe = create_recipe("triplet", triplet_softness=0.0)
    options = {"epochs": 2, "batch_size": 64, "learning_rate": 1e-6, "show_progress": False, "folder": tmp_path}
    with pytest.raises(TrainError, match=r"--triplet-mining all.*--on-collapse warn"):
        train_backbone(new(), recipe, splits.train, splits.validation, on_collapse="stop", **options)
    run = train_backbone(new(), recipe, splits.train, splits.validation, resume=True, **options)
    assert [row["epoch"] for row in run.history] == [1, 2]


@pytest.mark.parametrize("preset", ["paper", "paper-code"])
def test_presets_of_the_paper_train_a_small_network(splits, preset):
    """No collapse in three epochs on a small WRN, at the preset's own optimiser, batch and loss."""
    config = resolve_config({"epochs": 3, "precision": "32-true", "seed": 0}, preset=preset)
    torch.manual_seed(0)
    model, recipe = config.model, config.recipe
    backbone = create_backbone("wrn-10-1", 10, embedding_size=model.embedding_size, branch=model.embedding_branch)
    run = train_backbone(backbone, recipe, splits.train, splits.validation, options=config.train, show_progress=False)
    assert run.history[-1]["validation_accuracy"] > 0.3
    assert run.history[-1]["spread"] > 0.1


def test_losses_that_read_the_head_refuse_an_embedding_beside_it(few):
    for recipe, option in ((MapleRecipe(), "prototype"), (create_recipe("duq"), "embedding-branch")):
        backbone = create_backbone("wrn-10-1", 10, embedding_size=8, branch=True)
        with pytest.raises(UsageError, match=option):
            start(recipe, few, backbone=backbone, epochs=1)


def test_a_head_beside_the_embedding_grows(few):
    recipe = dataclasses.replace(EAGER, prototype_weight=0.0, head_growth="fresh", cluster_scope="class")
    run = start(recipe, few, backbone=create_backbone("wrn-10-1", 10, embedding_size=8, branch=True), epochs=2)
    assert run.backbone.head.weight.shape == (run.relabelling.n_clusters, 64)


def test_torch_data_train_the_same_network(few):
    data_sets = dataclasses.replace(few, train=NamedPictures(few.train), validation=Pictures(few.validation))
    ours, theirs = (start(EAGER, splits, epochs=1, augment="crop") for splits in (few, data_sets))
    assert theirs.class_names == ours.class_names
    for name, tensor in ours.backbone.state_dict().items():
        assert torch.equal(theirs.backbone.state_dict()[name], tensor), name
