"""MAPLE in loops of others: the same relabelling as in ours, heads that the optimiser knows, and Lightning."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import maple
from maple.data.batches import Epoch, training_batches
from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.errors import DataError, TrainError, UsageError
from maple.networks import create_backbone, wrap_backbone
from maple.prediction.callback import _make_callback
from maple.prediction.fit import fit_predictor
from maple.prediction.own_loop import Indexed, Relabeller, resize_head
from maple.training.head import grow_backbone, named_state, replace_head
from maple.training.loop import train_backbone
from maple.training.maple import MapleRecipe
from maple.training.optimizers import learning_rate_at
from maple.training.options import TrainOptions
from maple.training.recipe import create_recipe
from maple.types import Relabelling

EPOCHS, BATCH, SEED = 3, 64, 5
EAGER = MapleRecipe(relabel_every=1, hard_class_error=0.0, min_cluster_size=10, max_clusters=3)
OPTIONS = TrainOptions(epochs=EPOCHS, batch_size=BATCH, seed=SEED, precision="32-true")


@pytest.fixture(scope="module")
def splits():
    whole = load_splits("digits", DataOptions())
    return dataclasses.replace(whole, train=whole.train.subset(np.arange(6 * BATCH)))


def make_backbone():
    torch.manual_seed(SEED)
    return create_backbone("resnet9", 10)


def make_optimizer(module):
    return torch.optim.SGD(
        module.parameters(), lr=OPTIONS.learning_rate, momentum=0.9, nesterov=True, weight_decay=OPTIONS.weight_decay
    )


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


# --- the optimiser ----------------------------------------------------------------------------------------------------

SPLIT = Relabelling(
    cluster_ids=np.array([0, 1, 2, 2]),
    cluster_to_class=np.array([0, 0, 1]),
    parents=np.array([0, 0, 1]),
    shares=np.array([0.5, 0.5, 1.0]),
)
OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), ("momentum_buffer",)),
    "adam": (lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "adafactor": (lambda p: torch.optim.Adafactor(p, 0.1), ()),  # what it keeps of a matrix has no rows
}


def tiny_backbone(bias=True):
    torch.manual_seed(0)
    backbone = wrap_backbone(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2, bias=bias)), example=IMAGES)
    backbone.train()
    return backbone


IMAGES = torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))


def step(backbone, optimizer, targets):
    optimizer.zero_grad()
    F.cross_entropy(backbone(IMAGES)[1], targets).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rows_that_live_on_keep_their_state(kind):
    make, keys = OPTIMIZERS[kind]
    backbone = tiny_backbone()
    groups = [{"params": [*backbone.body.parameters()]}, {"params": [*backbone.head.parameters()], "weight_decay": 0.3}]
    optimizer = make(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(backbone, optimizer, torch.tensor([0, 0, 1, 1]))
    scheduler.step()
    before = {
        name: {key: torch.as_tensor(value).clone() for key, value in values.items()}
        for name, values in named_state(optimizer, backbone).items()
    }
    head = backbone.head
    replace_head(optimizer, head, backbone, grow_backbone(backbone, EAGER, SPLIT, named_state(optimizer, backbone)))
    after = named_state(optimizer, backbone)
    assert after["body.1.weight"].keys() == before["body.1.weight"].keys()
    if keys:
        for name in ("head.weight", "head.bias"):
            for key in keys:
                assert torch.equal(after[name][key], before[name][key][[0, 0, 1]]), (name, key)
    else:
        assert "head.weight" in before and "head.weight" not in after
    assert not any(parameter in optimizer.state for parameter in head.parameters())
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(p) for p in backbone.head.parameters()]
    assert optimizer.param_groups[1]["weight_decay"] == 0.3 and optimizer.param_groups[1]["lr"] == 0.05
    weight = backbone.head.weight.detach().clone()
    assert torch.equal(weight[0], weight[1])
    for _ in range(2):  # of one parent, the rows now part: the optimiser moves the new head, and its states are apart
        step(backbone, optimizer, torch.tensor([0, 1, 2, 2]))
    assert not torch.allclose(backbone.head.weight[0], backbone.head.weight[1])


def test_a_new_bias_joins_the_group_of_the_weight():
    backbone = tiny_backbone(bias=False)
    optimizer = torch.optim.SGD(backbone.named_parameters(), 0.1, momentum=0.9)
    step(backbone, optimizer, torch.tensor([0, 0, 1, 1]))
    head = backbone.head
    replace_head(optimizer, head, backbone, grow_backbone(backbone, EAGER, SPLIT, named_state(optimizer, backbone)))
    (group,) = optimizer.param_groups
    assert len(group["params"]) == len(group["param_names"]) == 4
    assert group["params"][-1] is backbone.head.bias and group["param_names"][-1] == "head.bias"
    bias = backbone.head.bias.detach().clone()
    step(backbone, optimizer, torch.tensor([0, 1, 2, 2]))
    assert not torch.equal(backbone.head.bias, bias)


def test_a_fresh_head_starts_without_momentum():
    backbone = tiny_backbone()
    optimizer = torch.optim.SGD(backbone.parameters(), 0.1, momentum=0.9)
    step(backbone, optimizer, torch.tensor([0, 0, 1, 1]))
    head = backbone.head
    recipe = create_recipe("maple", head_growth="fresh", cluster_scope="class")
    replace_head(optimizer, head, backbone, grow_backbone(backbone, recipe, SPLIT, named_state(optimizer, backbone)))
    assert set(named_state(optimizer, backbone)) == {"body.1.weight", "body.1.bias"}
    assert not torch.equal(backbone.head.weight[0], head.weight[0])


# --- data of others ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arrays(splits):
    """Digits as tensors, and a small network that is not trained."""
    torch.manual_seed(1)
    x = torch.from_numpy(splits.train.pixels.transpose(0, 3, 1, 2).copy())  # uint8
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 10))
    return x, wrap_backbone(module, example=x[:2].float() / 255)


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


# --- what is refused --------------------------------------------------------------------------------------------------


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
    with pytest.raises(UsageError, match=f"epoch {epoch} of 2"):
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


# --- Lightning --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lightning():
    if importlib.util.find_spec("pytorch_lightning") is None:
        pytest.skip("Lightning is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert maple.MapleCallback is maple.MapleCallback  # one class, made once; making it imports Lightning
    return sys.modules["pytorch_lightning"]


def make_classifier(lightning, backbone):
    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone = backbone
            self.seen = []  # epoch, positions and labels of each batch

        def training_step(self, batch, batch_idx):
            x, y, index = batch
            self.seen.append((self.trainer.current_epoch, index.clone(), y.clone()))
            return F.cross_entropy(self.backbone(x)[1], y)

        def test_step(self, batch, batch_idx):
            self.log("clusters", float(self.backbone(batch[0])[1].shape[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return Classifier()


def make_trainer(lightning, callback, epochs=3):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return lightning.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[callback], **quiet)


def fit(lightning, module, callback, images, epochs=3, **options):
    trainer = make_trainer(lightning, callback, epochs)
    torch.manual_seed(0)
    trainer.fit(module, DataLoader(Indexed(images), batch_size=96, shuffle=True), **options)
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_lightning_callback(lightning, splits, arrays, tmp_path):
    backbone = copy.deepcopy(arrays[1])
    callback = maple.MapleCallback(EAGER, splits.train, splits.validation, splits.calibration)
    assert isinstance(callback, lightning.Callback)
    module = make_classifier(lightning, backbone)
    trainer = fit(lightning, module, callback, splits.train)
    assert [found.epoch for found in callback.history] == [1, 2, 3]
    assert callback.history[0].relabelled and not callback.history[-1].relabelled
    assert trainer.callback_metrics["maple_clusters"] == callback.session.n_clusters == backbone.head.out_features > 10
    (optimizer,) = trainer.optimizers
    assert backbone.head.weight in optimizer.state  # it has made steps with the head that has grown
    parents = callback.session.relabelling.cluster_to_class.tolist()
    for epoch, index, y in module.seen:
        labels = torch.from_numpy(splits.train.labels)[index]
        if epoch == 0:
            assert torch.equal(y, labels)
        if epoch == 2:
            assert torch.equal(y, callback.session.labels[index])
            assert [parents[cluster] for cluster in y] == labels.tolist()
    prediction = callback.predictor(splits.test)
    assert (prediction.class_id == splits.test.labels).mean() > 0.7
    assert callback.predictor.calibration_scores.size == len(splits.calibration)

    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = maple.MapleCallback(EAGER, splits.train, splits.validation)
    torch.manual_seed(3)
    other = make_classifier(lightning, copy.deepcopy(arrays[1]))
    assert other.backbone.head.out_features == 10
    labels = callback.session.labels
    fit(lightning, other, again, splits.train, epochs=4, ckpt_path=tmp_path / "last.ckpt")
    assert [found.epoch for found in again.history] == [4]
    assert torch.equal(again.session.labels, labels)
    assert other.backbone.head.out_features == backbone.head.out_features

    grown = backbone.head.out_features  # weights of a head that has grown can also be tested, and fitted, without fit
    tested = maple.MapleCallback(EAGER, splits.train, splits.validation, splits.calibration)
    other = make_classifier(lightning, copy.deepcopy(arrays[1]))
    trainer = make_trainer(lightning, tested)
    images = TensorDataset(arrays[0].float() / 255, torch.from_numpy(splits.train.labels))
    (metrics,) = trainer.test(other, DataLoader(images, batch_size=96), tmp_path / "last.ckpt", verbose=False)
    assert metrics["clusters"] == grown == other.backbone.head.out_features
    np.testing.assert_array_equal(tested.predictor(splits.test).score, prediction.score)

    fit(lightning, module, callback, splits.train, epochs=2)  # another Trainer: the epochs count on
    assert [found.epoch for found in callback.history] == [1, 2, 3, 4, 5]
    assert callback.session.epochs == 5 and callback.session.n_clusters == backbone.head.out_features >= grown
    callback.train = dataclasses.replace(splits.train, labels=np.roll(splits.train.labels, 1))
    with pytest.raises(UsageError, match="MapleCallback"):
        fit(lightning, module, callback, splits.train, epochs=2)


@pytest.mark.filterwarnings("ignore")
def test_lightning_leaves_module_and_loader_as_they_are(lightning, splits, arrays, tmp_path):
    """Batches may be views of someone's own tensors."""
    images, labels, index = arrays[0].float() / 255, torch.from_numpy(splits.train.labels), torch.arange(len(arrays[0]))
    own = labels.clone()
    views = [(images[i : i + 96], own[i : i + 96], index[i : i + 96]) for i in range(0, len(own), 96)]
    batches = DataLoader(views, batch_size=1, collate_fn=lambda items: items[0])
    module = make_classifier(lightning, copy.deepcopy(arrays[1]))
    callback = maple.MapleCallback(EAGER, splits.train, splits.validation)
    trainer = make_trainer(lightning, callback, 2)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "first.ckpt")  # before there is a session
    with pytest.raises(UsageError, match=r"trainer\.fit"):
        _ = callback.predictor
    trainer.fit(module, batches)
    assert torch.equal(own, labels)
    seen = torch.cat([y for epoch, _, y in module.seen if epoch == 1])
    assert torch.equal(seen, callback.session.labels) and not torch.equal(seen, labels)
    assert "training_step" not in vars(module)


