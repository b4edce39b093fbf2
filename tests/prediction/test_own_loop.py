"""Own loops reach the weights of train_backbone; checkpoints, data sets of any kind, refusals."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from maple.data.batches import Epoch, training_batches
from maple.errors import DataError, TrainError, UsageError
from maple.networks import create_backbone, wrap_backbone
from maple.prediction.fit import fit_predictor
from maple.prediction.own_loop import Indexed, Relabeller, resize_head
from maple.training.loop import train_backbone
from maple.training.optimizers import learning_rate_at
from maple.training.recipe import create_recipe
from maple.types import Relabelling
from own_training import BATCH, EAGER, EPOCHS, OPTIONS, SEED, make_backbone, make_optimizer


def run_own_loop(splits, recipe, first=1, session=None, backbone=None, optimizer=None, stop=EPOCHS):
    """A loop as anyone might write it, on the batches and learning rates of ours."""
    backbone = backbone or make_backbone()
    optimizer = optimizer or make_optimizer(backbone)
    session = session or Relabeller(recipe, splits.train.labels, 10, epochs=EPOCHS, seed=SEED)
    found = []
    for epoch in range(first, stop + 1):
        torch.manual_seed((SEED * 1_000_003 + epoch) * 1_009)
        backbone.train()
        order = Epoch(batch_size=BATCH, seed=SEED, number=epoch)
        batches = training_batches(splits.train, session.labels.numpy(), order)
        for x, _, index in batches:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(session.progress, OPTIONS)
            loss = session.loss(backbone, x, session.labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(session.end_epoch(epoch, backbone, splits.train, splits.validation, optimizer))
    return session, backbone, optimizer, found


@pytest.fixture(scope="module")
def own(splits):
    return run_own_loop(splits, EAGER)


@pytest.fixture(scope="module")
def ours(splits):
    return train_backbone(make_backbone(), EAGER, splits.train, splits.validation, options=OPTIONS, show_progress=False)


def test_own_loop_is_the_loop_of_train_backbone(own, ours, splits):
    """Bit for bit: pseudo-labels, clusters, weights, and what is said about the epochs."""
    session, backbone, _, found = own
    for field in dataclasses.fields(Relabelling):
        np.testing.assert_array_equal(getattr(session.relabelling, field.name), getattr(ours.relabelling, field.name))
    assert session.n_clusters == backbone.head.out_features > 10
    for (name, a), b in zip(ours.backbone.state_dict().items(), backbone.state_dict().values()):
        assert torch.equal(a, b), name
    names = splits.train.class_names
    assert [";".join(names[c] for c in row.relabelled) for row in found] == [row["relabelled"] for row in ours.history]
    for row, expected in zip(found, ours.history):
        assert row.validation_accuracy == expected["validation_accuracy"]
        assert row.n_clusters == expected["clusters"]
        assert row.relabel_shift == expected.get("relabel_shift", 0.0) < 1e-5


def test_predictor_is_that_of_fit_predictor(own, splits):
    session, backbone, _, _ = own
    found = session.fit(backbone, splits.train, splits.validation, splits.calibration)
    expected = fit_predictor(
        backbone, splits.train, splits.validation, splits.calibration, relabelling=session.relabelling
    )
    a, b = found(splits.test), expected(splits.test)
    np.testing.assert_array_equal(a.score, b.score)
    np.testing.assert_array_equal(a.log_probabilities, b.log_probabilities)
    assert found.class_names == splits.class_names and found.threshold == expected.threshold
    assert a.cluster.max() >= 10 and a.md_class_id.max() < 10


def test_checkpoint_of_an_own_loop(splits, own, tmp_path):
    """Killed after the second epoch, with a head that has grown: the rest of it is as if nothing had happened."""
    session, backbone, optimizer, _ = run_own_loop(splits, EAGER, stop=2)
    assert session.n_clusters > 10
    parts = {"model": backbone, "optimizer": optimizer, "session": session}
    torch.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "own.pt")
    state = torch.load(tmp_path / "own.pt", weights_only=True)
    torch.manual_seed(77)
    again = create_backbone("resnet9", 10)
    fresh = Relabeller(EAGER, splits.train.labels, 10, epochs=EPOCHS, seed=SEED)
    fresh.load_state_dict(state["session"], again)
    again.load_state_dict(state["model"])
    optimizer = make_optimizer(again)
    optimizer.load_state_dict(state["optimizer"])
    run_own_loop(splits, EAGER, 3, fresh, again, optimizer)
    assert torch.equal(fresh.labels, own[0].labels)
    for a, b in zip(own[1].state_dict().values(), again.state_dict().values()):
        assert torch.equal(a, b)
    others = Relabeller(EAGER, np.roll(splits.train.labels, 1), 10, epochs=EPOCHS)
    with pytest.raises(UsageError, match="checkpoint"):
        others.load_state_dict(state["session"], again)


def test_datasets_and_arrays_give_what_image_sets_give(splits, arrays):
    x, backbone = arrays
    labels = torch.from_numpy(splits.train.labels)
    floats = x.float() / 255
    kinds = {
        "images": splits.train,
        "dataset": TensorDataset(floats, labels),
        "tensor": floats,
        "array": splits.train.pixels,
    }
    validation = TensorDataset(
        torch.from_numpy(splits.validation.pixels.transpose(0, 3, 1, 2).copy()).float() / 255,
        torch.from_numpy(splits.validation.labels),
    )
    found = {}
    for name, train in kinds.items():
        session = Relabeller(EAGER, labels, 10, epochs=2)
        head = wrap_backbone(backbone).head
        optimizer = torch.optim.SGD(backbone.parameters(), 0.0)
        end = session.end_epoch(1, backbone, train, validation, optimizer)
        predictor = session.fit(backbone, train, validation)
        found[name] = (end, session.labels, predictor(splits.test).score, predictor.size)
        backbone.head = head
    for name in ("dataset", "tensor", "array"):
        assert found[name][0] == found["images"][0] and found[name][0].n_clusters > 10
        assert torch.equal(found[name][1], found["images"][1])
        np.testing.assert_allclose(found[name][2], found["images"][2], rtol=1e-5)
        assert found[name][3] == 8


def test_indexed(splits, arrays):
    x, _ = arrays
    indexed = Indexed(splits.train)
    assert len(indexed) == len(splits.train)
    image, label, index = indexed[7]
    assert torch.equal(image, x[7].float() / 255) and label == splits.train.labels[7] and index == 7
    others = Indexed(TensorDataset(x, torch.from_numpy(splits.train.labels)))
    batch = next(iter(DataLoader(others, batch_size=5)))
    assert torch.equal(batch[2], torch.arange(5)) and torch.equal(batch[0], x[:5])


def test_refusals(splits, arrays):
    _, backbone = arrays
    labels, train, validation = splits.train.labels, splits.train, splits.validation
    with pytest.raises(UsageError, match="'duq'"):
        Relabeller(create_recipe("duq"), labels, 10, epochs=1)
    with pytest.raises(UsageError, match="from 0 to 8"):
        Relabeller(EAGER, labels, 9, epochs=1)
    with pytest.raises(DataError, match="class 10"):
        Relabeller(EAGER, labels, 11, epochs=1)
    session = Relabeller(EAGER, labels, 10, epochs=9)
    optimizer = torch.optim.SGD(backbone.parameters(), 0.1)
    body = torch.optim.SGD(backbone.body.parameters(), 0.1)
    module = nn.Linear(3, 3)
    calls = {
        "optimiser": (1, backbone, train, validation, body),
        "labels": (1, backbone, train.subset(np.arange(100)), validation, optimizer),
        "order": (1, backbone, train.subset(np.arange(len(train))[::-1]), validation, optimizer),
        "DataLoader": (1, backbone, DataLoader(Indexed(train)), validation, optimizer),
        "no labels": (1, backbone, train, validation.pixels, optimizer),
        "wrap_backbone": (1, module, train, validation, optimizer),
    }
    for message, arguments in calls.items():
        with pytest.raises(UsageError, match=message):
            session.end_epoch(*arguments)
    assert session.n_clusters == 10 and session.epoch <= 1
    broken = wrap_backbone(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), example=torch.rand(2, 3, 8, 8))
    nn.init.constant_(broken.head.weight, float("nan"))
    with pytest.raises(TrainError, match="epoch 2"):
        session.end_epoch(2, broken, train, validation, torch.optim.SGD(broken.parameters(), 0.1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"class_names": ["a", "b"]}, "class_names"),
        ({"labels": [0.0, 1.5, 2.0]}, "float64"),
        ({"labels": torch.tensor([0.0, 1.0, 2.0])}, "float32"),
    ],
)
def test_what_a_session_is_made_of(changes, message):
    with pytest.raises(UsageError, match=message):
        Relabeller(**{"recipe": EAGER, "labels": [0, 1, 2], "n_classes": 3, "epochs": 2} | changes)


@pytest.mark.parametrize("epoch", [0, 3])
def test_epochs_are_counted_from_one(splits, arrays, epoch):
    session = Relabeller(EAGER, splits.train.labels, 10, epochs=2)
    with pytest.raises(UsageError, match=f"epoch is {epoch}"):
        session.end_epoch(epoch, arrays[1], splits.train, splits.validation, make_optimizer(arrays[1]))
    assert session.epoch == 0


@pytest.mark.parametrize("wrong", [-1, 10])
def test_validation_images_of_other_classes(splits, arrays, wrong):
    session = Relabeller(EAGER, splits.train.labels, 10, epochs=2)
    labels = torch.from_numpy(splits.train.labels.copy())
    labels[3] = wrong
    others = TensorDataset(arrays[0].float() / 255, labels)
    with pytest.raises(UsageError, match="0 to 9"):
        session.end_epoch(1, arrays[1], splits.train, others, make_optimizer(arrays[1]))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (nn.Linear(24, 1000), r"1000 .*torch.nn.Linear\(backbone.embedding_size, 10\)"),
        (nn.Linear(24, 7), "7 outputs.* 10"),
        (nn.Sequential(nn.Linear(24, 10)), "Sequential.* 10"),
    ],
)
def test_heads_of_the_wrong_size(splits, arrays, head, message):
    backbone = copy.deepcopy(arrays[1])
    backbone.head = head
    session = Relabeller(EAGER, splits.train.labels, 10, epochs=2)
    calls = (
        lambda: session.loss(backbone, torch.rand(2, 3, 8, 8), torch.tensor([0, 1])),
        lambda: session.end_epoch(1, backbone, splits.train, splits.validation, make_optimizer(backbone)),
        lambda: session.fit(backbone, splits.train, splits.validation),
    )
    for call in calls:
        with pytest.raises(UsageError, match=message):
            call()
    assert session.progress == 0


def test_the_first_batch_is_in_the_unit_interval(splits, arrays):
    session = Relabeller(EAGER, splits.train.labels, 10, epochs=2)
    x, pseudo_labels = torch.rand(8, 3, 8, 8), torch.arange(8)
    for images, message in (
        ((x - 0.5) / 0.25, r"\[0, 1\]"),
        (x * 255, r"\[0, 1\]"),
        ((x * 255).to(torch.uint8), "torch.uint8"),
    ):
        with pytest.raises(UsageError, match=message):
            session.loss(arrays[1], images, pseudo_labels)
    session.loss(arrays[1], x, pseudo_labels=pseudo_labels)
    session.loss(arrays[1], 1.1 * x - 0.05, pseudo_labels)  # a change of contrast


def test_validation_does_not_count_as_progress(splits, arrays):
    _, backbone = arrays
    session = Relabeller(EAGER, splits.train.labels, 10, epochs=2)
    x, targets = torch.rand(192, 3, 8, 8), torch.zeros(192, dtype=torch.int64)
    with torch.no_grad():
        session.loss(backbone, x, targets)
    assert session.progress == 0
    session.loss(backbone, x, targets)
    assert session.progress == 192 / len(splits.train) / 2


def test_resize_head_keeps_one_that_fits(arrays):
    backbone = copy.deepcopy(arrays[1])
    head = backbone.head
    resize_head(backbone, 10)
    assert backbone.head is head
    resize_head(backbone, 12)
    assert backbone.head.out_features == 12


def test_fit_refuses_options_that_the_session_owns(arrays, splits):
    """The clusters and the class rule are those of the training: another value is not silently ignored."""
    session = Relabeller(EAGER, splits.train.labels, 10, epochs=1)
    for name in ("relabelling", "class_rule"):
        with pytest.raises(TypeError, match=name):
            session.fit(arrays[1], splits.train, splits.validation, **{name: None})
