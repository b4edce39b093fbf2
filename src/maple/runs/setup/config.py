"""All options of a run: command line over file over preset over defaults.

Sections of ``config.toml`` are options of the package, one class each, and one section with the options of the chosen
recipe. On the command line an option is a flag (``--epochs 3``) or ``--set OWNER.OPTION=VALUE``, whose owner is a
section or a method.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from maple.data.options import DataOptions
from maple.decisions.options import DecisionOptions
from maple.detectors.options import DetectorOptions
from maple.detectors.registry import DETECTORS
from maple.errors import ConfigError, UsageError, suggest
from maple.networks.options import ModelOptions
from maple.options import Values, as_dict, build_options, find_option, flag_name, list_options, validate_options
from maple.registry import Method
from maple.runs.setup.presets import read_preset
from maple.training.options import TrainOptions, default_optimizer
from maple.training.recipe import RECIPES, Recipe, find_recipe

SECTIONS: dict[str, type] = {
    "data": DataOptions,
    "model": ModelOptions,
    "train": TrainOptions,
    "detector": DetectorOptions,
    "decision": DecisionOptions,
}
RECIPE = "recipe"  # owner that stands for the chosen recipe; also MAPLE's section
OWN_DETECTOR = "maple"  # the detector of every run, whose options are the section [detector]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All options of a run."""

    data: DataOptions
    model: ModelOptions
    train: TrainOptions
    recipe: Recipe  # the chosen one, with its options
    detector: DetectorOptions
    decision: DecisionOptions

    def sections(self) -> dict[str, Values]:
        """The sections of ``config.toml``."""
        own = {key: value for key, value in self.recipe.options().items() if key != RECIPE}
        found = {f.name: own if f.name == RECIPE else as_dict(getattr(self, f.name)) for f in fields(self)}
        return {self.recipe.section if name == RECIPE else name: values for name, values in found.items()}


def resolve_config(
    flags: Mapping[str, Any] | None = None,
    file: Mapping[str, Any] | None = None,
    preset: str | None = None,
    plugin: str | None = None,
) -> RunConfig:
    """Merge flags over the sections of a file over a preset over the defaults.

    Keys of ``flags`` are names of options, or ``owner.option`` as in ``--set``. ``plugin`` is the one that a run was
    made with, for the error if its recipe is unknown.

    >>> config = resolve_config({"epochs": 3}, {"train": {"epochs": 5, "seed": 7}}, preset="paper")
    >>> config.train.epochs, config.train.seed, config.train.batch_size, config.recipe.head_growth
    (3, 7, 64, 'fresh')
    >>> resolve_config({"recipe": "sngp", "sngp.features": "256"}).recipe.features
    256
    """
    flags, file, base = flags or {}, file or {}, read_preset(preset) if preset else {}
    method = find_recipe(_choose_recipe(flags, file, base), plugin)
    _check_names(method)
    base = _without(base, preset_options_unused(base, method))
    layers = (_sort_sections(base, method), _sort_sections(file, method, strict=True), _sort_flags(flags, method))
    values: dict[str, Values] = {section: {} for section in (*SECTIONS, RECIPE)}
    for layer in layers:
        for section, own in layer.items():
            values[section] |= own
    if "recipe" in values["model"]:
        values["model"]["recipe"] = method.name  # perhaps given by a former name
    values["train"] = _follow_epochs(base.get("train", {}), values["train"])
    model = build_options(ModelOptions, values.pop("model"), "section [model]")
    values["train"].setdefault("optimizer", default_optimizer(model.backbone))
    recipe = method.create(values.pop(RECIPE), f"section [{method.kind.section}]")
    built: dict[str, Any] = {
        name: build_options(SECTIONS[name], own, f"section [{name}]") for name, own in values.items()
    }
    return RunConfig(**built, model=model, recipe=recipe)


def given_options(flags: Mapping[str, Any], recipe: str) -> Values:
    """The values of flags and of ``--set`` by the name of the option alone, each checked and in its type.

    >>> given_options({"epochs": "3", "data.fit": "stretch", "maple.margin": "0.7"}, "maple")
    {'epochs': 3, 'fit': 'stretch', 'margin': 0.7}
    """
    found = _sort_flags(flags, find_recipe(recipe)).values()
    return {name: value for values in found for name, value in values.items()}


