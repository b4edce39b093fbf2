"""The rows of suites: which network is trained, and which method reads it.

Recipes and detectors that the paper does not name, those of plug-ins among them, follow from the registries: every
comparison ends with the former, the suite ``detectors`` lists all of the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from maple.detectors.registry import create_detector, list_detectors
from maple.evaluation.paper.profiles import Profile
from maple.training.maple import MapleRecipe
from maple.training.recipe import find_recipe, list_recipes


@dataclass(frozen=True)
class Training:
    """One network: a protocol, and the flags that differ from the profile."""

    protocol: str
    flags: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, protocol: str, **flags: Any) -> Training:
        return cls(protocol, tuple(sorted(flags.items())))


@dataclass(frozen=True)
class Row:
    """One line of a table: a network, and the method that reads it (a key of ``Results.methods``)."""

    title: str
    training: Training
    method: str
    paper: str = ""  # the row of the paper's table to compare with

    @property
    def recipe(self) -> str:
        return dict(self.training.flags).get("recipe", "maple")


# Fitted in every evaluation, in one pass over the training images; others only for suites whose rows name them.
STANDARD_DETECTORS = ("softmax", "energy", "md", "pca-md", "pca-ed", "rmd", "marginal-md")
READ_AS_PAPER = "pca-md"  # raw embeddings, PCA, tied covariance, chi-square tail: the paper's P_MD and u
READ_NORMALISED = "maple-paper"  # the same of the run's own Gaussians, whose embeddings are normalised by default
READ_OURS = "maple"

COMPARATORS = {  # row of the paper: recipe and method
    "Deterministic": ("cross-entropy", "softmax"),
    "MC Dropout": ("mc-dropout", "mc-dropout"),
    "Deep Ensemble": ("ensemble", "ensemble"),
    "DUQ": ("duq", "duq"),
    "SNGP": ("sngp", "sngp"),
    "DUE": ("due", "due"),
    "VMDLS": ("vmdls", "vmdls"),
}


def _recipe(profile: Profile, protocol: str, recipe: str, **flags: Any) -> Training:
    if recipe == "ensemble":
        flags["members"] = 3 if protocol == "imagenet" else profile.members
    return Training.of(protocol, recipe=recipe, **flags)


def _both_readings(profile: Profile, title: str, training: Training, paper: str = "") -> list[Row]:
    """Distances of raw embeddings as in the paper, and of normalised ones, unless training is the paper's own."""
    rows = [Row(title, training, READ_AS_PAPER, paper)]
    return rows if profile.as_paper else [*rows, Row(f"{title}, normalised", training, READ_NORMALISED)]


def compare_recipes(protocol: str, names: Collection[str]) -> Callable[[Profile], list[Row]]:
    """The paper's comparators by name, other recipes, then MAPLE's network as the paper reads it and as we do."""

    def rows(profile: Profile) -> list[Row]:
        found = [
            Row(name, _recipe(profile, protocol, recipe), method, name)
            for name, (recipe, method) in COMPARATORS.items()
            if name in names
        ]
        found += [Row(name, _recipe(profile, protocol, name), method) for name, method in _other_recipes().items()]
        ours = _recipe(profile, protocol, "maple")
        return [*found, *_both_readings(profile, "MAPLE, P_MD", ours, "MAPLE"), Row("MAPLE", ours, READ_OURS)]

    return rows


def _other_recipes() -> dict[str, str]:
    """The method that reads each registered recipe that is neither a variant of MAPLE nor named by the paper."""
    named = {recipe for recipe, _ in COMPARATORS.values()}
    kinds = {name: find_recipe(name).kind for name in list_recipes() if name not in named}
    others = {name: kind for name, kind in kinds.items() if kind is not MapleRecipe}
    return {name: READ_OURS if issubclass(kind, MapleRecipe) else name for name, kind in others.items()}


def detector_rows(profile: Profile) -> list[Row]:
    """All registered detectors that see no unknown image, on a network trained with cross-entropy."""
    plain = _recipe(profile, "cifar10", "cross-entropy")
    names = [name for name in list_detectors() if not getattr(create_detector(name), "learns_from_ood", False)]
    return [Row("MAPLE" if name == READ_OURS else name, plain, name) for name in names]


