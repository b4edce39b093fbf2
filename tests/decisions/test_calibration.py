"""Decisions from calibration images: groups of classes, thresholds, p-values and the promise in words."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maple.decisions.calibration import MIN_CLASS_IMAGES, Calibration
from maple.decisions.conformal import conformal_p_values, conformal_threshold
from maple.errors import DataError, UsageError
from maple.files import load_arrays, save_arrays

RATES = st.one_of(st.floats(1e-3, 0.999), st.sampled_from([0.01, 0.05, 0.1, 0.25, 0.5]), st.just(1 / 3))


def uneven_calibration(rng: np.random.Generator, counts: list[int], ties: bool = False) -> Calibration:
    """Classes of these sizes, each with a scale of its own, in random order."""
    class_ids = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    scores = (1 + class_ids) * rng.chisquare(4, size=len(class_ids))
    return Calibration(scores.round() if ties else scores, class_ids, len(counts))


def test_one_threshold_for_all_images_unless_asked(rng):
    calibration = uneven_calibration(rng, [300, 200, 0])
    scores, class_ids = rng.chisquare(4, size=50) * 3, rng.integers(0, 3, size=50)
    for confidence in (None, 0.9):
        decision = calibration.decide(0.1, confidence)
        threshold = conformal_threshold(calibration.scores, 0.1, confidence)
        np.testing.assert_array_equal(decision.thresholds, np.full(3, threshold))
        np.testing.assert_array_equal(decision.is_ood(scores, class_ids), scores > threshold)
        np.testing.assert_array_equal(
            decision.p_values(scores, class_ids), conformal_p_values(scores, calibration.scores)
        )
        assert decision.n_images == 500 and decision.n_own_thresholds == 0


@pytest.mark.parametrize(("small", "pooled"), [([99, 99], True), ([5, 4], True), ([5, 3], False), ([0, 0], False)])
def test_groups_per_class(rng, small, pooled):
    """Classes with enough images stand alone, the others together, or with all where even together they cannot flag."""
    counts = [MIN_CLASS_IMAGES, 250, *small]
    calibration = uneven_calibration(rng, counts)
    decision = calibration.decide(0.1, per_class=True)
    rest = np.isin(calibration.class_ids, [2, 3]) if pooled else np.ones(sum(counts), dtype=bool)
    members = [calibration.class_ids == 0, calibration.class_ids == 1, rest, rest]
    new = rng.chisquare(4, size=40) * 3
    for c, rows in enumerate(members):
        own = calibration.scores[rows]
        assert decision.thresholds[c] == conformal_threshold(own, 0.1)
        p_values = decision.p_values(new, np.full(40, c))
        np.testing.assert_array_equal(p_values, conformal_p_values(new, own))
    mixed = rng.integers(0, 4, size=40)
    expected = [decision.p_values(new[i : i + 1], mixed[i : i + 1])[0] for i in range(40)]
    np.testing.assert_array_equal(decision.p_values(new, mixed), expected)
    assert decision.n_own_thresholds == 2


def test_rare_levels_need_more_images_per_class(rng):
    calibration = uneven_calibration(rng, [300, 250, 1000])  # 299 images are the least for 1 % with 95 % confidence
    decision = calibration.decide(0.01, 0.95, per_class=True)
    assert (decision.group_of_class > 0).tolist() == [True, False, True]
    assert decision.thresholds[0] == calibration.scores[calibration.class_ids == 0].max()
    assert decision.thresholds[1] == conformal_threshold(calibration.scores, 0.01, 0.95)


@given(
    seed=st.integers(0, 99),
    counts=st.lists(st.integers(0, 250), min_size=1, max_size=5),
    false_alarm=RATES,
    per_class=st.booleans(),
)
def test_flagged_exactly_where_the_p_value_is_at_most_the_level(seed, counts, false_alarm, per_class):
    rng = np.random.default_rng(seed)
    decision = uneven_calibration(rng, counts, ties=True).decide(false_alarm, per_class=per_class)
    class_ids = rng.integers(0, len(counts), size=100)
    scores = np.r_[rng.integers(0, 40, size=99), np.inf]
    flagged = decision.is_ood(scores, class_ids)
    if sum(counts):
        np.testing.assert_array_equal(flagged, decision.p_values(scores, class_ids) <= false_alarm)
    else:
        assert not flagged.any() and np.isnan(decision.p_values(scores, class_ids)).all()


@given(seed=st.integers(0, 9), per_class=st.booleans(), confidence=st.sampled_from([None, 0.5, 0.95]))
def test_order_of_calibration_images_does_not_matter(seed, per_class, confidence):
    rng = np.random.default_rng(seed)
    calibration = uneven_calibration(rng, [150, 30, 200])
    order = rng.permutation(len(calibration))
    shuffled = Calibration(calibration.scores[order], calibration.class_ids[order], 3)
    one, other = (c.decide(0.1, confidence, per_class) for c in (calibration, shuffled))
    new, class_ids = rng.chisquare(4, size=30) * 3, rng.integers(0, 3, size=30)
    np.testing.assert_array_equal(one.thresholds, other.thresholds)
    np.testing.assert_array_equal(one.p_values(new, class_ids), other.p_values(new, class_ids))


@pytest.mark.parametrize("per_class", [False, True])
def test_nothing_is_flagged_without_calibration(per_class):
    decision = Calibration.empty(3).decide(per_class=per_class)
    assert (decision.thresholds == np.inf).all() and decision.thresholds.shape == (3,)
    assert np.isnan(decision.p_values([1.0, np.inf], [0, 2])).all()
    assert decision.is_ood([1.0, np.inf], [0, 2]).tolist() == [False, False]
    assert decision.is_ood([], []).shape == decision.p_values([], []).shape == (0,)
    assert "there are none" in decision.sentence()


def test_tensors_serve_as_arrays(rng):
    torch = pytest.importorskip("torch")
    calibration = uneven_calibration(rng, [120, 150])
    same = Calibration(torch.tensor(calibration.scores), torch.tensor(calibration.class_ids), 2)
    one, other = (c.decide(per_class=True) for c in (calibration, same))
    new, class_ids = rng.chisquare(4, size=20), rng.integers(0, 2, size=20)
    found = other.p_values(torch.tensor(new), torch.tensor(class_ids))
    np.testing.assert_array_equal(found, one.p_values(new, class_ids))


def test_calibration_survives_a_file(tmp_path, rng):
    for calibration in (uneven_calibration(rng, [120, 9]), Calibration.empty(2)):
        save_arrays(tmp_path / "c.safetensors", calibration.to_arrays(), {})
        again = Calibration.from_arrays(load_arrays(tmp_path / "c.safetensors")[0])
        assert again.n_classes == 2 and type(again.n_classes) is int
        for name, array in calibration.to_arrays().items():
            np.testing.assert_array_equal(again.to_arrays()[name], array)
            assert again.to_arrays()[name].dtype == array.dtype


def test_bad_images_are_refused(rng):
    with pytest.raises(UsageError, match="class ids"):
        Calibration(np.zeros(3), np.zeros(2, dtype=int), 2)
    with pytest.raises(UsageError, match="class ids"):
        Calibration(np.zeros(3), np.array([0, 1, 2]), 2)
    with pytest.raises(UsageError, match="class ids"):
        Calibration(np.zeros(3), np.array([1, -1, 0]), 2)
    with pytest.raises(DataError, match="NaN"):
        Calibration(np.array([np.nan, 1.0]), np.array([0, 1]), 2)
    decision = uneven_calibration(rng, [30, 40]).decide()
    for ask in (decision.is_ood, decision.p_values):
        with pytest.raises(UsageError, match="class ids"):
            ask([1.0], [-1])
        with pytest.raises(UsageError, match="class ids"):
            ask([1.0, 2.0], [0])
        with pytest.raises(DataError, match="NaN"):
            ask([np.nan], [0])


@pytest.mark.parametrize(
    ("confidence", "per_class", "kind"),
    [
        (None, False, "marginal"),
        (0.95, False, "confidence"),
        (None, True, "marginal per class"),
        (0.95, True, "confidence per class"),
    ],
)
def test_description_is_plain(rng, confidence, per_class, kind):
    decision = uneven_calibration(rng, [400, 30, 0]).decide(0.05, confidence, per_class)
    found = decision.describe()
    assert found == json.loads(json.dumps(found, allow_nan=False))
    levels = {"kind": kind, "false_alarm": 0.05, "confidence": confidence, "per_class": per_class}
    assert found.items() >= (levels | {"n_calibration": 430, "n_own_thresholds": int(per_class)}).items()
    if per_class:
        assert found["thresholds"] == decision.thresholds.tolist()
    else:
        assert found["threshold"] == decision.thresholds[0]
    nothing = Calibration.empty(2).decide(per_class=per_class).describe()
    assert nothing["thresholds"] == [None, None] if per_class else nothing["threshold"] is None


@pytest.mark.parametrize(
    ("counts", "options", "sentence"),
    [
        (
            [600, 400],
            {},
            "flags at most 5 % of in-distribution images on average over calibration sets "
            "(1,000 calibration images; 90 % of such sets flag 3.9 to 6.2 %)",
        ),
        (
            [600, 400],
            {"confidence": 0.95},
            "flags at most 5 % of in-distribution images with 95 % confidence in this calibration set "
            "(1,000 calibration images; 90 % of such sets flag 2.9 to 5.0 %)",
        ),
        (
            [600, 400],
            {"per_class": True},
            "flags at most 5 % of in-distribution images of each predicted class on average over calibration sets "
            "(1,000 calibration images; every class has its own threshold)",
        ),
        (
            [600, 60, 50],
            {"per_class": True},
            "flags at most 5 % of in-distribution images of each predicted class on average over calibration sets "
            "(710 calibration images; own thresholds for 1 of 3 classes, the others share one)",
        ),
        (
            [600, 10],
            {"per_class": True, "confidence": 0.9},
            "flags at most 5 % of in-distribution images of each predicted class with 90 % confidence in this "
            "calibration set (610 calibration images; own thresholds for 1 of 2 classes, the others have too few "
            "images and use that of all, without a promise of their own)",
        ),
        (
            [60, 50],
            {"per_class": True, "false_alarm": 0.1},
            "flags at most 10 % of in-distribution images on average over calibration sets "
            "(110 calibration images; 90 % of such sets flag 5.7 to 14.9 %; "
            "no class has enough images for its own threshold)",
        ),
        (
            [10, 5],
            {},
            "flags nothing: this false-alarm rate takes at least 19 calibration images, and there are 15",
        ),
    ],
)
def test_sentences(rng, counts, options, sentence):
    assert uneven_calibration(rng, counts).decide(**options).sentence() == sentence


@pytest.mark.parametrize(
    ("counts", "options", "known"),
    [
        ([600, 400], {}, ["known images", "known images"]),
        ([600, 400], {"per_class": True}, ["known images called a", "known images called b"]),
        ([600, 60], {"per_class": True}, ["known images called a", "known images of the classes without a threshold"]),
        ([600, 10], {"per_class": True}, ["known images called a", "known images"]),  # too few: all serve
        ([60, 50], {"per_class": True}, ["known images", "known images"]),
    ],
)
def test_p_values_speak_of_the_images_they_come_from(rng, counts, options, known):
    decision = uneven_calibration(rng, counts).decide(**options)
    found = decision.known_images(["a", "b"])
    assert [words.removesuffix(" of their own") for words in found] == known


def test_a_bad_rate_is_refused():
    with pytest.raises(UsageError, match="false-alarm rate"):
        Calibration.empty(2).decide(1.5)
