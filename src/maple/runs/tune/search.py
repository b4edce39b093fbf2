"""Search over the settings of a recipe: the paper's grid, or Optuna's Bayesian search (TPE).

Settings are judged on in-distribution images alone, and only on the validation split: no unknown image, no calibration
image and no test image has a say, so that what is promised and measured afterwards still holds. The validation images
are cut into two halves. What ``maple train`` learns from validation images after the training (temperature, weight of
the network, scores) is learned from one half and judged on the other, then the other way round; a criterion is the mean
over both.

A study lives in an Optuna storage, by default an SQLite file. A *trial* of ours is one setting, however often Optuna
had to start it: one that was killed goes on from its own checkpoint, in whichever process comes next.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import shlex
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from maple.baselines.ensemble import EnsembleRecipe
from maple.data.image_set import channel_statistics
from maple.data.splits import Splits, load_splits
from maple.decisions.conformal import min_calibration_images
from maple.errors import DataError, FitError, MapleError, RunError, TrainError, UsageError, suggest
from maple.evaluation.trials import CRITERIA, Choices, Settings, Space, Trial
from maple.files import RunFile, load_json, save_json, take_lock, write_atomic
from maple.options import flag_name, list_options, to_toml
from maple.progress import counting, say, warn
from maple.reporting.plots import standalone_svg
from maple.reporting.plots.trials import plot_trials
from maple.runs.config import RunConfig, resolve_config
from maple.runs.splits import digest_images
from maple.runs.train import check_options, new_network
from maple.runs.tune.criteria import halve, judge_run
from maple.runs.tune.space import SEARCHES, Search, choose_space, current_value, list_parameters, with_settings
from maple.text import compact, number
from maple.training.distributed import count_processes
from maple.training.loop import Run, train_backbone
from maple.training.options import MapleOptions
from maple.training.resume import FREE_OPTIONS

Progress = Callable[[int, int], None]

TRIALS = 20  # of a Bayesian search
MAX_GRID = 10_000  # settings in all
RANDOM_TRIALS = 8  # finished trials from which on a Bayesian search goes by what it has seen
PRUNE_AFTER = 5  # finished trials from which on others are stopped early
MAX_ATTEMPTS = 3  # starts of a trial that get no further
MAX_REPEATED = 50  # proposals in a row that are known already
HEARTBEAT, LOST = 30, 300  # seconds between signs of life, and without one until a trial is given to another process
SQLITE_PATIENCE = 60  # seconds to wait for another process

STUDY, DATABASE, LOCK, TRIALS_FOLDER = "study.json", "study.db", "study.lock", "trials"
TABLE, BEST, PICTURE = "trials.csv", "best.toml", "trials.svg"


# --- request and plan -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TuneRequest:
    """What ``maple tune`` was asked to do; ``flags``, ``file`` and ``preset`` are what all trials have in common."""

    source: str
    out: Path
    search: Search = "bayes"
    trials: int | None = None  # of a Bayesian search, over all processes and calls
    criterion: str = "nll"
    parameters: Sequence[str] | None = None
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    prune: bool = True
    storage: str | None = None  # an Optuna URL; None: an SQLite file in ``out``
    study: str | None = None  # its name in the storage; None: the name of ``out``
    data_root: Path | None = None
    validation: str | None = None
    calibration: str | None = None
    test: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    file: dict[str, Any] = field(default_factory=dict)
    preset: str | None = None

    @property
    def study_name(self) -> str:
        return self.study or self.out.resolve().name


@dataclass(frozen=True)
class Plan:
    """What a request comes to."""

    search: Search
    criterion: str
    prune: bool
    config: RunConfig  # what all trials have in common
    space: Space
    n_trials: int

    def grid(self) -> list[Settings]:
        """The settings of a grid, in order."""
        values = [found.values for found in self.space.values() if isinstance(found, Choices)]
        return [dict(zip(self.space, point)) for point in itertools.product(*values)]

    def start(self) -> Settings:
        """The settings as they are, or what of the space is nearest to them: where a Bayesian search begins."""
        return {name: found.nearest(current_value(self.config, name)) for name, found in self.space.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "search": self.search,
            "trials": self.n_trials,
            "epochs": self.config.train.epochs,
            "criterion": self.criterion,
            "prune": self.prune,
            "parameters": {name: str(found) for name, found in self.space.items()},
            "recipe": self.config.model.recipe,
            "backbone": self.config.model.backbone,
        }

    def describe(self) -> str:
        """The plan for people."""
        widest = max(map(len, self.space))
        epochs = self.config.train.epochs
        rows = [
            f"{self.n_trials} trials of {epochs} epochs each, {self.n_trials * epochs} epochs at most"
            + ("; trials that fall behind are stopped early" if self.prune else ""),
            f"search: {self.search}, of recipe {self.config.model.recipe} with {self.config.model.backbone}",
            f"criterion: {self.criterion}, {CRITERIA[self.criterion]}",
            "parameters:",
            *(f"  {name:<{widest}}  {found}" for name, found in self.space.items()),
        ]
        return "\n".join(rows)


def make_plan(request: TuneRequest) -> Plan:
    """Check a request, as far as that goes without its images.

    >>> request = TuneRequest("digits", Path("runs/tuned"), search="grid", flags={"epochs": 30})
    >>> print(make_plan(request).describe())
    48 trials of 30 epochs each, 1440 epochs at most; trials that fall behind are stopped early
    search: grid, of recipe maple with resnet9
    criterion: nll, negative log-likelihood of the class probabilities
    parameters:
      hard_class_error  0.1, 0.3, 0.5
      relabel_every     5, 10, 15, 20
      max_clusters      3, 5, 7, 10
    """
    for what, name, known in (("search", request.search, SEARCHES), ("criterion", request.criterion, CRITERIA)):
        if name not in known:
            raise UsageError(f"unknown {what} '{name}': {suggest(name, known)}")
    config = resolve_config(request.flags, request.file, request.preset)
    _check_config(config, request)
    space = choose_space(request.search, config, request.parameters, request.values)
    for name, found in space.items():
        relative = list_parameters(config.model.recipe)[name].relative
        if name in request.flags and isinstance(found, Choices) and not relative:
            raise UsageError(
                f"{flag_name(name)} is what is searched: leave it out, or out of --parameters and --values"
            )
    size = math.prod(found.size for found in space.values())
    if request.search == "grid":
        if request.trials is not None:
            raise UsageError(f"--trials belongs to --search bayes: this grid has {size:.0f} trials, leave it out")
        if size > MAX_GRID:
            raise UsageError(
                f"this grid has {size:.0f} trials, more than {MAX_GRID}: use --search bayes, or fewer values"
            )
        n_trials = int(size)
    else:
        asked = TRIALS if request.trials is None else request.trials
        if asked < 1:
            raise UsageError(f"--trials is {asked}: give at least 1")
        n_trials = int(min(asked, size))
    return Plan(request.search, request.criterion, request.prune, config, space, n_trials)


def _check_config(config: RunConfig, request: TuneRequest) -> None:
    """What could go wrong only in the first trial; better known now."""
    if isinstance(config.recipe, EnsembleRecipe):
        raise UsageError("an ensemble has no settings of its own to tune: tune its members with --recipe cross-entropy")
    check_options(config.train)
    if count_processes(config.train) != (1, 1):
        raise UsageError(
            "a trial is trained in one process: leave out --devices, --nodes and torchrun, and start the same "
            "maple tune several times instead"
        )


def open_splits(request: TuneRequest, plan: Plan) -> Splits:
    """The splits that ``maple train`` would make; of which train and validation are used here."""
    with counting("decoding") as progress:
        splits = load_splits(
            request.source,
            plan.config.data,
            data_root=request.data_root,
            test=request.test,
            validation=request.validation,
            calibration=request.calibration,
            progress=progress,
        )
    half = min(map(len, halve(splits.validation)))
    needed = min_calibration_images(plan.config.decision.false_alarm) if plan.criterion == "errors" else 1
    if half < needed:
        reason = f" at --false-alarm {plan.config.decision.false_alarm:g}" if plan.criterion == "errors" else ""
        raise DataError(
            f"{len(splits.validation)} validation images are too few for criterion '{plan.criterion}'{reason}, which "
            f"needs {2 * needed}: give validation a larger share of --splits, or --validation"
        )
    return splits


# --- the study --------------------------------------------------------------------------------------------------------


def tune_recipe(request: TuneRequest) -> Tuning:
    """Search, or go on with a search; returns when no trial is left that this process could start.

    A study in the same storage goes on, whatever ended it: finished trials are never repeated, interrupted ones go on
    from their checkpoints, and with the same seed the same trials follow. Several processes may share a study.

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
    with _quiet(optuna), _storage_errors(optuna):
        search = _Search(optuna, request, plan, splits)
        try:
            search.run()
        except (KeyboardInterrupt, MapleError):
            kept = sum(trial.is_done for trial in search.write().trials)
            say(f"{kept} of {plan.n_trials} trials are done and kept in '{request.out}': the same command goes on")
            raise
        return search.write()


