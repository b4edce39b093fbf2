"""Search over the settings of a recipe: the paper's grid, or Optuna's Bayesian search (TPE).

Settings are judged on in-distribution images alone, and only on the validation split: no unknown image, no calibration
image and no test image has a say, so that what is promised and measured afterwards still holds.

A study lives in an Optuna storage, by default an SQLite file. A killed trial resumes from its own checkpoint, in
whichever process comes next.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from maple.data.image_set import channel_statistics
from maple.data.splits import Splits
from maple.errors import FitError, MapleError, TrainError, UsageError
from maple.evaluation.trials import Settings, Trial
from maple.files import RunFile, load_json, save_json, take_lock, write_atomic
from maple.progress import counting, say, warn
from maple.reporting.plots import standalone_svg
from maple.reporting.plots.trials import plot_trials
from maple.runs.setup.config import RunConfig
from maple.runs.train import new_network
from maple.runs.tune.attempts import describe_attempts, is_hopeless, key_of, settings_of
from maple.runs.tune.criteria import judge_run
from maple.runs.tune.plan import Plan, TuneRequest, make_plan, open_splits
from maple.runs.tune.space import with_settings
from maple.runs.tune.storage import check_same_study, import_optuna, open_storage, quiet, storage_errors, study_identity
from maple.runs.tune.tuning import BEST, PICTURE, TABLE, Tuning, best_toml, find_best, train_command, trials_csv
from maple.text import compact, number
from maple.training.loop import Run, train_backbone

_RANDOM_TRIALS = 8  # finished trials before a Bayesian search models what it has seen
_PRUNE_AFTER = 5  # finished trials before others are stopped early
_MAX_REPEATED = 50  # known proposals in a row before a search ends
_STUDY, _LOCK, _TRIALS_FOLDER = "study.json", "study.lock", "trials"

Progress = Callable[[int, int], None]


def tune_recipe(request: TuneRequest) -> Tuning:
    """Run or resume a search; returns when no trial is left that this process could start.

    Finished trials are never repeated, interrupted ones resume from their checkpoints, and the same seed gives the same
    trials. Several processes may share a study.

    >>> import tempfile
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
    optuna = import_optuna()
    splits = open_splits(request, plan)
    with quiet(optuna), storage_errors(optuna):
        search = _Search(optuna, request, plan, splits)
        try:
            search.run()
        except (KeyboardInterrupt, MapleError):
            kept = f"{sum(trial.is_done for trial in search.write().trials)} of {plan.n_trials} trials"
            say(f"{kept} are done and kept in '{request.out}': rerun the same command to resume")
            raise
        return search.write()


class _Discarded(Exception):
    """An attempt that Optuna started but that is not needed."""


class _TakenOver(BaseException):
    """The attempt at work belongs to another process by now. Not an ``Exception``: Optuna would end the attempt."""


