"""Records of arrays: rows, columns of the prediction files, and what they show."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maple.types import PREDICTION_COLUMNS, About, Outputs, Prediction, Relabelling, RunClasses, Skipped


def outputs(n: int) -> Outputs:
    rows = np.arange(n)
    return Outputs(rows[:, None] * np.ones(3, np.float32), labels=rows, cluster_to_class=np.array([0, 0, 1]))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_parts_of_outputs_add_up(lengths):
    whole, ends = outputs(sum(lengths)), np.cumsum([0, *lengths])
    parts = [whole[start:end] for start, end in itertools.pairwise(ends)]
    assert list(map(len, parts)) == lengths
    joined = Outputs.concatenate(parts)
    np.testing.assert_array_equal(joined.embeddings, whole.embeddings)
    np.testing.assert_array_equal(joined.labels, whole.labels)
    assert joined.logits is None and joined.cluster_to_class is whole.cluster_to_class


def test_rows_of_outputs_by_mask_and_index():
    whole = outputs(4)
    np.testing.assert_array_equal(whole[whole.labels > 1].labels, [2, 3])
    np.testing.assert_array_equal(whole[np.array([3, 0])].embeddings[:, 0], [3, 0])
    assert repr(whole) == "Outputs(embeddings=(4, 3), labels=(4,), cluster_to_class=(3,))"


@pytest.fixture
def prediction() -> Prediction:
    probabilities = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    return Prediction(
        class_id=np.array([0, 2]),
        probability=np.array([0.7, 0.8]),
        typicality=np.array([0.5, 0.0], np.float32),
        uncertainty=np.array([0.5, 1.0], np.float32),
        score=np.array([3.0, 90.0]),
        p_value=np.array([0.4, 0.01]),
        is_ood=np.array([False, True]),
        cluster=np.array([1, 4]),
        md_class_id=np.array([0, 1]),
        softmax_class_id=np.array([2, 2]),
        log_probabilities=np.log(probabilities),
        squared_distance=np.array([3.0, 90.0]),
        class_names=("<a>", "b", "c"),
    )


def test_the_columns_of_the_files_are_fixed(prediction):
    """They are a format: programs of users read them."""
    assert PREDICTION_COLUMNS == (
        "file", "class", "probability", "is_ood", "p_value", "score", "typicality", "uncertainty", "cluster",
        "md_class", "softmax_class",
    )  # fmt: skip
    first, second = prediction.rows(["x.png", "y.png"])
    assert tuple(first) == PREDICTION_COLUMNS
    assert first == {
        "file": "x.png", "class": "<a>", "probability": 0.7, "is_ood": False, "p_value": 0.4, "score": 3.0,
        "typicality": 0.5, "uncertainty": 0.5, "cluster": 1, "md_class": "<a>", "softmax_class": "c",
    }  # fmt: skip
    assert [type(value) for value in second.values()] == [str, str, float, bool, *[float] * 4, int, str, str]


def test_rows_with_sets_and_all_probabilities(prediction):
    sets = np.array([[True, True, False], [False, False, True]])
    first, second = prediction.rows(["x", "y"], all_probabilities=True, sets=sets)
    assert first["prediction_set"] == ["<a>", "b"] and second["prediction_set"] == ["c"]
    assert [first[f"p_{name}"] for name in prediction.class_names] == pytest.approx([0.7, 0.2, 0.1])
    (only,) = prediction.rows(["x"])
    assert only["file"] == "x"


def test_classes_without_names_are_numbers(prediction):
    first, _ = dataclasses.replace(prediction, class_names=()).rows(["x", "y"])
    assert (first["class"], first["softmax_class"]) == ("0", "2")


def test_views_say_whether_anything_was_decided(prediction):
    assert "n_ood=1" in repr(prediction)
    html = prediction._repr_html_()
    assert "&lt;a&gt;" in html and "<a>" not in html
    bare = dataclasses.replace(prediction, p_value=np.full(2, np.nan), is_ood=np.zeros(2, bool))
    assert not bare.is_calibrated and "not calibrated" in repr(bare) and "not calibrated" in bare._repr_html_()
    assert (
        "Prediction"
        in dataclasses.replace(
            bare, **{n: v[:0] for n, v in vars(bare).items() if isinstance(v, np.ndarray)}
        )._repr_html_()
    )


def test_before_any_split_clusters_are_classes():
    found = Relabelling.initial(np.array([1, 0, 1], np.int32), 2)
    assert found.n_clusters == 2 and found.cluster_ids.dtype == np.int64
    np.testing.assert_array_equal(found.parents, found.cluster_to_class)
    assert "n_images=3" in repr(found)


def test_a_class_describes_itself():
    class Documented:
        """One line.

        And more."""

    class Declared:
        about = About("title", "paper")

    assert About.of(Documented).title == "One line." and About.of(Declared).paper == "paper"


def test_classes_of_a_run_survive_json():
    known = RunClasses(
        classes=("a", "b"), skipped=(Skipped("x.png", "broken"),), cluster_to_class=np.array([0, 1, 1]), left_out=("c",)
    )
    again = RunClasses.from_json({"format": 2, **known.to_json()})
    assert again.skipped == known.skipped and again.classes == known.classes and again.left_out == ("c",)
    np.testing.assert_array_equal(again.cluster_to_class, known.cluster_to_class)
    assert again.cluster_sizes is None and "updates" not in known.to_json()
