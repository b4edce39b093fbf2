"""History and checkpoints: resumed trainings reach the same weights; other data, options or networks are refused."""

from __future__ import annotations

import csv
import dataclasses
import io

import numpy as np
import pytest
import torch

from maple.errors import RunError, UsageError
from maple.files import RunFile
from maple.networks import create_backbone
from maple.training.recipe import create_recipe
from maple.training.resume import COLUMNS, Checkpoint, data_digest, history_csv
from short_training import EAGER, start


@pytest.mark.parametrize(
    "recipe",
    [
        EAGER,
        create_recipe(
            "maple", relabel_every=1, hard_class_error=0.0, head_growth="fresh", cluster_scope="class", class_rule="max"
        ),
        create_recipe("cross-entropy", rotation_share=0.25, outlier_share=0.25),
        create_recipe("mc-dropout"),
        create_recipe("sngp", features=64),
        create_recipe("duq"),
        create_recipe("vmdls-like"),
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
        with pytest.raises(RunError, match="one-epoch"):
            start(create_recipe("triplet"), changed, one_epoch, epochs=1, resume=True)


def test_resume_refuses_another_network(few, one_epoch):
    for backbone in (create_backbone("resnet20", 10), create_backbone("resnet9", 10, embedding_size=16)):
        with pytest.raises(RunError, match="--backbone"):
            start(create_recipe("triplet"), few, one_epoch, epochs=1, resume=True, backbone=backbone)


def test_resume_accepts_options_that_change_nothing(few, one_epoch):
    run = start(create_recipe("triplet"), few, one_epoch, epochs=1, resume=True, workers=0, checkpoint_every=3)
    assert len(run.history) == 1


def test_options_that_did_not_exist_at_the_start_are_not_compared(one_epoch):
    found = Checkpoint.load(one_epoch / RunFile.CHECKPOINT)
    older = dataclasses.replace(found, options={k: v for k, v in found.options.items() if k != "label_smoothing"})
    older.check({**found.options, "label_smoothing": 0.1}, found.data, one_epoch)
    with pytest.raises(UsageError, match="--label-smoothing"):
        found.check({**found.options, "label_smoothing": 0.1}, found.data, one_epoch)


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


def test_head_without_bias_is_restored(few, tmp_path):
    runs = []
    for resume in (False, True):
        backbone = create_backbone("resnet9", 10)
        backbone.head = torch.nn.Linear(backbone.embedding_size, 10, bias=False)
        runs.append(start(create_recipe("triplet"), few, tmp_path, epochs=1, resume=resume, backbone=backbone))
    assert runs[1].backbone.head.bias is None
    assert torch.equal(runs[0].backbone.head.weight, runs[1].backbone.head.weight)


def test_own_terms_come_last_and_missing_ones_are_empty():
    rows = list(csv.DictReader(io.StringIO(history_csv([{"epoch": 1, "brier": 0.5}, {"epoch": 2, "other": 0.25}]))))
    assert tuple(rows[0]) == (*COLUMNS, "brier", "other")
    assert [(row["epoch"], row["brier"], row["other"]) for row in rows] == [("1", "0.5", ""), ("2", "", "0.25")]
