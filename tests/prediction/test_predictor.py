"""Backbone and detector together: one pass, same answer after saving, nothing augmented."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from maple.data.image_set import ImageSet
from maple.data.splits import load_splits
from maple.decisions.calibration import MIN_CLASS_IMAGES
from maple.decisions.conformal import conformal_threshold
from maple.decisions.options import DecisionOptions
from maple.detectors.maple import MapleDetector
from maple.errors import DataError, RunError, UsageError
from maple.files import load_arrays, save_arrays
from maple.networks import create_backbone, embed, wrap_backbone
from maple.prediction.fit import fit_predictor
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_backbone, load_predictor, save_backbone
from maple.types import Relabelling


@pytest.fixture(scope="module")
def splits():
    return load_splits("digits")


@pytest.fixture(scope="module")
def backbone():
    torch.manual_seed(0)
    return create_backbone("resnet9", 10).eval()


@pytest.fixture(scope="module")
def predictor(backbone, splits):
    return fit_predictor(backbone, splits.train, splits.validation, splits.calibration)


def test_columns_follow_from_the_squared_distances(predictor, splits):
    outputs = embed(predictor.backbone, splits.test)
    said = predictor.predict_outputs(outputs)
    distances = predictor.detector.squared_distances(outputs)
    np.testing.assert_array_equal(said.cluster, distances.argmin(1))
    np.testing.assert_array_equal(said.squared_distance, distances.min(1))
    degrees = predictor.detector.describe(outputs).degrees_of_freedom
    np.testing.assert_allclose(said.typicality, chi2.sf(distances.min(1), degrees), rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(said.uncertainty, chi2.cdf(distances.min(1), degrees), rtol=1e-9)
    np.testing.assert_allclose(said.probabilities.sum(1), 1)
    np.testing.assert_array_equal(said.class_id, said.probabilities.argmax(1))
    np.testing.assert_array_equal(said.softmax_class_id, outputs.logits.argmax(1))


def test_batch_composition_does_not_matter(predictor, splits):
    whole = predictor(splits.test)
    single = predictor(splits.test.subset([7]))
    assert single.squared_distance[0] == pytest.approx(whole.squared_distance[7], rel=1e-4)


@pytest.mark.parametrize("broken", [[], [1, 4], [0, 1, 2, 3, 4, 5]])
def test_images_without_a_finite_embedding_are_left_out(predictor, splits, broken):
    def overflow(body: torch.nn.Module, inputs: object, features: torch.Tensor) -> torch.Tensor:
        n_passes.append(len(features))
        return features.index_fill(0, torch.tensor(broken, dtype=torch.long), math.inf)

    n_passes: list[int] = []
    hook = predictor.backbone.body.register_forward_hook(overflow)
    try:
        said, usable = predictor.predict_usable(splits.test.pixels[:6])
    finally:
        hook.remove()
    assert n_passes == [6] and np.flatnonzero(~usable).tolist() == broken
    expected = predictor.predict_pixels(splits.test.pixels[:6])
    np.testing.assert_allclose(said.score, expected.score[usable], rtol=1e-4)
    assert len(said) == usable.sum()


def test_fit_sees_no_augmentation(backbone, splits, predictor):
    """The same images with another augmentation setting give the same Gaussians to the last bit."""
    flipped = dataclasses.replace(splits.train, augment="crop,flip-both")
    again = fit_predictor(backbone, flipped, splits.validation, splits.calibration)
    np.testing.assert_array_equal(again.detector.gaussians_.matrix, predictor.detector.gaussians_.matrix)
    np.testing.assert_array_equal(again.calibration_scores, predictor.calibration_scores)


def test_saved_and_loaded_predict_the_same(backbone, splits, tmp_path):
    ids = splits.train.labels.copy()
    rows = np.flatnonzero(ids == 9)
    ids[rows[::2]] = 10
    mapping = np.array([*range(10), 9])
    relabelling = Relabelling(ids, mapping, mapping, np.r_[np.ones(9), 0.5, 0.5])
    torch.manual_seed(1)
    grown = create_backbone("resnet9", 11, embedding_size=24)
    options = DecisionOptions(false_alarm=0.1, confidence=0.8, per_class=True)
    before = fit_predictor(
        grown, splits.train, splits.validation, splits.calibration, relabelling=relabelling, options=options
    )
    before.save(tmp_path)
    after = load_predictor(tmp_path)
    a, b = before(splits.test), after(splits.test)
    for name in ("class_id", "probabilities", "score", "p_value", "is_ood", "cluster", "softmax_class_id"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    np.testing.assert_array_equal(before.prediction_sets(a, 0.9), after.prediction_sets(b, 0.9))
    assert after.options == options and after.decision.describe() == before.decision.describe()
    assert after.class_names == splits.class_names


@pytest.mark.parametrize("covariance", ["tied", "global", "full"])
@pytest.mark.parametrize("distance", ["mahalanobis", "euclidean"])
def test_every_kind_of_gaussian(backbone, splits, covariance, distance, tmp_path):
    detector = MapleDetector(covariance=covariance, distance=distance)
    predictor = fit_predictor(backbone, splits.train, splits.validation, splits.calibration, detector=detector)
    said = predictor(splits.test)
    assert np.isfinite(said.probabilities).all()
    predictor.save(tmp_path)
    np.testing.assert_allclose(load_predictor(tmp_path)(splits.test).score, said.score, rtol=1e-12)


def test_threshold_and_p_values_agree(predictor, splits):
    said = predictor(splits.test)
    for level in (0.01, 0.05, 0.3):
        np.testing.assert_array_equal(predictor.decide(false_alarm=level)(splits.test).is_ood, said.p_value <= level)
    careful = predictor.decide(false_alarm=0.05, confidence=0.95)(splits.test)
    assert careful.is_ood.sum() <= (said.p_value <= 0.05).sum()
    predictor.decide(confidence=None)
    assert predictor.decision.kind == "marginal"


def test_classes_with_enough_calibration_images_have_their_own_threshold(backbone, splits, tmp_path):
    """Calibrated on the training images, since only they are enough; on all but those of two classes."""
    predictor = fit_predictor(backbone, splits.train, splits.validation)
    images = splits.train.subset(np.flatnonzero(splits.train.labels < 8))
    predictor.calibrate(images, false_alarm=0.2, per_class=True)
    known = predictor(images)
    counts = np.bincount(known.class_id, minlength=10)
    own = np.flatnonzero(counts >= MIN_CLASS_IMAGES)
    assert 2 <= len(own) <= 8
    rest = known.score[~np.isin(known.class_id, own)]
    expected = np.full(10, conformal_threshold(rest if len(rest) >= 4 else known.score, 0.2))  # 4 = 1 / 0.2 - 1
    for c in own:
        expected[c] = conformal_threshold(known.score[known.class_id == c], 0.2)
    assert len(np.unique(expected[own])) == len(own)
    predictor.save(tmp_path)
    for each in (predictor, load_predictor(tmp_path)):
        np.testing.assert_allclose(each.decision.thresholds, expected, rtol=1e-6)
        assert math.isnan(each.threshold)
        said = each(splits.test)
        np.testing.assert_array_equal(said.is_ood, said.score > each.decision.thresholds[said.class_id])
        np.testing.assert_array_equal(said.is_ood, said.p_value <= 0.2)
        together = each.decide(per_class=False)(splits.test)
        np.testing.assert_array_equal(together.is_ood, together.score > each.threshold)
        assert (together.is_ood != said.is_ood).any()


def test_prediction_sets_cover(predictor, splits):
    said = predictor(splits.test)
    for coverage in (0.6, 0.9):
        sets = predictor.prediction_sets(said, coverage)
        covered = sets[np.arange(len(sets)), splits.test.labels].mean()
        assert covered > coverage - 4 * math.sqrt(coverage * (1 - coverage) / len(splits.calibration))
        assert sets[np.arange(len(sets)), said.class_id].all()
    with pytest.raises(DataError, match="labelled calibration images"):
        unlabelled = ImageSet.from_arrays(splits.calibration.pixels)
        Predictor(predictor.backbone, predictor.detector, predictor.class_names, size=predictor.size).calibrate(
            unlabelled
        ).prediction_sets(said, 0.9)


def test_without_calibration_nothing_is_flagged(backbone, splits):
    said = fit_predictor(backbone, splits.train, splits.validation)(splits.test)
    assert np.isnan(said.p_value).all()
    assert not said.is_ood.any()
    assert math.isinf(fit_predictor(backbone, splits.train, splits.validation).threshold)


def test_temperature_improves_the_likelihood(predictor, splits):
    found = predictor.detector.describe(embed(predictor.backbone, splits.validation))
    rows = np.arange(len(splits.validation))
    loss = {
        t: -found.log_posterior(t)[rows, splits.validation.labels].mean()
        for t in (1.0, predictor.probability.temperature)
    }
    assert loss[predictor.probability.temperature] <= loss[1.0]


def test_wrapped_module_needs_no_recipe(splits):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    wrapped = wrap_backbone(module, example=torch.rand(2, 3, 8, 8))
    said = fit_predictor(wrapped, splits.train, splits.validation, splits.calibration)(splits.test)
    assert (said.class_id == splits.test.labels).mean() > 0.8


def test_errors(backbone, predictor, tmp_path):
    with pytest.raises(RunError, match="maple train"):
        load_predictor(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="false"):
        predictor.calibrate(torch.rand(4, 3, 8, 8), false_alarm=1.5)


def test_weights_of_another_network_are_refused(backbone, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_backbone(path, backbone)
    assert isinstance(load_backbone(path).head, torch.nn.Linear)
    arrays, metadata = load_arrays(path)
    save_arrays(path, arrays, {**metadata, "backbone": "resnet18"})
    with pytest.raises(RunError, match="does not fit"):
        load_backbone(path)


def test_a_wrapped_module_is_not_saved_as_a_run_that_cannot_be_loaded(splits, tmp_path):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    wrapped = wrap_backbone(module, example=torch.rand(2, 3, 8, 8))
    predictor = fit_predictor(wrapped, splits.train, splits.validation, splits.calibration)
    with pytest.raises(RunError, match="create_backbone"):
        predictor.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_predictor_accepts_plain_arrays(predictor, splits):
    images = splits.test.pixels[:5]
    np.testing.assert_allclose(predictor(images).score, predictor(splits.test).score[:5], rtol=1e-4)
    assert isinstance(predictor, Predictor)