def import_optuna() -> Any:
    """Optuna, or a clear error where it is not installed."""
    try:
        import filelock  # noqa: F401
        import optuna
    except ImportError:
        raise UsageError("maple tune needs Optuna: pip install 'maple-uncertainty[tune]'") from None
    return optuna


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Optuna's own messages are not for our users."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def _storage_errors(optuna: Any) -> Iterator[None]:
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        raise RunError(f"the storage of the study failed ({_first_line(error)}): the same command goes on") from None


def _first_line(error: BaseException) -> str:
    return str(error.__cause__ or error).partition("\n")[0]


def open_storage(optuna: Any, url: str | None, out: Path) -> Any:
    """An Optuna storage; processes that die are noticed where its database keeps signs of life."""
    if url is None:
        out.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{out.resolve() / DATABASE}"
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise UsageError(f"--storage takes an Optuna URL, such as sqlite:///study.db or postgresql://..., not '{url}'")
    waiting = {"connect_args": {"timeout": SQLITE_PATIENCE}} if scheme.startswith("sqlite") else {}
    try:
        if scheme.startswith("redis"):
            return optuna.storages.get_storage(url)
        return optuna.storages.RDBStorage(url, engine_kwargs=waiting, heartbeat_interval=HEARTBEAT, grace_period=LOST)
    except Exception as error:  # of SQLAlchemy, of drivers, of the network
        raise RunError(
            f"cannot open the storage {scheme}://...: {_first_line(error)}; check --storage, and that the driver of "
            "the database is installed"
        ) from None


