"""Options of the decision; light, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from maple.options import NoneByName, option


@dataclass(frozen=True, kw_only=True)
class DecisionOptions:
    """When an image is flagged as out-of-distribution."""

    false_alarm: Annotated[float, Interval(ge=1e-9, lt=1)] = option(
        0.05, "largest share of in-distribution images to flag, on average: 0.05 for 5 %"
    )
    confidence: Annotated[Annotated[float, Interval(gt=0, lt=1)] | None, NoneByName] = option(
        None, "confidence that the share holds for this calibration set, such as 0.95, or 'none' (on average over sets)"
    )
    per_class: bool = option(False, "one threshold per predicted class that has enough calibration images", rare=True)
