"""A trial is one setting; an attempt is one of Optuna's trials, of which a setting may need several."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from maple.evaluation.trials import Settings, Trial

_MAX_ATTEMPTS = 3  # that get no further


def key_of(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)


def settings_of(attempt: Any) -> Settings:
    """The settings of an attempt, also before it is started."""
    return attempt.system_attrs.get("fixed_params") or attempt.params


def is_hopeless(attempts: Sequence[Any]) -> bool:
    """Whether several attempts ended at the same epoch, each by something other than Ctrl-C."""
    ends = Counter(len(each.intermediate_values) for each in attempts if "interrupted" not in each.user_attrs)
    return max(ends.values(), default=0) >= _MAX_ATTEMPTS


def describe_attempts(number: int, attempts: Sequence[Any], folder: str) -> Trial:
    """The trial that attempts at one setting make: the finished one counts, else the running one, else the last."""
    order = ("COMPLETE", "PRUNED", "RUNNING", "WAITING", "FAIL")
    attempt = min(reversed(attempts), key=lambda each: order.index(each.state.name))
    reason = attempt.user_attrs.get("reason", "")
    states: dict[str, Any] = {
        "COMPLETE": "finished",
        "PRUNED": "diverged" if reason else "pruned",
        "RUNNING": "running",
        "WAITING": "waiting",
        "FAIL": "failed" if is_hopeless(attempts) else "interrupted",
    }
    return Trial(
        number,
        states[attempt.state.name],
        settings_of(attempt),
        attempt.user_attrs.get("criteria", {}),
        len(attempt.intermediate_values),
        attempt.user_attrs.get("seconds", math.nan),
        attempt.user_attrs.get("clusters"),
        reason,
        folder,
    )
