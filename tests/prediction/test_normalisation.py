"""A head that fails because its images are normalised in another way than in its training."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from maple.data.sources import open_images
from maple.data.splits import load_splits
from maple.networks import embed, open_model, wrap_backbone
from maple.prediction.fit import fit_predictor
from maple.prediction.normalisation import COMMON, PYTHON, Disagreement, Trial, find_disagreement, normalised_by

BY_NAME = {how.name.split()[-1]: how for how in COMMON}  # "ImageNet", "CIFAR-10", .. "0..1", "0..255"


@pytest.fixture(scope="module")
def splits():
    return load_splits("digits")


def train_network(splits, how):
    """A small network, trained on digits with this normalisation."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 48, 3), nn.ReLU(), nn.Flatten(), nn.Linear(768, 10)
    )
    x = torch.from_numpy(splits.train.pixels.copy()).permute(0, 3, 1, 2).float() / 255
    x = (x - torch.tensor(how.mean)[:, None, None]) / torch.tensor(how.std)[:, None, None]
    labels = torch.from_numpy(splits.train.labels)
    optimizer = torch.optim.Adam(module.parameters(), 3e-3)
    for step in range(120):
        rows = torch.arange(step * 64, step * 64 + 64) % len(x)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x[rows]), labels[rows]).backward()
        optimizer.step()
    return module.eval()


@pytest.fixture(scope="module")
def module(splits):
    return train_network(splits, BY_NAME["ImageNet"])


def fit(module, splits, how):
    backbone = wrap_backbone(module, mean=how.mean, std=how.std, example=torch.rand(2, 3, 8, 8))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        predictor = fit_predictor(backbone, splits.train, splits.validation)
    return predictor, [str(warning.message) for warning in said if warning.category is UserWarning]


@pytest.mark.parametrize("opened", ["0..1", "0..255"])
def test_the_right_normalisation_is_named(module, splits, opened):
    predictor, said = fit(module, splits, BY_NAME[opened])
    assert len(said) == 1 and "mean=(" in said[0] and "ImageNet" in said[0]  # the numbers of CIFAR are as good here
    found = find_disagreement(predictor, splits.validation, embed(predictor.backbone, splits.validation))
    right, _ = fit(module, splits, BY_NAME["ImageNet"])
    head = (right(splits.validation).softmax_class_id == splits.validation.labels).mean()
    assert found.better.normalisation in COMMON[:3]
    assert found.better.accuracy == pytest.approx(head, abs=0.02) and head > found.head + 0.1


def test_a_network_in_order_is_not_tried(module, splits):
    predictor, said = fit(module, splits, BY_NAME["ImageNet"])
    assert said == []
    assert find_disagreement(predictor, splits.validation, embed(predictor.backbone, splits.validation)) is None


def test_classes_in_another_order_are_named_when_no_normalisation_helps(module, splits):
    turned = nn.Sequential(*module[:-1], nn.Linear(768, 10)).eval()
    with torch.no_grad():
        turned[-1].weight.copy_(module[-1].weight.roll(3, 0))
        turned[-1].bias.copy_(module[-1].bias.roll(3, 0))
    _, said = fit(turned, splits, BY_NAME["ImageNet"])
    assert len(said) == 1 and "another order" in said[0] and "mean=" not in said[0]


def test_the_network_is_left_as_it_was(module):
    backbone = wrap_backbone(module, mean=(0.1, 0.2, 0.3), example=torch.rand(2, 3, 8, 8))
    with pytest.raises(KeyError), normalised_by(backbone, BY_NAME["0..255"]):
        assert float(backbone.std[0]) == pytest.approx(1 / 255)
        raise KeyError
    np.testing.assert_allclose(backbone.mean, (0.1, 0.2, 0.3))


def test_of_equal_accuracies_the_likelier_one_is_named(module):
    tried = tuple(Trial(how, 0.9, -1.0 - i) for i, how in enumerate(COMMON))
    found = Disagreement(0.4, 0.7, 500, tried)
    assert found.better.normalisation == COMMON[0]
    backbone = wrap_backbone(module, example=torch.rand(2, 3, 8, 8))
    assert "mean 0,0,0 and deviation 1,1,1" in found.describe(backbone, PYTHON)
    assert Disagreement(0.89, 0.92, 500, tried).better is None


@pytest.mark.shared
@pytest.mark.parametrize("opened", ["0..1", "0..255"])
def test_public_resnet20(shared_dir, opened):
    """Its weights expect the numbers of ImageNet, of which those of CIFAR are a neighbour."""
    how = BY_NAME[opened]
    weights = shared_dir / "weights" / "resnet20-12fca82f.th"
    backbone = open_model("resnet20", weights=weights, mean=how.mean, std=how.std)
    test = open_images("cifar10/test", data_root=shared_dir / "data", size=32)
    known, unseen = test.subset(np.arange(1500)), test.subset(np.arange(1500, 2000))
    outputs = embed(backbone, unseen)
    predictor = fit_predictor(backbone, known, outputs)
    found = find_disagreement(predictor, unseen, outputs)
    assert found.better.normalisation in COMMON[:3] and found.better.accuracy > 0.88
