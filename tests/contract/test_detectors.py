"""What every detector that reads outputs promises; each module's own tests say what it computes."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from maple.detectors.base import Detector
from maple.detectors.gradients.base import ImageDetector
from maple.detectors.registry import create_detector, list_detectors, restore_detector
from maple.errors import FitError, MapleError, NotFittedError, UsageError
from maple.types import About, LinearHead, Outputs
from ranks import in_two_ranks

NAMES = [name for name in list_detectors() if not isinstance(create_detector(name), ImageDetector)]
DIRECTIONS = np.eye(3, 8) * 8  # class means; the head reads them off
HEAD = LinearHead((DIRECTIONS / 4).astype(np.float32), np.zeros(3, np.float32))

pytestmark = pytest.mark.parametrize("name", NAMES)


def fit(name: str, outputs, **options) -> Detector:
    return create_detector(name, **options).fit(outputs, head=HEAD)


def outputs_of(embeddings: np.ndarray, labels: np.ndarray | None = None, dtype=np.float32) -> Outputs:
    return Outputs(embeddings.astype(dtype), (embeddings @ HEAD.weight.T).astype(dtype), labels)


@pytest.fixture
def train(rng) -> Outputs:
    labels = np.arange(600) % 3
    return outputs_of(rng.normal(size=(600, 8)) + DIRECTIONS[labels], labels)


@pytest.fixture
def test(rng) -> Outputs:
    return outputs_of(rng.normal(size=(200, 8)) + DIRECTIONS[np.arange(200) % 3])


@pytest.fixture
def ood(rng) -> Outputs:
    return outputs_of(rng.normal(size=(200, 8)) + 8 * np.eye(8)[4])  # a class in a direction of none of them


def test_fit_returns_itself(name, train):
    detector = create_detector(name)
    assert detector.name == name
    assert detector.fit(train, head=HEAD) is detector


def test_it_says_what_it_is(name):
    about = type(create_detector(name)).about
    assert isinstance(about, About) and re.search(r"\d{4}$", about.paper) and about.needs and about.passes == "1"


def test_unfitted_detectors_say_so(name, train):
    with pytest.raises(NotFittedError, match=f"'{re.escape(name)}'"):
        create_detector(name).score(train)
    with pytest.raises(NotFittedError):
        create_detector(name).get_state()


def test_a_missing_head_is_named_where_it_is_needed(name, train):
    detector = create_detector(name)
    if detector.needs_head:
        with pytest.raises(UsageError, match=f"'{name}'.*head"):
            detector.fit(train)
    else:
        detector.fit(train)


def test_one_float64_score_per_image(name, train, test):
    detector = fit(name, train)
    scores = detector.score(test)
    assert scores.shape == (200,) and scores.dtype == np.float64 and np.isfinite(scores).all()
    assert detector.score(test[:1]).shape == (1,)
    assert detector.score(test[:0]).shape == (0,)
    np.testing.assert_allclose(
        detector.score(test[50:60]), scores[50:60], rtol=1e-5, atol=1e-5
    )  # no image depends on the others


def test_higher_means_more_out_of_distribution(name, train, test, ood):
    detector = fit(name, train)
    ind, far = detector.score(test), detector.score(ood)
    assert (far[:, None] > ind).mean() > 0.95  # AUROC


def test_batches_give_the_same_scores(name, train, test):
    expected = fit(name, train).score(test)
    batches = [train[start : start + 130] for start in range(0, 600, 130)]
    for form in (batches, iter(batches), lambda: iter(batches)):
        np.testing.assert_allclose(fit(name, form).score(test), expected, rtol=1e-6, atol=1e-6)


def test_order_of_the_images_does_not_matter(name, train, test, rng):
    detector, order = fit(name, train), rng.permutation(600)
    shuffled = fit(name, train[order])
    np.testing.assert_allclose(shuffled.score(test), detector.score(test), rtol=1e-5, atol=1e-5)
    order = rng.permutation(200)
    np.testing.assert_allclose(detector.score(test[order]), detector.score(test)[order], rtol=1e-5, atol=1e-5)


def test_state_restores_the_scores_exactly(name, train, test):
    detector = fit(name, train)
    arrays, metadata = detector.get_state()
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in arrays.values())
    restored = restore_detector(arrays, json.loads(json.dumps(metadata)))
    assert type(restored) is type(detector) and restored.name == name
    np.testing.assert_array_equal(restored.score(test), detector.score(test))
    again, metadata_again = restored.get_state()
    assert metadata_again == metadata and again.keys() == arrays.keys()


def test_number_types_hardly_matter(name, rng, train, test):
    expected = fit(name, train).score(test)
    wide = fit(name, outputs_of(train.embeddings, train.labels, np.float64))
    np.testing.assert_allclose(
        wide.score(outputs_of(test.embeddings, None, np.float64)), expected, rtol=1e-3, atol=1e-6
    )
    half = fit(name, outputs_of(train.embeddings, train.labels, np.float16))
    scores = half.score(outputs_of(test.embeddings, None, np.float16))
    assert np.isfinite(scores).all() and np.corrcoef(scores, expected)[0, 1] > 0.99


def test_fitting_again_starts_anew(name, train, test):
    detector = fit(name, train[:300]).fit(train, head=HEAD)
    np.testing.assert_array_equal(detector.score(test), fit(name, train).score(test))


def test_inputs_are_left_as_they_were(name, train, test):
    arrays = (train.embeddings, train.logits, test.embeddings, test.logits, HEAD.weight, HEAD.bias)
    copies = [array.copy() for array in arrays]
    fit(name, train).score(test)
    for before, after in zip(copies, arrays):
        np.testing.assert_array_equal(before, after)


def test_nothing_to_learn_from_is_an_error(name):
    with pytest.raises(FitError, match=r"no outputs|0 training images"):
        fit(name, iter([]))


def test_wrong_width_is_an_error_of_ours(name, train):
    with pytest.raises(MapleError, match="columns"):
        fit(name, train).score(Outputs(np.zeros((3, 5)), np.zeros((3, 7))))


def test_fit_in_two_processes_is_the_fit_in_one(name, train, test):
    def fit_share(rank, sum_over_ranks):
        return create_detector(name).fit(train[rank::2], sum_over_ranks=sum_over_ranks, head=HEAD)

    if name == "knn":  # it keeps images, and sums do not gather them
        with pytest.raises(FitError, match="one process"):
            in_two_ranks(fit_share)
        return
    expected = fit(name, train).score(test)
    for detector in in_two_ranks(fit_share):
        np.testing.assert_allclose(detector.score(test), expected, rtol=1e-5, atol=1e-5)
