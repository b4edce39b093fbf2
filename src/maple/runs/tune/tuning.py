"""The outcome of a search: the best trial, notes on it, and the files that people and ``maple train`` read."""

from __future__ import annotations

import csv
import io
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maple.evaluation.trials import Trial
from maple.options import flag_name, list_options, to_toml
from maple.runs.setup.config import RunConfig
from maple.runs.tune.plan import Plan, TuneRequest
from maple.text import compact, number
from maple.training.options import MapleOptions
from maple.training.recipe import RECIPES

TABLE, BEST, PICTURE = "trials.csv", "best.toml", "trials.svg"


@dataclass(frozen=True)
class Tuning:
    """A study so far."""

    plan: Plan
    trials: list[Trial]
    best: Trial | None
    config: RunConfig | None  # of the best trial
    out: Path
    command: str  # that trains with it

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "best": None if self.best is None else self.best.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
            "command": self.command if self.best else None,
            "out": str(self.out),
        }

    def describe(self) -> str:
        """A summary as text: states, best trial, notes, and the command that trains with it."""
        counts = Counter(trial.state for trial in self.trials)
        done = f"{len(self.trials)} of {self.plan.n_trials} trials: "
        rows = [done + ", ".join(f"{n} {state}" for state, n in counts.items())]
        rows += [f"trial {each.number} {each.state}: {each.reason}" for each in self.trials if each.reason][:3]
        if self.best is None:
            return "\n".join([*rows, "no trial has finished, so that there is no best one"])
        rows.append(f"best: trial {self.best.number}, {self.measured(self.best)}")
        start = next((each for each in self.trials if each.criteria and each.settings == self.plan.start()), None)
        if start is not None and start != self.best:
            rows.append(f"nearest to the settings as they are: trial {start.number}, {self.measured(start)}")
        rows += [f"  {name} = {compact(value)}" for name, value in self.best.settings.items()]
        rows += [f"note: {note}" for note in (self._find_tradeoff(), self._find_idleness()) if note]
        rows += [f"trials: {self.out / TABLE}, picture: {self.out / PICTURE}", f"train with it: {self.command}"]
        return "\n".join(rows)

    def measured(self, trial: Trial) -> str:
        value = number(trial.criteria[self.plan.criterion], 4)
        return f"{self.plan.criterion} {value}, validation accuracy {number(trial.criteria['accuracy'], 4)}"

    def _find_tradeoff(self, slack: float = 0.02) -> str | None:
        """A warning if another trial classifies clearly better; Gaussian embeddings alone do not separate classes."""
        if self.best is None:
            return None
        top = max((each for each in self.trials if each.criteria), key=lambda each: each.criteria["accuracy"])
        if top.criteria["accuracy"] - self.best.criteria["accuracy"] <= slack:
            return None
        return f"trial {top.number} classifies better, {self.measured(top)}: see {TABLE} before you choose"

    def _find_idleness(self) -> str | None:
        """A warning if the parameters had no effect."""
        finished = [trial for trial in self.trials if trial.criteria]
        if len(finished) < 2 or any(trial.criteria != finished[0].criteria for trial in finished):
            return None
        of_clusters = {
            name for name, each in list_options(MapleOptions).items() if each.metadata["needs"] == "clustering"
        }
        if of_clusters.issuperset(self.plan.space):
            return "all trials came out the same, since none split a class: --cluster-method xmeans splits more readily"
        return "all trials came out the same: what was searched changes nothing here"


def train_command(request: TuneRequest, recipe: str = "maple") -> str:
    """The command that trains with the best settings on the same splits.

    >>> train_command(TuneRequest("digits", Path("runs/tuned")))
    'maple train digits --config runs/tuned/best.toml'
    """
    words = ["maple", "train", request.source, "--config", str(request.out / BEST)]
    for name in ("data_root", "validation", "calibration", "test"):
        if (value := getattr(request, name)) is not None:
            words += [flag_name(name), str(value)]
    if plugin := RECIPES.plugin_of(recipe):
        words += ["--plugin", plugin]
    return shlex.join(words)


def trials_csv(tuning: Tuning) -> str:
    """One row per trial."""
    text = io.StringIO()
    columns = Trial(0, "waiting", dict.fromkeys(tuning.plan.space)).to_dict()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(trial.to_dict() for trial in tuning.trials)
    return text.getvalue()


def best_toml(tuning: Tuning) -> str:
    """All options of the best trial, for ``maple train --config``."""
    assert tuning.best is not None and tuning.config is not None
    return (
        f"# maple tune: trial {tuning.best.number} of {len(tuning.trials)}, {tuning.measured(tuning.best)}\n"
        f"# {tuning.command}\n\n" + to_toml(tuning.config.sections())
    )


def find_best(trials: Sequence[Trial], criterion: str) -> Trial | None:
    """The finished trial with the lowest criterion; of equals the most likely one, then the first.

    >>> trials = [Trial(i, "finished", {}, {"errors": 0.1, "nll": nll}) for i, nll in ((1, 0.5), (2, 0.4))]
    >>> find_best(trials, "errors").number
    2
    """
    finished = [trial for trial in trials if trial.state == "finished"]
    return min(finished, key=lambda trial: (trial.criteria[criterion], trial.criteria["nll"]), default=None)
