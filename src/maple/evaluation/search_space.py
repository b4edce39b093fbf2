"""What a search goes through: options with their values or bounds, and trials of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from maple.errors import UsageError, suggest
from maple.evaluation.criteria import CRITERIA
from maple.options import GROUPS, RunConfig, as_dict, build_options
from maple.progress import warn
from maple.text import compact
from maple.training.recipe import unused_options

Search = Literal["grid", "bayes"]
SEARCHES = get_args(Search)
Settings = dict[str, Any]  # by name of the option
MAX_VALUES = 100  # of a parameter


@dataclass(frozen=True)
class Parameter:
    """Where an option is searched: values of a grid, and bounds of a Bayesian search."""

    grid: tuple[Any, ...]
    bounds: tuple[float, float] | None = None  # of whole numbers where both are; None: the values of the grid
    log: bool = False  # whether factors count, not differences
    relative: bool = False  # whether values and bounds are multiples of the option as it is


PARAMETERS: dict[str, Parameter] = {
    # The paper's three: t, p and max_num_cluster, with the values of its grid (of t those that its tables show).
    "hard_class_error": Parameter((0.1, 0.3, 0.5), (0.0, 0.9)),
    "relabel_every": Parameter((5, 10, 15, 20), (1, 20)),
    "max_clusters": Parameter((3, 5, 7, 10), (2, 10)),
    # The rest of the recipe
    "min_cluster_size": Parameter((10, 20, 50), (5, 100), log=True),
    "cluster_method": Parameter(("xmeans", "gmeans", "tmeans", "kmeans")),
    "cluster_space": Parameter(("raw", "normalised", "projected", "whitened")),
    "cross_entropy_norm": Parameter((0.0, 5.0, 10.0, 20.0)),
    "margin": Parameter((0.3, 0.5, 0.7), (0.1, 1.5)),
    "triplet_weight": Parameter((0.3, 1.0, 3.0), (0.03, 3.0), log=True),
    "triplet_softness": Parameter((0.0, 0.2, 0.5), (0.0, 1.0)),
    "prototype_weight": Parameter((0.3, 1.0, 3.0), (0.03, 3.0), log=True),
    "prototype_scale": Parameter((5.0, 10.0, 20.0), (3.0, 40.0), log=True),
    # Whatever the recipe
    "learning_rate": Parameter((0.3, 1.0, 3.0), (0.1, 3.0), log=True, relative=True),
    "weight_decay": Parameter((1e-4, 5e-4, 2e-3), (1e-5, 1e-2), log=True),
    # Of the methods MAPLE is compared with
    "dropout": Parameter((0.05, 0.1, 0.2, 0.3), (0.02, 0.5), log=True),
    "duq_length_scale": Parameter((0.05, 0.1, 0.3), (0.03, 1.0), log=True),
    "duq_gradient_penalty": Parameter((0.1, 0.5, 1.0), (0.01, 2.0), log=True),
    "sngp_spectral_bound": Parameter((0.95, 2.0, 6.0), (0.5, 8.0), log=True),
    "sngp_amplitude": Parameter((5.0, 10.0, 20.0), (2.0, 50.0), log=True),
    "due_spectral_bound": Parameter((0.95, 3.0, 7.0), (0.5, 8.0), log=True),
    "vmdls_kl_weight": Parameter((0.01, 0.1, 1.0), (1e-3, 3.0), log=True),
    "vmdls_prior_scale": Parameter((0.1, 0.2, 0.4), (0.05, 1.0), log=True),
}
PAPER_GRID = ("hard_class_error", "relabel_every", "max_clusters")
BAYES = (*PAPER_GRID, "learning_rate", "margin", "triplet_weight", "prototype_weight")


@dataclass(frozen=True)
class Choices:
    """An option that takes one of several values."""

    values: tuple[Any, ...]

    @property
    def size(self) -> float:
        """How many values there are."""
        return len(self.values)

    def nearest(self, value: Any) -> Any:
        """The value itself where it is one of them, else the middle one."""
        return value if value in self.values else self.values[len(self.values) // 2]

    def suggest(self, trial: Any, name: str) -> Any:
        return trial.suggest_categorical(name, self.values)

    def __str__(self) -> str:
        return ", ".join(map(compact, self.values))


@dataclass(frozen=True)
class Span:
    """An option between two bounds, both included."""

    low: float
    high: float
    log: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def size(self) -> float:
        """How many values there are."""
        return self.high - self.low + 1 if self.is_whole else math.inf

    def nearest(self, value: Any) -> Any:
        """The value itself where it is between the bounds, else the nearer of them."""
        return min(max(value, self.low), self.high)

    def suggest(self, trial: Any, name: str) -> Any:
        suggest = trial.suggest_int if self.is_whole else trial.suggest_float
        return suggest(name, self.low, self.high, log=self.log)

    def __str__(self) -> str:
        return f"{compact(self.low)} to {compact(self.high)}{', by factors' if self.log else ''}"


Space = dict[str, Choices | Span]  # by name of the option


def list_parameters(recipe: str) -> list[str]:
    """The options that a search may vary with this recipe: those of the training and of its own.

    >>> list_parameters("cross-entropy"), list_parameters("mc-dropout")
    (['learning_rate', 'weight_decay'], ['learning_rate', 'weight_decay', 'dropout'])
    """
    unused = unused_options(recipe)
    return [name for name in PARAMETERS if name not in unused]


def section_of(option: str) -> str:
    """The section of ``config.toml`` that holds an option.

    >>> section_of("learning_rate"), section_of("max_clusters")
    ('train', 'recipe')
    """
    return next(section for section, group in GROUPS.items() if option in {f.name for f in fields(group)})


def choose_space(
    search: Search,
    config: RunConfig,
    parameters: Sequence[str] | None = None,
    values: Mapping[str, Sequence[Any]] | None = None,
) -> Space:
    """What a search goes through: ``parameters`` by name, those in ``values`` through the values given there.

    Without either, the paper's grid, or what of ``BAYES`` and of the recipe's own options there is.

    >>> from maple.options import resolve_config
    >>> space = choose_space("grid", resolve_config(), values={"max_clusters": ["3", 5]})
    >>> print({name: str(found) for name, found in space.items()})
    {'max_clusters': '3, 5'}
    """
    recipe, values = config.model.recipe, values or {}
    names = list(dict.fromkeys([*(parameters or ()), *values])) or _default_parameters(search, recipe)
    known = list_parameters(recipe)
    for name in names:
        if name not in PARAMETERS:
            raise UsageError(f"unknown parameter '{name}': {suggest(name, known)}")
        if name not in known:
            raise UsageError(f"'{name}' changes nothing with recipe '{recipe}': choose among {', '.join(known)}")
    space = {
        name: _given_values(name, values[name]) if name in values else _own_range(name, search, config)
        for name in names
    }
    return _within_epochs(space, config.train.epochs)


def _default_parameters(search: Search, recipe: str) -> list[str]:
    known = list_parameters(recipe)
    own = [name for name in known if section_of(name) not in ("train", "recipe")]
    found = [name for name in (PAPER_GRID if search == "grid" else (*BAYES, *own)) if name in known]
    if not found:
        raise UsageError(
            f"recipe '{recipe}' has none of the options of the paper's grid: name some with --parameters, known: "
            f"{', '.join(known)}"
        )
    return found


def _own_range(name: str, search: Search, config: RunConfig) -> Choices | Span:
    """What the table says of a parameter."""
    parameter = PARAMETERS[name]
    unit = current_value(config, name) if parameter.relative else 1
    if search == "grid" or parameter.bounds is None:
        return Choices(tuple(unit * value for value in parameter.grid) if parameter.relative else parameter.grid)
    low, high = parameter.bounds
    return Span(unit * low, unit * high, parameter.log)


def _given_values(name: str, values: Sequence[Any]) -> Choices:
    """Values of the user, checked as the option itself is."""
    if not 0 < len(values) <= MAX_VALUES:
        raise UsageError(f"--values {name} names {len(values)} values: give 1 to {MAX_VALUES}, or use --search bayes")
    group = GROUPS[section_of(name)]
    typed = [getattr(build_options(group, {name: value}, where=None), name) for value in values]
    return Choices(tuple(dict.fromkeys(typed)))


def current_value(config: RunConfig, name: str) -> Any:
    """The value of an option.

    >>> from maple.options import resolve_config
    >>> current_value(resolve_config(), "max_clusters")
    5
    """
    return getattr(getattr(config, section_of(name)), name)


def with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """The same configuration with some options changed.

    >>> from maple.options import resolve_config
    >>> changed = with_settings(resolve_config(), {"max_clusters": 7, "learning_rate": 0.03})
    >>> changed.recipe.max_clusters, changed.train.learning_rate, changed.recipe.margin
    (7, 0.03, 0.5)
    """
    sections: dict[str, Any] = {}
    for name, value in settings.items():
        section = section_of(name)
        options = sections.get(section, getattr(config, section))
        sections[section] = build_options(GROUPS[section], {**as_dict(options), name: value}, f"section [{section}]")
    return dataclasses.replace(config, **sections)


def _within_epochs(space: Space, epochs: int) -> Space:
    """Without intervals of relabelling at which nothing is ever relabelled, where all other options are idle."""
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
        warn(f"with {epochs} epochs relabel_every is searched only through {within}: later, no class would be split")
    return {**space, "relabel_every": within}


@dataclass(frozen=True)
class Trial:
    """One setting and what came of it."""

    number: int  # from 1
    state: Literal["finished", "pruned", "diverged", "failed", "interrupted", "running", "waiting"]
    settings: Settings
    criteria: dict[str, float] = field(default_factory=dict)  # those of :func:`judge`; only of finished trials
    epochs: int = 0  # that were trained
    seconds: float = math.nan
    clusters: int | None = None
    reason: str = ""  # why it diverged or failed
    folder: str = ""  # of its history, inside ``trials``

    @property
    def is_done(self) -> bool:
        """Whether it will never be started again."""
        return self.state in ("finished", "pruned", "diverged", "failed")

    def to_dict(self) -> dict[str, Any]:
        measured = {name: self.criteria.get(name) for name in (*CRITERIA, "accuracy")}
        return {
            "trial": self.number,
            "state": self.state,
            **measured,
            "clusters": self.clusters,
            "epochs": self.epochs,
            "seconds": None if math.isnan(self.seconds) else self.seconds,
            **self.settings,
            "folder": self.folder,
            "reason": self.reason,
        }
