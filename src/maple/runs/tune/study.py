"""The study in Optuna: its storage, what all its processes must share, and which trial comes next.

A trial is one setting; an attempt is one of Optuna's trials, of which a setting may need several. A lock of the folder
``out`` is held while a trial is chosen; a lock on the folder of a trial shows that its process is alive. The operating
system releases both, however a process ends.

Optuna's own parts do less than a study needs: ``GridSampler`` draws points in random order and never repeats one that
was interrupted; ``RetryFailedTrialCallback`` repeats only trials whose heartbeat stopped, up to a total of attempts.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from filelock import FileLock

from maple.data.splits import Splits
from maple.errors import FitError, MapleError, RunError, TrainError, UsageError
from maple.evaluation.trials import Settings, Trial
from maple.files import load_json, save_json, take_lock
from maple.options import flag_name
from maple.progress import say, warn
from maple.runs.setup.splits import digest_images
from maple.runs.tune.plan import Plan
from maple.training.resume import FREE_OPTIONS, History

_RANDOM_TRIALS = 8  # finished trials before a Bayesian search models what it has seen
_PRUNE_AFTER = 5  # finished trials before others are stopped early
_MAX_REPEATED = 50  # known proposals in a row before a search ends
_MAX_ATTEMPTS = 3  # that get no further
_HEARTBEAT, _LOST = 30, 300  # seconds between heartbeats, and without one until another process may take a trial
_SQLITE_PATIENCE = 60  # seconds to wait for another process
_FOLDER, _LOCK, _DATABASE, _TRIALS = "study.json", "study.lock", "study.db", "trials"

Work = Callable[[optuna.Trial, Settings], dict[str, float]]  # trains and judges a setting: its criteria


class _Discarded(Exception):
    """An attempt that Optuna started but that is not needed."""


class _TakenOver(BaseException):
    """The attempt at work belongs to another process by now. Not an ``Exception``: Optuna would end the attempt."""


class Study:
    """One process at work on a study."""

    def __init__(self, plan: Plan, splits: Splits) -> None:
        self.plan, self.out, self.name = plan, plan.request.folder, plan.request.study_name
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"'{self.out}' is a file: choose a folder for --out")
        self.out.mkdir(parents=True, exist_ok=True)
        self.repeated = 0  # known proposals in a row
        self.last: Settings = {}  # of the trial that was started last
        self._n_reported = 0  # epochs of the trial at work
        self._lock = FileLock(self.out / _LOCK)
        token = self.out / _FOLDER  # names this folder, wherever it is mounted
        with self._lock:
            if not token.exists():
                save_json(token, {"folder": uuid.uuid4().hex})
            self._token = str(load_json(token).get("folder"))
            self._study = self._open(plan.request.storage, _identify(plan, splits))

    def _open(self, url: str | None, identity: dict[str, Any]) -> optuna.Study:
        unjudged = max(1, self.plan.config.train.epochs // 2)  # a high learning rate looks bad until it falls
        median = optuna.pruners.MedianPruner(n_startup_trials=_PRUNE_AFTER, n_warmup_steps=unjudged)
        study = optuna.create_study(
            storage=_open_storage(url or f"sqlite:///{self.out.resolve() / _DATABASE}"),
            study_name=self.name,
            pruner=median if self.plan.request.prune else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        if (then := study.user_attrs.get("maple")) is not None:
            _check_same(then, identity, self.name)
        elif study.get_trials(deepcopy=False):
            raise UsageError(f"the study '{self.name}' is not one of maple tune: choose another --study")
        else:
            study.set_user_attr("maple", identity)
        return study

    # --- trials

    def trials(self) -> list[Trial]:
        """All trials so far, of all processes."""
        return [
            _describe(number, attempts, self.folder(_settings(attempts[0])).name)
            for number, attempts in enumerate(self._attempts().values(), start=1)
        ]

    def n_done(self) -> int:
        """The number of trials that will never be started again."""
        return sum(trial.is_done for trial in self.trials())

    def folder(self, settings: Settings) -> Path:
        """The folder of history and checkpoint, the same for every attempt at a trial."""
        named = _key(settings) + json.dumps(self._study.user_attrs["maple"], sort_keys=True)
        return self.out / _TRIALS / hashlib.blake2b(named.encode(), digest_size=6).hexdigest()

    def _attempts(self) -> dict[str, list[Any]]:
        """Attempts by settings, in order."""
        found: dict[str, list[Any]] = {}
        for attempt in self._study.get_trials(deepcopy=False):
            settings = _settings(attempt)
            if settings.keys() == self.plan.space.keys() and "discarded" not in attempt.user_attrs:
                found.setdefault(_key(settings), []).append(attempt)
        return found

    def _take(self, settings: Settings) -> Any:
        """The acquired lock on the folder of a trial; None if another process holds it."""
        return take_lock(self.folder(settings) / "lock")

    # --- choosing

    def run_next(self, work: Work) -> bool:
        """Start the next trial; False where there is nothing left to start."""
        self._lock.acquire()  # until the trial has its own
        try:
            self._recover()
            if not self._queue_next():
                return False
            self._study.sampler = self._make_sampler()
            self._study.optimize(lambda attempt: self._attempt(attempt, work), n_trials=1, catch=(_Discarded,))
        except _TakenOver:
            warn("another process took over a trial of this one, whose heartbeat was late")
        finally:
            self._lock.release()
        if self.repeated >= _MAX_REPEATED:
            say("no new settings are left to try: the search ends")
        return self.repeated < _MAX_REPEATED

    def _recover(self) -> None:
        """Queue again the trials whose processes have ended."""
        optuna.storages.fail_stale_trials(self._study)
        for attempt in self._study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
            if attempt.user_attrs.get("folder") == self._token and (lock := self._take(_settings(attempt))):
                lock.release()
                self._study.tell(attempt.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
        for attempts in list(self._attempts().values())[: self.plan.n_trials]:
            if all(attempt.state.name == "FAIL" for attempt in attempts) and not _is_hopeless(attempts):
                self._study.enqueue_trial(_settings(attempts[0]))

    def _queue_next(self) -> bool:
        """Whether there is a trial to start. The first one and those of a grid are known, and queued here."""
        attempts = self._attempts()
        if any(attempt.state.name == "WAITING" for each in attempts.values() for attempt in each):
            return True
        if self.plan.request.search == "grid":
            missing = next((point for point in self.plan.grid() if _key(point) not in attempts), None)
            if missing is not None:
                self._study.enqueue_trial(missing)
            return missing is not None
        if not attempts:
            self._study.enqueue_trial(self.plan.start())
        return len(attempts) < self.plan.n_trials

    def _make_sampler(self) -> optuna.samplers.BaseSampler:
        """A sampler seeded by the progress of the study: an interrupted search proposes the same settings."""
        attempts = self._attempts()
        started = sum(any(attempt.state.name != "WAITING" for attempt in each) for each in attempts.values())
        discarded = sum("discarded" in attempt.user_attrs for attempt in self._study.get_trials(deepcopy=False))
        seed = np.random.SeedSequence([self.plan.config.train.seed, started, discarded]).generate_state(1)[0]
        return optuna.samplers.TPESampler(
            seed=int(seed), n_startup_trials=_RANDOM_TRIALS, multivariate=True, constant_liar=True
        )

    # --- one attempt

    def _attempt(self, attempt: optuna.Trial, work: Work) -> float:
        settings = {name: found.suggest(attempt, name) for name, found in self.plan.space.items()}
        lock = None if self._is_superfluous(attempt, settings) else self._take(settings)
        if lock is None:
            self.repeated += 1
            attempt.set_user_attr("discarded", True)
            raise _Discarded
        self.repeated, self.last, self._n_reported = 0, settings, 0
        try:
            attempt.set_user_attr("folder", self._token)
            self._lock.release()
            criteria = work(attempt, settings)
            attempt.set_user_attr("criteria", criteria)
            return criteria[self.plan.request.criterion]
        except KeyboardInterrupt:
            attempt.set_user_attr("interrupted", True)
            raise
        except MapleError as error:
            attempt.set_user_attr("reason", str(error))
            if isinstance(error, TrainError | FitError):
                raise optuna.TrialPruned from None
            raise
        except optuna.exceptions.UpdateFinishedTrialError:
            raise _TakenOver from None
        finally:
            lock.release()

    def _is_superfluous(self, attempt: optuna.Trial, settings: Settings) -> bool:
        """Whether another machine has started these settings, or the last trial of the search, before this one."""
        attempts = self._attempts()
        twins = [other for other in attempts[_key(settings)] if other.state.name != "FAIL"]
        return twins[0].number < attempt.number or list(attempts).index(_key(settings)) >= self.plan.n_trials

    def report(self, attempt: optuna.Trial, history: History) -> None:
        """Tell the study of all epochs, also of those before an interruption; a trial that falls behind ends here."""
        for row in history[self._n_reported :]:
            attempt.report(row["validation_loss"], row["epoch"])
        self._n_reported = len(history)
        falls_behind = len(history) < self.plan.config.train.epochs and attempt.should_prune()
        if falls_behind or len(history) == self.plan.config.train.epochs:
            attempt.set_user_attr("seconds", round(sum(row["seconds"] for row in history), 2))
            attempt.set_user_attr("clusters", history[-1]["clusters"])
        if falls_behind:
            raise optuna.TrialPruned


# --- attempts ---------------------------------------------------------------------------------------------------------


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)


def _settings(attempt: Any) -> Settings:
    """The settings of an attempt, also before it is started."""
    return attempt.system_attrs.get("fixed_params") or attempt.params


def _is_hopeless(attempts: Sequence[Any]) -> bool:
    """Whether several attempts ended at the same epoch, each by something other than Ctrl-C."""
    ends = Counter(len(each.intermediate_values) for each in attempts if "interrupted" not in each.user_attrs)
    return max(ends.values(), default=0) >= _MAX_ATTEMPTS


def _describe(number: int, attempts: Sequence[Any], folder: str) -> Trial:
    """The trial that attempts at one setting make: the finished one counts, else the running one, else the last."""
    order = ("COMPLETE", "PRUNED", "RUNNING", "WAITING", "FAIL")
    attempt = min(reversed(attempts), key=lambda each: order.index(each.state.name))
    known = attempt.user_attrs
    states: dict[str, Any] = {
        "COMPLETE": "finished",
        "PRUNED": "diverged" if "reason" in known else "pruned",
        "RUNNING": "running",
        "WAITING": "waiting",
        "FAIL": "failed" if _is_hopeless(attempts) else "interrupted",
    }
    return Trial(
        number,
        states[attempt.state.name],
        _settings(attempt),
        known.get("criteria", {}),
        epochs=len(attempt.intermediate_values),
        seconds=known.get("seconds", math.nan),
        clusters=known.get("clusters"),
        reason=known.get("reason", ""),
        folder=folder,
    )


# --- the storage ------------------------------------------------------------------------------------------------------


@contextmanager
def using_optuna() -> Iterator[None]:
    """Silence Optuna's own messages; an error of its storage says how to resume."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    except optuna.exceptions.StorageInternalError as error:
        raise RunError(
            f"the storage of the study failed ({_first_line(error)}): rerun the same command to resume"
        ) from None
    finally:
        optuna.logging.set_verbosity(before)


