"""Reasons to look at a prediction: the decision counts before the probability, and that before the class."""

from __future__ import annotations

import math

import pytest

from maple.decisions.attention import RARE_SHARE, REASONS, find_reason, is_doubtful
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