def drop_unused(flags: Mapping[str, Any], recipe: str) -> Values:
    """The flags that have an effect with this recipe, by the name of the option alone.

    >>> drop_unused({"epochs": 3, "margin": 0.7, "ensemble.members": "5", "sngp.features": "64"}, "ensemble")
    {'epochs': 3, 'members': 5}
    """
    method = find_recipe(recipe)
    return given_options({key: value for key, value in flags.items() if _has_effect(key, method)}, recipe)


def check_used(flags: Mapping[str, Any], recipes: Collection[str]) -> None:
    """Refuse ``--set`` with an unknown name, or one that has no effect with any of these recipes."""
    methods = [find_recipe(recipe) for recipe in recipes]
    for key in flags:
        owner, _, option = key.rpartition(".")
        if not owner or not methods or any(_has_effect(key, method) for method in methods):
            continue
        _find_owner(owner, option, methods[0])
        raise UsageError(
            f"--set {key} has no effect on these trainings, whose recipes are {', '.join(recipes)}: leave it out"
        )


def section_of(option: str, method: Method[Recipe]) -> str | None:
    """The section of an option, ``recipe`` for those of the chosen recipe; None if it has no effect with that.

    >>> section_of("learning_rate", find_recipe("maple")), section_of("max_clusters", find_recipe("maple"))
    ('train', 'recipe')
    """
    found = (name for name, group in SECTIONS.items() if option in list_options(group))
    return next(found, RECIPE if option in method.options else None)


# --- files and presets ------------------------------------------------------------------------------------------------


