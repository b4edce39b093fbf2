"""Provenance of results: the command, options and decision, the commit of a checkout, and the hardware.

:func:`maple.evaluation.evaluate.evaluate` adds the seed and the versions of the packages.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maple.prediction.predictor import Predictor
    from maple.runs.setup.config import RunConfig


def describe_origin(
    config: RunConfig, sections: Mapping[str, Any], predictor: Predictor, command: str
) -> dict[str, Any]:
    """How results were made; of the options, those of the ``sections`` that the run's ``config.toml`` has."""
    import torch

    return {
        "command": command,
        "config": {name: values for name, values in config.sections().items() if name in sections},
        "commit": find_commit(),
        "false_alarm": predictor.false_alarm,
        "calibration_images": len(predictor.calibration),
        "decision": predictor.decision.describe(),
        "promise": predictor.decision.sentence(),
        "score": predictor.detector.score_,
        "norm_exponent": predictor.detector.exponent_,
        "temperature": predictor.probability.temperature,
        "network_weight": predictor.probability.network_weight,
        "odds_exponent": predictor.probability.odds_exponent,
        "hardware": f"{describe_hardware()}, {torch.get_num_threads()} threads",
    }


def find_commit(source: Path = Path(__file__)) -> str | None:
    """The commit of the checkout that tracks the file ``source``; ``None`` where there is none, or no git."""
    folder = source.resolve().parent
    tracked = _git(folder, "ls-files", source.name)  # not so in an environment that lies inside another checkout
    return _git(folder, "rev-parse", "--short", "HEAD") if tracked else None


def describe_hardware() -> str:
    """Processor architecture and number of cores."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        asked = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None if asked.returncode == 0 else None
