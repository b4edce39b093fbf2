"""Built-in sets and their parameters."""

from __future__ import annotations

import re

import numpy as np
import pytest

from maple.data.sources import open_images
from maple.errors import UsageError


def test_digits_are_not_flipped() -> None:
    digits = open_images("digits")
    assert digits.class_names == tuple("0123456789") and digits.augment == "crop"
    assert digits.pixels is not None and digits.pixels.max() == 255
    assert open_images("digits", size=16).read(0).shape == (16, 16, 3)


def test_simulated_diatoms_and_their_parameters() -> None:
    images = open_images("simulated-diatoms?n=40&size=24&seed=3&taxa=4")
    assert len(images) == 40 and images.size == 24 and len(images.class_names) == 4
    assert images.augment == "crop,flip-both" and images.name == "simulated-diatoms"
    again = open_images("simulated-diatoms?n=40&size=24&seed=3&taxa=4")
    np.testing.assert_array_equal(images.pixels, again.pixels)
    assert (open_images("simulated-diatoms?n=40&size=24&seed=4&taxa=4").keys != images.keys).all()
    assert open_images("simulated-diatoms/near?n=5").name == "simulated-diatoms/near"
    assert open_images("simulated-diatoms/far?n=5", size=16).size == 16
    assert open_images("simulated-diatoms?n=5&size=24", size=16).size == 16


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("simulated-diatoms?m=4", "'m'"),
        ("simulated-diatoms?sed=4", "'seed'"),
        ("simulated-diatoms?n=0", "n=0"),
        ("simulated-diatoms?n=-5", "n=-5"),
        ("simulated-diatoms?n=1e3", "n=1e3"),
        ("simulated-diatoms?n=99999999999999999999999", "n=99999999999999999999999"),
        ("simulated-diatoms?size=4", "size=4"),
        ("simulated-diatoms?size=100000", "size=100000"),
        ("simulated-diatoms?n=10000000", re.escape("simulated-diatoms?n=10000000")),
        ("simulated-diatoms?n", "n="),
        ("simulated-diatoms/nearer", "'simulated-diatoms/near'"),
        ("digits?n=3", "digits"),
    ],
)
def test_parameters_that_cannot_be_used(source: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_images(source)
