"""What every detector promises, for all that are registered."""

from __future__ import annotations

import json

import numpy as np
import pytest

from maple.detector import Detector, create_detector, list_detectors, restore_detector
from maple.errors import MapleError, NotFittedError
from maple.types import Outputs

pytestmark = pytest.mark.parametrize("name", list_detectors())
DIRECTIONS = np.eye(3, 8) * 8  # class means; a linear head reads them off


def outputs_of(embeddings: np.ndarray, labels: np.ndarray | None = None) -> Outputs:
    logits = (embeddings @ DIRECTIONS.T / 4).astype(np.float32)
    return Outputs(embeddings=embeddings.astype(np.float32), logits=logits, labels=labels)


@pytest.fixture
def train(rng) -> Outputs:
    labels = np.arange(600) % 3
    return outputs_of(rng.normal(size=(600, 8)) + DIRECTIONS[labels], labels)


@pytest.fixture
def test(rng) -> Outputs:
    return outputs_of(rng.normal(size=(200, 8)) + DIRECTIONS[np.arange(200) % 3])


@pytest.fixture
def ood(rng) -> Outputs:
    return outputs_of(rng.normal(size=(200, 8)))  # between all classes, in a direction of none


def test_fit_returns_itself(name, train):
    detector = create_detector(name)
    assert isinstance(detector, Detector) and detector.name == name
    assert detector.fit(train) is detector


def test_unfitted_detectors_say_so(name, train):
    with pytest.raises(NotFittedError, match=f"'{name}' .* call fit first"):
        create_detector(name).score(train)
    with pytest.raises(NotFittedError):
        create_detector(name).get_state()


def test_one_float64_score_per_image(name, train, test):
    detector = create_detector(name).fit(train)
    scores = detector.score(test)
    assert scores.shape == (200,) and scores.dtype == np.float64 and np.isfinite(scores).all()
    assert detector.score(test[:1]).shape == (1,)
    np.testing.assert_allclose(detector.score(test[50:60]), scores[50:60], rtol=1e-5)  # no image depends on the others
    np.testing.assert_array_equal(detector.score(test), scores)


def test_higher_means_more_out_of_distribution(name, train, test, ood):
    detector = create_detector(name).fit(train)
    ind, far = detector.score(test), detector.score(ood)
    assert (far[:, None] > ind).mean() > 0.95  # AUROC


def test_batches_give_the_same_scores(name, train, test):
    expected = create_detector(name).fit(train).score(test)
    batches = [train[start : start + 150] for start in range(0, 600, 150)]
    for form in (batches, iter(batches), lambda: iter(batches)):
        np.testing.assert_allclose(create_detector(name).fit(form).score(test), expected, rtol=1e-5)


def test_state_restores_the_scores(name, train, test):
    detector = create_detector(name).fit(train)
    arrays, metadata = detector.get_state()
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in arrays.values())
    restored = restore_detector(arrays, json.loads(json.dumps(metadata)))
    assert type(restored) is type(detector)
    np.testing.assert_array_equal(restored.score(test), detector.score(test))


def test_number_types_hardly_matter(name, train, test):
    def cast(outputs: Outputs, dtype) -> Outputs:
        return Outputs(outputs.embeddings.astype(dtype), outputs.logits.astype(dtype), outputs.labels)

    expected = create_detector(name).fit(train).score(test)
    wide = create_detector(name).fit(cast(train, np.float64)).score(cast(test, np.float64))
    np.testing.assert_allclose(wide, expected, rtol=1e-3, atol=1e-6)
    half = create_detector(name).fit(cast(train, np.float16)).score(cast(test, np.float16))
    assert np.corrcoef(half, expected)[0, 1] > 0.99


def test_fitting_again_starts_anew(name, train, test):
    detector = create_detector(name).fit(train[:300]).fit(train)
    np.testing.assert_array_equal(detector.score(test), create_detector(name).fit(train).score(test))


def test_inputs_are_left_as_they_were(name, train, test):
    copies = [part.copy() for part in (train.embeddings, train.logits, test.embeddings, test.logits)]
    create_detector(name).fit(train).score(test)
    for before, after in zip(copies, (train.embeddings, train.logits, test.embeddings, test.logits)):
        np.testing.assert_array_equal(before, after)


def test_wrong_width_is_an_error_of_ours(name, train):
    detector = create_detector(name).fit(train)
    with pytest.raises(MapleError):
        detector.score(Outputs(np.zeros((3, 5)), np.zeros((3, 7))))