class _Discarded(Exception):
    """A trial that Optuna started, but that is not needed."""


class _TakenOver(BaseException):
    """The trial at work belongs to another process by now; Optuna, which would end it as its own, must not see this."""


class _Search:
    """One process at work on a study.

    What must not change while a trial is chosen is done under a lock of the folder ``out``; a lock on the folder of a
    trial says that its process lives. Both are released by the system, however a process ends.
    """

    def __init__(self, optuna: Any, request: TuneRequest, plan: Plan, splits: Splits) -> None:
        from filelock import FileLock

        self.optuna, self.request, self.plan, self.splits = optuna, request, plan, splits
        self.out = request.out
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"'{self.out}' is a file: choose a folder for --out")
        self.out.mkdir(parents=True, exist_ok=True)
        self.statistics = channel_statistics(splits.train)
        self.lock = FileLock(self.out / LOCK)
        self.repeated = 0  # proposals in a row
        self.last: Settings = {}  # of the trial that was started last
        self.bar: Progress | None = None
        with self.lock:
            self.token = self._read_token()
            self.study = self._open_study()

    def _read_token(self) -> str:
        """A name for this very folder, wherever it is mounted."""
        path = self.out / STUDY
        if not path.exists():
            save_json(path, {"folder": uuid.uuid4().hex})
        return str(load_json(path).get("folder"))

    def _open_study(self) -> Any:
        unjudged = max(1, self.plan.config.train.epochs // 2)  # a high learning rate looks bad until it falls
        pruner = (
            self.optuna.pruners.MedianPruner(n_startup_trials=PRUNE_AFTER, n_warmup_steps=unjudged)
            if self.plan.prune
            else self.optuna.pruners.NopPruner()
        )
        study = self.optuna.create_study(
            storage=open_storage(self.optuna, self.request.storage, self.out),
            study_name=self.request.study_name,
            pruner=pruner,
            load_if_exists=True,
        )
        identity = study_identity(self.request, self.plan, self.splits)
        if (then := study.user_attrs.get("maple")) is not None:
            check_same_study(then, identity, self.request.study_name)
        elif study.get_trials(deepcopy=False):
            raise UsageError(f"the study '{self.request.study_name}' is not one of maple tune: choose another --study")
        else:
            study.set_user_attr("maple", identity)
        return study

    # Choosing

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
            warn("another process has taken over a trial of this one, which showed no sign of life for too long")
        finally:
            self.lock.release()
        if self.repeated >= MAX_REPEATED:
            say("the search proposes nothing new any more, and ends")
        return self.repeated < MAX_REPEATED

    def _recover(self) -> None:
        """Queue again what nobody is at work on any more."""
        self.optuna.storages.fail_stale_trials(self.study)
        for attempts in self._attempts().values():
            for attempt in attempts:
                if attempt.state.name == "RUNNING" and self._is_abandoned(attempt):
                    self.study.tell(attempt.number, state=self.optuna.trial.TrialState.FAIL, skip_if_finished=True)
        for attempts in list(self._attempts().values())[: self.plan.n_trials]:
            if all(attempt.state.name == "FAIL" for attempt in attempts) and not _is_hopeless(attempts):
                self.study.enqueue_trial(_settings_of(attempts[0]))

    def _is_abandoned(self, attempt: Any) -> bool:
        """Whether a trial was at work in this folder, and is no more."""
        if attempt.user_attrs.get("folder") != self.token:
            return False
        lock = self._lock_of(_settings_of(attempt))
        if lock is None:
            return False
        lock.release()
        return True

    def _lock_of(self, settings: Settings) -> Any:
        """The lock on the folder of a trial, held; None where another process holds it."""
        return take_lock(self._folder(settings) / "lock")

    def _queue_next(self) -> bool:
        """Whether there is a trial to start. The next one is queued where it is known: of a grid, and the first."""
        attempts = self._attempts()
        if any(attempt.state.name == "WAITING" for each in attempts.values() for attempt in each):
            return True
        if self.plan.search == "grid":
            missing = next((point for point in self.plan.grid() if _key(point) not in attempts), None)
            if missing is not None:
                self.study.enqueue_trial(missing)
            return missing is not None
        if len(attempts) >= self.plan.n_trials:
            return False
        if not attempts:
            self.study.enqueue_trial(self.plan.start())
        return True

    def _make_sampler(self) -> Any:
        """A sampler seeded by how far the study is, so that one that was interrupted goes on as if it were not."""
        attempts = self._attempts()
        started = sum(any(attempt.state.name != "WAITING" for attempt in each) for each in attempts.values())
        discarded = sum("discarded" in attempt.user_attrs for attempt in self.study.get_trials(deepcopy=False))
        seed = np.random.SeedSequence([self.plan.config.train.seed, started, discarded]).generate_state(1)[0]
        return self.optuna.samplers.TPESampler(
            seed=int(seed), n_startup_trials=RANDOM_TRIALS, multivariate=True, constant_liar=True
        )

    def _attempts(self) -> dict[str, list[Any]]:
        """Optuna's trials by settings, in order: several where one had to be started again."""
        found: dict[str, list[Any]] = {}
        for attempt in self.study.get_trials(deepcopy=False):
            settings = _settings_of(attempt)
            if settings.keys() == self.plan.space.keys() and "discarded" not in attempt.user_attrs:
                found.setdefault(_key(settings), []).append(attempt)
        return found

    # One trial

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
        """Whether another machine was quicker to start these settings, or the last trial that was still due."""
        attempts = self._attempts()
        twins = [other for other in attempts[_key(settings)] if other.state.name != "FAIL"]
        return twins[0].number < attempt.number or list(attempts).index(_key(settings)) >= self.plan.n_trials

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
        backbone = new_network(config.model, len(self.splits.class_names), config.train.seed, self.statistics)
        reported: set[int] = set()

        def report(history: list[dict[str, Any]]) -> None:
            """Tell the study of all epochs, also of those before an interruption."""
            for row in history:
                if row["epoch"] not in reported:
                    reported.add(row["epoch"])
                    attempt.report(row["validation_loss"], row["epoch"])
            self._show(len(history))

        def finish(history: list[dict[str, Any]]) -> None:
            report(history)
            attempt.set_user_attr("seconds", round(sum(row["seconds"] for row in history), 2))
            attempt.set_user_attr("clusters", history[-1]["clusters"])

        def on_epoch(history: list[dict[str, Any]]) -> None:
            report(history)
            if len(history) < config.train.epochs and attempt.should_prune():
                finish(history)
                raise self.optuna.TrialPruned

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
        finish(run.history)
        return run

    def _folder(self, settings: Settings) -> Path:
        """Where a trial keeps history and checkpoint: the same wherever and whenever it is started again."""
        named = _key(settings) + json.dumps(self.study.user_attrs["maple"], sort_keys=True)
        return self.out / TRIALS_FOLDER / hashlib.blake2b(named.encode(), digest_size=6).hexdigest()

    def _show(self, epochs: int) -> None:
        """Move the bar: trials that are done, and epochs of the one at work."""
        if self.bar is not None:
            done = sum(trial.is_done for trial in self.trials())
            each = self.plan.config.train.epochs
            self.bar(done * each + epochs, self.plan.n_trials * each)

    def _say_last(self, tuning: Tuning) -> None:
        """A line about the trial that this process has just done."""
        trial = next((trial for trial in tuning.trials if trial.settings == self.last), None)
        if trial is None or self.repeated:
            return
        value = trial.criteria.get(self.plan.criterion)
        came_of_it = trial.state if value is None else f"{self.plan.criterion} {number(value, 4)}"
        settings = "  ".join(f"{name} {compact(setting)}" for name, setting in trial.settings.items())
        best = "  (best so far)" if trial == tuning.best else ""
        say(f"trial {trial.number} of {self.plan.n_trials}  {settings}  {came_of_it}{best}")

    # What there is

    def trials(self) -> list[Trial]:
        """All trials so far, of all processes."""
        return [
            describe_attempts(number, attempts, self._folder(_settings_of(attempts[0])).name)
            for number, attempts in enumerate(self._attempts().values(), start=1)
        ]

    def tuning(self) -> Tuning:
        trials = self.trials()
        best = find_best(trials, self.plan.criterion)
        config = None if best is None else with_settings(self.plan.config, best.settings)
        return Tuning(self.plan, trials, best, config, self.out, train_command(self.request))

    def write_tables(self) -> Tuning:
        """What is read by people and by ``maple train``; checkpoints that nobody needs any more are removed."""
        tuning = self.tuning()
        for trial in tuning.trials:
            if trial.is_done:
                (self.out / TRIALS_FOLDER / trial.folder / RunFile.CHECKPOINT).unlink(missing_ok=True)
        write_atomic(self.out / TABLE, trials_csv(tuning))
        if tuning.best is not None:
            write_atomic(self.out / BEST, best_toml(tuning))
        return tuning

    def write(self) -> Tuning:
        """Tables and picture."""
        tuning = self.write_tables()
        if tuning.best is not None:
            plot = plot_trials(self.plan.criterion, self.plan.space, tuning.trials, tuning.best.number)
            write_atomic(self.out / PICTURE, standalone_svg(plot))
        return tuning


# --- settings and attempts --------------------------------------------------------------------------------------------


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)