def _choose_recipe(flags: Mapping[str, Any], file: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    asked = {key.removeprefix("model."): value for key, value in flags.items()}
    for values in (asked, file.get("model", {}), base.get("model", {})):
        if isinstance(values, dict) and "recipe" in values:
            return str(values["recipe"])
    return ModelOptions().recipe


def _sort_sections(sections: Mapping[str, Any], method: Method[Recipe], strict: bool = False) -> dict[str, Values]:
    """The values of a file or preset by section.

    That of the chosen recipe may be written ``mc_dropout`` or ``mc-dropout``. Sections of other recipes
    are left out; ``strict`` refuses them, as well as options that the chosen name fixes.
    """
    found: dict[str, Values] = {}
    for section, values in sections.items():
        name = _recipe_name(section)
        if section not in SECTIONS and section != RECIPE and name is None:
            known = [*SECTIONS, RECIPE, *RECIPES.names()]
            raise ConfigError(f"unknown section '{section}' in the configuration file: {suggest(section, known)}")
        if not isinstance(values, dict):
            raise ConfigError(f"'{section}' in the configuration file is {values!r}: write it as a section [{section}]")
        if section in SECTIONS:
            found[section] = values
        elif section == method.kind.section or (name is not None and find_recipe(name).kind is method.kind):
            found[RECIPE] = found.get(RECIPE, {}) | values
        elif strict:
            raise UsageError(f"section [{section}] does not belong to the chosen recipe '{method.name}': remove it")
    if fixed := next((key for key in method.fixed if strict and key in found.get(RECIPE, {})), None):
        raise ConfigError(f"'{fixed}' is fixed by the name of the recipe: set recipe in section [model] instead")
    return found


def preset_options_unused(preset: Mapping[str, Any], method: Method[Recipe]) -> tuple[str, ...]:
    """Options in section [model] of a preset that the recipe cannot use: an embedding beside the head is MAPLE's.

    >>> preset_options_unused(read_preset("paper-code"), find_recipe("sngp"))
    ('embedding_branch', 'embedding_size')
    """
    has_branch = preset.get("model", {}).get("embedding_branch", False)
    return () if method.kind.takes_branch or not has_branch else ("embedding_branch", "embedding_size")


def _without(preset: Mapping[str, Any], unused: Collection[str]) -> dict[str, Any]:
    model = {key: value for key, value in preset.get("model", {}).items() if key not in unused}
    return {**preset, "model": model} if "model" in preset else dict(preset)


def _follow_epochs(preset: Mapping[str, Any], values: Values) -> Values:
    """Scale the milestones of a preset to the number of epochs, if that is not the preset's.

    >>> _follow_epochs({"epochs": 200, "milestones": [60, 120]}, {"epochs": 20, "milestones": [60, 120]})["milestones"]
    [6, 12]
    """
    milestones, asked = preset.get("milestones"), str(values.get("epochs"))
    if not milestones or list(values["milestones"]) != list(milestones) or not asked.isdecimal():
        return values
    epochs = int(asked)
    moved = {round(milestone * epochs / preset["epochs"]) for milestone in milestones}
    moved = {milestone for milestone in moved if 0 < milestone < epochs}
    if not moved and values.get("schedule") == "step":
        return {**values, "schedule": "constant", "milestones": []}
    return {**values, "milestones": sorted(moved)}


def _recipe_name(owner: str) -> str | None:
    """The recipe that a section or an owner in ``--set`` names; TOML keys are written with ``_``."""
    return next((name for name in (owner, owner.replace("_", "-")) if name in RECIPES), None)


def _check_names(method: Method[Recipe]) -> None:
    """Refuse an option of a plug-in that is also one of a section: a flag could mean either."""
    for section, group in SECTIONS.items():
        if both := method.options.keys() & list_options(group).keys():
            raise UsageError(
                f"option '{min(both)}' of recipe '{method.name}' clashes with '{min(both)}' in section [{section}]: "
                "rename it"
            )


# --- flags and --set --------------------------------------------------------------------------------------------------


def _sort_flags(flags: Mapping[str, Any], method: Method[Recipe]) -> dict[str, Values]:
    """Values of flags by section, checked one by one so that an error names the flag."""
    found: dict[str, Values] = {}
    spelled: dict[str, str] = {}  # how each option was given
    for key, value in flags.items():
        owner, _, option = key.rpartition(".")
        section = _owned_section(owner, option, method) if owner else _flag_section(option, method)
        group = method.kind if section == RECIPE else SECTIONS[section]
        typed = validate_options(group, {option: value}, None, owner)
        said = f"--set {key}" if owner else flag_name(key)
        for name in typed:
            if name in spelled:
                raise UsageError(f"{spelled[name]} and {said} are both given: give one")
            spelled[name] = said
        found.setdefault(section, {}).update(typed)
    return found


def _has_effect(key: str, method: Method[Recipe]) -> bool:
    """Whether a flag or ``--set`` concerns this recipe; options of sections do, known or not."""
    owner, _, option = key.rpartition(".")
    if not owner:
        return section_of(option, method) is not None
    try:
        _owned_section(owner, option, method)
    except UsageError:
        return False
    return True


def _flag_section(option: str, method: Method[Recipe]) -> str:
    """The section of a flag."""
    section = section_of(option, method)
    if section is not None:
        return section
    owners = [name for name in RECIPES.names() if option in find_recipe(name).options]
    if not owners:
        known = [*method.options, *(name for group in SECTIONS.values() for name in list_options(group))]
        raise ConfigError(f"unknown option '{option}': {suggest(option, known)}")
    owner = "maple" if "maple" in owners else owners[0]
    raise UsageError(f"{flag_name(option)} needs --recipe {owner}, not {method.name}: add it or leave it out")


def _owned_section(owner: str, option: str, method: Method[Recipe]) -> str:
    """The section of ``--set owner.option``."""
    if owner in SECTIONS:
        return owner
    if owner == OWN_DETECTOR and option in list_options(DetectorOptions):
        return "detector"
    given, (named, option) = f"--set {owner}.{option}", _find_owner(owner, option, method)
    if named.kind is not method.kind:
        raise UsageError(f"{given} needs --recipe {named.name}, not {method.name}: add it or leave it out")
    if option in method.options:
        return RECIPE
    if option in method.fixed and option not in named.options:
        raise UsageError(f"{given} is fixed by --recipe {method.name}: choose another recipe")
    raise UsageError(f"{given} has no effect with --recipe {method.name}: leave it out")


def _find_owner(owner: str, option: str, method: Method[Recipe]) -> tuple[Method[Recipe], str]:
    """The recipe that ``--set owner.option`` names, and the present name of the option."""
    given, name = f"--set {owner}.{option}", method.name if owner == RECIPE else _recipe_name(owner)
    if name is None and owner in DETECTORS:
        raise UsageError(
            f"{given}: '{owner}' is a detector to compare with, give it to maple evaluate --detector {owner}"
        )
    if name is None:
        known = {*SECTIONS, *RECIPES.names(), *DETECTORS.names()}
        raise UsageError(f"{given}: unknown method '{owner}', {suggest(owner, known)}")
    return find_recipe(name), find_option(find_recipe(name).kind, option, None, owner)
