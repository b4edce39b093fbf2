"""Labels: integers and names as indices of class names, against explicit loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maple.data._labels import index_labels, no_labels
from maple.errors import DataError


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_numbers_become_positions_in_their_numeric_order(values: list[int]) -> None:
    labels, names = index_labels(np.array(values), None, "x")
    assert names == tuple(str(value) for value in sorted(set(values)))
    assert [names[label] for label in labels] == [str(value) for value in values]


@given(st.lists(st.sampled_from("abcd"), min_size=1))
def test_names_become_positions_among_those_declared(values: list[str]) -> None:
    labels, names = index_labels(np.array(values), ["d", "c", "b", "a"], "x")
    assert names == ("d", "c", "b", "a") and [names[label] for label in labels] == values


def test_labels_that_cannot_be_used_name_their_source() -> None:
    for values, declared in (
        (np.array([0, 3]), ["a", "b"]),
        (np.array([0, -1]), None),
        (np.array(["a", "e"]), ["a", "b"]),
        (np.array([0, 1]), ["a", "a"]),
        (np.array([0.5]), None),
        (np.zeros((2, 2), int), None),
    ):
        with pytest.raises(DataError, match="pets"):
            index_labels(values, declared, "pets")


def test_images_without_labels() -> None:
    labels, names = no_labels(3)
    assert labels.tolist() == [-1] * 3 and names == ()