def _settings_of(attempt: Any) -> Settings:
    """What one of Optuna's trials is about, also before it is started."""
    return attempt.system_attrs.get("fixed_params") or attempt.params


def _is_hopeless(attempts: Sequence[Any]) -> bool:
    """Whether several attempts came to the same epoch and no further, each ended by something else than Ctrl-C."""
    ends = Counter(len(each.intermediate_values) for each in attempts if "interrupted" not in each.user_attrs)
    return max(ends.values(), default=0) >= MAX_ATTEMPTS


def describe_attempts(number: int, attempts: Sequence[Any], folder: str) -> Trial:
    """What came of the attempts at one setting: what finished counts, else what is at work, else the last."""
    order = ("COMPLETE", "PRUNED", "RUNNING", "WAITING", "FAIL")
    attempt = min(reversed(attempts), key=lambda each: order.index(each.state.name))
    reason = attempt.user_attrs.get("reason", "")
    states: dict[str, Any] = {
        "COMPLETE": "finished",
        "PRUNED": "diverged" if reason else "pruned",
        "RUNNING": "running",
        "WAITING": "waiting",
        "FAIL": "failed" if _is_hopeless(attempts) else "interrupted",
    }
    return Trial(
        number,
        states[attempt.state.name],
        _settings_of(attempt),
        attempt.user_attrs.get("criteria", {}),
        len(attempt.intermediate_values),
        attempt.user_attrs.get("seconds", math.nan),
        attempt.user_attrs.get("clusters"),
        reason,
        folder,
    )