def md_rows(profile: Profile) -> list[Row]:
    plain, ours = _recipe(profile, "cifar10", "cross-entropy"), _recipe(profile, "cifar10", "maple")
    return [
        Row("Lee et al.", plain, "lee-md", "Lee et al."),
        Row("Marginal MD", plain, "marginal-md", "Marginal MD"),
        Row("RMD", plain, "rmd", "RMD"),
        Row("MD", plain, "md"),
        *_both_readings(profile, "MAPLE's distance", ours, "MAPLE"),
        Row("MAPLE", ours, READ_OURS),
    ]


def _clustered(profile: Profile, recipe: str = "maple", **flags: Any) -> Training:
    """A network trained with the paper's clustering, whose p counts epochs of a training of 200."""
    options = {"relabel_every": 10, "hard_class_error": 0.3, "max_clusters": 5, **profile.clusters, **flags}
    options["relabel_every"] = profile.relabel_every(options["relabel_every"])
    return _recipe(profile, "cifar10", recipe, **options)


def ablation_rows(profile: Profile) -> list[Row]:
    plain = _recipe(profile, "cifar10", "cross-entropy")

    def both(title: str, training: Training, paper: str | None = None) -> list[Row]:
        return _both_readings(profile, title, training, paper or title)

    return [
        Row("DNN+MD", plain, "md", "DNN+MD"),
        *both("DNN+PCA+MD", plain),
        Row("DNN+PCA+ED", plain, "pca-ed", "DNN+PCA+ED"),
        *both("DNN+Triplet+PCA+MD", _recipe(profile, "cifar10", "triplet")),
        *both("DNN+Clustering+PCA+MD", _clustered(profile, "clustering")),
        *both("MAPLE, X-Means, P_MD", _clustered(profile), "MAPLE"),
        Row("MAPLE, X-Means", _clustered(profile), READ_OURS),
        Row("MAPLE", _recipe(profile, "cifar10", "maple"), READ_OURS),
    ]


def maple_rows(settings: Mapping[str, Mapping[str, Any]]) -> Callable[[Profile], list[Row]]:
    """Rows by title: MAPLE with the paper's clustering and these flags, read by its own Gaussians."""
    return lambda profile: [
        Row(title, _clustered(profile, **flags), READ_NORMALISED, title) for title, flags in settings.items()
    ]


def backbone_rows(profile: Profile) -> list[Row]:
    names = {"WRN-28-10": "wrn-28-10", "ResNet-18": "resnet18", "EfficientNet-B0": "efficientnet-b0"}
    small = {"WRN-28-10": "wrn-10-2", "ResNet-18": "resnet20", "EfficientNet-B0": "resnet9"}
    chosen = names if profile.name == "paper" else small
    return [
        Row(
            title if profile.name == "paper" else f"{chosen[title]} for {title}",
            _recipe(profile, "cifar10", "maple", backbone=chosen[title]),
            READ_NORMALISED,
            title,
        )
        for title in names
    ]


def metric_loss_rows(profile: Profile) -> list[Row]:
    return [
        Row(title, _recipe(profile, "cifar10", "maple", metric_loss=name), READ_NORMALISED)
        for title, name in (("Triplet loss", "triplet"), ("Contrastive loss", "contrastive"))
    ]


def gaussian_rows(profile: Profile) -> list[Row]:
    return [
        *_both_readings(profile, "Deterministic", _recipe(profile, "cifar10", "cross-entropy"), "Deterministic"),
        *_both_readings(profile, "Triplet loss", _recipe(profile, "cifar10", "triplet")),
        *_both_readings(profile, "MAPLE, X-Means", _clustered(profile), "MAPLE"),
        *_both_readings(profile, "MAPLE", _recipe(profile, "cifar10", "maple")),
    ]


def figure_rows(profile: Profile) -> list[Row]:
    return [
        Row("Deterministic", _recipe(profile, "cifar10", "cross-entropy"), "softmax"),
        Row("MAPLE, X-Means", _clustered(profile), READ_AS_PAPER),
        Row("MAPLE", _recipe(profile, "cifar10", "maple"), READ_OURS),
    ]
