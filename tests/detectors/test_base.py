"""The contract of detectors: one hole to fill, sources of batches, state."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from maple.detectors.base import Batches, Detector, RemoteOutputs, finite_embeddings, pack_records, unpack_records
from maple.detectors.maple import MapleDetector
from maple.errors import DataError, FitError, NotFittedError, UsageError
from maple.stats.arrays import with_prefix
from maple.stats.moments import Moments
from maple.types import Outputs


class Mean(Detector):
    """Distance to the mean length of the training embeddings; fails where there are none."""

    name = "mean"
    mean_: float

    def _fit(self, batches, validation):
        lengths = [np.linalg.norm(outputs.embeddings, axis=1) for outputs in batches.start()]
        if not lengths:
            raise FitError("no outputs")
        self.mean_ = float(np.concatenate(lengths).mean())

    def _score(self, outputs):
        return np.abs(np.linalg.norm(outputs.embeddings, axis=1) - self.mean_).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Headed(Detector):
    """A detector that needs a head."""

    needs_head: ClassVar[bool] = True

    def _score(self, outputs):
        return np.zeros(len(outputs))


def test_the_contract_has_one_hole():
    with pytest.raises(TypeError):
        Detector()
    detector = Mean()
    outputs = Outputs(np.array([[3.0, 4.0], [0.0, 1.0]]))
    assert detector.fit(outputs) is detector
    scores = detector.score(outputs)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, [2.0, 2.0])
    assert detector.describe(outputs) is None


def test_unfitted_and_badly_fitted_detectors_say_so():
    detector, outputs = Mean(), Outputs(np.eye(2))
    for ask in (lambda: detector.score(outputs), detector.get_state):
        with pytest.raises(NotFittedError, match="'mean'"):
            ask()
    detector.fit(outputs)
    with pytest.raises(FitError):
        detector.fit([])
    with pytest.raises(NotFittedError):
        detector.score(outputs)


def test_learned_numbers_survive_the_state():
    outputs = Outputs(np.eye(3))
    detector = Mean().fit(outputs)
    arrays, metadata = detector.get_state()
    assert arrays == {} and metadata == {"detector": "mean", "options": {}, "mean": 1.0}
    np.testing.assert_array_equal(Mean.from_state(arrays, metadata).score(outputs), detector.score(outputs))


def test_a_head_is_asked_for():
    with pytest.raises(UsageError, match="head"):
        Headed().fit(Outputs(np.eye(2)))


def test_batches_come_in_three_forms():
    outputs = Outputs(np.eye(4))
    parts = [outputs[:2], outputs[2:]]
    for source, repeatable in ((outputs, True), (parts, True), (lambda: iter(parts), True), (iter(parts), False)):
        batches = Batches(source)
        assert batches.repeatable == repeatable
        assert sum(len(batch) for batch in batches.start()) == 4
    with pytest.raises(UsageError, match="int"):
        Batches(3)


class InParts(RemoteOutputs):
    """Images that only sums come back from: two parts, each summed by a copy of what starts a sum."""

    def __init__(self, outputs: Outputs) -> None:
        self.parts = [outputs[:150], outputs[150:]]

    def accumulate(self, start):
        starts = [pickle.loads(pickle.dumps(start)) for _ in self.parts]  # noqa: S301
        totals = [begin(part).add(part).to_arrays() for begin, part in zip(starts, self.parts, strict=True)]
        kind = type(start(self.parts[0]))
        names = {name.rpartition(".")[0] for name in totals[0] if "." in name}
        merged = {name: array for name, array in totals[0].items() if "." not in name}
        for name in names:
            first, second = ({key: total[key] for key in total if key.rpartition(".")[0] == name} for total in totals)
            merged |= _add(name, first, second)
        return kind.from_arrays(merged)


def _add(name: str, first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if f"{name}.second" not in first:
        return {key: first[key] + second[key] for key in first}
    total = Moments.from_arrays(with_prefix(first, f"{name}."))
    total.absorb(Moments.from_arrays(with_prefix(second, f"{name}.")))
    return {f"{name}.{key}": array for key, array in total.to_arrays().items()}


@pytest.mark.parametrize("covariance", ["tied", "full"])
def test_images_elsewhere_give_the_same_detector(rng, covariance):
    labels = np.arange(300) % 3
    embeddings = rng.normal(size=(300, 6)) + 5 * np.eye(3, 6)[labels]
    outputs = Outputs(embeddings, labels=labels, shallow=rng.normal(size=(300, 4)))
    known = MapleDetector(covariance=covariance).fit(outputs)
    found = MapleDetector(covariance=covariance).fit(InParts(outputs))
    np.testing.assert_allclose(found.squared_distances(outputs), known.squared_distances(outputs), rtol=1e-8)
    with pytest.raises(UsageError, match="'mean'"):
        Mean().fit(InParts(outputs))


def test_broken_embeddings_are_counted():
    with pytest.raises(DataError, match="1 of 2"):
        finite_embeddings(Outputs(np.array([[1.0, np.inf], [0.0, 0.0]])))


def test_records_are_packed_by_name_and_absent_ones_left_out():
    moments = Moments(2, 3).update(np.arange(12.0).reshape(4, 3), [0, 1, 1, 0])
    arrays = pack_records({"near": moments, "far": None})
    assert arrays and all(name.startswith("near.") for name in arrays)
    found = unpack_records(Moments.from_arrays, {**arrays, "other": np.zeros(1)}, ("near", "far"))
    assert list(found) == ["near"]
    np.testing.assert_array_equal(found["near"].second, moments.second)
    np.testing.assert_array_equal(found["near"].counts, [2, 2])


@pytest.mark.parametrize("shape", [(2, 0), (2, 1), (1,), ()])
def test_scores_of_a_wrong_shape_name_the_detector(shape):
    class Wrong(Mean):
        def _score(self, outputs):
            return np.zeros(shape)

    outputs = Outputs(np.eye(2))
    with pytest.raises(UsageError, match="'mean'"):
        Wrong().fit(outputs).score(outputs)