class _Search:
    """One process at work on a study.

    A lock of the folder ``out`` is held while a trial is chosen; a lock on the folder of a trial shows that its process
    is alive. The operating system releases both, however a process ends.
    """

    def __init__(self, optuna: Any, request: TuneRequest, plan: Plan, splits: Splits) -> None:
        from filelock import FileLock

        self.optuna, self.request, self.plan, self.splits = optuna, request, plan, splits
        self.out = request.out
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"'{self.out}' is a file: choose a folder for --out")
        self.out.mkdir(parents=True, exist_ok=True)
        self.statistics = channel_statistics(splits.train)
        self.lock = FileLock(self.out / _LOCK)
        self.repeated = 0  # proposals in a row
        self.n_reported = 0  # epochs of the trial at work
        self.last: Settings = {}  # of the trial that was started last
        self.bar: Progress | None = None
        with self.lock:
            self.token = self._read_token()
            self.study = self._open_study()

    def _read_token(self) -> str:
        """A name for this folder, wherever it is mounted."""
        path = self.out / _STUDY
        if not path.exists():
            save_json(path, {"folder": uuid.uuid4().hex})
        return str(load_json(path).get("folder"))

    def _open_study(self) -> Any:
        unjudged = max(1, self.plan.config.train.epochs // 2)  # a high learning rate looks bad until it falls
        pruner = (
            self.optuna.pruners.MedianPruner(n_startup_trials=_PRUNE_AFTER, n_warmup_steps=unjudged)
            if self.plan.prune
            else self.optuna.pruners.NopPruner()
        )
        study = self.optuna.create_study(
            storage=open_storage(self.optuna, self.request.storage, self.out),
            study_name=self.request.study_name,
            pruner=pruner,
            load_if_exists=True,
        )
        identity = study_identity(self.plan, self.splits)
        if (then := study.user_attrs.get("maple")) is not None:
            check_same_study(then, identity, self.request.study_name)
        elif study.get_trials(deepcopy=False):
            raise UsageError(f"the study '{self.request.study_name}' is not one of maple tune: choose another --study")
        else:
            study.set_user_attr("maple", identity)
        return study

    # --- choosing

    def run(self) -> None:
        with counting("tuning, epochs") as self.bar:
            self._show(0)
            while self._run_next():
                self._say_last(self.write_tables())

    def _run_next(self) -> bool:
        """Start the next trial; False where there is nothing left to start."""
        self.lock.acquire()  # until the trial has its own
        try:
            self._recover()
            if not self._queue_next():
                return False
            self.study.sampler = self._make_sampler()
            self.study.optimize(self._objective, n_trials=1, catch=(_Discarded,))
        except _TakenOver:
            warn("another process has taken over a trial of this process, whose heartbeat was late")
        finally:
            self.lock.release()
        if self.repeated >= _MAX_REPEATED:
            say("no new settings are left to try: the search ends")
        return self.repeated < _MAX_REPEATED

    def _recover(self) -> None:
        """Queue again the trials whose processes have ended."""
        self.optuna.storages.fail_stale_trials(self.study)
        for attempts in self._attempts().values():
            for attempt in attempts:
                if attempt.state.name == "RUNNING" and self._is_abandoned(attempt):
                    self.study.tell(attempt.number, state=self.optuna.trial.TrialState.FAIL, skip_if_finished=True)
        for attempts in list(self._attempts().values())[: self.plan.n_trials]:
            if all(attempt.state.name == "FAIL" for attempt in attempts) and not is_hopeless(attempts):
                self.study.enqueue_trial(settings_of(attempts[0]))

    def _is_abandoned(self, attempt: Any) -> bool:
        """Whether an attempt ran in this folder and its process has ended."""
        if attempt.user_attrs.get("folder") != self.token:
            return False
        lock = self._lock_of(settings_of(attempt))
        if lock is None:
            return False
        lock.release()
        return True

    def _lock_of(self, settings: Settings) -> Any:
        """The acquired lock on the folder of a trial; None if another process holds it."""
        return take_lock(self._folder(settings) / "lock")

    def _queue_next(self) -> bool:
        """Whether there is a trial to start. The first one and those of a grid are known, and queued here."""
        attempts = self._attempts()
        if any(attempt.state.name == "WAITING" for each in attempts.values() for attempt in each):
            return True
        if self.plan.search == "grid":
            missing = next((point for point in self.plan.grid() if key_of(point) not in attempts), None)
            if missing is not None:
                self.study.enqueue_trial(missing)
            return missing is not None
        if len(attempts) >= self.plan.n_trials:
            return False
        if not attempts:
            self.study.enqueue_trial(self.plan.start())
        return True

    def _make_sampler(self) -> Any:
        """A sampler seeded by the progress of the study: an interrupted search proposes the same settings."""
        attempts = self._attempts()
        started = sum(any(attempt.state.name != "WAITING" for attempt in each) for each in attempts.values())
        discarded = sum("discarded" in attempt.user_attrs for attempt in self.study.get_trials(deepcopy=False))
        seed = np.random.SeedSequence([self.plan.config.train.seed, started, discarded]).generate_state(1)[0]
        return self.optuna.samplers.TPESampler(
            seed=int(seed), n_startup_trials=_RANDOM_TRIALS, multivariate=True, constant_liar=True
        )

    def _attempts(self) -> dict[str, list[Any]]:
        """Attempts by settings, in order."""
        found: dict[str, list[Any]] = {}
        for attempt in self.study.get_trials(deepcopy=False):
            settings = settings_of(attempt)
            if settings.keys() == self.plan.space.keys() and "discarded" not in attempt.user_attrs:
                found.setdefault(key_of(settings), []).append(attempt)
        return found

    # --- one trial

    def _objective(self, attempt: Any) -> float:
        settings = {name: found.suggest(attempt, name) for name, found in self.plan.space.items()}
        lock = None if self._is_superfluous(attempt, settings) else self._lock_of(settings)
        if lock is None:
            self.repeated += 1
            attempt.set_user_attr("discarded", True)
            raise _Discarded
        self.repeated, self.last = 0, settings
        try:
            attempt.set_user_attr("folder", self.token)
            self.lock.release()
            return self._train_and_judge(attempt, settings)
        except KeyboardInterrupt:
            attempt.set_user_attr("interrupted", True)
            raise
        except MapleError as error:
            attempt.set_user_attr("reason", str(error))
            raise
        except self.optuna.exceptions.UpdateFinishedTrialError:
            raise _TakenOver from None
        finally:
            lock.release()

    def _is_superfluous(self, attempt: Any, settings: Settings) -> bool:
        """Whether another machine has started these settings, or the last trial of the search, before this one."""
        attempts = self._attempts()
        twins = [other for other in attempts[key_of(settings)] if other.state.name != "FAIL"]
        return twins[0].number < attempt.number or list(attempts).index(key_of(settings)) >= self.plan.n_trials

    def _train_and_judge(self, attempt: Any, settings: Settings) -> float:
        config = with_settings(self.plan.config, settings)
        try:
            run = self._train(attempt, config, self._folder(settings))
            criteria = judge_run(run, self.splits.train, self.splits.validation, config)
            if not all(map(math.isfinite, criteria.values())):
                raise TrainError("its criteria are not finite")
        except (TrainError, FitError) as error:
            attempt.set_user_attr("reason", str(error))
            raise self.optuna.TrialPruned from None
        attempt.set_user_attr("criteria", criteria)
        return criteria[self.plan.criterion]

    def _train(self, attempt: Any, config: RunConfig, folder: Path) -> Run:
        def on_epoch(history: list[dict[str, Any]]) -> None:
            self._report(attempt, history)
            if len(history) < config.train.epochs and attempt.should_prune():
                self._finish(attempt, history)
                raise self.optuna.TrialPruned

        self.n_reported = 0
        backbone = new_network(config.model, len(self.splits.class_names), config.train.seed, self.statistics)
        run = train_backbone(
            backbone,
            config.recipe,
            self.splits.train,
            self.splits.validation,
            folder=folder,
            resume=True,
            show_progress=False,
            options=config.train,
            on_epoch=on_epoch,
        )
        self._finish(attempt, run.history)
        return run

    def _report(self, attempt: Any, history: list[dict[str, Any]]) -> None:
        """Tell the study of all epochs, also of those before an interruption."""
        for row in history[self.n_reported :]:
            attempt.report(row["validation_loss"], row["epoch"])
        self.n_reported = len(history)
        self._show(len(history))

    def _finish(self, attempt: Any, history: list[dict[str, Any]]) -> None:
        self._report(attempt, history)
        attempt.set_user_attr("seconds", round(sum(row["seconds"] for row in history), 2))
        attempt.set_user_attr("clusters", history[-1]["clusters"])

    def _folder(self, settings: Settings) -> Path:
        """The folder of history and checkpoint, the same for every attempt at a trial."""
        named = key_of(settings) + json.dumps(self.study.user_attrs["maple"], sort_keys=True)
        return self.out / _TRIALS_FOLDER / hashlib.blake2b(named.encode(), digest_size=6).hexdigest()

    def _show(self, epochs: int) -> None:
        """Move the progress bar to the finished trials and ``epochs`` of the running one."""
        if self.bar is not None:
            done = sum(trial.is_done for trial in self.trials())
            each = self.plan.config.train.epochs
            self.bar(done * each + epochs, self.plan.n_trials * each)

    def _say_last(self, tuning: Tuning) -> None:
        """Print the trial that this process has just finished."""
        trial = next((trial for trial in tuning.trials if trial.settings == self.last), None)
        if trial is None or self.repeated:
            return
        value = trial.criteria.get(self.plan.criterion)
        outcome = trial.state if value is None else f"{self.plan.criterion} {number(value, 4)}"
        settings = "  ".join(f"{name} {compact(setting)}" for name, setting in trial.settings.items())
        best = "  (best so far)" if trial == tuning.best else ""
        say(f"trial {trial.number} of {self.plan.n_trials}  {settings}  {outcome}{best}")

    # --- results

    def trials(self) -> list[Trial]:
        """All trials so far, of all processes."""
        return [
            describe_attempts(number, attempts, self._folder(settings_of(attempts[0])).name)
            for number, attempts in enumerate(self._attempts().values(), start=1)
        ]

    def tuning(self) -> Tuning:
        trials = self.trials()
        best = find_best(trials, self.plan.criterion)
        config = None if best is None else with_settings(self.plan.config, best.settings)
        return Tuning(
            self.plan, trials, best, config, self.out, train_command(self.request, self.plan.config.model.recipe)
        )

    def write_tables(self) -> Tuning:
        """Write trials and best settings, and remove checkpoints of finished trials."""
        tuning = self.tuning()
        for trial in tuning.trials:
            if trial.is_done:
                (self.out / _TRIALS_FOLDER / trial.folder / RunFile.CHECKPOINT).unlink(missing_ok=True)
        write_atomic(self.out / TABLE, trials_csv(tuning))
        if tuning.best is not None:
            write_atomic(self.out / BEST, best_toml(tuning))
        return tuning

    def write(self) -> Tuning:
        """Write tables and plot."""
        tuning = self.write_tables()
        if tuning.best is not None:
            plot = plot_trials(self.plan.criterion, self.plan.space, tuning.trials, tuning.best.number)
            write_atomic(self.out / PICTURE, standalone_svg(plot))
        return tuning
