"""The request of a search and the plan it resolves to: configuration, space and number of trials.

The space holds options with the ranges that they declare, or with values of the user.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maple.baselines.ensemble import EnsembleRecipe
from maple.data.splits import Splits
from maple.decisions.conformal import min_calibration_images
from maple.errors import DataError, UsageError, suggest
from maple.evaluation.trials import CRITERIA, Choices, Settings, Space, Span
from maple.options import Range, flag_name, list_options, validate_options
from maple.progress import warn
from maple.runs.folder import RunOrigin
from maple.runs.requests import TuneRequest
from maple.runs.setup.config import RECIPE, RunConfig, given_options, resolve_config, section_of
from maple.runs.setup.splits import load_run_splits
from maple.runs.train import check_options
from maple.runs.tune.criteria import halve
from maple.text import plural
from maple.training.options import TrainOptions
from maple.training.processes import count_processes
from maple.training.recipe import find_recipe

SEARCHES = ("grid", "bayes")
MAX_VALUES = 100  # of a parameter
PAPER_GRID = ("hard_class_error", "relabel_every", "max_clusters")
BAYES = (*PAPER_GRID, "learning_rate", "margin", "triplet_weight", "prototype_weight")
_TRIALS = 20  # of a Bayesian search
_MAX_GRID = 10_000  # settings in all


@dataclass(frozen=True)
class Plan:
    """A request, resolved and checked."""

    request: TuneRequest
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
            "search": self.request.search,
            "trials": self.n_trials,
            "epochs": self.config.train.epochs,
            "criterion": self.request.criterion,
            "prune": self.request.prune,
            "parameters": {name: str(found) for name, found in self.space.items()},
            "recipe": self.config.model.recipe,
            "backbone": self.config.model.backbone,
        }

    def describe(self) -> str:
        """The plan as text."""
        widest = max(map(len, self.space))
        asked, model, epochs = self.request, self.config.model, self.config.train.epochs
        total = self.n_trials * epochs
        rows = [
            f"{plural(self.n_trials, 'trial')} of {plural(epochs, 'epoch')}, {plural(total, 'epoch')} at most"
            + ("; trials that fall behind are stopped early" if asked.prune else ""),
            f"search: {asked.search}, of recipe {model.recipe} with {model.backbone}",
            f"criterion: {asked.criterion}, {CRITERIA[asked.criterion]}",
            "parameters:",
            *(f"  {name:<{widest}}  {found}" for name, found in self.space.items()),
        ]
        return "\n".join(rows)


def make_plan(request: TuneRequest) -> Plan:
    """Resolve and check a request without opening its images.

    >>> request = TuneRequest("digits", search="grid", flags={"epochs": 30})
    >>> print(make_plan(request).describe())
    48 trials of 30 epochs, 1,440 epochs at most; trials that fall behind are stopped early
    search: grid, of recipe maple with airbench-32
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
    _check_config(config)
    space = choose_space(request, config)
    given = given_options(request.flags, config.model.recipe)
    for name, found in space.items():
        relative = list_parameters(config.model.recipe)[name].relative
        if name in given and isinstance(found, Choices) and not relative:
            raise UsageError(
                f"{flag_name(name)} is searched and cannot be fixed: leave it out, or out of --parameters and --values"
            )
    n_trials = _count_trials(request, math.prod(found.size for found in space.values()))
    return Plan(request, config, space, n_trials)


def _count_trials(request: TuneRequest, size: float) -> int:
    """The number of trials in a space of ``size`` points."""
    if request.search == "bayes":
        asked = _TRIALS if request.trials is None else request.trials
        if asked < 1:
            raise UsageError(f"--trials is {asked}: give at least 1")
        return int(min(asked, size))
    if request.trials is not None:
        raise UsageError(
            f"--trials belongs to --search bayes: this grid has {plural(int(size), 'trial')}, leave it out"
        )
    if size > _MAX_GRID:
        raise UsageError(f"this grid has {size:.0f} trials, more than {_MAX_GRID}: use --search bayes, or fewer values")
    return int(size)


def _check_config(config: RunConfig) -> None:
    """Refuse requests that would fail in the first trial."""
    if isinstance(config.recipe, EnsembleRecipe):
        raise UsageError("an ensemble has no settings of its own to tune: tune its members with --recipe cross-entropy")
    if count_processes(config.train) != (1, 1):
        raise UsageError(
            "a trial is trained in one process: leave out --devices, --nodes and torchrun, and start the same "
            "maple tune several times instead"
        )
    check_options(config.train)


def open_splits(plan: Plan) -> Splits:
    """The splits that ``maple train`` would make; a search uses training and validation images only."""
    request, false_alarm = plan.request, plan.config.decision.false_alarm
    origin = RunOrigin(
        source=request.source, validation=request.validation, calibration=request.calibration, test=request.test
    )
    splits = load_run_splits(origin, plan.config.data, request.data_root)
    half = min(map(len, halve(splits.validation)))
    flags_errors = request.criterion == "errors"
    needed = min_calibration_images(false_alarm) if flags_errors else 1
    if half < needed:
        reason = f" at --false-alarm {false_alarm:g}" if flags_errors else ""
        raise DataError(
            f"{len(splits.validation)} validation images are too few for criterion '{request.criterion}'{reason}, "
            f"which needs {2 * needed}: give validation a larger share of --splits, or --validation"
        )
    return splits