def _first_line(error: BaseException) -> str:
    return str(error.__cause__ or error).partition("\n")[0]


def _open_storage(url: str) -> Any:
    """An Optuna storage; databases keep heartbeats, by which trials of lost machines are noticed."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise UsageError(f"--storage takes an Optuna URL, such as sqlite:///study.db or postgresql://..., not '{url}'")
    waiting = {"connect_args": {"timeout": _SQLITE_PATIENCE}} if scheme.startswith("sqlite") else {}
    try:
        if scheme.startswith("redis"):
            return optuna.storages.get_storage(url)
        return optuna.storages.RDBStorage(url, engine_kwargs=waiting, heartbeat_interval=_HEARTBEAT, grace_period=_LOST)
    except Exception as error:  # of SQLAlchemy, of drivers, of the network
        raise RunError(
            f"cannot open the storage {scheme}://...: {_first_line(error)}; check --storage, and that the driver of "
            "the database is installed"
        ) from None


# --- what all processes of a study share ------------------------------------------------------------------------------


def _identify(plan: Plan, splits: Splits) -> dict[str, Any]:
    """Everything that all processes and calls of a study must share, as JSON gives it back."""
    options = {
        key: value
        for section in plan.config.sections().values()
        for key, value in section.items()
        if key not in FREE_OPTIONS and key not in plan.space
    }
    identity = {
        "space": {name: asdict(found) for name, found in plan.space.items()},
        "search": plan.request.search,
        "criterion": plan.request.criterion,
        "prune": plan.request.prune,
        "options": options,
        "images": [digest_images(splits.train), digest_images(splits.validation)],
    }
    return json.loads(json.dumps(identity))


def _check_same(then: dict[str, Any], now: dict[str, Any], name: str) -> None:
    """Refuse to add trials that could not be compared with those of the study."""
    before, after = ({**found, **found.get("options", {})} for found in (then, now))
    by_key = {"space": "other --parameters or --values", "images": "other images"}
    for key in ("space", "search", "criterion", "prune", *now["options"], "images"):
        if before.get(key) != after[key]:
            difference = by_key.get(key, f"{flag_name(key)} {before.get(key)}, not {after[key]}")
            raise UsageError(f"the study '{name}' was started with {difference}: repeat that, or choose another --out")
