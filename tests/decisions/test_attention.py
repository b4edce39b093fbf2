"""Reasons to look at a prediction: the decision counts before the probability, and that before the class."""

from __future__ import annotations

import math

import pytest

from maple.decisions.attention import RARE_SHARE, REASONS, find_reason, is_doubtful, look_rank
from maple.text import percent
from maple.types import DOUBTFUL_PROBABILITY


@pytest.mark.parametrize(
    ("probability", "is_ood", "share", "reason"),
    [
        (0.3, True, 0.001, "unknown"),
        (0.3, False, 0.001, "doubtful"),
        (DOUBTFUL_PROBABILITY, False, RARE_SHARE, "rare"),
        (DOUBTFUL_PROBABILITY, False, 0.02, None),
        (math.nan, False, 0.5, None),
    ],
)
def test_the_first_reason_counts(probability, is_ood, share, reason):
    assert find_reason(probability, is_ood, share) == reason
    assert is_doubtful(probability, is_ood) == (reason == "doubtful")


def test_the_sentences_name_the_limits():
    assert f"{100 * DOUBTFUL_PROBABILITY:.0f} %" in REASONS["doubtful"] and percent(RARE_SHARE) in REASONS["rare"]


def test_flagged_images_come_by_p_value_and_known_ones_by_probability():
    images = {  # probability, is_ood, p-value, score
        "flagged, odd": (0.9, True, 0.03, 5.0),
        "flagged, odder": (0.9, True, 0.01, 5.0),
        "flagged, as odd but farther": (0.2, True, 0.01, 9.0),
        "flagged, less probable": (0.1, True, 0.03, 1.0),
        "doubtful": (0.4, False, 0.6, 1.0),
        "doubtful, more usual": (0.4, False, 0.9, 1.0),
        "sure": (0.99, False, 0.06, 4.0),
        "not calibrated": (0.4, False, math.nan, 4.0),
        "not calibrated, farther": (0.4, False, math.nan, 6.0),
    }
    assert sorted(images, key=lambda name: look_rank(*images[name])) == [
        "flagged, as odd but farther", "flagged, odder", "flagged, less probable", "flagged, odd",
        "doubtful", "doubtful, more usual", "not calibrated, farther", "not calibrated", "sure",
    ]  # fmt: skip
