"""The callback for Lightning."""

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
from maple.errors import UsageError
from maple.prediction.callback import _make_callback
from maple.prediction.own_loop import Indexed
from own_training import EAGER


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


@pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, short epochs, renamed functions of torch
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


@pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, short epochs, renamed functions of torch
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


@pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, short epochs, renamed functions of torch
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


@pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, short epochs, renamed functions of torch
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
