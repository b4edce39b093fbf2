"""Predictors that learn more images or new classes, and are calibrated again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maple.data.image_set import ImageSet
from maple.decisions.conformal import conformal_p_values
from maple.errors import DataError, UsageError
from maple.evaluation.cases import evaluate
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor
from maple.prediction.update import cut_calibration, join_class_names, update_from_outputs, update_predictor
from maple.types import Outputs
from torch_sets import Pictures
from updating import read_digits, train_nine


@pytest.fixture(scope="module")
def nine(tmp_path_factory) -> Path:
    return train_nine(tmp_path_factory.mktemp("runs") / "nine")


@pytest.fixture(scope="module")
def digits() -> dict[str, ImageSet]:
    return read_digits()


def same_state(one: Predictor, other: Predictor) -> bool:
    a, b = one.detector.get_state()[0], other.detector.get_state()[0]
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_a_new_class_is_recognised_without_retraining(nine, digits, tmp_path):
    before, test = load_predictor(nine), digits["test"]
    untouched = load_predictor(nine)
    old = test.subset(test.labels < 9)
    was = (before(old).class_id == old.labels).mean()
    after = update_predictor(before, digits["new"])
    assert same_state(before, untouched) and before.class_names == tuple("012345678")
    assert after.class_names == tuple("0123456789")
    said = after(test)
    assert (said.class_id[test.labels == 9] == 9).mean() > 0.4  # 0.5 to 0.8 by the seed; 0 before
    assert (said.class_id[test.labels < 9] == old.labels).mean() > was - 0.1
    assert (said.softmax_class_id < 9).all()
    np.testing.assert_allclose(said.probabilities.sum(axis=1), 1)
    after.save(tmp_path)
    again = load_predictor(tmp_path)(test)
    for name in ("class_id", "log_probabilities", "score", "p_value", "cluster", "softmax_class_id"):
        np.testing.assert_array_equal(getattr(again, name), getattr(said, name), err_msg=name)


def test_thresholds_are_void_until_images_calibrate_them(nine, digits):
    before = load_predictor(nine)
    assert not np.isnan(before(digits["test"]).p_value).any()
    for images in (digits["new"], digits["more"]):  # of a new class, of known ones
        void = update_predictor(before, images)
        said = void(digits["test"])
        assert len(void.calibration) == 0 and np.isnan(said.p_value).all() and not said.is_ood.any()
        assert void.options == before.options
    validation, calibration = cut_calibration(digits["calibrate"], void.class_names + ("9",))
    after = update_predictor(before, digits["new"], calibration, validation)
    said, scores = after(digits["test"]), after(calibration).score
    np.testing.assert_array_equal(said.p_value, conformal_p_values(said.score, scores))
    np.testing.assert_array_equal(said.is_ood, said.p_value <= 0.05)
    assert said.is_ood.mean() < 0.2  # 5 % on average
    assert after.probability.temperature != before.probability.temperature
    sets = after.prediction_sets(said, 0.9)
    assert sets[np.arange(len(sets)), digits["test"].labels].mean() > 0.8


def test_only_calibrating_keeps_the_gaussians(nine, digits):
    before = load_predictor(nine)
    held = digits["calibrate"].subset(digits["calibrate"].labels < 9)
    validation, calibration = cut_calibration(held, before.class_names)
    assert not np.isin(validation.keys, calibration.keys).any() and len(validation) + len(calibration) == len(held)
    assert set(validation.labels) == set(calibration.labels) == set(range(9))
    after = update_predictor(before, None, calibration, validation)
    np.testing.assert_array_equal(after.detector.gaussians_.matrix, before.detector.gaussians_.matrix)
    assert len(after.calibration) == len(calibration)
    only = update_predictor(before, calibration=calibration)  # temperature and score stay
    assert only.probability == before.probability and same_state(only, before)


def test_updating_with_nothing_changes_nothing(nine, digits):
    before = load_predictor(nine)
    for nothing in (None, digits["new"].subset([])):
        after = update_predictor(before, nothing)
        assert same_state(after, before) and after.class_names == before.class_names
        np.testing.assert_array_equal(after(digits["test"]).p_value, before(digits["test"]).p_value)


def test_two_updates_equal_one(nine, digits):
    before, new = load_predictor(nine), digits["new"]
    once = update_predictor(before, new)
    twice = update_predictor(update_predictor(before, new.subset(np.arange(30))), new.subset(np.arange(30, 90)))
    a, b = once(digits["test"]), twice(digits["test"])
    np.testing.assert_allclose(a.squared_distance, b.squared_distance, rtol=1e-4)  # networks are float32
    np.testing.assert_array_equal(a.class_id, b.class_id)


def test_evaluation_of_a_run_whose_head_does_not_know_all_classes(nine, digits):
    predictor = update_predictor(load_predictor(nine), digits["new"])
    outputs = predictor.detector.complete(outputs_of(predictor, digits["test"]))
    results = evaluate(predictor, outputs, {"more": outputs[:50]})
    assert np.isnan(results.false_alarm) and np.isnan(results.threshold)
    own, ours = results.methods["softmax"].classification, results.methods["maple"].classification
    known = (digits["test"].labels < 9).mean()
    assert own.nll == np.inf and own.accuracy <= known < ours.accuracy
    assert type(results).from_json(results.to_json()).methods["softmax"].classification.nll == np.inf


def outputs_of(predictor: Predictor, images: ImageSet) -> Outputs:
    from maple.networks import embed

    return embed(predictor.backbone, images)


def test_class_names_are_matched_by_name(nine, digits):
    """A source that lists its classes in another order, and names one that it has no images of."""
    before, new = load_predictor(nine), digits["new"]
    shuffled = new.with_class_names(("9", "zebra", "0", *map(str, range(1, 9))))
    assert join_class_names(before.class_names, shuffled) == tuple("0123456789")
    one, other = update_predictor(before, new), update_predictor(before, shuffled)
    assert one.class_names == other.class_names and same_state(one, other)


def test_wrong_images_are_refused(nine, digits):
    predictor, new = load_predictor(nine), digits["new"]
    with pytest.raises(UsageError, match="size=8"):
        update_predictor(predictor, ImageSet.from_arrays(np.zeros((2, 16, 16), np.uint8), ["a", "a"], size=16))
    with pytest.raises(DataError, match="label"):
        update_predictor(predictor, replace(new, labels=np.full(90, -1)))
    with pytest.raises(DataError, match="'9'"):
        update_predictor(predictor, None, digits["calibrate"])
    with pytest.raises(DataError, match="'9'"):
        cut_calibration(digits["more"], tuple("0123456789"))
    with pytest.raises(UsageError, match="class_names"):
        update_from_outputs(predictor, None, tuple("9012345678"))
    with pytest.raises(DataError, match="labels"):
        update_from_outputs(predictor, validation=replace(outputs_of(predictor, new), labels=None))
    with pytest.raises(DataError, match="'emu'"):
        update_from_outputs(predictor, None, (*predictor.class_names, "emu"))


def test_numbers_of_a_torch_data_set_count_known_then_new_classes(nine, digits):
    before = load_predictor(nine)
    by_images = update_predictor(before, digits["new"], calibration=digits["calibrate"])
    by_data_sets = update_predictor(before, Pictures(digits["new"]), calibration=Pictures(digits["calibrate"]))
    assert by_data_sets.class_names == by_images.class_names == tuple("0123456789")
    assert same_state(by_data_sets, by_images)
    np.testing.assert_array_equal(by_data_sets.calibration_scores, by_images.calibration_scores)
