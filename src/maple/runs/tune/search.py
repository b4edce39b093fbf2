"""Search over the settings of a recipe: the paper's grid, or Optuna's Bayesian search (TPE).

Settings are judged on in-distribution images of the validation split alone. No unknown, calibration or test image is
used, so that thresholds and figures computed from those later remain valid.

A study lives in an Optuna storage, by default an SQLite file. A killed trial resumes from its own checkpoint, in
whichever process comes next.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from maple.data.image_set import channel_statistics
from maple.data.splits import Splits
from maple.errors import MapleError, TrainError, naming_extras
from maple.evaluation.trials import Settings
from maple.files import RunFile
from maple.progress import counting, say
from maple.runs.requests import TuneRequest
from maple.runs.train import new_network
from maple.runs.tune.criteria import judge_run
from maple.runs.tune.plan import make_plan, open_splits, with_settings
from maple.runs.tune.tuning import Tuning
from maple.text import compact, number, plural
from maple.training.loop import train_backbone
from maple.training.recipe import History

if TYPE_CHECKING:
    import optuna

    from maple.runs.tune.study import Study


def tune_recipe(request: TuneRequest) -> Tuning:
    """Run or resume a search; returns when no trial is left that this process could start.

    Finished trials are never repeated, interrupted ones resume from their checkpoints, and the same seed gives the same
    trials. Several processes may share a study.

    >>> import tempfile
    >>> from pathlib import Path
    >>> flags = {"epochs": 1, "batch_size": 64, "splits": (0.1, 0.1, 0.1, 0.7)}
    >>> request = TuneRequest(
    ...     "digits", Path(tempfile.mkdtemp()), search="grid", values={"margin": [0.3, 0.7]}, flags=flags
    ... )
    >>> tuning = tune_recipe(request)
    >>> [(trial.state, trial.settings) for trial in tuning.trials]
    [('finished', {'margin': 0.3}), ('finished', {'margin': 0.7})]
    >>> tuning.best.criteria["nll"] == min(trial.criteria["nll"] for trial in tuning.trials)
    True
    """
    plan = make_plan(request)
    with naming_extras():
        from maple.runs.tune.study import Study, using_optuna
    splits = open_splits(plan)
    with using_optuna():
        search = _Search(Study(plan, splits), splits)
        try:
            search.run()
        except (KeyboardInterrupt, MapleError):
            search.write()
            kept = f"{search.study.n_done()} of {plural(plan.n_trials, 'trial')}"
            say(f"{kept} done and kept in '{request.folder}': rerun the same command to resume")
            raise
        return search.write()


class _Search:
    """Trains and judges the trials of a study, and shows them."""

    def __init__(self, study: Study, splits: Splits) -> None:
        self.study, self.splits, self.plan = study, splits, study.plan
        self.statistics = channel_statistics(splits.train)

    def run(self) -> None:
        with counting("tuning, epochs") as self.bar:
            self._show(0)
            while self.study.run_next(self._train_and_judge):
                self._say_last(self.write(plot=False))

    def _train_and_judge(self, attempt: optuna.Trial, settings: Settings) -> dict[str, float]:
        """The criteria of a setting."""

        def on_epoch(history: History) -> None:
            self._show(len(history))
            self.study.report(attempt, history)

        config, splits = with_settings(self.plan.config, settings), self.splits
        run = train_backbone(
            new_network(config.model, len(splits.class_names), config.train.seed, self.statistics),
            config.recipe,
            splits.train,
            splits.validation,
            folder=self.study.folder(settings),
            resume=True,
            show_progress=False,
            options=config.train,
            on_epoch=on_epoch,
        )
        on_epoch(run.history)  # it may have been trained to the end before an interruption
        criteria = judge_run(run, splits.train, splits.validation, config)
        if not all(map(math.isfinite, criteria.values())):
            raise TrainError("its criteria are not finite")
        return criteria

    def _show(self, epochs: int) -> None:
        """Move the progress bar to the finished trials and ``epochs`` of the running one."""
        if self.bar is not None:
            each = self.plan.config.train.epochs
            self.bar(self.study.n_done() * each + epochs, self.plan.n_trials * each)

    def _say_last(self, tuning: Tuning) -> None:
        """Print the trial that this process has just finished."""
        trial = next((trial for trial in tuning.trials if trial.settings == self.study.last), None)
        if trial is None or self.study.repeated:
            return
        criterion = self.plan.request.criterion
        outcome = f"{criterion} {number(trial.criteria[criterion], 4)}" if trial.criteria else trial.state
        settings = "  ".join(f"{name} {compact(setting)}" for name, setting in trial.settings.items())
        best = "  (best so far)" if trial == tuning.best else ""
        say(f"trial {trial.number} of {self.plan.n_trials}  {settings}  {outcome}{best}")

    def write(self, plot: bool = True) -> Tuning:
        """Write trials, best settings and plot, and remove checkpoints of finished trials."""
        tuning = Tuning(self.plan, self.study.trials())
        for trial in tuning.trials:
            if trial.is_done:
                (self.study.folder(trial.settings) / RunFile.CHECKPOINT).unlink(missing_ok=True)
        tuning.write(plot)
        return tuning
