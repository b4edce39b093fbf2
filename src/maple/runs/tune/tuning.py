"""The outcome of a search: the best trial, notes on it, and the files that people and ``maple train`` read."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from maple.evaluation.trials import Trial
from maple.files import to_csv, write_atomic
from maple.options import flag_name, list_options, to_toml
from maple.reporting.plots import standalone_svg
from maple.reporting.plots.trials import plot_trials
from maple.runs.setup.config import RunConfig
from maple.runs.tune.plan import Plan, with_settings
from maple.text import compact, number, plural
from maple.training.options import MapleOptions
from maple.training.recipe import RECIPES

TABLE, BEST, PICTURE = "trials.csv", "best.toml", "trials.svg"
_SLACK = 0.02  # of accuracy, that the best trial may have less than another without a note


@dataclass(frozen=True)
class Tuning:
    """A study so far."""

    plan: Plan
    trials: list[Trial]

    @property
    def out(self) -> Path:
        return self.plan.request.folder

    @cached_property
    def best(self) -> Trial | None:
        """The finished trial with the lowest criterion; of equals the most likely one, then the first.

        >>> from maple.runs.requests import TuneRequest
        >>> from maple.runs.tune.plan import make_plan
        >>> plan = make_plan(TuneRequest("digits", Path("runs")))
        >>> trials = [Trial(i, "finished", {}, {"nll": nll}) for i, nll in ((1, 0.5), (2, 0.4))]
        >>> Tuning(plan, trials).best.number
        2
        """
        finished = [trial for trial in self.trials if trial.state == "finished"]
        criterion = self.plan.request.criterion
        return min(finished, key=lambda trial: (trial.criteria[criterion], trial.criteria["nll"]), default=None)

    @property
    def config(self) -> RunConfig | None:
        """The options of the best trial."""
        return None if self.best is None else with_settings(self.plan.config, self.best.settings)

    @property
    def command(self) -> str:
        """The command that trains with the best settings on the same splits.

        >>> from maple.runs.requests import TuneRequest
        >>> from maple.runs.tune.plan import make_plan
        >>> Tuning(make_plan(TuneRequest("digits", Path("runs/tuned"))), []).command
        'maple train digits --config runs/tuned/best.toml'
        """
        words = ["maple", "train", self.plan.request.source, "--config", str(self.out / BEST)]
        for name in ("data_root", "validation", "calibration", "test"):
            if (value := getattr(self.plan.request, name)) is not None:
                words += [flag_name(name), str(value)]
        if plugin := RECIPES.plugin_of(self.plan.config.model.recipe):
            words += ["--plugin", plugin]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "best": None if self.best is None else self.best.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
            "command": self.command if self.best else None,
            "out": str(self.out),
        }

    # --- as text

    def describe(self) -> str:
        """A summary as text: states, best trial, notes, and the command that trains with it."""
        counts = Counter(trial.state for trial in self.trials)
        done = f"{len(self.trials)} of {plural(self.plan.n_trials, 'trial')}: "
        rows = [done + ", ".join(f"{n} {state}" for state, n in counts.items())]
        rows += [f"trial {each.number} {each.state}: {each.reason}" for each in self.trials if each.reason][:3]
        if self.best is None:
            return "\n".join([*rows, "no trial has finished yet"])
        rows.append(f"best: trial {self.best.number}, {self._measured(self.best)}")
        start = next((each for each in self.trials if each.criteria and each.settings == self.plan.start()), None)
        if start is not None and start != self.best:
            rows.append(f"nearest to the present settings: trial {start.number}, {self._measured(start)}")
        rows += [f"  {name} = {compact(value)}" for name, value in self.best.settings.items()]
        rows += [f"note: {note}" for note in self._notes(self.best)]
        rows += [f"trials: {self.out / TABLE}, picture: {self.out / PICTURE}", f"train with it: {self.command}"]
        return "\n".join(rows)

    def _measured(self, trial: Trial) -> str:
        criterion = self.plan.request.criterion
        value = number(trial.criteria[criterion], 4)
        return f"{criterion} {value}, validation accuracy {number(trial.criteria['accuracy'], 4)}"

    def _notes(self, best: Trial) -> list[str]:
        """Whether another trial classifies clearly better than the best, and whether the parameters had no effect."""
        finished = [trial for trial in self.trials if trial.criteria]
        top = max(finished, key=lambda each: each.criteria["accuracy"])
        notes = []
        if (
            top.criteria["accuracy"] - best.criteria["accuracy"] > _SLACK
        ):  # Gaussian embeddings may not separate classes
            notes.append(f"trial {top.number} classifies better, {self._measured(top)}: see {TABLE} before you choose")
        if len(finished) > 1 and all(trial.criteria == finished[0].criteria for trial in finished):
            known = list_options(MapleOptions)
            of_clusters = {name for name, each in known.items() if each.metadata["needs"] == "clustering"}
            notes.append(
                "all trials came out the same, since none split a class: --cluster-method xmeans splits more readily"
                if of_clusters.issuperset(self.plan.space)
                else "all trials came out the same: the options searched have no effect here"
            )
        return notes

    # --- as files

    def write(self, plot: bool = True) -> None:
        """Write the table of trials, and once a trial has finished the best settings and the plot."""
        columns = list(Trial(0, "waiting", dict.fromkeys(self.plan.space)).to_dict())
        write_atomic(self.out / TABLE, to_csv((trial.to_dict() for trial in self.trials), columns, header=True))
        if self.best is None or self.config is None:
            return
        about = f"# maple tune: trial {self.best.number} of {len(self.trials)}, {self._measured(self.best)}\n"
        write_atomic(self.out / BEST, f"{about}# {self.command}\n\n{to_toml(self.config.sections())}")
        if plot:
            request, space = self.plan.request, self.plan.space
            drawn = plot_trials(request.criterion, space, self.trials, self.best.number)
            write_atomic(self.out / PICTURE, standalone_svg(drawn))
