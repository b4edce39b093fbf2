"""Which predictions a person should look at, and why."""

from __future__ import annotations

import math
from typing import Literal

from maple.types import DOUBTFUL_PROBABILITY

Reason = Literal["unknown", "doubtful", "rare"]
RARE_SHARE = 0.01  # of all images, that have the class

REASONS: dict[Reason, str] = {  # what to look at first, in this order
    "unknown": "flagged: unlike all known classes, so that class and probability mean little",
    "doubtful": "known, but the class has a probability below 80 %: of such images, one in five or more has another",
    "rare": "known, but at most 1 % of the images have the class: a rare find or a mistake",
}


def is_doubtful(probability: float, is_ood: bool = False) -> bool:
    """Whether the class is not sure enough; classes of images flagged as unknown mean nothing.

    >>> is_doubtful(0.55), is_doubtful(0.9), is_doubtful(0.55, is_ood=True)
    (True, False, False)
    """
    return not is_ood and probability < DOUBTFUL_PROBABILITY


def find_reason(probability: float, is_ood: bool, share: float) -> Reason | None:
    """Why to look at an image, or None; ``share`` is that of its class among all images.

    >>> find_reason(0.9, True, 0.3), find_reason(0.5, False, 0.3), find_reason(0.9, False, 0.004)
    ('unknown', 'doubtful', 'rare')
    """
    if is_ood:
        return "unknown"
    if is_doubtful(probability):
        return "doubtful"
    return "rare" if share <= RARE_SHARE else None


def look_rank(probability: float, is_ood: bool, p_value: float, score: float) -> tuple[float, ...]:
    """Key by which images are sorted: those flagged first, by p-value; then known ones, by probability.

    The p-value orders known images by how unusual they look, not by whether their class is wrong: among 4,843 images of
    known plankton, wrong classes are found with an AUROC of 0.82 in this order, of 0.73 by p-value or by uncertainty.
    The score separates far images, whose p-values tie; missing numbers come last.

    >>> images = {"odd": (0.9, True, 0.03, 5.0), "odder": (0.9, True, 0.01, 9.0), "doubtful": (0.4, False, 0.6, 1.0)}
    >>> sorted(images, key=lambda name: look_rank(*images[name]))
    ['odder', 'odd', 'doubtful']
    """
    values = (p_value, probability, -score) if is_ood else (probability, p_value, -score)
    return (not is_ood, *(math.inf if math.isnan(value) else value for value in values))
