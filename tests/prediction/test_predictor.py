"""Backbone and detector together: one pass, same answer after saving, nothing augmented."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch.utils.data import DataLoader

from maple.data.image_set import ImageSet
from maple.decisions.calibration import MIN_CLASS_IMAGES
from maple.decisions.conformal import conformal_threshold
from maple.errors import DataError, UsageError
from maple.networks import embed
from maple.networks.origin import Origin
from maple.prediction.fit import fit_predictor
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor
from torch_sets import NamedPictures, Pictures


def test_columns_follow_from_the_squared_distances(predictor, whole):
    outputs = embed(predictor.backbone, whole.test)
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


def test_batch_composition_does_not_matter(predictor, whole):
    together = predictor(whole.test)
    single = predictor(whole.test.subset([7]))
    assert single.squared_distance[0] == pytest.approx(together.squared_distance[7], rel=1e-4)


@pytest.mark.parametrize("broken", [[], [1, 4], [0, 1, 2, 3, 4, 5]])
def test_images_without_a_finite_embedding_are_left_out(predictor, whole, broken):
    def overflow(body: torch.nn.Module, inputs: object, features: torch.Tensor) -> torch.Tensor:
        n_passes.append(len(features))
        return features.index_fill(0, torch.tensor(broken, dtype=torch.long), math.inf)

    n_passes: list[int] = []
    hook = predictor.backbone.body.register_forward_hook(overflow)
    try:
        said, usable = predictor.predict_usable(whole.test.pixels[:6])
    finally:
        hook.remove()
    assert n_passes == [6] and np.flatnonzero(~usable).tolist() == broken
    expected = predictor.predict_pixels(whole.test.pixels[:6])
    np.testing.assert_allclose(said.score, expected.score[usable], rtol=1e-4)
    assert len(said) == usable.sum()


def test_threshold_and_p_values_agree(predictor, whole):
    said = predictor(whole.test)
    for level in (0.01, 0.05, 0.3):
        np.testing.assert_array_equal(predictor.decide(false_alarm=level)(whole.test).is_ood, said.p_value <= level)
    careful = predictor.decide(false_alarm=0.05, confidence=0.95)(whole.test)
    assert careful.is_ood.sum() <= (said.p_value <= 0.05).sum()
    predictor.decide(confidence=None)
    assert predictor.decision.kind == "marginal"


def test_classes_with_enough_calibration_images_have_their_own_threshold(backbone, whole, tmp_path):
    """Calibrated on the training images, since only they are enough; on all but those of two classes."""
    predictor = fit_predictor(backbone, whole.train, whole.validation)
    images = whole.train.subset(np.flatnonzero(whole.train.labels < 8))
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
        said = each(whole.test)
        np.testing.assert_array_equal(said.is_ood, said.score > each.decision.thresholds[said.class_id])
        np.testing.assert_array_equal(said.is_ood, said.p_value <= 0.2)
        together = each.decide(per_class=False)(whole.test)
        np.testing.assert_array_equal(together.is_ood, together.score > each.threshold)
        assert (together.is_ood != said.is_ood).any()


@pytest.mark.parametrize(
    ("kind", "spec", "shown"),
    [("huggingface", "/secret/vit", "vit"), ("onnx", "secret/net.onnx", "net.onnx"), ("timm", "timm/vit", "timm/vit")],
)
def test_the_name_of_the_network_has_no_folder(kind, spec, shown, predictor):
    other = copy.copy(predictor)
    other.backbone = copy.copy(predictor.backbone)
    other.backbone.name, other.backbone.origin = spec, Origin(kind=kind, spec=spec)
    assert other.network == shown
    assert predictor.network == predictor.backbone.name


def test_prediction_sets_cover(predictor, whole):
    said = predictor(whole.test)
    for coverage in (0.6, 0.9):
        sets = predictor.prediction_sets(said, coverage)
        covered = sets[np.arange(len(sets)), whole.test.labels].mean()
        assert covered > coverage - 4 * math.sqrt(coverage * (1 - coverage) / len(whole.calibration))
        assert sets[np.arange(len(sets)), said.class_id].all()
    with pytest.raises(DataError, match="calibration"):
        unlabelled = ImageSet.from_arrays(whole.calibration.pixels)
        Predictor(predictor.backbone, predictor.detector, predictor.class_names, size=predictor.size).calibrate(
            unlabelled
        ).prediction_sets(said, 0.9)


def test_a_rate_above_one_is_refused(predictor):
    with pytest.raises(UsageError, match="false_alarm"):
        predictor.calibrate(torch.rand(4, 3, 8, 8), false_alarm=1.5)


def test_predictor_accepts_data_sets_of_pictures(predictor, whole):
    """In any size: they are resized like files."""
    part = whole.test.subset(np.arange(20))
    np.testing.assert_array_equal(predictor(Pictures(part)).score, predictor(part).score)
    np.testing.assert_array_equal(predictor(DataLoader(Pictures(part), 7)).score, predictor(part).score)
    again = copy.copy(predictor).calibrate(NamedPictures(whole.calibration))
    np.testing.assert_array_equal(again.calibration_scores, predictor.calibration_scores)
    assert again.calibration.set_scores.size == predictor.calibration.set_scores.size


def test_predictor_accepts_plain_arrays(predictor, whole):
    images = whole.test.pixels[:5]
    np.testing.assert_allclose(predictor(images).score, predictor(whole.test).score[:5], rtol=1e-4)
    assert isinstance(predictor, Predictor)
