"""Fitting a predictor: every kind of Gaussian, no augmentation, with and without calibration."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from maple.data.image_set import ImageSet
from maple.detectors.maple import MapleDetector
from maple.errors import UsageError
from maple.networks import create_backbone, embed, wrap_backbone
from maple.prediction.fit import fit_predictor
from maple.prediction.store import load_predictor
from maple.training.options import TrainOptions
from maple.training.processes import make_fabric
from processes import in_processes
from torch_sets import NamedPictures, Pictures


def test_fit_sees_no_augmentation(backbone, whole, predictor):
    """The same images with another augmentation setting give the same Gaussians to the last bit."""
    flipped = dataclasses.replace(whole.train, augment="crop,flip-both")
    again = fit_predictor(backbone, flipped, whole.validation, whole.calibration)
    np.testing.assert_array_equal(again.detector.gaussians_.matrix, predictor.detector.gaussians_.matrix)
    np.testing.assert_array_equal(again.calibration_scores, predictor.calibration_scores)


@pytest.mark.parametrize("covariance", ["tied", "global", "full"])
@pytest.mark.parametrize("distance", ["mahalanobis", "euclidean"])
def test_every_kind_of_gaussian(backbone, whole, covariance, distance, tmp_path):
    detector = MapleDetector(covariance=covariance, distance=distance)
    predictor = fit_predictor(backbone, whole.train, whole.validation, whole.calibration, detector=detector)
    said = predictor(whole.test)
    assert np.isfinite(said.probabilities).all()
    predictor.save(tmp_path)
    np.testing.assert_allclose(load_predictor(tmp_path)(whole.test).score, said.score, rtol=1e-12)


@pytest.mark.parametrize("n_outputs", [5, 12])
def test_a_head_for_other_classes_is_named(whole, n_outputs):
    with pytest.raises(UsageError, match=f"{n_outputs} logits"):
        fit_predictor(create_backbone("resnet9", n_outputs), whole.train, whole.validation, whole.calibration)


def test_without_calibration_nothing_is_flagged(backbone, whole):
    said = fit_predictor(backbone, whole.train, whole.validation)(whole.test)
    assert np.isnan(said.p_value).all()
    assert not said.is_ood.any()
    assert math.isinf(fit_predictor(backbone, whole.train, whole.validation).threshold)


def test_temperature_improves_the_likelihood(predictor, whole):
    found = predictor.detector.describe(embed(predictor.backbone, whole.validation))
    rows = np.arange(len(whole.validation))
    loss = {
        t: -found.log_posterior(t)[rows, whole.validation.labels].mean()
        for t in (1.0, predictor.probability.temperature)
    }
    assert loss[predictor.probability.temperature] <= loss[1.0]


def test_wrapped_module_needs_no_recipe(whole):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    wrapped = wrap_backbone(module, example=torch.rand(2, 3, 8, 8))
    said = fit_predictor(wrapped, whole.train, whole.validation, whole.calibration)(whole.test)
    assert (said.class_id == whole.test.labels).mean() > 0.8


def test_torch_data_are_fitted_like_the_images_they_hold(backbone, whole, predictor):
    loader = DataLoader(Pictures(whole.calibration), batch_size=8, shuffle=True)
    again = fit_predictor(backbone, NamedPictures(whole.train), Pictures(whole.validation), loader)
    assert again.class_names == whole.class_names
    np.testing.assert_array_equal(again.detector.gaussians_.matrix, predictor.detector.gaussians_.matrix)
    np.testing.assert_array_equal(again.calibration_scores, predictor.calibration_scores)
    assert again.probability == predictor.probability


def fit_few() -> np.ndarray:
    """Distances to the clusters of twelve images, of which only the first of several processes has any."""
    torch.manual_seed(0)
    backbone, rng = create_backbone("resnet9", 3), np.random.default_rng(0)
    train, validation = (
        ImageSet.from_arrays(rng.integers(0, 256, (n, 16, 16, 3), np.uint8), np.arange(n) % 3) for n in (12, 6)
    )
    fabric = make_fabric(TrainOptions(accelerator="cpu", precision="32-true"))
    detector = fit_predictor(backbone, train, validation, fabric=fabric).detector
    assert isinstance(detector, MapleDetector)
    return detector.gaussians_.squared_distances(np.linspace(0, 1, 2 * backbone.embedding_size).reshape(2, -1))


def test_a_process_without_training_images_fits_what_the_others_fit():
    alone = fit_few()
    for found in in_processes(fit_few):
        np.testing.assert_allclose(found, alone, rtol=1e-9, atol=1e-12)
