"""What a search goes through: options with the ranges that they declare, or values of the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from maple.errors import UsageError, suggest
from maple.evaluation.trials import Choices, Settings, Space, Span
from maple.options import Range, list_options, validate_options
from maple.progress import warn
from maple.runs.setup.config import RECIPE, RunConfig, resolve_config, section_of
from maple.training.options import TrainOptions
from maple.training.recipe import find_recipe

Search = Literal["grid", "bayes"]
SEARCHES = get_args(Search)
MAX_VALUES = 100  # of a parameter
PAPER_GRID = ("hard_class_error", "relabel_every", "max_clusters")
BAYES = (*PAPER_GRID, "learning_rate", "margin", "triplet_weight", "prototype_weight")


def list_parameters(recipe: str) -> dict[str, Range]:
    """The options that a search may vary with this recipe: of the training and its own that declare a range.

    >>> list(list_parameters("cross-entropy")), list(list_parameters("mc-dropout"))
    (['learning_rate', 'weight_decay'], ['learning_rate', 'weight_decay', 'dropout'])
    """
    known = list_options(TrainOptions) | find_recipe(recipe).options
    return {name: each.metadata["search"] for name, each in known.items() if each.metadata.get("search")}


def choose_space(
    search: Search,
    config: RunConfig,
    parameters: Sequence[str] | None = None,
    values: Mapping[str, Sequence[Any]] | None = None,
) -> Space:
    """What a search goes through: ``parameters`` by name, those in ``values`` through the values given there.

    Without either, the paper's grid, or what of ``BAYES`` and of the recipe's own options there is.

    >>> space = choose_space("grid", resolve_config(), values={"max_clusters": ["3", 5]})
    >>> print({name: str(found) for name, found in space.items()})
    {'max_clusters': '3, 5'}
    """
    recipe, values = config.model.recipe, values or {}
    names = list(dict.fromkeys([*(parameters or ()), *values])) or _default_parameters(search, recipe)
    known = list_parameters(recipe)
    for name in names:
        if name not in known:
            raise UsageError(f"'{name}' cannot be searched with recipe '{recipe}': {suggest(name, known)}")
    space = {
        name: _given_values(name, values[name], config) if name in values else _own_range(name, search, config)
        for name in names
    }
    return _within_epochs(space, config.train.epochs)


def _default_parameters(search: Search, recipe: str) -> list[str]:
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


def _own_range(name: str, search: Search, config: RunConfig) -> Choices | Span:
    """The range that the option declares."""
    parameter = list_parameters(config.model.recipe)[name]
    unit = current_value(config, name) if parameter.relative else 1
    if search == "grid" or parameter.bounds is None:
        return Choices(tuple(unit * value for value in parameter.grid) if parameter.relative else parameter.grid)
    low, high = parameter.bounds
    return Span(unit * low, unit * high, parameter.log)


def _given_values(name: str, values: Sequence[Any], config: RunConfig) -> Choices:
    """Values of the user, checked as the option itself is."""
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
