"""The request of a search and the plan it resolves to: configuration, space and number of trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maple.baselines.ensemble import EnsembleRecipe
from maple.data.splits import Splits, load_splits
from maple.decisions.conformal import min_calibration_images
from maple.errors import DataError, UsageError, suggest
from maple.evaluation.trials import CRITERIA, Choices, Settings, Space
from maple.options import flag_name
from maple.progress import counting
from maple.runs.setup.config import RunConfig, resolve_config
from maple.runs.train import check_options
from maple.runs.tune.criteria import halve
from maple.runs.tune.space import SEARCHES, Search, choose_space, current_value, list_parameters
from maple.training.distributed import count_processes

_TRIALS = 20  # of a Bayesian search
_MAX_GRID = 10_000  # settings in all


@dataclass(frozen=True)
class TuneRequest:
    """The arguments of ``maple tune``; ``flags``, ``file`` and ``preset`` are common to all trials."""

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
    """A request, resolved and checked."""

    search: Search
    criterion: str
    prune: bool
    config: RunConfig  # common to all trials
    space: Space
    n_trials: int

    def grid(self) -> list[Settings]:
        """The settings of a grid, in order."""
        values = [found.values for found in self.space.values() if isinstance(found, Choices)]
        return [dict(zip(self.space, point)) for point in itertools.product(*values)]

    def start(self) -> Settings:
        """The point of the space nearest to the present settings, where a Bayesian search begins."""
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
        """The plan as text."""
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
    """Resolve and check a request without opening its images.

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
    n_trials = _count_trials(request, math.prod(found.size for found in space.values()))
    return Plan(request.search, request.criterion, request.prune, config, space, n_trials)


def _count_trials(request: TuneRequest, size: float) -> int:
    """The number of trials in a space of ``size`` points."""
    if request.search == "bayes":
        asked = _TRIALS if request.trials is None else request.trials
        if asked < 1:
            raise UsageError(f"--trials is {asked}: give at least 1")
        return int(min(asked, size))
    if request.trials is not None:
        raise UsageError(f"--trials belongs to --search bayes: this grid has {size:.0f} trials, leave it out")
    if size > _MAX_GRID:
        raise UsageError(f"this grid has {size:.0f} trials, more than {_MAX_GRID}: use --search bayes, or fewer values")
    return int(size)


def _check_config(config: RunConfig, request: TuneRequest) -> None:
    """Refuse now what would fail only in the first trial."""
    if isinstance(config.recipe, EnsembleRecipe):
        raise UsageError("an ensemble has no settings of its own to tune: tune its members with --recipe cross-entropy")
    check_options(config.train)
    if count_processes(config.train) != (1, 1):
        raise UsageError(
            "a trial is trained in one process: leave out --devices, --nodes and torchrun, and start the same "
            "maple tune several times instead"
        )


def open_splits(request: TuneRequest, plan: Plan) -> Splits:
    """The splits that ``maple train`` would make; a search uses training and validation images only."""
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