def find_best(trials: Sequence[Trial], criterion: str) -> Trial | None:
    """The finished trial with the lowest criterion; of equals the most likely one, then the first.

    >>> trials = [Trial(i, "finished", {}, {"errors": 0.1, "nll": nll}) for i, nll in ((1, 0.5), (2, 0.4))]
    >>> find_best(trials, "errors").number
    2
    """
    finished = [trial for trial in trials if trial.state == "finished"]
    return min(finished, key=lambda trial: (trial.criteria[criterion], trial.criteria["nll"]), default=None)


def study_identity(request: TuneRequest, plan: Plan, splits: Splits) -> dict[str, Any]:
    """What all processes and calls of a study must have in common; as JSON gives it back."""
    options = {
        key: value
        for section in plan.config.sections().values()
        for key, value in section.items()
        if key not in FREE_OPTIONS and key not in plan.space
    }
    identity = {
        "search": plan.search,
        "criterion": plan.criterion,
        "prune": plan.prune,
        "options": options,
        "space": {name: dataclasses.asdict(found) for name, found in plan.space.items()},
        "images": [digest_images(splits.train), digest_images(splits.validation)],
    }
    return json.loads(json.dumps(identity))


def check_same_study(then: dict[str, Any], now: dict[str, Any], name: str) -> None:
    """Refuse to go on with trials that could not be compared."""
    remedy = "go on as it was started, or choose another --out"
    before = {**then.get("options", {}), **{key: then.get(key) for key in ("search", "criterion", "prune")}}
    after = {**now["options"], **{key: now[key] for key in ("search", "criterion", "prune")}}
    if then.get("space") != now["space"]:
        raise UsageError(f"the study '{name}' was started with other --parameters or --values: {remedy}")
    for key, value in after.items():
        if before.get(key) != value:
            raise UsageError(
                f"the study '{name}' was started with {flag_name(key)} {before.get(key)}, not {value}: {remedy}"
            )
    if then.get("images") != now["images"]:
        raise UsageError(f"the study '{name}' was started with other images: {remedy}")