# --- the space --------------------------------------------------------------------------------------------------------


def list_parameters(recipe: str) -> dict[str, Range]:
    """The options that a search may vary with this recipe: of the training and its own that declare a range.

    >>> list(list_parameters("cross-entropy")), list(list_parameters("mc-dropout"))
    (['learning_rate', 'weight_decay'], ['learning_rate', 'weight_decay', 'dropout'])
    """
    known = list_options(TrainOptions) | find_recipe(recipe).options
    return {name: each.metadata["search"] for name, each in known.items() if each.metadata.get("search")}


def choose_space(request: TuneRequest, config: RunConfig) -> Space:
    """The space of a search: ``parameters`` by name, those in ``values`` with the values given there.

    Without either, the paper's grid, or those of ``BAYES`` and of the recipe's own options that it has.

    >>> request = TuneRequest("digits", search="grid", values={"max_clusters": ["3", 5]})
    >>> print({name: str(found) for name, found in choose_space(request, resolve_config()).items()})
    {'max_clusters': '3, 5'}
    """
    recipe, given = config.model.recipe, request.values
    known = list_parameters(recipe)
    names = [*(request.parameters or ()), *given] or _default_parameters(request.search, recipe)
    for name in names:
        if name not in known:
            raise UsageError(f"'{name}' cannot be searched with recipe '{recipe}': {suggest(name, known)}")
    space = {
        name: _given_values(name, given[name], config) if name in given else _own_range(name, request.search, config)
        for name in names
    }
    return _within_epochs(space, config.train.epochs)


def _default_parameters(search: str, recipe: str) -> list[str]:
    known = list_parameters(recipe)
    maple = find_recipe(recipe).kind is find_recipe("maple").kind
    own = [] if maple else [name for name in known if name in find_recipe(recipe).options]
    found = [name for name in (PAPER_GRID if search == "grid" else (*BAYES, *own)) if name in known]
    if not found:
        raise UsageError(
            f"recipe '{recipe}' has none of the options of the paper's grid: name some with --parameters, known: "
            f"{', '.join(known)}"
        )
    return found


def _own_range(name: str, search: str, config: RunConfig) -> Choices | Span:
    """The range that the option declares."""
    parameter = list_parameters(config.model.recipe)[name]
    unit = current_value(config, name) if parameter.relative else 1
    if search == "grid" or parameter.bounds is None:
        return Choices(tuple(unit * value for value in parameter.grid) if parameter.relative else parameter.grid)
    low, high = parameter.bounds
    return Span(unit * low, unit * high, parameter.log)


def _given_values(name: str, values: Sequence[Any], config: RunConfig) -> Choices:
    """Values of the user, checked like the option itself."""
    if not 0 < len(values) <= MAX_VALUES:
        raise UsageError(f"--values {name} names {len(values)} values: give 1 to {MAX_VALUES}, or use --search bayes")
    group = type(_owner(config, name))
    typed = [validate_options(group, {name: value}, where=None)[name] for value in values]
    return Choices(tuple(dict.fromkeys(typed)))


def _owner(config: RunConfig, name: str) -> Any:
    """The object that holds an option."""
    return getattr(config, section_of(name, find_recipe(config.model.recipe)) or RECIPE)


def current_value(config: RunConfig, name: str) -> Any:
    """The value of an option.

    >>> current_value(resolve_config(), "max_clusters")
    5
    """
    return getattr(_owner(config, name), name)


def with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """The same configuration with some options changed.

    >>> changed = with_settings(resolve_config(), {"max_clusters": 7, "learning_rate": 0.03})
    >>> changed.recipe.max_clusters, changed.train.learning_rate, changed.recipe.margin
    (7, 0.03, 0.5)
    """
    return resolve_config(settings, config.sections())


def _within_epochs(space: Space, epochs: int) -> Space:
    """Leave out intervals so long that nothing is ever relabelled: the other options would have no effect."""
    found = space.get("relabel_every")
    if found is None:
        return space
    if isinstance(found, Span):
        within: Choices | Span = dataclasses.replace(found, high=min(found.high, epochs - 1))
    else:
        within = Choices(tuple(value for value in found.values if value < epochs))
    if within.size < 1:
        raise UsageError(
            f"with --epochs {epochs} no class is ever split at relabel_every {found}: raise --epochs, or give smaller "
            "intervals, such as --values relabel_every=1,2"
        )
    if within != found:
        warn(f"relabel_every is searched only through {within}: {epochs} epochs are too few for longer intervals")
    return {**space, "relabel_every": within}