@pytest.mark.filterwarnings("ignore")
def test_predictor_where_lightning_was_interrupted(lightning, splits, arrays):
    class Stop(lightning.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            raise ValueError("stop")

    module = make_classifier(lightning, copy.deepcopy(arrays[1]))
    callback = maple.MapleCallback(EAGER, splits.train, splits.validation)
    trainer = make_trainer(lightning, callback)
    trainer.callbacks.append(Stop())
    with pytest.raises(ValueError, match="stop"):
        trainer.fit(module, DataLoader(Indexed(splits.train), batch_size=96))
    assert "training_step" not in vars(module)
    assert callback.predictor is callback.predictor
    assert len(callback.predictor.cluster_to_class) == callback.session.n_clusters == module.backbone.head.out_features


@pytest.mark.filterwarnings("ignore")
def test_lightning_refusals(lightning, splits, arrays):
    module = make_classifier(lightning, nn.Linear(3, 3))
    with pytest.raises(UsageError, match="'backbone'"):
        fit(lightning, module, maple.MapleCallback(EAGER, splits.train, splits.validation), splits.train)
    module = make_classifier(lightning, copy.deepcopy(arrays[1]))
    callback = maple.MapleCallback(EAGER, splits.train, splits.validation)
    with pytest.raises(UsageError, match=r"maple\.Indexed"):
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False
        )
        trainer.fit(module, DataLoader(TensorDataset(arrays[0].float() / 255, torch.from_numpy(splits.train.labels))))
    with pytest.raises(UsageError, match="max_epochs"):
        fit(lightning, module, callback, splits.train, epochs=-1)
    module.backbone.head = nn.Linear(24, 1000)
    with pytest.raises(UsageError, match="1000"):
        fit(lightning, module, callback, splits.train)


def test_without_lightning_a_sentence_says_so(monkeypatch):
    monkeypatch.setattr("maple.prediction.callback.PACKAGES", {"no_such_lightning": "no_such_lightning"})
    with pytest.raises(UsageError, match=r"pip install 'maple-uncertainty\[lightning\]'"):
        _make_callback.__wrapped__()


def test_resize_head_keeps_one_that_fits(arrays):
    backbone = copy.deepcopy(arrays[1])
    head = backbone.head
    resize_head(backbone, 10)
    assert backbone.head is head
    resize_head(backbone, 12)
    assert backbone.head.out_features == 12