# --- what is written --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """A study as it stands."""

    plan: Plan
    trials: list[Trial]
    best: Trial | None
    config: RunConfig | None  # of the best trial
    out: Path
    command: str  # that trains with it

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "best": None if self.best is None else self.best.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
            "command": self.command if self.best else None,
            "out": str(self.out),
        }

    def describe(self) -> str:
        """What people want to know of it."""
        counts = Counter(trial.state for trial in self.trials)
        done = f"{len(self.trials)} of {self.plan.n_trials} trials: "
        rows = [done + ", ".join(f"{n} {state}" for state, n in counts.items())]
        rows += [f"trial {each.number} {each.state}: {each.reason}" for each in self.trials if each.reason][:3]
        if self.best is None:
            return "\n".join([*rows, "no trial has finished, so that there is no best one"])
        rows.append(f"best: trial {self.best.number}, {self._measured(self.best)}")
        start = next((each for each in self.trials if each.criteria and each.settings == self.plan.start()), None)
        if start is not None and start != self.best:
            rows.append(f"nearest to the settings as they are: trial {start.number}, {self._measured(start)}")
        rows += [f"  {name} = {compact(value)}" for name, value in self.best.settings.items()]
        rows += [f"note: {note}" for note in (self.find_tradeoff(), self.find_idleness()) if note]
        rows += [f"trials: {self.out / TABLE}, picture: {self.out / PICTURE}", f"train with it: {self.command}"]
        return "\n".join(rows)

    def _measured(self, trial: Trial) -> str:
        value = number(trial.criteria[self.plan.criterion], 4)
        return f"{self.plan.criterion} {value}, validation accuracy {number(trial.criteria['accuracy'], 4)}"

    def find_tradeoff(self, slack: float = 0.02) -> str | None:
        """A warning where another trial classifies clearly better: Gaussian embeddings alone tell nothing apart."""
        if self.best is None:
            return None
        top = max((each for each in self.trials if each.criteria), key=lambda each: each.criteria["accuracy"])
        if top.criteria["accuracy"] - self.best.criteria["accuracy"] <= slack:
            return None
        return f"trial {top.number} classifies better, {self._measured(top)}: see {TABLE} before you choose"

    def find_idleness(self) -> str | None:
        """A warning where the parameters changed nothing at all."""
        finished = [trial for trial in self.trials if trial.criteria]
        if len(finished) < 2 or any(trial.criteria != finished[0].criteria for trial in finished):
            return None
        of_clusters = {
            name for name, each in list_options(MapleOptions).items() if each.metadata["needs"] == "clustering"
        }
        if of_clusters.issuperset(self.plan.space):
            return "all trials came out the same, since none split a class: --cluster-method xmeans splits more readily"
        return "all trials came out the same: what was searched changes nothing here"


def train_command(request: TuneRequest) -> str:
    """The command that trains with the best settings on the same splits.

    >>> train_command(TuneRequest("digits", Path("runs/tuned")))
    'maple train digits --config runs/tuned/best.toml'
    """
    words = ["maple", "train", request.source, "--config", str(request.out / BEST)]
    for name in ("data_root", "validation", "calibration", "test"):
        if (value := getattr(request, name)) is not None:
            words += [flag_name(name), str(value)]
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
        f"# maple tune: trial {tuning.best.number} of {len(tuning.trials)}, {tuning._measured(tuning.best)}\n"
        f"# {tuning.command}\n\n" + to_toml(tuning.config.sections())
    )
